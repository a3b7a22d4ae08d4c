"""Experiment trackers: MLflow and Weights & Biases get the job, the numbers, the pictures and the result of a run."""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cordee.core.env import mlflow_address
from cordee.core.errors import MissingExtraError, StorageError
from cordee.monitoring.events import AnyEvent, Picture, RunEnded, RunStarted
from cordee.monitoring.scalars import scalars_of

_ID_FILE = ".mlflow"  # of the run directory: which run of MLflow continues
_MOST_TEXT = 500  # characters of a parameter that MLflow takes


@contextlib.contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turn any error of a tracker into one after which training continues without it."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().splitlines()
        detail = text[0] if text else type(error).__name__
        raise StorageError(f"{what} failed: {detail}; it gets nothing more, training continues") from error


class MlflowSink:
    """Logs a run to MLflow: at $MLFLOW_TRACKING_URI, or else in the run directory.

    A resumed run continues its run of MLflow. Raises `MissingExtraError` without MLflow, `StorageError` when it fails.
    """

    def __init__(self, run_dir: Path, name: str, settings: dict[str, Any]) -> None:
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ImportError:
            raise MissingExtraError("monitoring.mlflow", "mlflow") from None
        self._id_file = run_dir / _ID_FILE
        address = mlflow_address() or f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        with _reporting("MLflow"):
            self._client = mlflow.MlflowClient(tracking_uri=address)
            self._run_id = self._begin(run_dir, name, settings)

    def _begin(self, run_dir: Path, name: str, settings: dict[str, Any]) -> str:
        if self._id_file.is_file():
            run_id = self._id_file.read_text().strip()
            self._client.set_terminated(run_id, "RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = (run_dir / "mlflow").absolute().as_uri() if not mlflow_address() else None
            number = self._client.create_experiment(name, artifact_location=place)
        else:
            number = experiment.experiment_id
        run_id = str(self._client.create_run(number, run_name=run_dir.name).info.run_id)
        for key, value in settings.items():
            self._client.log_param(run_id, key, str(value)[:_MOST_TEXT])
        self._id_file.write_text(run_id)
        return run_id

    def emit(self, event: AnyEvent) -> None:
        with _reporting("MLflow"):
            for name, value in scalars_of(event).items():
                self._client.log_metric(self._run_id, name, value, int(event.time * 1000), event.step)  # type: ignore[union-attr]
            if isinstance(event, Picture):
                with tempfile.TemporaryDirectory(prefix="cordee-") as folder:
                    file = Path(folder) / f"{event.name}-step-{event.step}.png"
                    file.write_bytes(event.png)
                    self._client.log_artifact(self._run_id, str(file), "logged")
            if isinstance(event, RunEnded):
                states = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
                self._client.set_terminated(self._run_id, states[event.status])

    def close(self) -> None:
        """May be called again; what was logged is already there."""


class WandbSink:
    """Logs a run to Weights & Biases, as its own variables say (WANDB_MODE, WANDB_PROJECT, WANDB_DIR and others).

    Offline runs are kept in the run directory. A resumed run continues the same run there. Raises `MissingExtraError`
    without the package, `StorageError` when it fails.
    """

    def __init__(self, run_dir: Path, name: str, settings: dict[str, Any]) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise MissingExtraError("monitoring.wandb", "wandb") from None
        self._open = {"project": name, "name": run_dir.name, "id": run_dir.name, "dir": str(run_dir)}
        self._settings = settings
        self._run: Any = None
        self._code = 1

    def emit(self, event: AnyEvent) -> None:
        with _reporting("Weights & Biases"):
            if isinstance(event, RunStarted) and self._run is None:
                quiet = self._wandb.Settings(console="off", silent=True)
                self._run = self._wandb.init(
                    **self._open, config=self._settings, resume="allow", settings=quiet, reinit="create_new"
                )
                # Evaluations come after the step event of the same step: its own counter would refuse them.
                self._run.define_metric("step")
                self._run.define_metric("*", step_metric="step")
            if self._run is not None and (found := scalars_of(event)):
                self._run.log({"step": event.step, **found})  # type: ignore[union-attr]
            if self._run is not None and isinstance(event, Picture):
                pillow: Any = importlib.import_module("PIL.Image")
                picture = self._wandb.Image(pillow.open(io.BytesIO(event.png)))
                self._run.log({"step": event.step, f"logged/{event.name}": picture})
            if isinstance(event, RunEnded):
                self._code = 0 if event.status in ("completed", "stopped") else 1
                if self._run is not None:
                    self._run.summary.update({"status": event.status, "weights_sha256": event.weights_sha256})

    def close(self) -> None:
        """Hand over what is left. May be called again."""
        run, self._run = self._run, None
        if run is not None:
            with _reporting("Weights & Biases"):
                run.finish(exit_code=self._code)


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of a job as `a.b`, with what trackers can show as a parameter. Pure."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, int | float | str | bool) else str(value)
    return found
