"""Keys of [strategy] that belong to federated."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from cordee.communication.compression import CompressionSettings
from cordee.core.durations import parse_duration
from cordee.core.errors import JobError
from cordee.core.job import read_section
from cordee.core.references import Use
from cordee.core.settings import Section

Accounting = Literal["pld", "rdp"]
RobustRule = Literal["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
T = TypeVar("T", bound=Section)


class PartitionSettings(Section, frozen=True, kw_only=True):
    """How the training set is divided among simulated clients."""

    # iid: at random; dirichlet: each class in shares drawn from Dir(alpha); labels: some classes each; key: by a value.
    kind: Literal["iid", "dirichlet", "labels", "key"] = "iid"
    clients: int = 10  # how many; with kind = "key" there is one for each value
    alpha: float = 0.5  # of kind = "dirichlet": the smaller, the more unequal
    per_client: int = 2  # of kind = "labels": classes that a client has
    key: str = ""  # of kind = "key": "target", or the name of an input whose value says whose sample it is
    min_samples: int = 1  # that every client must have

    def __post_init__(self) -> None:
        for name in ("clients", "per_client", "min_samples"):
            if (value := getattr(self, name)) < 1:
                raise JobError(f"strategy.partition.{name} = {value} must be at least 1")
        if not self.alpha > 0:
            raise JobError(f"strategy.partition.alpha = {self.alpha} must be above 0")
        if (self.kind == "key") != bool(self.key):
            raise JobError(
                f"strategy.partition.kind = '{self.kind}' and key = '{self.key}': kind = 'key' needs the key that says "
                "whose a sample is, and other kinds take none"
            )


class PrivacySettings(Section, frozen=True, kw_only=True):
    """Differential privacy of clients: what a client sends is clipped, and noise is added."""

    clip_norm: float  # largest norm of what a client sends
    noise: float  # deviation of the noise, in units of clip_norm, on the sum of a round
    where: Literal["central", "local"] = "central"  # local: each client adds the noise to what it sends
    delta: float = 1e-5
    max_epsilon: float = 0.0  # the run ends before the round that would pass it; 0: there is no limit
    accountant: Accounting = "pld"

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise"):
            if not (value := getattr(self, name)) > 0:
                raise JobError(f"strategy.privacy.{name} = {value} must be above 0")
        if not 0 < self.delta < 1:
            raise JobError(f"strategy.privacy.delta = {self.delta} must be above 0 and below 1")
        if not self.max_epsilon >= 0:
            raise JobError(f"strategy.privacy.max_epsilon = {self.max_epsilon} must be at least 0")


class RobustSettings(Section, frozen=True, kw_only=True):
    """An aggregation that some wrong updates cannot move far."""

    use: RobustRule
    wrong: float = 0.2  # share of a round's updates that may be wrong

    def __post_init__(self) -> None:
        if not 0 <= self.wrong < 0.5:
            raise JobError(f"strategy.robust.wrong = {self.wrong} must be at least 0 and below 0.5")


class SecureSettings(Section, frozen=True, kw_only=True):
    """Secure aggregation: the server gets the sum of the updates only."""

    threshold: float = 0.67  # share of a round's clients that must answer to the end; fewer abort the round
    bits: int = 20  # of a quantised number
    range: float = 4.0  # largest magnitude of what is sent: difference · weight ÷ most_samples; larger is refused

    def __post_init__(self) -> None:
        if not 0.5 < self.threshold <= 1:
            raise JobError(f"strategy.secure.threshold = {self.threshold} must be above 0.5 and at most 1")
        if not 8 <= self.bits <= 32:
            raise JobError(f"strategy.secure.bits = {self.bits} must be at least 8 and at most 32")
        if not self.range > 0:
            raise JobError(f"strategy.secure.range = {self.range} must be above 0")


class ClockSettings(Section, frozen=True, kw_only=True):
    """The virtual clock of a simulation: how long clients take, and which fail. Nothing waits for it."""

    sample_seconds: float = 0.001  # that a client takes to train on a sample
    overhead_seconds: float = 0.0  # that a client takes in a round besides
    stragglers: float = 0.0  # share of the clients that are slower
    slowdown: float = 10.0  # by how much
    failures: float = 0.0  # probability that a client that was asked fails in the round

    def __post_init__(self) -> None:
        for name in ("stragglers", "failures"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise JobError(f"strategy.clock.{name} = {value} must be at least 0 and below 1")
        if not self.slowdown >= 1:
            raise JobError(f"strategy.clock.slowdown = {self.slowdown} must be at least 1")
        for name in ("sample_seconds", "overhead_seconds"):
            if not (value := getattr(self, name)) >= 0:
                raise JobError(f"strategy.clock.{name} = {value} must be at least 0")


class FederatedSettings(Section, frozen=True, kw_only=True, dict=True):
    """Who takes part in a round, what a client does in it, and what becomes of it."""

    algorithm: str | dict[str, Any] = "fedavg"  # a name, "module:callable", or { use = "fedprox", mu = 0.01 }
    rounds: int = 10  # how often the server asks clients and takes a step
    local_epochs: int | None = None  # passes of a client over its samples in a round; 1 where neither is set
    local_steps: int | None = None  # steps of a client in a round, instead of epochs
    clients_per_round: int | None = None  # that are asked in a round
    fraction: float | None = None  # of all clients, that is asked in a round; all where neither is set
    sampling: Literal["fixed", "poisson"] = "fixed"  # poisson: each client is asked with probability `fraction`
    # Clients that take longer are late and do not count; virtual time in a simulation. "": all are waited for.
    deadline: str | float = ""
    weights: Literal["samples", "equal"] = "samples"  # of a client in the mean
    most_samples: int | None = None  # a client's weight is at most that of so many samples, whatever it claims
    max_norm: float = 0.0  # largest norm of an update; a larger one is scaled to it. 0: there is none
    personal: tuple[str, ...] = ()  # patterns of names of parameters that stay with the client
    client_test: float = 0.0  # share of each client's samples that is set aside to measure the client's accuracy on
    # What is sent in a smaller form: a name, or { use = "topk", share = 0.01 }; see docs/how-to/slow-links.md.
    compress: str | dict[str, Any] = "none"
    # How the training set is divided among clients: { kind = "dirichlet", alpha = 0.5, clients = 10 }.
    partition: dict[str, Any] = msgspec.field(default_factory=dict)
    # Clipping, noise and the limit of epsilon: { clip_norm = 1.0, noise = 1.0, max_epsilon = 8.0 }.
    privacy: dict[str, Any] = msgspec.field(default_factory=dict)
    robust: str | dict[str, Any] = ""  # a name, or { use = "trimmed_mean", wrong = 0.2 }
    secure: bool | dict[str, Any] = False  # whether the server learns the sum of the updates only; between sites
    # How long simulated clients take, and how many fail: { stragglers = 0.1, slowdown = 10.0, failures = 0.05 }.
    clock: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise JobError(f"strategy.rounds = {self.rounds} must be at least 1")
        _refuse_both(self, "local_epochs", "local_steps")
        _refuse_both(self, "clients_per_round", "fraction")
        for name in ("local_epochs", "local_steps", "clients_per_round", "most_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise JobError(f"strategy.{name} = {value} must be at least 1")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise JobError(f"strategy.fraction = {self.fraction} must be above 0 and at most 1")
        if self.sampling == "poisson" and self.fraction is None:
            raise JobError("strategy.sampling = 'poisson' asks each client with a probability: set strategy.fraction")
        if not self.max_norm >= 0:
            raise JobError(f"strategy.max_norm = {self.max_norm} must be at least 0")
        if not 0 <= self.client_test < 1:
            raise JobError(f"strategy.client_test = {self.client_test} must be at least 0 and below 1")
        if self.deadline != "" and not self.deadline_s > 0:
            raise JobError(f"strategy.deadline = {self.deadline!r} must be longer than nothing")
        self.parts.check_together(self)

    @property
    def use(self) -> Use:
        """The algorithm and its settings."""
        return Use.coerce("strategy.algorithm", self.algorithm)

    @property
    def deadline_s(self) -> float:
        """Seconds after which a client is late; infinite where there is no deadline."""
        if self.deadline == "":
            return float("inf")
        return parse_duration(self.deadline, "strategy.deadline") if isinstance(self.deadline, str) else self.deadline

    @functools.cached_property  # asked for several times in each client's round: reading takes half a millisecond
    def parts(self) -> FederatedParts:
        """The sub-tables, read. Raises JobError."""
        return FederatedParts(
            partition=_read("strategy.partition", self.partition, PartitionSettings),
            compress=CompressionSettings.read("strategy.compress", self.compress),
            privacy=_read("strategy.privacy", self.privacy, PrivacySettings) if self.privacy else None,
            robust=_read("strategy.robust", self.robust, RobustSettings) if self.robust else None,
            secure=_read_secure(self.secure),
            clock=_read("strategy.clock", self.clock, ClockSettings),
        )

    def is_personal(self, name: str) -> bool:
        """Whether a parameter, or buffer, stays with the client."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.personal)

    def num_asked(self, num_clients: int) -> int:
        """Return how many of all clients a round asks; with `poisson`, the mean of it. Raises JobError for too many."""
        if self.fraction is not None:
            return max(1, round(self.fraction * num_clients))
        if self.clients_per_round is None:
            return num_clients
        if self.clients_per_round > num_clients:
            raise JobError(
                f"strategy.clients_per_round = {self.clients_per_round} is more than there are clients: {num_clients}. "
                "Ask fewer, or divide the data among more (strategy.partition.clients)"
            )
        return self.clients_per_round

    def weight_of(self, num_samples: int) -> float:
        """Return the weight of a client that says that it has so many samples."""
        if self.weights == "equal" or self.privacy:  # one client's share in the sum is bounded by clip_norm alone
            return 1.0
        return float(num_samples if self.most_samples is None else min(num_samples, self.most_samples))


class FederatedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The sub-tables of [strategy], as structs. None: not asked for."""

    partition: PartitionSettings
    compress: CompressionSettings
    privacy: PrivacySettings | None
    robust: RobustSettings | None
    secure: SecureSettings | None
    clock: ClockSettings

    def check_together(self, settings: FederatedSettings) -> None:
        """Raise JobError for parts that rule each other out."""
        if self.robust and self.secure:
            raise JobError(
                f"strategy.robust = '{self.robust.use}' compares the updates of clients, and with strategy.secure the "
                "server has their sum only: remove one of them"
            )
        if self.robust and self.privacy:
            raise JobError(
                f"strategy.robust = '{self.robust.use}' is no sum, and the noise of strategy.privacy is that of a sum: "
                "remove one of them (clip_norm bounds what one client can do)"
            )
        if self.secure and self.compress.use != "none":
            raise JobError(
                f"strategy.compress = '{self.compress.use}' and strategy.secure: masked updates are quantised numbers "
                "of all places (strategy.secure.bits): remove strategy.compress"
            )
        if self.privacy and settings.weights != "samples":
            raise JobError("strategy.weights has no effect with strategy.privacy, where all clients weigh the same")
        if self.privacy and settings.most_samples is not None:
            raise JobError("strategy.most_samples has no effect with strategy.privacy: all clients weigh the same")
        if self.privacy and settings.max_norm:
            raise JobError("strategy.max_norm and strategy.privacy.clip_norm bound the same: remove strategy.max_norm")


def _read_secure(given: bool | Mapping[str, Any]) -> SecureSettings | None:
    if isinstance(given, bool):
        return SecureSettings() if given else None
    return _read("strategy.secure", given, SecureSettings)


def _read(section: str, given: str | Mapping[str, Any], into: type[T]) -> T:
    table = {"use": given} if isinstance(given, str) else given
    missing = [field.name for field in msgspec.structs.fields(into) if field.required and field.name not in table]
    if missing:
        raise JobError(f"{section} needs {_listed(missing)}: set {section}.{missing[0]}")
    found: T = read_section(section, table, into)
    return found


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _refuse_both(settings: FederatedSettings, one: str, other: str) -> None:
    first, second = getattr(settings, one), getattr(settings, other)
    if first is not None and second is not None:
        raise JobError(f"strategy.{one} = {first} and strategy.{other} = {second} contradict each other: remove one")
