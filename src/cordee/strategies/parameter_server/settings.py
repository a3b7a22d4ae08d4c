"""Keys of [strategy] that belong to parameter_server."""

from __future__ import annotations

import math
from typing import Literal

from cordee.communication.compression import SPARSE, Compression
from cordee.core.errors import JobError
from cordee.core.settings import Section

MAX_SERVERS = 64
DEFAULT_TOPK = 0.01


class ParameterServerSettings(Section, frozen=True, kw_only=True):
    """How far apart workers may run, and what the servers do with what they push."""

    servers: int = 1  # processes that hold the parameters, a slice each
    staleness: int | Literal["unbounded"] = 0  # steps a worker may be ahead of the slowest; 0: synchronous
    push_every: int = 1  # batches whose gradients go out together, as one unit of work
    pull_every: int = 1  # units of work between two looks at the servers' parameters
    aggregate: Literal["weighted", "mean", "sum"] = "weighted"  # of the gradients of one step; weighted by samples
    staleness_lr: Literal["none", "inverse"] = "none"  # inverse: the rate is divided by the age of the gradient
    delay_compensation: float = 0.0  # the lambda of DC-ASGD; 0 is off
    compression: Compression = "none"  # of what travels, both ways
    topk: float = DEFAULT_TOPK  # share of the values that `topk` and `topk_2bit` send
    weight_decay: float = 0.0  # added to the gradients on the servers
    clip_norm: float = 0.0  # largest norm of a gradient on the servers; 0 leaves it alone
    replicas: Literal[1, 2] = 1  # 2: every server has a follower that can take its place at once
    servers_on: Literal["launcher", "slots"] = "launcher"  # slots: servers and the evaluator run beside workers
    drop_late: float = 0.0  # seconds after which a unit is given to another worker; 0: when its worker is lost

    def __post_init__(self) -> None:
        _check(self.servers >= 1, f"strategy.servers = {self.servers} must be at least 1")
        _check(
            self.servers <= MAX_SERVERS,
            f"strategy.servers = {self.servers} must be at most {MAX_SERVERS}: each is a process of its own",
        )
        if isinstance(self.staleness, int):
            _check(self.staleness >= 0, f"strategy.staleness = {self.staleness} must be at least 0, or 'unbounded'")
        _check(self.push_every >= 1, f"strategy.push_every = {self.push_every} must be at least 1")
        _check(self.pull_every >= 1, f"strategy.pull_every = {self.pull_every} must be at least 1")
        if self.is_synchronous and (self.push_every > 1 or self.pull_every > 1):
            raise JobError(
                "strategy.staleness = 0 exchanges at every step: set push_every and pull_every to 1, "
                "or staleness to a number of steps or 'unbounded'"
            )
        if self.is_synchronous and (self.delay_compensation or self.staleness_lr != "none"):
            raise JobError(
                "strategy.staleness = 0 has no old gradients: delay_compensation and staleness_lr are for "
                "staleness above 0 or 'unbounded'"
            )
        if not self.is_synchronous and self.aggregate != "weighted":
            raise JobError(
                f"strategy.aggregate = '{self.aggregate}' is for the gradients of a step that are applied together, "
                f"and strategy.staleness = {self.staleness!r} applies each by itself: leave aggregate out, or set "
                "staleness = 0"
            )
        for key in ("delay_compensation", "weight_decay", "clip_norm", "drop_late"):
            value = getattr(self, key)
            _check(math.isfinite(value), f"strategy.{key} = {value} must be a finite number")
        _check(
            self.delay_compensation >= 0,
            f"strategy.delay_compensation = {self.delay_compensation} must be at least 0",
        )
        _check(0 < self.topk <= 1, f"strategy.topk = {self.topk} must be above 0 and at most 1")
        _check(
            self.compression in SPARSE or self.topk == DEFAULT_TOPK,
            f"strategy.topk = {self.topk} is for compression = 'topk' and 'topk_2bit', and strategy.compression = "
            f"'{self.compression}'",
        )
        _check(self.weight_decay >= 0, f"strategy.weight_decay = {self.weight_decay} must be at least 0")
        _check(self.clip_norm >= 0, f"strategy.clip_norm = {self.clip_norm} must be at least 0")
        _check(self.drop_late >= 0, f"strategy.drop_late = {self.drop_late} must be at least 0")

    @property
    def place(self) -> Literal["launcher", "beside"]:
        """Where the engine is to start servers and the evaluator."""
        return "beside" if self.servers_on == "slots" else "launcher"

    @property
    def is_synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def keeps_order(self) -> bool:
        """Whether each worker is given its own share of every step, so that what it leaves out is of that share."""
        return self.is_synchronous and self.compression != "none" and not self.drop_late

    def gradient_weight(self, num_workers: int) -> float:
        """What the gradient of one worker counts, where all compute as much."""
        return 1 / num_workers if self.is_synchronous and self.aggregate != "sum" else 1.0

    @property
    def max_staleness(self) -> int | None:
        """Steps that workers may be apart; None: any number."""
        return self.staleness if isinstance(self.staleness, int) else None


def _check(is_fine: bool, message: str) -> None:
    if not is_fine:
        raise JobError(message)
