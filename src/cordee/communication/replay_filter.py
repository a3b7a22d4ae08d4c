"""Who may still speak: refuses other runs, the past, and what was heard before. Decides without I/O."""

from __future__ import annotations

import enum
from collections import Counter

from cordee.communication.wire import Envelope


class Verdict(enum.StrEnum):
    """What a `ReplayFilter` says of an envelope. All but `ADMITTED` are reasons of a refusal."""

    ADMITTED = "admitted"
    WRONG_RUN = "wrong-run"
    STALE_GENERATION = "stale-generation"  # of a team that has been re-formed since
    STALE_INCARNATION = "stale-incarnation"  # the sender was fenced, or has started again since
    REPLAY = "replay"  # heard already, or overtaken by a later message
    TOO_MANY_SENDERS = "too-many-senders"


class ReplayFilter:
    """Judges envelopes in the order they arrive.

    Remembers, for each sender, its newest incarnation and the highest sequence heard of it. A newer
    generation than the gate's own is admitted: its holder has learned of it first. Generation 0 belongs to no
    team and is never stale; what fences such messages is the incarnation.

    A gate that starts empty, as after a restart, admits any first sequence of a sender.
    """

    def __init__(self, run: str, *, max_senders: int = 65536) -> None:
        self.run = run
        self.generation = 0
        self.refusals: Counter[Verdict] = Counter()  # how often each verdict was given, but for ADMITTED
        self._max_senders = max_senders
        self._heard: dict[str, tuple[int, int]] = {}  # sender -> (incarnation, highest sequence)

    def admit(self, envelope: Envelope) -> Verdict:
        """Judge one envelope and, if it is admitted, remember it."""
        verdict = self._judge(envelope)
        if verdict is Verdict.ADMITTED:
            self._heard[envelope.sender] = (envelope.incarnation, envelope.sequence)
        else:
            self.refusals[verdict] += 1
        return verdict

    def advance(self, generation: int) -> None:
        """Make `generation` the current one: messages of earlier ones are refused from now on."""
        assert generation >= self.generation, f"generation {generation} after {self.generation}"
        self.generation = generation

    def fence(self, sender: str, incarnation: int) -> None:
        """Refuse whatever this incarnation of the sender, or an earlier one, still says."""
        if self._heard.get(sender, (-1, -1))[0] <= incarnation:
            self._heard[sender] = (incarnation + 1, -1)

    def _judge(self, envelope: Envelope) -> Verdict:
        if envelope.run != self.run:
            return Verdict.WRONG_RUN
        heard = self._heard.get(envelope.sender)
        if heard is None:
            if len(self._heard) >= self._max_senders:
                return Verdict.TOO_MANY_SENDERS
        elif envelope.incarnation < heard[0]:
            return Verdict.STALE_INCARNATION
        elif envelope.incarnation == heard[0] and envelope.sequence <= heard[1]:
            return Verdict.REPLAY
        if 0 < envelope.generation < self.generation:
            return Verdict.STALE_GENERATION
        return Verdict.ADMITTED
