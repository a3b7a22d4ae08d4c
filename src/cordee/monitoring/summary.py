"""`summary.json`: what came out of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cordee.core.errors import RunDirectoryError
from cordee.monitoring.files import read_regular, reason, to_json, write_atomically

Status = Literal["completed", "stopped", "interrupted", "failed"]
_MOST_BYTES = 1 << 24  # of a file that is read


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. What was not measured is None; so is, once read back, what was not a number."""

    status: Status
    name: str = ""
    strategy: str = ""
    workers: int = 1
    device: str = ""
    parameters: int = 0  # numbers in the model's parameters, frozen ones included
    trainable_parameters: int | None = None  # those that are learnt
    steps: int = 0  # optimizer steps, those before a resume included
    epochs: float | int = 0  # passes over the training set
    samples: int = 0  # training samples used
    samples_lost: int = 0  # that lost workers had trained on alone, so that nobody has what they learnt
    wall_seconds: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None  # the mean of a step, without evaluating and saving
    predicted_step_seconds: float | None = None  # where the planner knew the model
    predicted_step_interval: tuple[float, float] | None = None  # nine of ten runs are expected to be within
    checkpoint_stall_seconds: float | None = None  # that training stood still for checkpoints
    best_step: int | None = None  # of the best evaluation
    not_in_storage: list[int] | None = None  # steps of kept checkpoints that are not in `checkpoint.storage`
    peak_memory_bytes: int | None = None  # of the worker that took most, what it shares with others not counted
    predicted_memory_bytes: int | None = None
    prediction_is_sure: bool | None = None  # False: from measurements beside other programs
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None  # from 0 to 1
    test_top5_accuracy: float | None = None
    metrics: dict[str, float | None] = {}  # those of `[metrics]` in the last evaluation
    bytes_sent: int | None = None  # that all workers gave to sockets; what goes through shared memory is not counted
    weights_sha256: str | None = None  # of all parameters and buffers in name order
    recoveries: int = 0  # lost workers that were trained around
    steps_redone: int = 0
    updates_lost: int = 0  # steps that a lost parameter server took with it: its slice of the weights lacks them
    residuals_lost: int = 0  # workers lost with what compression had left out of their gradients
    staleness: dict[str, int] | None = None  # gradients by how many updates had overtaken them
    epsilon: float | None = None  # spent, with `strategy.privacy`
    stopped_by: str | None = None  # the stop rule, or what else ended the run early
    error: str | None = None  # why it failed
    cordee_version: str = ""
    torch_version: str = ""
    started: float | None = None  # unix seconds
    ended: float | None = None

    def to_json(self) -> bytes:
        """Return indented JSON; NaN and infinities as null."""
        return msgspec.json.format(to_json(self), indent=2) + b"\n"


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary` so that the file is whole or not there. Raises `StorageError` on a full disk."""
    write_atomically(path, summary.to_json())


def read_summary(path: Path) -> Summary | None:
    """Return the summary in `path`, None when there is none. Raises `RunDirectoryError` if it cannot be read."""
    try:
        return msgspec.json.decode(read_regular(path, _MOST_BYTES), type=Summary)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {reason(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from None
