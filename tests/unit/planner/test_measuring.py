"""What is measured of a model: its blocks, their bytes, and times that add up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cordee
from cordee.planner.measurements import Exchange, Machine, ModelProfile, free_memory_bytes, keep, key_of, read_kept
from cordee.planner.measuring import describe_blocks, name_blocks, time_blocks
from cordee.planner.profiling import assemble_alone, first_batch, profile_key, take_profile


class Skipping(nn.Module):
    """Not a chain: the input is added to the output."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.last = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last(x + self.inner(x))  # type: ignore[no-any-return]


def job(model: object = "mlp", **training: object) -> cordee.Job:
    return cordee.Job(model=model, data="digits", training={"batch_size": 32, "threads": 1, **training})  # type: ignore[arg-type]


def test_blocks_of_a_chain_have_all_parameters_once() -> None:
    parts = assemble_alone(job())
    blocks = describe_blocks(parts.model, parts.computation, first_batch(parts))
    assert [block.name for block in blocks] == ["flatten", "linear1", "activation1", "classifier"]
    assert sum(block.parameters for block in blocks) == parts.num_parameters
    assert [block.output_bytes for block in blocks] == [4 * 64, 4 * 128, 4 * 128, 4 * 10]
    # Kept for the backward pass: what ReLU gave. The input is there in any case.
    assert [block.activation_bytes for block in blocks] == [0, 0, 4 * 128, 0]
    assert blocks[1].splittable == 1.0


def test_tied_weights_are_counted_once() -> None:
    text = cordee.Job(
        model={"use": "gpt", "num_layers": 1, "embedding_width": 16},  # type: ignore[arg-type]
        data={"use": "synthetic", "kind": "tokens", "shape": [8], "num_classes": 11, "size": 64},  # type: ignore[arg-type]
        training={"batch_size": 8},  # type: ignore[arg-type]
    )
    parts = assemble_alone(text)
    blocks = describe_blocks(parts.model, parts.computation, first_batch(parts))
    assert sum(block.parameters for block in blocks) == parts.num_parameters


def test_any_other_model_is_measured_by_its_leaves() -> None:
    parts = assemble_alone(job(Skipping))
    assert name_blocks(parts.model)[1] is False
    times = time_blocks(parts.model, parts.computation, first_batch(parts), 0.01)
    assert len(times.forward_s) == len(times.backward_s) == 2
    assert min(times.forward_s) > 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_profile_leaves_the_model_and_the_random_numbers_alone(accumulate: int) -> None:
    parts = assemble_alone(job(accumulate=accumulate))
    before = [parameter.clone() for parameter in parts.model.parameters()]
    profile = take_profile(parts, budget_s=0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, parts.model.parameters(), strict=True))
    assert profile.num_parameters == parts.num_parameters
    assert profile.optimizer_state_bytes >= 2 * profile.parameter_bytes  # Adam's two moments
    small, large = profile.step(4), profile.step(32)
    assert small.step_s > 0 and large.step_s > 0
    assert len(large.forward_s) == len(profile.blocks)


def test_the_key_follows_what_matters() -> None:
    same, again = profile_key(assemble_alone(job())), profile_key(assemble_alone(job()))
    other = profile_key(assemble_alone(job(batch_size=16)))
    wider = profile_key(assemble_alone(job({"use": "mlp", "hidden": [7]})))
    assert same == again and len({same, other, wider}) == 3


def test_what_was_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))
    machine = Machine(cores=2, slowdowns={2: 1.7})
    assert read_kept("machines", key_of("a"), Machine) is None
    keep("machines", key_of("a"), machine)
    assert read_kept("machines", key_of("a"), Machine) == machine
    assert read_kept("machines", key_of("a"), ModelProfile) is None  # not what was asked for
    (tmp_path / "machines" / f"{key_of('a')}.json").write_text("{ half")
    assert read_kept("machines", key_of("a"), Machine) is None


def test_exchanges_between_and_beyond_the_sizes() -> None:
    exchange = Exchange(kind="all_reduce", num_processes=2, sizes=(1000, 3000), seconds=(1.0, 2.0))
    assert [exchange.at(size) for size in (10, 2000, 6000)] == [1.0, 1.5, 4.0]


def test_slowdowns_of_more_processes_than_were_measured() -> None:
    assert Machine(cores=2).slowdown(4) == 4.0
    assert Machine(cores=2, slowdowns={2: 1.5}).slowdown(4) == 3.0


def test_more_workers_than_devices(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        '[devices.a]\nspeed = 1\nmemory = "1 GB"\n[[hosts]]\nname = "h"\ncount = 2\ndevice = "a"\n'
        '[links]\nbetween = { bandwidth = "1 GB/s" }\n'
    )
    with pytest.raises(cordee.CordeeError, match=r"9 workers, and .*two\.toml has 2 devices"):
        cordee.plan(job(), workers=9, cluster=tmp_path / "two.toml")


PASSES = """
import torch
from cordee.planner.measuring import measure_pass_memory

def take_pass(samples):
    blocks = [torch.ones(1 << 18) for _ in range(samples)]  # a MiB each
    assert len(blocks) == samples

print(measure_pass_memory(take_pass, 64)[0], measure_pass_memory(take_pass, 3))
"""


def test_the_memory_of_a_pass_follows_the_samples() -> None:
    # In a process of its own: what other tests have left in this one would hide what a pass takes.
    done = subprocess.run([sys.executable, "-c", PASSES], capture_output=True, text=True, timeout=60, check=True)
    per_sample, _, too_few = done.stdout.strip().partition(" ")
    assert float(per_sample) == pytest.approx(1 << 20, rel=0.1)
    assert too_few == "(0.0, 0.0)"


def test_there_is_memory() -> None:
    assert free_memory_bytes() > 1 << 20
