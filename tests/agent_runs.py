"""A run whose agents are started as a user would: by the commands that it prints, here or inside of a namespace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

CORDEE = [sys.executable, "-m", "cordee"]
TIMEOUT_S = 120.0


class AgentRun:
    """`cordee train --engine agents`. Each command that it prints is run, unless `starts` says no to the agent."""

    def __init__(
        self,
        job: Path,
        run_dir: Path,
        *settings: str,
        workers: int = 2,
        address: str = "127.0.0.1",
        inside: Callable[[int], list[str]] = lambda agent: [],
        launcher_inside: tuple[str, ...] = (),
        starts: Callable[[int], bool] = lambda agent: True,
        environment: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self._inside, self._starts = inside, starts
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.tickets: dict[int, list[str]] = {}
        options = [f"cluster.address={address}", *settings]
        command = [*launcher_inside, *CORDEE, "train", str(job), "--engine", "agents", "--workers", str(workers)]
        for option in options:
            command += ["--set", option]
        command += ["--resume"] * resume
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self.printed: list[str] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.printed)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        number = -1
        for line in stream:
            lines.append(line.rstrip())
            words = line.split()
            if line.startswith("start agent "):
                number = int(words[2])
            elif words[:2] == ["cordee", "agent"]:
                self.tickets[number] = words[2:]
                if self._starts(number):
                    self.start(number)

    def start(self, number: int) -> None:
        command = [*self._inside(number), *CORDEE, "agent", *self.tickets[number]]
        log = (self.run_dir.parent / f"agent-{number}.txt").open("w")
        with log:
            self.agents[number] = subprocess.Popen(
                command, stdout=log, stderr=log, text=True, env=self._environment, start_new_session=True
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return [event for event in found if event.get("type") == kind]

    def await_step(self, step: int) -> None:
        """Wait until an event says that a step was reached."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(event["step"] >= step for event in self.events("step")):
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.describe()
            time.sleep(0.02)

    def finish(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait for the end; return the summary of a run that ended well."""
        assert self.process.wait(timeout_s) == 0, self.describe()
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    def describe(self) -> str:
        agents = [path.read_text() for path in sorted(self.run_dir.parent.glob("agent-*.txt"))]
        logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join([*self.printed, *(line[:300] for line in self.errors), *agents, *logs])

    def close(self) -> None:
        for process in [self.process, *self.agents.values()]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def agent_run(job: Path, run_dir: Path, *settings: str, **more: Any) -> Iterator[AgentRun]:
    run = AgentRun(job, run_dir, *settings, **more)
    try:
        yield run
    finally:
        run.close()
