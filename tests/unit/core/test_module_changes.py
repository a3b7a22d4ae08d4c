"""Values of imported modules that this program has changed and workers, which import the files, would not have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cordee.core.errors import JobError
from cordee.core.module_changes import refuse_changed_modules

FILES = {
    "changed_settings": "WIDTH = 8\nSIZES = [8, 8]\nUNREAD = 1\n",
    "changed_layers": "GAIN = 1.0\ndef scale(x):\n    return x * GAIN\n",
    "changed_helper": """
import enum
import changed_settings
from changed_layers import scale
SCALE, BIAS = 1.0, 2.0
RATE: float = 0.1
NAMES = {"a": 1}
CACHE = None
CALLS = 0
TABLE = {}
OTHER = 1
class Kind(enum.IntEnum):
    A = 1
class Net:
    slope = 0.1
    made = 0
    def __init__(self):
        Net.made += 1
    def forward(self, x):
        global CALLS
        CALLS += 1
        TABLE[x] = CACHE
        return scale(x) * RATE * self.slope * len(NAMES) * changed_settings.WIDTH + Kind.A + SIZE()
def SIZE():
    return changed_settings.SIZES
def set_rate(value):
    global RATE
    RATE = value
""",
}


@pytest.fixture
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("changed_helper")
    yield
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_modules")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pass", ""),
        ("changed_helper.NAMES['b'] = 2", "'NAMES'"),
        ("changed_helper.NAMES = {'a': 1}", ""),  # the same
        ("changed_helper.Net.slope = 0.2", "'Net.slope'"),
        ("changed_settings.WIDTH = 16", "'WIDTH'"),  # read as an attribute of the module
        ("changed_settings.SIZES.append(9)", "'SIZES'"),
        ("changed_layers.GAIN = 2", "'GAIN'"),  # read by what another module was given
        ("changed_helper.OTHER = 2", ""),  # nobody reads it
        ("changed_settings.UNREAD = 2", ""),
        ("changed_helper.CALLS = 7", ""),  # changes by itself
        ("changed_helper.Net()", ""),
        ("changed_helper.TABLE[1] = 2", ""),
        ("changed_helper.set_rate(3.0)", ""),  # by code of its own, that workers may call as well
    ],
)
def test_what_workers_would_not_see_is_named(change: str, named: str) -> None:
    exec(change, dict(sys.modules))
    if not named:
        refuse_changed_modules(["changed_helper:Net"])
        return
    with pytest.raises(JobError, match=named):
        refuse_changed_modules(["changed_helper:Net"])


@pytest.mark.usefixtures("_modules")
def test_what_the_program_calls_to_change_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import changed_helper\nif __name__ == '__main__':\n    changed_helper.set_rate(3.0)\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
    refuse_changed_modules(["changed_helper:Net"])
    sys.modules["changed_helper"].set_rate(3.0)
    with pytest.raises(JobError, match=r"'RATE' is 3\.0 in this program and 0\.1 in the file"):
        refuse_changed_modules([f"{tmp_path}/changed_helper.py:Net"])


@pytest.mark.usefixtures("_modules")
def test_what_another_module_sets_is_the_same_for_workers(tmp_path: Path) -> None:
    (tmp_path / "changed_setup.py").write_text("import changed_settings\nchanged_settings.WIDTH = 16\n")
    importlib.import_module("changed_setup")
    try:
        refuse_changed_modules(["changed_helper:Net"])
    finally:
        del sys.modules["changed_setup"]
