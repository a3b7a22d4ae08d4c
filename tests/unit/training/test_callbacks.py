"""Callbacks are called with typed events, log into every sink, and are named when they raise."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cordee
from cordee.cluster import Team
from cordee.cluster.member_link import describe_failure
from cordee.core.errors import JobError, TrainingError
from cordee.monitoring import events
from cordee.monitoring.pictures import encode_png, size_of_png
from cordee.training.callbacks import Context, share_problem


def job(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"use": "mlp", "hidden": [4]},
        "data": {"use": "synthetic", "shape": [3], "num_classes": 2, "size": 24, "test_size": 6},
        "training": {"batch_size": 8, "epochs": 2, "threads": 1},
        "checkpoint": {"every_steps": 4},
        "monitoring": {"every_steps": 3},
        **sections,
    }


class Recording:
    def __init__(self, fail_in: str = "") -> None:
        self.seen: list[tuple[str, Any, int]] = []
        self._fail_in = fail_in

    def _record(self, method: str, event: Any, context: Context) -> None:
        self.seen.append((method, event, context.step))
        if method == self._fail_in:
            raise KeyError("no such thing")

    def on_start(self, event: events.RunStarted, context: Context) -> None:
        self._record("on_start", event, context)

    def on_step(self, event: events.Step, context: Context) -> None:
        assert context.optimizer is not None and context.optimizer.param_groups[0]["lr"] == event.lr
        context.log(own=event.step)
        self._record("on_step", event, context)

    def on_evaluation(self, event: events.Evaluation, context: Context) -> None:
        context.log_image("ramp", torch.linspace(0, 1, 12).view(3, 4))
        self._record("on_evaluation", event, context)

    def on_checkpoint(self, event: events.Checkpoint, context: Context) -> None:
        assert Path(event.path).is_dir()
        self._record("on_checkpoint", event, context)

    def on_end(self, event: Any, context: Context) -> None:
        assert sum(p.numel() for p in context.model.parameters()) > 0
        self._record("on_end", event, context)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["type"] == kind]


def test_called_at_every_moment(tmp_path: Path) -> None:
    own = Recording()
    cordee.train(
        job(monitoring={"every_steps": 3, "tensorboard": True}), callbacks=[own], run_dir=tmp_path / "r", quiet=True
    )
    methods = [method for method, _, _ in own.seen]
    assert methods[0] == "on_start" and methods[-1] == "on_end"
    steps = [(event.step, at) for method, event, at in own.seen if method == "on_step"]
    assert steps == [(step, step) for step in range(1, 7)]
    assert [event.step for method, event, _ in own.seen if method == "on_evaluation"] == [3, 6]
    assert sorted(event.step for method, event, _ in own.seen if method == "on_checkpoint") == [4, 6]
    assert [event["step"] for event in lines(tmp_path / "r", "step")] == [1, 4]  # as without callbacks
    assert [event["values"]["own"] for event in lines(tmp_path / "r", "logged")] == [1, 2, 3, 4, 5, 6]
    pictures = lines(tmp_path / "r", "picture")
    assert [picture["path"] for picture in pictures] == ["pictures/ramp-step-3.png", "pictures/ramp-step-6.png"]
    assert (tmp_path / "r" / pictures[0]["path"]).read_bytes()[:4] == b"\x89PNG"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "r" / "tensorboard")).Reload()
    assert "logged/own" in board.Tags()["scalars"] and board.Tags()["images"] == ["logged/ramp"]
    assert board.Images("logged/ramp")[0].width == 4


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end"])
def test_one_that_raises_is_named_and_the_run_is_saved(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with pytest.raises(
        TrainingError, match=rf"callback 'callback_1' raised KeyError in {method} at step \d+: 'no such thing'"
    ):
        cordee.train(job(), callbacks=[Recording(method)], run_dir=folder, quiet=True)
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    # What was trained is not lost: resumed without the callback, the run ends with the weights of a run without it.
    resumed = cordee.train(job(), run_dir=folder, resume=True, quiet=True)
    plain = cordee.train(job(), run_dir=tmp_path / "plain", quiet=True)
    assert resumed.summary.weights_sha256 == plain.summary.weights_sha256
    assert resumed.summary.steps == 6


class Misspelt:
    def on_epoch(self, event: Any, context: Context) -> None: ...


class Nothing(cordee.Callback):
    pass


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("nothing_here:Watch", "callbacks.own = .*no module 'nothing_here'"),
        (Misspelt, "has 'on_epoch', which is never called"),
        (Nothing, "has none of the methods on_start, on_step"),
        ({"use": Recording, "fail": 1}, "no setting 'fail'.*did you mean 'fail_in'"),
        ("watch", "is not known"),
    ],
)
def test_bad_callbacks_are_refused(part: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        cordee.train(job(callbacks={"own": part}), run_dir=tmp_path / "r", quiet=True)
    assert not (tmp_path / "r").exists()


def test_live_ones_are_for_one_process(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"callbacks.callback_1: .*exists only in this process"):
        cordee.train(job(strategy={"workers": 2}), callbacks=[Recording()], run_dir=tmp_path / "r", quiet=True)


def test_on_step_is_refused_where_nobody_takes_steps(tmp_path: Path) -> None:
    strategy = {"name": "parameter_server", "workers": 1}
    with pytest.raises(JobError, match=r"callbacks.own has on_step, and no process of strategy 'parameter_server'"):
        table = job(strategy=strategy, callbacks={"own": f"{__file__}:Recording"})
        cordee.train(table, run_dir=tmp_path / "r", quiet=True)


def test_pictures() -> None:
    grey = encode_png(torch.tensor([[0.0, 0.5], [1.0, 2.0]]))
    assert size_of_png(grey) == (2, 2, 1)
    at = grey.index(b"IDAT")
    (length,) = struct.unpack(">I", grey[at - 4 : at])
    assert zlib.decompress(grey[at + 4 : at + 4 + length]) == bytes([0, 0, 128, 0, 255, 255])
    assert size_of_png(encode_png(torch.zeros(3, 5, 7))) == (5, 7, 3)
    assert size_of_png(encode_png(torch.zeros(5, 7, 4, dtype=torch.uint8))) == (5, 7, 4)
    for bad in (torch.zeros(3), torch.zeros(2, 5, 7), torch.full((2, 2), float("nan")), torch.zeros(0, 3)):
        with pytest.raises(TrainingError, match="a picture"):
            encode_png(bad)
    with pytest.raises(TrainingError, match="log a smaller one"):
        encode_png(torch.rand(600, 600))


def test_logging_refuses_what_is_no_number() -> None:
    seen: list[Any] = []
    context = Context(None, cordee_team(), 3, None, lambda: torch.nn.Linear(1, 1), seen.append)  # type: ignore[arg-type]
    context.log(a=torch.tensor(2.0), b=1)
    assert seen[0].values == {"a": 2.0, "b": 1.0} and seen[0].step == 3
    with pytest.raises(TrainingError, match="a = Tensor is not one number"):
        context.log(a=torch.zeros(2))
    with pytest.raises(TrainingError, match="names a file"):
        context.log_image("../x", torch.zeros(2, 2))


def cordee_team() -> Any:
    from cordee.cluster import Team

    return Team()


class TeamOfTwo(Team):
    """As one of two workers, of which the first has a problem, sees the exchange of problems."""

    def any(self, flag: bool) -> bool:
        return True

    def gather_rows(self, values: Sequence[int]) -> list[list[int]]:
        problem = b"boom".ljust(8 * len(values), b"\0")
        return [list(struct.unpack(f"<{len(values)}q", problem)), [0] * len(values)]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("own", ["boom", "bang"])
def test_a_problem_is_reported_by_the_worker_that_has_it(index: int, own: str) -> None:
    """The launcher shows the first cause that it hears of: that of the worker whose log has the traceback."""
    team = TeamOfTwo(worker_index=index, num_workers=2, members=(4, 7))
    error = share_problem(own if index == 0 or own == "bang" else "", team)
    assert isinstance(error, TrainingError)
    failure = describe_failure(error, 3)
    assert failure.is_consequence is (index == 1)
    assert str(error) == ("boom" if index == 0 else "boom (on worker 4)")
