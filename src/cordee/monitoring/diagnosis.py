"""Where the time of a run goes, and what to change, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cordee.monitoring.timeline import Line, Phase
from cordee.monitoring.wording import plural

_MUCH = 0.20  # of the time: less is not worth a change
_FEW_ROWS_US = 2_000_000  # of recorded time before anything is said: the first steps are no measure


def add_up(lines: Iterable[Line]) -> list[int]:
    """Return the microseconds of each phase. Pure."""
    totals = [0] * len(Phase)
    for line in lines:
        for phase in Phase:
            totals[phase] += sum(line.phases[phase][: line.num_rows])
    return totals


class Crowd(NamedTuple):
    """A host that has more workers than cores: they wait for each other however equal their steps are."""

    host: str
    workers: int
    cores: int


def find_crowd(places: Mapping[str, tuple[str, int]]) -> Crowd | None:
    """Return the host with the fewest cores for each of its workers, if these are more than its cores. Pure.

    `places` are host and cores of each worker; 0 cores are not known.
    """
    cores = dict(places.values())
    workers = Counter(host for host, _ in places.values())
    crowds = [Crowd(host, workers[host], cores[host]) for host in workers if 0 < cores[host] < workers[host]]
    return min(crowds, key=lambda crowd: crowd.cores / crowd.workers, default=None)


def diagnose_queue(queued: Mapping[str, tuple[int, int]], crowd: Crowd | None) -> str:
    """Return which worker had work and no core for much of the time, and why; empty if none had. Pure.

    `queued` are, for each worker, the microseconds without a core and those of training. What a member waits for says
    nothing then: its peers may be without a core.
    """
    shares = {name: min(without / spent, 1.0) for name, (without, spent) in queued.items() if spent >= _FEW_ROWS_US}
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] < _MUCH:
        return ""
    why = "its cores are taken by other programs or data.processes, or training.threads is too high"
    if crowd is not None:
        why = f"{_share_cores(crowd)}; lower strategy.workers, or add hosts"
    return f"{in_words(name)} waits for a core {_of_the_time(shares[name])}: {why}"


def _share_cores(crowd: Crowd) -> str:
    return f"{plural(crowd.workers, 'worker')} share {plural(crowd.cores, 'core')} of {crowd.host}"


def diagnose_phases(totals: Mapping[str, list[int]], *, has_stages: bool = False, crowd: Crowd | None = None) -> str:
    """Return what holds training up most, and which setting helps; empty if nothing does. Pure.

    `totals` are the microseconds of each phase by member. A member that waits is not the cause: the cause is the
    member that the others wait for, which waits least. With `has_stages` each member computes some layers only.
    """
    known = {name: spent for name, spent in totals.items() if sum(spent) >= _FEW_ROWS_US}
    shares = {name: [value / sum(spent) for value in spent] for name, spent in known.items()}
    if not shares:
        return ""
    hungry = max(shares, key=lambda name: shares[name][Phase.DATA])
    if (share := shares[hungry][Phase.DATA]) >= _MUCH:
        return f"{in_words(hungry)} waits for its data {_of_the_time(share)}: raise data.processes"
    waiting = max(shares, key=lambda name: shares[name][Phase.WAIT])
    sending = max(shares, key=lambda name: shares[name][Phase.EXCHANGE])
    is_waited_more = shares[waiting][Phase.WAIT] >= shares[sending][Phase.EXCHANGE]
    if len(shares) > 1 and is_waited_more and (share := shares[waiting][Phase.WAIT]) >= _MUCH:
        if crowd is not None:
            return (
                f"the workers wait up to {_of_the_time(share)} for each other: {_share_cores(crowd)}; "
                "lower strategy.workers, or add hosts"
            )
        # In seconds: a member that has trained alone while the others were lost has smaller shares for that reason.
        slowest = min(known, key=lambda name: known[name][Phase.WAIT])
        if slowest != waiting and known[slowest][Phase.WAIT] < known[waiting][Phase.WAIT] / 2:
            return f"{in_words(waiting)} waits {_of_the_time(share)} for {in_words(slowest)}, which computes longer"
        if has_stages:
            return (
                f"the stages wait up to {_of_the_time(share)} for each other: raise strategy.microbatches, "
                "or move layers with strategy.placement"
            )
        return f"the workers wait {_of_the_time(share)} for each other: their steps differ in length"
    if (share := shares[sending][Phase.EXCHANGE]) >= _MUCH:
        return (
            f"{in_words(sending)} exchanges {_of_the_time(share)}: raise training.batch_size, "
            "or see docs/how-to/slow-links.md"
        )
    for phase, key in ((Phase.EVALUATE, "evaluation.every_steps"), (Phase.SAVE, "checkpoint.every_steps")):
        name = max(shares, key=lambda name, phase=phase: shares[name][phase])  # type: ignore[misc]
        if (share := shares[name][phase]) >= _MUCH:
            return f"{in_words(name)} spends {_of_the_time(share)} in {phase.name.lower()}: raise {key}"
    return ""


def in_words(member: str) -> str:
    """Return a member as events call it: "worker-1" is worker 1."""
    return member.replace("-", " ")


def _of_the_time(share: float) -> str:
    return f"{100 * share:.0f} % of the time"
