"""Who is there, how far they are, and who failed first: decided without I/O.

A failing worker makes others fail: they lose a peer in the middle of an exchange and say so, often before the
failing one was heard of. `culprit` tells the cause from the consequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

SETTLING_S = 1.0  # how long the first sign of a failure waits for what the workers themselves say of it


@dataclass(frozen=True)
class Trouble:
    """Why a worker cannot go on. A consequence is the loss of a peer, which was somebody else's doing."""

    worker_index: int
    step: int
    reason: str
    traceback: str = ""
    is_consequence: bool = False
    is_final: bool = True  # nothing better will be heard of it; an exit is followed by the worker's own account
    at_s: float = 0.0

    def describe(self) -> str:
        return f"worker {self.worker_index} {self.reason} (in step {self.step + 1})"


@dataclass
class Record:
    """What is known of one worker."""

    state: Literal["starting", "member", "finished", "gone"] = "starting"
    step: int = 0  # steps it has taken
    heard_s: float = 0.0


@dataclass
class Membership:
    """The workers of a run, from the first sign of life to the last."""

    num_workers: int
    failure_timeout_s: float
    startup_timeout_s: float
    started_s: float
    records: dict[int, Record] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index in range(self.num_workers):
            self.records[index] = Record(heard_s=self.started_s)

    def register(self, index: int, now_s: float) -> None:
        self.records[index].state = "member"
        self.records[index].heard_s = now_s

    def hear(self, index: int, now_s: float, step: int | None = None) -> None:
        """Take note of a sign of life."""
        record = self.records[index]
        record.heard_s = now_s
        if step is not None:
            record.step = max(record.step, step)

    def finish(self, index: int) -> None:
        self.records[index].state = "finished"

    def report(self, trouble: Trouble) -> None:
        """Take note of a failure; the first of each worker counts, but its own account more than its exit."""
        for at, known in enumerate(self.troubles):
            if known.worker_index == trouble.worker_index:
                if trouble.is_final and not known.is_final:
                    self.troubles[at] = replace(trouble, at_s=known.at_s)
                return
        self.troubles.append(trouble)

    def exit(self, index: int, how: str, now_s: float, *, is_killed: bool = False) -> None:
        """Take note that the process of a worker has ended; one that was killed had no time to say anything."""
        record = self.records[index]
        if record.state != "finished":
            self.report(Trouble(index, record.step, how, is_final=is_killed, at_s=now_s))
            record.state = "gone"

    def check_silence(self, now_s: float, is_working: Callable[[int], bool] = lambda index: False) -> list[int]:
        """Report the workers that were not heard of for too long; return them.

        One that `is_working` says is getting processor time is too busy to speak, not frozen: it has as much
        time again.
        """
        silent = []
        for index, record in self.records.items():
            limit_s = self.startup_timeout_s if record.state == "starting" else self.failure_timeout_s
            if record.state in ("starting", "member") and now_s - record.heard_s > limit_s:
                if record.state == "member" and is_working(index):
                    record.heard_s = now_s
                    continue
                what = "did not start" if record.state == "starting" else "is frozen: no sign of life"
                self.report(Trouble(index, record.step, f"{what} for {now_s - record.heard_s:.1f} s", at_s=now_s))
                silent.append(index)
        return silent

    @property
    def is_complete(self) -> bool:
        """Whether every worker has registered."""
        return all(record.state != "starting" for record in self.records.values())

    @property
    def is_over(self) -> bool:
        """Whether every worker has ended well."""
        return all(record.state == "finished" for record in self.records.values())

    def culprit(self, now_s: float) -> Trouble | None:
        """Return the failure to report, once it is known: a cause at once, a consequence after some time."""
        causes = [trouble for trouble in self.troubles if not trouble.is_consequence]
        if causes:
            first = min(causes, key=lambda trouble: trouble.at_s)
            if first.traceback:
                return first
            if now_s - first.at_s <= SETTLING_S and not self._has_all_accounts:
                return None
            # What it was last heard of is old; those who lost it in the same step know better.
            return replace(first, step=max(trouble.step for trouble in self.troubles))
        is_anybody_left = any(record.state in ("starting", "member") for record in self.records.values())
        limit_s = SETTLING_S + (self.failure_timeout_s if is_anybody_left else 0.0)
        if self.troubles and now_s - self.troubles[0].at_s > limit_s:
            return self.troubles[0]
        return None

    @property
    def _has_all_accounts(self) -> bool:
        """Whether every worker has ended well or said what is wrong: nobody's account is awaited."""
        known = {trouble.worker_index for trouble in self.troubles if trouble.is_final}
        return all(index in known or record.state == "finished" for index, record in self.records.items())
