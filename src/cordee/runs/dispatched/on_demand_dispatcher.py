"""The part of answering the members of a run with work on demand that does not depend on what the work is."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from cordee.cluster.member_channel import MemberChannel
from cordee.cluster.members import MemberRecord
from cordee.communication.channel import Received
from cordee.communication.messages import Failure
from cordee.monitoring import events
from cordee.runs.dispatched.messages import Leave


@dataclass
class OnDemandDispatcher(MemberChannel):
    """Holds the requests of workers that wait for work, and lets workers leave."""

    failures: list[tuple[str, Failure]] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waiting: dict[str, Received] = {}  # worker -> its request for work

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """How far the run is."""

    @property
    @abc.abstractmethod
    def min_workers(self) -> int:
        """With fewer workers no work is handed out."""

    @property
    @abc.abstractmethod
    def is_final(self) -> bool:
        """Whether the run was asked to end: what is begun is finished, with the workers that are there."""

    @abc.abstractmethod
    def give_up(self, end_reason: str) -> None:
        """Have what is there saved, and end the run early, for `end_reason`."""

    @property
    def active_workers(self) -> list[str]:
        """The workers that are there to stay."""
        return [record.name for record in self.members.staying_workers if record.phase == "joined"]

    @property
    def has_too_few_workers(self) -> bool:
        return len(self.active_workers) < self.min_workers and not self.is_final

    def _take_failure(self, record: MemberRecord, failure: Failure) -> None:
        self.failures.append((record.name, failure))

    def _take_bye(self, record: MemberRecord) -> None:
        record.phase = "finished"

    def _release_leaving(self) -> None:
        """Let workers leave that are to, unless nobody could continue without them."""
        leaving = [name for name in self._waiting if self.members.records[name].is_leaving]
        if not leaving or self.is_final:
            return
        if self.has_too_few_workers:
            # They stay for as long as it takes to save.
            self.give_up(f"{', '.join(leaving)} had to leave, and too few workers are left to continue")
            return
        for name in leaving:
            record = self.members.records[name]
            self._reply(self._waiting.pop(name), Leave())
            if not record.is_released:
                record.is_released = True
                self.emit(events.WorkerLeft(worker=record.index, step=self.step))

    def _release_waiting(self) -> None:
        for name in list(self._waiting):
            self._reply(self._waiting.pop(name), Leave())
