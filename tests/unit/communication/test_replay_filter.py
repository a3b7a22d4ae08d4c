"""The gate: nothing of another run, of the past, or heard before gets through."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.communication.endpoint import ReplayFilter, Verdict
from cordee.communication.wire import PROTOCOL_VERSION, Envelope


def envelope(
    sender: str = "w", incarnation: int = 1, sequence: int = 1, generation: int = 0, run: str = "r"
) -> Envelope:
    return Envelope(
        version=PROTOCOL_VERSION, run=run, sender=sender, incarnation=incarnation, generation=generation,
        sequence=sequence, reply_to=0, buffers=(), payload=msgspec.Raw(b"\x90"),
    )  # fmt: skip


def test_sequences_must_grow() -> None:
    gate = ReplayFilter("r")
    verdicts = [gate.admit(envelope(sequence=sequence)) for sequence in (1, 2, 2, 1, 5, 4)]
    assert verdicts == [Verdict.ADMITTED] * 2 + [Verdict.REPLAY] * 2 + [Verdict.ADMITTED, Verdict.REPLAY]
    assert gate.admit(envelope(sender="other", sequence=1)) is Verdict.ADMITTED
    assert gate.refusals == {Verdict.REPLAY: 3}


def test_a_new_incarnation_silences_the_old_one() -> None:
    gate = ReplayFilter("r")
    assert gate.admit(envelope(incarnation=1, sequence=90)) is Verdict.ADMITTED
    assert gate.admit(envelope(incarnation=2, sequence=1)) is Verdict.ADMITTED
    assert gate.admit(envelope(incarnation=1, sequence=91)) is Verdict.STALE_INCARNATION


def test_generations() -> None:
    gate = ReplayFilter("r")
    gate.advance(3)
    assert gate.admit(envelope(sequence=1, generation=2)) is Verdict.STALE_GENERATION
    assert gate.admit(envelope(sequence=2, generation=3)) is Verdict.ADMITTED
    assert gate.admit(envelope(sequence=3, generation=4)) is Verdict.ADMITTED  # its holder knows more than we do
    assert gate.admit(envelope(sequence=4, generation=0)) is Verdict.ADMITTED  # of no generation
    with pytest.raises(AssertionError):
        gate.advance(2)


def test_the_fenced_must_come_back_as_somebody_new() -> None:
    gate = ReplayFilter("r")
    gate.admit(envelope(incarnation=1, sequence=1))
    gate.fence("w", 1)
    gate.fence("never-heard", 4)
    assert gate.admit(envelope(incarnation=1, sequence=2)) is Verdict.STALE_INCARNATION
    assert gate.admit(envelope(sender="never-heard", incarnation=4)) is Verdict.STALE_INCARNATION
    assert gate.admit(envelope(incarnation=2, sequence=1)) is Verdict.ADMITTED
    gate.fence("w", 1)  # late news of a death that is history
    assert gate.admit(envelope(incarnation=2, sequence=2)) is Verdict.ADMITTED


def test_another_run_and_too_many_senders() -> None:
    gate = ReplayFilter("r", max_senders=2)
    assert gate.admit(envelope(run="other")) is Verdict.WRONG_RUN
    assert [gate.admit(envelope(sender=name)) for name in "abc"] == [
        Verdict.ADMITTED,
        Verdict.ADMITTED,
        Verdict.TOO_MANY_SENDERS,
    ]
    assert gate.admit(envelope(sender="a", sequence=2)) is Verdict.ADMITTED


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)),
            st.tuples(st.just("fence"), st.sampled_from("ab"), st.integers(0, 3)),
            st.tuples(st.just("advance")),
        ),
        max_size=40,
    )
)
def test_no_message_is_admitted_twice_nor_after_its_time(actions: list[tuple[object, ...]]) -> None:
    gate = ReplayFilter("r")
    admitted: list[tuple[str, int, int]] = []
    fenced: dict[str, int] = {}
    for action in actions:
        match action:
            case ("advance",):
                gate.advance(gate.generation + 1)
            case ("fence", str(name), int(incarnation)):
                gate.fence(name, incarnation)
                fenced[name] = max(incarnation, fenced.get(name, -1))
            case (str(name), int(incarnation), int(sequence), int(generation)):
                verdict = gate.admit(envelope(name, incarnation, sequence, generation))
                earlier = [heard[1:] for heard in admitted if heard[0] == name]
                is_due = (
                    incarnation > fenced.get(name, -1)
                    and all((incarnation, sequence) > heard for heard in earlier)
                    and not 0 < generation < gate.generation
                )
                assert (verdict is Verdict.ADMITTED) == is_due
                if is_due:
                    admitted.append((name, incarnation, sequence))
