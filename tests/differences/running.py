"""Runs a trial as a user would, with `cordee train`, and reads what it left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import load_file

from cordee.checkpoint import list_checkpoints
from cordee.monitoring import read_events
from cordee.tools.audit import audit_run
from differences.generator import Choices, Table, job_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from warm_launch import WarmServer

RUN_TIMEOUT_S = 90.0
HANG = -1000  # instead of an exit code


@dataclass(frozen=True)
class Outcome:
    """What a trial left behind. `message` is what the command printed to standard error."""

    code: int
    message: str
    folder: Path

    @property
    def is_refused(self) -> bool:
        return self.code == 2

    @cached_property
    def summary(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return table

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        return list(read_events(self.folder / "events.jsonl"))

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def saved_steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in list_checkpoints(self.folder / "checkpoints")]

    @cached_property
    def _last(self) -> Path:
        return self.folder / "checkpoints" / f"step-{max(self.saved_steps)}"

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self._last / "model.safetensors")

    @cached_property
    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        path = self._last / "optimizer.safetensors"
        return load_file(path) if path.exists() else {}

    @cached_property
    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression left out on the workers, where a checkpoint has the mean of it."""
        path = self._last / "residual.safetensors"
        return load_file(path) if path.exists() else {}

    @cached_property
    def values(self) -> dict[str, Any]:
        table: dict[str, Any] = json.loads((self._last / "values.json").read_text())
        return table

    @cached_property
    def unsound(self) -> list[str]:
        """What `cordee doctor --run` complains about."""
        return [f"{found.subject}: {found.detail}" for found in audit_run(self.folder) if found.state == "problem"]


class Runner:
    """Runs trials one after the other in folders below `folder`, and remembers those of one worker."""

    def __init__(self, server: WarmServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._number = 0
        self._known: dict[str, Outcome] = {}

    def run(self, choices: Choices) -> Outcome:
        """Run the trial to its end, or, where it is resumed, to `resume_at` and from there on."""
        self._number += 1
        folder = self._folder / f"{self._number}"
        folder.mkdir(parents=True)
        if choices["before"] is not None:
            first = job_table({**choices, "strategy": choices["before"]})
            first["stop"] = {**first.get("stop", {}), "steps": choices["resume_at"]}
            outcome = self._train(first, folder)
            if outcome.code != 0:
                return outcome
            return self._train(job_table(choices), folder, "--resume")
        return self._train(job_table(choices), folder)

    def run_once(self, choices: Choices) -> Outcome:
        """Like `run` without an interruption, but a trial that was run before is not run again."""
        return self.train_once(job_table(choices))

    def train_once(self, table: Table) -> Outcome:
        """Train a job that is given as its table, unless that was done before."""
        key = json.dumps(table, sort_keys=True)
        if key not in self._known:
            self._number += 1
            folder = self._folder / f"{self._number}"
            folder.mkdir(parents=True)
            self._known[key] = self._train(table, folder)
        return self._known[key]

    def train_in_two(self, table: Table, at: int) -> Outcome:
        """Train to step `at`, and with --resume from there on; in one go where `at` is 0."""
        self._number += 1
        folder = self._folder / f"{self._number}"
        folder.mkdir(parents=True)
        if at:
            first = self._train({**table, "stop": {"steps": at}}, folder)
            if first.code != 0:
                return first
        return self._train(table, folder, *(["--resume"] if at else []))

    def forget(self) -> None:
        """Remove what the runs so far left on the disk."""
        self._known = {}
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def _train(self, table: Table, folder: Path, *options: str) -> Outcome:
        job = folder / "trial.toml"
        job.write_text(tomli_w.dumps(table))
        process = self._server.cordee("train", str(job), "--run-dir", "run", "--quiet", *options, folder=folder)
        try:
            _, message = process.communicate(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
            return Outcome(HANG, f"did not end within {RUN_TIMEOUT_S:g} s", folder / "run")
        assert process.returncode is not None
        return Outcome(process.returncode, message, folder / "run")
