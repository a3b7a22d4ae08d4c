"""What workers miss of a script that they import only up to its first call of Cordée."""

from __future__ import annotations

import pytest

from cordee.core.importing import find_guarded, find_missed

ABOVE = """import torch, cordee
SCALE = 1
class Net:
    def forward(self, x): return torch.relu(x) * SCALE
def data(): return Net, SCALE, torch
job = Net
"""


@pytest.mark.parametrize(
    ("rest", "calls", "found"),
    [
        ("cordee.train(job)\n", [7], None),
        ("cordee.plan(job)\ncordee.train(job)\n", [7, 8], None),
        ("for lr in (1, 2):\n    cordee.train(Net, lr)\n", [8, 8], None),
        ("cordee.plan(job)\ntorch.manual_seed(0)\nother = Net\ncordee.train(other)\n", [7, 10], None),
        ("cordee.plan(job)\nSCALE = 2\ncordee.train(job)\n", [7, 9], (7, 8, "SCALE")),
        ("cordee.plan(job)\nSCALE.append(2)\ncordee.train(job)\n", [7, 9], (7, 8, "SCALE")),
        ("cordee.plan(job)\nif __name__ == 'x':\n    SCALE = 2\n    cordee.train(job)\n", [7, 10], (7, 8, "SCALE")),
        ("if __name__ == 'x':\n    cordee.plan(job)\n    SCALE = 2\n    cordee.train(job)\n", [8, 10], None),
        ("cordee.plan(job)\ntorch.K = 2\ncordee.train(job)\n", [7, 9], (7, 8, "torch")),
        ("cordee.plan(job)\nNet.parts[0].K = 2\ncordee.train(job)\n", [7, 9], (7, 8, "Net")),
        ("for SCALE in (1, 2):\n    cordee.train(job)\n", [8], None),
        ("for SCALE in (1, 2):\n    cordee.train(job)\n", [8, 8], (8, 7, "SCALE")),
        ("for SCALE in (1, 2):\n    cordee.plan(job)\n    cordee.train(job)\n", [8, 9], (8, 7, "SCALE")),
    ],
)
def test_names_between_calls(rest: str, calls: list[int], found: tuple[int, int, str] | None) -> None:
    assert find_missed(ABOVE + rest, calls) == found


@pytest.mark.parametrize(
    ("guarded", "used", "found"),
    [
        ("SCALE = 2", ["Net"], (8, "SCALE")),
        ("SCALE += 1", ["Net.make"], (8, "SCALE")),
        ("for SCALE in (2, 3): pass", ["data"], (8, "SCALE")),
        ("set_scale(2)", ["Net"], (8, "SCALE")),
        ("SCALE = 2", ["other"], None),  # does not read it
        ("OTHER = 2", ["Net"], None),  # workers do not have it at all: they fail, and say so
        ("x = 2", ["Net"], None),  # a local name of a function
        ("job = 2", ["Net", "data"], None),
    ],
)
def test_globals_that_workers_have_with_another_value(
    guarded: str, used: list[str], found: tuple[int, str] | None
) -> None:
    guard = f"if __name__ == '__main__':\n    {guarded}\n    cordee.train(job)\n"
    rest = "x = 1\ndef other(): return 1\ndef set_scale(y):\n    global SCALE\n    SCALE = y\n"
    assert find_guarded(ABOVE + guard + rest, used) == found
