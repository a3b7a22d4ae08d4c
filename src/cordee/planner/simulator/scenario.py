"""What is simulated: a job, workers, links and failures, as TOML; and published scenarios, with what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from cordee.core.durations import format_duration, parse_duration
from cordee.core.errors import JobError, nearest
from cordee.core.job import apply_override, read_section, read_toml
from cordee.core.settings import Section
from cordee.monitoring.wording import plural
from cordee.planner.amounts import in_bytes, in_time, parse_latency, parse_rate, parse_size
from cordee.strategies.table import quote_names, strategies_where

_REQUIRED = ("workers", "step", "gradients")
MOST_WORKERS = 100_000
MOST_LAYERS = 10_000
MOST_STEPS = 20_000_000  # of all workers together: so many are held in 160 MB


ALL_REDUCE = "all_reduce"
WINDOWS = strategies_where(lambda entry: entry.cost_model == "windows")
ROUNDS = strategies_where(lambda entry: entry.cost_model == "clients")
SERVER = "10 Gbit/s"
ALONE = (*WINDOWS, *ROUNDS)  # whose workers take steps without a word to the others
WITH_SERVERS = tuple(strategies_where(lambda entry: entry.cost_model == "servers"))


def _seconds(value: str | float, key: str) -> float:
    seconds = parse_duration(value, key) if isinstance(value, str) else float(value)
    if not 0 <= seconds < math.inf:
        raise JobError(f"{key} = {value} must be a length of time, of 0 or more seconds")
    return seconds


class _Amount:
    """A key of a scenario as a number: of seconds, bytes, or bytes per second."""

    def __init__(self, key: str, parse: Callable[[str | float, str], float]) -> None:
        self._key, self._parse = key, parse

    def __get__(self, scenario: Scenario, owner: object) -> float:
        return self._parse(getattr(scenario, self._key), self._key)


class Scenario(Section, frozen=True, kw_only=True):
    """A training job that is not run. Amounts are texts with a unit, or numbers in seconds and bytes."""

    workers: tuple[int, ...]  # the numbers of workers to look at
    step: str | float  # computing of one worker in one step
    gradients: str | float  # bytes that are exchanged in a step
    name: str = ""
    strategy: str = ALL_REDUCE  # or one with servers
    sync_every: int = 1  # steps that a worker takes alone, with local_sgd or as a client of a round
    quorum: float = 1.0  # federated: the share of the clients that a round waits for; what the others did is lost
    server_bandwidth: str | float = SERVER  # federated: of the server, which all clients share
    stragglers: float = 0.0  # share of the workers that are slow all the time
    straggler_slowdown: float = 1.0  # how many times as long as others they take
    spread: float = 0.0  # deviation of a worker's step from one to the next, as a share of it
    backward: float = 0.67  # share of the step that is the backward pass
    overlap: bool = True  # exchange gradients while the backward pass continues
    layers: int = 50  # whose gradients are ready one after the other
    bucket: str | float = "64 MiB"  # at most so many bytes of them are exchanged at once
    # When gradients are ready: (share of the backward pass, share of the bytes ready by then). Even where empty.
    order: tuple[tuple[float, float], ...] = ()
    per_host: int = 1  # workers that share a host's network
    bandwidth: str | float = "10 Gbit/s"  # between hosts, as data gets it
    latency: str | float = "20us"
    inside_bandwidth: str | float = "10 GB/s"  # between workers of a host
    servers: int = 0  # 0: one for every four workers
    staleness: int | Literal["unbounded"] = 0  # steps a worker may be ahead of the slowest
    steps: int = 100  # of each worker, that are simulated
    mtbf: str | float = 0.0  # mean time between failures of one worker; 0: none
    restart: str | float = "60s"  # from a failure to the first step after it
    checkpoint_every: str | float = "10m"
    checkpoint_time: str | float = "5s"  # that training stands still for
    seed: int = 0

    step_s = _Amount("step", _seconds)
    gradient_bytes = _Amount("gradients", parse_size)
    bucket_bytes = _Amount("bucket", parse_size)
    bytes_per_s = _Amount("bandwidth", parse_rate)
    server_bytes_per_s = _Amount("server_bandwidth", parse_rate)
    inside_bytes_per_s = _Amount("inside_bandwidth", parse_rate)
    latency_s = _Amount("latency", parse_latency)
    mtbf_s = _Amount("mtbf", _seconds)
    restart_s = _Amount("restart", _seconds)
    checkpoint_every_s = _Amount("checkpoint_every", _seconds)
    checkpoint_time_s = _Amount("checkpoint_time", _seconds)

    def __post_init__(self) -> None:
        if not self.workers:
            raise JobError("workers = [] names no number of workers: write for example workers = [1, 8, 64, 512]")
        for count in self.workers:
            if not 1 <= count <= MOST_WORKERS:
                raise JobError(f"workers = {list(self.workers)}: {count} must be from 1 to {MOST_WORKERS:,}")
        for key, lowest in (
            ("per_host", 1),
            ("steps", 1),
            ("sync_every", 1),
            ("layers", 1),
            ("servers", 0),
            ("seed", 0),
        ):
            if getattr(self, key) < lowest:
                raise JobError(f"{key} = {getattr(self, key)} must be at least {lowest}")
        if self.layers > MOST_LAYERS:
            raise JobError(f"layers = {self.layers} must be at most {MOST_LAYERS:,}")
        if self.steps * max(self.workers) > MOST_STEPS:
            raise JobError(
                f"steps = {self.steps} of {max(self.workers):,} workers are more than {MOST_STEPS:,} in all: set steps "
                f"to at most {max(1, MOST_STEPS // max(self.workers))}"
            )
        if isinstance(self.staleness, int) and self.staleness < 0:
            raise JobError(f"staleness = {self.staleness} must be at least 0, or 'unbounded'")
        if not 0.0 <= self.spread < 2.0:
            raise JobError(f"spread = {self.spread} must be at least 0 and below 2 (0.1 is 10 % of a step)")
        if not 0.0 <= self.stragglers <= 1.0 or not 1.0 <= self.straggler_slowdown < math.inf:
            raise JobError(
                f"stragglers = {self.stragglers} must be from 0 to 1, and straggler_slowdown = "
                f"{self.straggler_slowdown} at least 1 (2 is twice as slow)"
            )
        if not 0.0 < self.quorum <= 1.0:
            raise JobError(f"quorum = {self.quorum} must be above 0 and at most 1, a share of the clients")
        if not 0.0 <= self.backward <= 1.0:
            raise JobError(f"backward = {self.backward} must be from 0 to 1, a share of the step")
        _check_order(self.order)
        for seconds, key in ((self.step_s, "step"), (self.checkpoint_every_s, "checkpoint_every")):
            if not seconds > 0:
                raise JobError(f"{key} must be longer than nothing")
        for key in ("mtbf_s", "restart_s", "checkpoint_time_s", "latency_s"):
            getattr(self, key)  # raises where it is not an amount
        known = [ALL_REDUCE, *ALONE, *WITH_SERVERS]
        if self.strategy not in known:
            raise JobError(
                f"strategy = {self.strategy!r} is not simulated{nearest(self.strategy, known)}: write "
                f"{quote_names(known)}"
            )
        if not self.has_servers and (self.staleness != 0 or self.servers):
            raise JobError(
                f"staleness and servers belong to strategy = {quote_names(WITH_SERVERS)}; the scenario has "
                f"'{self.strategy}'"
            )
        self._check_alone()
        rates = (self.server_bytes_per_s, self.bytes_per_s, self.inside_bytes_per_s)
        if min(self.gradient_bytes, self.bucket_bytes, *rates) <= 0:
            raise JobError("gradients, bucket and bandwidths must be above 0")

    def _check_alone(self) -> None:
        if self.sync_every > 1 and self.strategy not in ALONE:
            raise JobError(f"sync_every belongs to strategy = {quote_names(ALONE)}; the scenario has '{self.strategy}'")
        if self.sync_every > self.steps:
            raise JobError(f"sync_every = {self.sync_every} is more than steps = {self.steps}: simulate more steps")
        if self.strategy not in ROUNDS and (self.quorum != 1.0 or self.server_bandwidth != SERVER):
            raise JobError(
                f"quorum and server_bandwidth belong to strategy = {quote_names(ROUNDS)}; the scenario has "
                f"'{self.strategy}'"
            )

    def describe(self) -> str:
        """Return the scenario in a sentence."""
        how = self.strategy.replace("_", "-")
        if self.strategy in ALONE:
            how += f" after every {plural(self.sync_every, 'step')}"
        if self.quorum < 1:
            how += f", waiting for {self.quorum:.0%} of the clients"
        if self.has_servers:
            how += f" with staleness {self.staleness}"
        text = (
            f"{how}: steps of {in_time(self.step_s)} that vary by {self.spread:.0%}, "
            f"{in_bytes(self.gradient_bytes)} of gradients, {in_bytes(self.bytes_per_s)}/s between hosts of "
            f"{plural(self.per_host, 'worker')}"
        )
        if self.stragglers:
            text += f"; {self.stragglers:.0%} of the workers take {self.straggler_slowdown:g} times as long"
        if self.mtbf_s:
            days = self.mtbf_s / 86400
            text += f"; each worker fails every {f'{days:.3g} days' if days > 2 else format_duration(self.mtbf_s)}"
        return text

    @property
    def has_servers(self) -> bool:
        return self.strategy in WITH_SERVERS

    def num_servers(self, num_workers: int) -> int:
        return self.servers or max(1, num_workers // 4)


def load_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario file. Raises JobError that names the file and the key."""
    table = read_toml(path, "scenario file")
    table.setdefault("name", path.stem)
    return read_scenario(table, overrides)


def read_scenario(table: Mapping[str, Any], overrides: Iterable[str] = ()) -> Scenario:
    """Return the scenario of a table, with overrides of the form "a=b" applied."""
    table = dict(table)
    for override in overrides:
        apply_override(table, override)
    if isinstance(table.get("workers"), int):
        table["workers"] = [table["workers"]]
    fields = [field.name for field in msgspec.structs.fields(Scenario)]
    for key in table:
        if key not in fields:
            raise JobError(f"a scenario has no key '{key}'{nearest(key, fields)} (it has: {', '.join(fields)})")
    for key in _REQUIRED:
        if key not in table:
            raise JobError(f"the scenario has no '{key}': add it, or give it with --set {key}=…")
    scenario: Scenario = read_section("scenario", table, Scenario)
    return scenario


def _check_order(order: tuple[tuple[float, float], ...]) -> None:
    before = (0.0, 0.0)
    for point in order:
        if not (0 <= point[0] <= 1 and 0 <= point[1] <= 1 and point[0] >= before[0] and point[1] >= before[1]):
            raise JobError(f"order = {[list(p) for p in order]}: shares must be from 0 to 1 and grow")
        before = point
    if order and order[-1][1] != 1.0:
        raise JobError(f"order = {[list(p) for p in order]}: the last share of the bytes must be 1.0")


# Published measurements that the tests compare the simulator with.
#
# Horovod (docs/benchmarks.rst of the project; 128 servers with 4 Pascal GPUs each, RoCE of 25 Gbit/s, batches of 64 per
# GPU): 90 % scaling efficiency at 512 GPUs for Inception V3 and ResNet-101, 68 % for VGG-16; an earlier version of the
# page has 90, 90 and 79 % at 128 GPUs. Taken from elsewhere:
#
# - Images per second of one GPU: 142 (Inception V3) and 154 (VGG-16) from TensorFlow's benchmarks of May 2017 (one
#   P100, batches of 64); 103.55 (ResNet-101) is 1656.82 / 16 from Horovod's page.
# - Parameters: 27.2 M (Inception V3 with its auxiliary head), 44.5 M (ResNet-101), 138.4 M (VGG-16, of which 123.6 M in
#   the three fully connected layers, whose gradients are the first to be ready).
# - At most 64 MB of gradients are fused: Horovod's default.
#
# Assumed, alike for all three: steps vary by 3 % from one to the next, and data gets 90 % of the line rate. Both were
# chosen with the published figures in view (80 % of the line rate gave VGG-16 65 % at 512 and 69 % at 128), and so was
# the rule that whatever is ready is sent together: the agreement is a fit of a few numbers, not a blind prediction.
#
# Parameter server (Li et al., OSDI'14, sparse logistic regression on 1000 machines, 800 of them workers): workers idle
# 50 % of the time with a maximal delay of 0, and 1.7 % with 16 (quoted from memory: check against the paper). The
# spread of the steps is not published: 0.24 is what makes the simulator idle half the time at delay 0, so only what
# follows for larger delays is a prediction.
_HOROVOD: dict[str, Any] = {
    "workers": [1, 4, 16, 64, 128, 256, 512],
    "spread": 0.03,
    "per_host": 4,
    "bandwidth": "22.5 Gbit/s",  # 90 % of 25
    "latency": "5us",
    "bucket": "64 MiB",
}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "horovod-inception3": {**_HOROVOD, "step": 64 / 142, "gradients": "108.8 MB"},
    "horovod-resnet101": {**_HOROVOD, "step": 64 / 103.55, "gradients": "178 MB"},
    "horovod-vgg16": {
        **_HOROVOD,
        "step": 64 / 154,
        "gradients": "553.6 MB",
        "order": [[0.05, 0.893], [1.0, 1.0]],
    },
    "parameter-server": {
        "strategy": WITH_SERVERS[0],
        "workers": [100, 400, 800],
        "servers": 200,
        "step": 10.0,
        "spread": 0.24,
        "gradients": "100 MB",
        "bandwidth": "10 Gbit/s",
        "staleness": 0,
        "steps": 60,
    },
}
