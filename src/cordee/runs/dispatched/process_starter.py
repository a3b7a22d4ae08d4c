"""The processes of a served run: starts them, and knows what each is told and where its log is."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cordee.cluster.coordinator import Addresses, CoordinatorSpec
from cordee.cluster.engine import ProcessSpec
from cordee.cluster.launcher_link import LauncherLink
from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import Process, Roster
from cordee.core import Job
from cordee.runs.dispatched.state import StarterState

_TARGETS = {role: f"cordee.runs.dispatched.{role}:main" for role in ("worker", "server", "evaluator")}


class ProcessStarter:
    """Those that take part in one run. The dispatcher listens at `addresses`."""

    def __init__(
        self, order: CoordinatorSpec, job: Job, launcher: LauncherLink, memory: StarterState, addresses: Addresses
    ) -> None:
        self.run_dir = Path(order.run_dir)
        self._order = order
        self._job = job
        self._launcher = launcher
        self._memory = memory
        self._addresses = addresses

    @property
    def roster(self) -> Roster:
        return self._memory.roster

    @property
    def workers(self) -> list[str]:
        """All workers that have not ended, the oldest first."""
        workers = [process for process in self.roster.processes.values() if process.role == "worker"]
        here = [process for process in workers if not (process.is_external and process.is_away)]
        return [process.name for process in sorted(here, key=lambda process: process.index)]

    def start(self, role: str, index: int) -> str:
        """Have a worker or the evaluator started; return its name."""
        return self._start(Process(role=role, index=index), resume=False)

    def start_worker(self) -> str:
        """Have another worker started; return its name."""
        return self.start("worker", self.take_number())

    def start_server(self, index: int, *, resume: bool, has_state: bool = True) -> str:
        """Have another process started for a server; return its name.

        With `resume` it reads the last checkpoint. Without `has_state` it has nothing of the run until another server
        gives it everything, and never serves before.
        """
        replicas = self._memory.newest_replica
        replicas[index] = replicas.get(index, -1) + 1
        return self._start(
            Process(role="server", index=index, replica=replicas[index]), resume=resume, has_state=has_state
        )

    def enlist(self, pid: int, now_s: float, data: str, *, is_remote: bool) -> MemberSpec:
        """Take a worker that somebody else started; return what it is told. `data` is what is known of the data."""
        index = self.take_number()
        process = Process(role="worker", index=index, pid=pid, since_s=now_s, is_remote=is_remote)
        self.roster.add(process)
        told = self._order.tell_external(self._tell(process), self._addresses, data, is_remote=is_remote)
        return msgspec.structs.replace(told, num_local=1) if is_remote else told

    def take_number(self) -> int:
        """Return a number that no worker has had."""
        self._memory.next_worker += 1
        return self._memory.next_worker - 1

    def log_file(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name.removesuffix('-0') if name == 'evaluator-0' else name}.log"

    def _start(self, process: Process, *, resume: bool, has_state: bool = True) -> str:
        self._memory.num_started += 1
        order = msgspec.to_builtins(self._tell(process, resume=resume, has_state=has_state))
        log = str(self.log_file(process.name))
        spec = ProcessSpec.new(self._memory.num_started, _TARGETS[process.role], order, log=log)
        self._launcher.start(spec)
        process.number, process.incarnation = spec.index, spec.incarnation
        self.roster.add(process)
        return process.name

    def _tell(self, process: Process, *, resume: bool = False, has_state: bool = True) -> MemberSpec:
        keys = self._order.server_keys if process.role == "server" else ""
        return self._order.tell(
            self._job, self._addresses, process, server_keys=keys, resume=resume, has_state=has_state
        )
