"""Too few workers are left to go on: how long others are waited for, and what is said of it. Decided without I/O."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from cordee.core.settings import Cluster


@dataclass(frozen=True)
class Lack:
    """How many workers are left, and after which loss."""

    loss: str  # in words
    left: int
    needed: int

    def describe(self) -> str:
        return f"{self.loss}; {self.left} of at least {self.needed} workers are left"

    def verdict(self, cluster: Cluster) -> str:
        """Return why the run cannot go on."""
        return f"{self.describe()}, and all {cluster.max_restarts} replacements are used up (cluster.max_restarts)"

    def describe_wait(self, cluster: Cluster, run_dir: Path) -> str:
        """Return what is waited for, and how it comes about; nothing if the run does not wait."""
        wait_s, run = cluster.wait_for_workers_s, shlex.quote(str(run_dir))
        if not wait_s:
            return ""
        how = f"`cordee scale {run} {self.needed}` or `cordee join {run}`"
        return f"{self.describe()}; waiting {wait_s:g} s for others, who come with {how}"


@dataclass(frozen=True)
class Shortage:
    """Others are waited for. Written down, so that a coordinator that comes back waits no longer."""

    verdict: str  # what is said when nobody has come
    until_s: float

    @classmethod
    def begin(cls, verdict: str, cluster: Cluster, now_s: float) -> Shortage:
        return cls(verdict, now_s + cluster.wait_for_workers_s)

    def is_past(self, now_s: float) -> bool:
        """Whether nobody has come in time."""
        return now_s >= self.until_s
