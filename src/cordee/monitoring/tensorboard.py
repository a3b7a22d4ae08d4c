"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cordee.core.errors import MissingExtraError, StorageError
from cordee.monitoring.files import reason
from cordee.monitoring.monitor import Event

_SCALARS = {
    "step": {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "lr": "train/lr",
        "samples_per_second": "train/samples_per_second",
    },
    "evaluation": {
        "test_loss": "test/loss",
        "test_accuracy": "test/accuracy",
        "test_top5_accuracy": "test/top5_accuracy",
    },
}


class TensorBoardSink:
    """Writes the numbers of `step` and `evaluation` events as scalars by step.

    A resumed run hides what was written after the step that it continues from. Raises `MissingExtraError` when
    TensorBoard is not installed, `StorageError` when its files cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        try:
            # Here and not above: it imports torch and takes a second.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard", "tensorboard") from None
        self._make_writer = SummaryWriter

    def emit(self, event: Event) -> None:
        try:
            if event.type == "run_started":
                self._open(event.fields.get("start_step") or 0)
            for field, tag in _SCALARS.get(event.type, {}).items():
                value = event.fields.get(field)
                if value is not None:
                    self._open(0).add_scalar(tag, float(value), event.fields["step"], walltime=event.time)
            if event.type == "evaluation":
                self._open(0).flush()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Write what is left. May be called again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                raise self._failure(error) from error

    def _open(self, start_step: int) -> Any:
        if self._writer is None:
            # Steps from `purge_step` on are discarded, and the first one now is start_step + 1.
            purge_step = start_step + 1 if start_step else None
            self._writer = self._make_writer(str(self._folder), purge_step=purge_step)
        return self._writer

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write TensorBoard files in {self._folder}: {reason(error)}; they end here, training continues"
        )
