"""Members are told apart by every part of what they continue from, and by nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cordee.checkpoint import Comparison, Digest, State, digest_state, model_state, optimizer_state
from cordee.checkpoint.sharing import FIRST_INTERVAL, SHARE, describe_difference, interval
from cordee.core.errors import TrainingError

BUFFERS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 20_000))  # small and large tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **progress: Any) -> State:
    joined = State.join(model=State(model_state(model), {}), optimizer=optimizer_state(optimizer, model))
    return State(joined.tensors, {**joined.values, "progress": {"step": 1, "elapsed_s": 3.0, **progress}})


def change(what: str) -> State:
    model, optimizer = trained()
    progress: dict[str, Any] = {}
    with torch.no_grad():
        if what == "model":
            model[2].weight[17, 3] += 1e-6
        elif what == "buffers":
            model[1].num_batches_tracked += 1
        elif what == "moment":
            optimizer.state[model[2].weight]["exp_avg"][5, 5] += 1e-9
        elif what == "counter":
            optimizer.state[model[0].bias]["step"] += 1
        elif what == "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        elif what == "progress":
            progress = {"batch": 2}
    return state_of(model, optimizer, **progress)


@pytest.mark.parametrize(
    ("what", "part"),
    [
        ("model", "model"),
        ("buffers", "buffers"),
        ("moment", "optimizer"),
        ("counter", "optimizer"),
        ("rate", "optimizer"),
        ("progress", "progress"),
    ],
)
def test_each_part_is_covered(what: str, part: str) -> None:
    known, other = digest_state(change("nothing"), BUFFERS), digest_state(change(what), BUFFERS)
    assert [name for name in known._fields if getattr(known, name) != getattr(other, name)] == [part]


def test_what_members_measure_and_the_order_of_the_state_are_left_out() -> None:
    state = change("nothing")
    values = copy.deepcopy(state.values)
    values["progress"] |= {"elapsed_s": 77.0, "metrics": {"seconds": 1.0}}
    values["optimizer"]["state"] = dict(reversed(values["optimizer"]["state"].items()))
    shuffled = State(dict(reversed(state.tensors.items())), values)
    again = digest_state(
        State(shuffled.tensors, {**values, "progress": values["progress"] | {"metrics": None}}), BUFFERS
    )
    assert digest_state(state, BUFFERS) == digest_state(shuffled, BUFFERS) == again


def test_the_difference_is_named() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 9, 4], [8, 2, 9, 4]]
    assert describe_difference(rows[:1] * 3, [0, 1, 5]) == ""
    assert describe_difference(rows, [0, 1, 5]) == (
        "worker 5 has other weights than worker 0; workers 1, 5 have other optimizer than worker 0"
    )


def test_members_that_differ_stop_and_others_agree_when_to_compare_again() -> None:
    comparison = Comparison()
    other = Digest(1, 2, 3, 2**64 - 1)

    def gather(row: Any, *, extra: int = 0) -> list[list[int]]:
        assert all(-(2**63) <= value < 2**63 for value in row)
        return [list(row), [*row[:2], row[2] + extra, *row[3:]]]

    assert comparison.compare(5, lambda: other, gather, (0, 1)) == other
    assert not comparison.is_due(5) and not comparison.is_due(5 + FIRST_INTERVAL - 1)
    assert comparison.is_due(5 + FIRST_INTERVAL)
    with pytest.raises(TrainingError, match="the members differ at step 6: worker 1 has other optimizer than worker 0"):
        comparison.compare(6, lambda: other, lambda row: gather(row, extra=1), (0, 1))


def test_comparing_takes_a_small_share_of_the_time() -> None:
    for digest_s, step_s in [(0.0005, 0.001), (0.1, 2.0), (0.001, 0.0001)]:
        num_steps = interval(digest_s, step_s)
        assert digest_s <= SHARE * step_s * num_steps * 1.001
    assert interval(0.0, 10.0) == 1
