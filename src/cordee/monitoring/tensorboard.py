"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cordee.core.errors import MissingExtraError, StorageError
from cordee.monitoring.events import AnyEvent, Evaluation, Picture, RunStarted
from cordee.monitoring.files import reason
from cordee.monitoring.pictures import size_of_png
from cordee.monitoring.scalars import scalars_of


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

    def emit(self, event: AnyEvent) -> None:
        try:
            if isinstance(event, RunStarted):
                self._open(event.start_step)
            for name, value in scalars_of(event).items():
                self._open(0).add_scalar(name, value, event.step, walltime=event.time)  # type: ignore[union-attr]
            if isinstance(event, Picture):
                self._add_picture(event)
            if isinstance(event, Evaluation):
                self._open(0).flush()
        except OSError as error:
            raise self._failure(error) from error

    def _add_picture(self, event: Picture) -> None:
        # SummaryWriter.add_image would encode the picture again, and needs Pillow for it.
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, channels = size_of_png(event.png)
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=event.png)
        summary = Summary(value=[Summary.Value(tag=f"logged/{event.name}", image=image)])
        self._open(0).file_writer.add_summary(summary, event.step, walltime=event.time)

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
