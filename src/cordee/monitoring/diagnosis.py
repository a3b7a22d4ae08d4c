"""Where the time of a run goes, and what to change, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cordee.monitoring.timeline import Line, Phase

_MUCH = 0.20  # of the time: less is not worth a change
_FEW_ROWS_US = 2_000_000  # of recorded time before anything is said: the first steps are no measure


def add_up(lines: Iterable[Line]) -> list[int]:
    """Return the microseconds of each phase. Pure."""
    totals = [0] * len(Phase)
    for line in lines:
        for phase in Phase:
            totals[phase] += sum(line.phases[phase][: line.num_rows])
    return totals


def diagnose_phases(totals: Mapping[str, list[int]]) -> str:
    """Return what holds training up most, and which setting helps; empty if nothing does. Pure.

    `totals` are the microseconds of each phase by member. A member that waits is not the cause: the cause is the
    member that the others wait for, which waits least.
    """
    known = {name: spent for name, spent in totals.items() if sum(spent) >= _FEW_ROWS_US}
    shares = {name: [value / sum(spent) for value in spent] for name, spent in known.items()}
    if not shares:
        return ""
    hungry = max(shares, key=lambda name: shares[name][Phase.DATA])
    if (share := shares[hungry][Phase.DATA]) >= _MUCH:
        return f"{_words(hungry)} waits for its data {share:.0%} of the time: raise data.processes"
    waiting = max(shares, key=lambda name: shares[name][Phase.WAIT])
    if len(shares) > 1 and (share := shares[waiting][Phase.WAIT]) >= _MUCH:
        slowest = min(shares, key=lambda name: shares[name][Phase.WAIT])
        if slowest != waiting and shares[slowest][Phase.WAIT] < share / 2:
            return f"{_words(waiting)} waits {share:.0%} of the time for {_words(slowest)}, which computes longer"
        return f"the workers wait {share:.0%} of the time for each other: their steps differ in length"
    sending = max(shares, key=lambda name: shares[name][Phase.EXCHANGE])
    if (share := shares[sending][Phase.EXCHANGE]) >= _MUCH:
        return (
            f"{_words(sending)} exchanges {share:.0%} of the time: raise training.batch_size, "
            "or see docs/how-to/slow-links.md"
        )
    for phase, key in ((Phase.EVALUATE, "evaluation.every_steps"), (Phase.SAVE, "checkpoint.every_steps")):
        name = max(shares, key=lambda name, phase=phase: shares[name][phase])  # type: ignore[misc]
        if (share := shares[name][phase]) >= _MUCH:
            return f"{_words(name)} spends {share:.0%} of the time in {phase.name.lower()}: raise {key}"
    return ""


def _words(member: str) -> str:
    return member.replace("-", " ")
