"""The replay filter: nothing of another run, of the past, or heard before gets through."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.communication.endpoint import Admission, ReplayFilter
from cordee.communication.wire import PROTOCOL_VERSION, Envelope


def envelope(
    sender: str = "w", incarnation: int = 1, sequence: int = 1, generation: int = 0, run: str = "r"
) -> Envelope:
    return Envelope(
        version=PROTOCOL_VERSION, run=run, sender=sender, incarnation=incarnation, generation=generation,
        sequence=sequence, reply_to=0, buffers=(), payload=msgspec.Raw(b"\x90"),
    )  # fmt: skip


def test_sequences_must_grow() -> None:
    replays = ReplayFilter("r")
    admissions = [replays.admit(envelope(sequence=sequence)) for sequence in (1, 2, 2, 1, 5, 4)]
    assert admissions == [Admission.ADMITTED] * 2 + [Admission.REPLAY] * 2 + [Admission.ADMITTED, Admission.REPLAY]
    assert replays.admit(envelope(sender="other", sequence=1)) is Admission.ADMITTED
    assert replays.refusals == {Admission.REPLAY: 3}


def test_a_new_incarnation_silences_the_old_one() -> None:
    replays = ReplayFilter("r")
    assert replays.admit(envelope(incarnation=1, sequence=90)) is Admission.ADMITTED
    assert replays.admit(envelope(incarnation=2, sequence=1)) is Admission.ADMITTED
    assert replays.admit(envelope(incarnation=1, sequence=91)) is Admission.STALE_INCARNATION


def test_generations() -> None:
    replays = ReplayFilter("r")
    replays.advance(3)
    assert replays.admit(envelope(sequence=1, generation=2)) is Admission.STALE_GENERATION
    assert replays.admit(envelope(sequence=2, generation=3)) is Admission.ADMITTED
    assert replays.admit(envelope(sequence=3, generation=4)) is Admission.ADMITTED  # its holder knows more than we do
    assert replays.admit(envelope(sequence=4, generation=0)) is Admission.ADMITTED  # of no generation
    with pytest.raises(AssertionError):
        replays.advance(2)


def test_the_fenced_must_come_back_as_somebody_new() -> None:
    replays = ReplayFilter("r")
    replays.admit(envelope(incarnation=1, sequence=1))
    replays.fence("w", 1)
    replays.fence("never-heard", 4)
    assert replays.admit(envelope(incarnation=1, sequence=2)) is Admission.STALE_INCARNATION
    assert replays.admit(envelope(sender="never-heard", incarnation=4)) is Admission.STALE_INCARNATION
    assert replays.admit(envelope(incarnation=2, sequence=1)) is Admission.ADMITTED
    replays.fence("w", 1)  # late news of a death that is history
    assert replays.admit(envelope(incarnation=2, sequence=2)) is Admission.ADMITTED


def test_another_run_and_too_many_senders() -> None:
    replays = ReplayFilter("r", max_senders=2)
    assert replays.admit(envelope(run="other")) is Admission.WRONG_RUN
    assert [replays.admit(envelope(sender=name)) for name in "abc"] == [
        Admission.ADMITTED,
        Admission.ADMITTED,
        Admission.TOO_MANY_SENDERS,
    ]
    assert replays.admit(envelope(sender="a", sequence=2)) is Admission.ADMITTED


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
    replays = ReplayFilter("r")
    admitted: list[tuple[str, int, int]] = []
    fenced: dict[str, int] = {}
    for action in actions:
        match action:
            case ("advance",):
                replays.advance(replays.generation + 1)
            case ("fence", str(name), int(incarnation)):
                replays.fence(name, incarnation)
                fenced[name] = max(incarnation, fenced.get(name, -1))
            case (str(name), int(incarnation), int(sequence), int(generation)):
                admission = replays.admit(envelope(name, incarnation, sequence, generation))
                earlier = [heard[1:] for heard in admitted if heard[0] == name]
                is_due = (
                    incarnation > fenced.get(name, -1)
                    and all((incarnation, sequence) > heard for heard in earlier)
                    and not 0 < generation < replays.generation
                )
                assert (admission is Admission.ADMITTED) == is_due
                if is_due:
                    admitted.append((name, incarnation, sequence))
