"""What a case left behind in each checkout, as facts, and which of them differ: decisions only, no processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# exact: the same bits. repeated: the same bits, but timing decides what happens on the way. counted: also which bits.
Precision = Literal["exact", "repeated", "counted"]

COUNTED_FIELDS = (
    "status",
    "stopped_by",
    "error",
    "strategy",
    "workers",
    "parameters",
    "trainable_parameters",
    "steps",
    "samples",
    "epochs",
    "recoveries",
    "updates_lost",
)
EXACT_FIELDS = (
    *COUNTED_FIELDS,
    "best_step",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "test_top5_accuracy",
    "weights_sha256",
)
# How many there are depends on how busy the machine is. What they look like is compared where both sides have them.
TIMED_EVENTS = frozenset({"straggler"})
MISSING = "(none)"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a case left behind."""

    exit_codes: list[int | None]  # of the commands up to the first that failed; None: it did not end in time
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json
    printed: dict[str, Any] = field(default_factory=dict)  # what a script says about itself
    events: list[dict[str, Any]] = field(default_factory=list)  # events.jsonl
    files: list[str] = field(default_factory=list)  # of the run directory
    left_behind: list[str] = field(default_factory=list)  # processes
    seconds: float = 0.0
    last_words: str = ""  # of a command that failed


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A fact on which the two checkouts do not agree."""

    fact: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What two checkouts made of one case."""

    differences: list[Difference]
    varying: list[str]  # facts on which two runs of BEFORE itself do not agree: they say nothing

    @property
    def is_same(self) -> bool:
        return not self.differences


def describe_events(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many events there are of each type, by the names of their fields."""
    counts: dict[str, Counter[str]] = {}
    for event in events:
        names = ", ".join(sorted(name for name in event if name not in ("type", "time")))
        counts.setdefault(str(event.get("type")), Counter())[names] += 1
    return {kind: dict(variants) for kind, variants in sorted(counts.items())}


def facts(outcome: Outcome, precision: Precision, *, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return what is compared of an outcome, by name; `ignored` are names, or `event TYPE`."""
    found: dict[str, Any] = {"exit codes": outcome.exit_codes, "processes left behind": len(outcome.left_behind)}
    if outcome.summary:
        names = COUNTED_FIELDS if precision == "counted" else EXACT_FIELDS
        found |= {name: outcome.summary.get(name) for name in names}
        found["fields of summary.json"] = sorted(outcome.summary)
    found |= {f"printed {name}": value for name, value in outcome.printed.items()}
    if precision == "exact":
        found["files of the run directory"] = outcome.files
    for kind, variants in describe_events(outcome.events).items():
        found[f"event {kind}: fields"] = sorted(variants)
        if kind not in TIMED_EVENTS:
            found[f"event {kind}: number"] = sum(variants.values()) if precision == "exact" else "some"
    return {name: value for name, value in found.items() if name.split(":")[0] not in ignored}


def judge(
    befores: Sequence[Outcome], afters: Sequence[Outcome], precision: Precision, *, ignored: Collection[str] = ()
) -> Verdict:
    """Compare the runs of a case pair by pair.

    A fact that varies between the runs of BEFORE is no difference. Any other that differs in one pair is, except for
    events, which must differ in every pair: what is sent depends a little on timing.
    """
    pairs = [
        tuple(facts(outcome, precision, ignored=ignored) for outcome in pair)
        for pair in zip(befores, afters, strict=True)
    ]
    differences, varying = [], []
    for name in dict.fromkeys(name for pair in pairs for side in pair for name in side):
        unlike = [pair for pair in pairs if not _is_alike(name, *(side.get(name, MISSING) for side in pair))]
        if not unlike:
            continue
        own = [before.get(name, MISSING) for before, _ in pairs]
        is_event = name.startswith("event ")
        if any(value != own[0] for value in own) or (is_event and len(unlike) < len(pairs)):
            varying.append(name)
        else:
            before, after = unlike[0]
            differences.append(
                Difference(fact=name, before=before.get(name, MISSING), after=after.get(name, MISSING))
            )  # fmt: skip
    return Verdict(differences=differences, varying=varying)


def _is_alike(name: str, before: Any, after: Any) -> bool:
    kind = name.removeprefix("event ").split(":")[0]
    if name.startswith("event ") and kind in TIMED_EVENTS and MISSING in (before, after):
        return True
    return bool(before == after)


def explain(difference: Difference) -> str:
    """Return a line that shows a difference; of lists only what one side has and the other has not."""
    before, after = difference.before, difference.after
    if isinstance(before, list) and isinstance(after, list):
        if difference.fact.endswith(": fields") and len(before) == len(after) == 1:
            before, after = before[0].split(", "), after[0].split(", ")
        only = [[entry for entry in own if entry not in other] for own, other in ((before, after), (after, before))]
        if any(only):
            return f"{difference.fact}: only before {only[0]}, only after {only[1]}"
    return f"{difference.fact}: before {before}, after {after}"
