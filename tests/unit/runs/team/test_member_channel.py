"""The coordinator and the links of workers, over a real channel, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cordee.cluster.member_link import MemberSpec
from cordee.cluster.members import MemberRecord
from cordee.cluster.messages import (
    TEAM,
    FirstStep,
    StepReached,
    StepTime,
    TeamReport,
    WorkerSummary,
)
from cordee.communication.channel import ClientChannel, RefusedError, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.communication.messages import Directive, Join, Joined
from cordee.communication.this_host import host_id
from cordee.communication.wire import Codec
from cordee.core.errors import CommunicationError
from cordee.monitoring import AnyEvent, Summary
from cordee.monitoring.events import Commit, Step, Warned
from cordee.runs.checkpoints import CheckpointReceiver
from cordee.runs.team.link import Answer, TeamLink
from cordee.runs.team.member_channel import TeamChannel
from cordee.runs.team.membership import Membership

pytestmark = pytest.mark.timeout(30)
SERVER_KEYS, (CLIENT_KEYS,) = make_keys()
TIMEOUT_S = 2.0


class Coordinated:
    """A coordinator of two workers that is served by a thread; the next one knows what `before` knew."""

    def __init__(self, before: Coordinated | None = None) -> None:
        self.events: list[AnyEvent] = []
        self.reports: list[tuple[int, TeamReport]] = []
        self.membership = Membership(num_workers=2, failure_timeout_s=TIMEOUT_S, startup_timeout_s=10.0)
        for index in range(2):
            self.membership.expect(MemberRecord(index=index, number=index), time.monotonic())
        if before is not None:
            self.membership = msgspec.msgpack.decode(msgspec.msgpack.encode(before.membership), type=Membership)
        speaker = Speaker(run="run", name="coordinator", incarnation=time.time_ns())
        address = before.address if before else "tcp://127.0.0.1:*"
        self._channel = ServerChannel(address, speaker, Codec(TEAM), SERVER_KEYS)
        self.coordinator = TeamChannel(
            self._channel,
            self.membership,
            self.events.append,
            lambda request: "",
            lambda worker, report: self.reports.append((worker, report)),
            CheckpointReceiver(Path("not there"), self.membership),
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self.coordinator.serve(0.01)
            self.coordinator.flush()

    @property
    def address(self) -> str:
        return self._channel.address

    def give_up(self, index: int, *, is_away: bool = False) -> None:
        """Have a worker taken for lost."""
        record = self.membership.of(index)
        self.membership.exit(index, "is frozen", time.monotonic(), is_killed=True)
        self.membership.lose(record, is_away=is_away)
        self.coordinator.fence(record)

    def link(self, index: int) -> TeamLink:
        spec = MemberSpec(
            kind="team",
            role="worker",
            index=index,
            run_dir="",
            run_id="run",
            run_host=host_id(),
            job="",
            address=self.address,
            client_keys=CLIENT_KEYS.to_text(),
            failure_timeout_s=TIMEOUT_S,
            startup_timeout_s=10.0,
        )
        return TeamLink(spec)

    def channel(self, name: str) -> ClientChannel:
        speaker = Speaker(run="run", name=name, incarnation=1)
        return ClientChannel(self.address, speaker, Codec(TEAM), CLIENT_KEYS)

    def kinds(self) -> list[str]:
        return [str(event.__struct_config__.tag) for event in self.events]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(5)
        self._channel.close()


@pytest.fixture
def coordinated() -> Iterator[Coordinated]:
    coordinated = Coordinated()
    yield coordinated
    coordinated.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def joined(coordinated: Coordinated, *links: TeamLink) -> list[Answer]:
    """Let all join and form a generation; return what each was told."""
    for link in links:
        link.join()
    told: dict[int, Answer] = {}

    def await_generation(at: int, link: TeamLink) -> None:
        told[at] = link.await_generation(-1, has_dropped=False)

    threads = [threading.Thread(target=await_generation, args=(at, link)) for at, link in enumerate(links)]
    for thread in threads:
        thread.start()
    wait_until(lambda: coordinated.membership.next_members() is not None)
    coordinated.coordinator.form(coordinated.membership.next_members() or [])
    for thread in threads:
        thread.join(15)
    return [told[at] for at in range(len(links))]


def test_all_learn_who_is_in_the_team(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        answers = joined(coordinated, second, first)
    for directive, generation in answers:
        assert directive.action == "new_generation" and generation == 1
        assert [(member.name, member.index) for member in directive.members] == [("worker-0", 0), ("worker-1", 1)]
    assert sorted(coordinated.kinds()) == ["worker_started", "worker_started"]


def test_a_pause_is_over_with_the_next_generation(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        coordinated.coordinator.direct("pause", [0, 1])
        wait_until(lambda: first.is_pause_asked and second.is_pause_asked)
        answers: list[Answer] = []
        waiting = threading.Thread(target=lambda: answers.append(first.await_generation(5, has_dropped=False)))
        waiting.start()
        wait_until(lambda: coordinated.membership.of(0).ready_step == 5)
        coordinated.membership.exit(1, "was killed by SIGKILL", time.monotonic(), is_killed=True)
        coordinated.membership.is_elastic = True
        coordinated.coordinator.form(coordinated.membership.next_members() or [])
        waiting.join(10)
        assert answers[0].generation == 2 and [m.index for m in answers[0].directive.members] == [0]
        assert not first.is_pause_asked


@pytest.mark.parametrize("action", ["pause", "stop"])
def test_a_directive_that_got_lost_is_said_again(
    coordinated: Coordinated, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Directive] = []
    send = ServerChannel.send

    def lose_the_first(channel: ServerChannel, peer: Any, message: Any, *more: Any, **options: Any) -> Any:
        if isinstance(message, Directive) and message.action == action and not lost:
            lost.append(message)
            raise CommunicationError("the connection is gone")
        return send(channel, peer, message, *more, **options)

    monkeypatch.setattr(ServerChannel, "send", lose_the_first)
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        coordinated.coordinator.direct(action, [0, 1])
        wait_until(lambda: all(link.is_pause_asked or link.is_stop_asked for link in (first, second)))
    assert lost


def test_a_worker_that_was_replaced_is_not_heard_any_more(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        coordinated.give_up(1)
        second.emit(Step(step=1))
        first.emit(Step(step=2))
        wait_until(lambda: "step" in coordinated.kinds())
    assert [event for event in coordinated.events if isinstance(event, Step)] == [Step(step=2)]


def test_one_that_was_given_up_joins_again_where_it_may(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        second.emit(Step(step=1))
        wait_until(lambda: "step" in coordinated.kinds())
        coordinated.give_up(1, is_away=True)
        wait_until(lambda: coordinated.membership.of(1).phase == "joined")
        second.emit(Step(step=2))  # counts again, and is heard
        wait_until(lambda: coordinated.kinds().count("step") == 2)
        assert coordinated.kinds().count("worker_started") == 3


def test_one_whose_place_is_taken_leaves(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        coordinated.give_up(1)
        answer = second.await_generation(5, has_dropped=True)
        assert answer.directive.action == "leave"
        second.leave()  # nobody waits to hear it
        assert coordinated.kinds().count("worker_started") == 2


def test_a_request_to_leave_is_passed_on(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        second.ask_to_leave()
        wait_until(lambda: coordinated.membership.of(1).is_leaving)
        assert coordinated.membership.needs_pause


def test_heartbeats_tell_how_far_a_worker_is(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        first.step = 12
        wait_until(lambda: coordinated.membership.of(0).step == 12)
        before_s = coordinated.membership.of(1).heard_s
        wait_until(lambda: coordinated.membership.of(1).heard_s > before_s)
        assert coordinated.membership.check_silence(time.monotonic()) == []


def test_events_pass_through(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        told = Commit(step=3, epoch=0, batch=3, samples=24, digest={"model": "ab"}, time=12.5, member="worker 0")
        first.emit(told)
        wait_until(lambda: "commit" in coordinated.kinds())
    assert told in coordinated.events, "with its time and its member"


def test_what_the_coordinator_decides_by_is_no_event(coordinated: Coordinated) -> None:
    told = [FirstStep(1, number=1), WorkerSummary(Summary(status="completed"), 2)]
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        for report in told:
            second.report(report)
        second.report(StepTime(2, 0.25))
        second.report(StepReached(2, None))
        wait_until(lambda: len(coordinated.reports) == 4)
    assert coordinated.reports == [(1, report) for report in (*told, StepTime(2, 0.25), StepReached(2, None))]
    assert set(coordinated.kinds()) == {"worker_started"}


def test_a_failure_is_a_cause_and_a_lost_peer_a_consequence(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        first.fail(CommunicationError("rank 1 died"))
        wait_until(lambda: coordinated.membership.failures)
        assert coordinated.membership.first_failure(time.monotonic()) is None
        second.fail(ValueError("x" * 10_000))
        wait_until(lambda: coordinated.membership.first_failure(time.monotonic()))
        found = coordinated.membership.first_failure(time.monotonic())
    assert found is not None and found.worker_index == 1
    assert found.reason.startswith("raised ValueError: xxx") and len(found.reason) <= 4000
    assert "ValueError" in found.traceback


def test_a_stop_reaches_all_and_goodbyes_end_the_run(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        assert not first.is_stop_asked
        coordinated.coordinator.direct("stop", [0, 1], "interrupted")
        wait_until(lambda: first.is_stop_asked and second.is_stop_asked)
        first.leave()
        second.leave()
        wait_until(lambda: coordinated.membership.is_over)


def test_a_stop_for_a_worker_that_is_gone_is_told_and_no_error(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first:
        with coordinated.link(1) as second:
            joined(coordinated, first, second)
        wait_until(lambda: coordinated.coordinator.direct("stop", [0, 1]) or "warning" in coordinated.kinds())
        wait_until(lambda: first.is_stop_asked)
    (warning, *_) = [event for event in coordinated.events if isinstance(event, Warned)]
    assert "worker 1 could not be told to stop" in warning.message


def test_another_coordinator_takes_up_where_one_was(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        joined(coordinated, first, second)
        first.emit(Step(step=1))
        wait_until(lambda: "step" in coordinated.kinds())
        coordinated.close()
        # Nobody listens: what is said now waits, and who asks waits for the answer.
        for step in (2, 3):
            first.emit(Step(step=step))
        answers: list[Answer] = []
        waiting = [
            threading.Thread(target=lambda: answers.append(first.await_generation(3, has_dropped=False))),
            threading.Thread(target=lambda: answers.append(second.await_generation(3, has_dropped=False))),
        ]
        for thread in waiting:
            thread.start()
        again = Coordinated(coordinated)
        try:
            wait_until(lambda: again.membership.next_members() is not None)
            again.coordinator.form(again.membership.next_members() or [])
            for thread in waiting:
                thread.join(10)
            assert [answer.generation for answer in answers] == [2, 2]
            wait_until(lambda: len(again.events) == 2)
            steps = [event.step for event in again.events if isinstance(event, Step)]
            assert steps == [2, 3], "each once, and in order"
            leaving = threading.Thread(target=first.leave)
            leaving.start()
            second.leave()
            leaving.join(10)
            assert again.membership.is_over
        finally:
            again.close()


def test_an_answer_that_was_lost_is_given_again(coordinated: Coordinated) -> None:
    with coordinated.link(0) as first, coordinated.link(1) as second:
        for link in (first, second):
            link.join()
        answers: list[Answer] = []
        waiting = [
            threading.Thread(target=lambda: answers.append(first.await_generation(-1, has_dropped=False))),
            threading.Thread(target=lambda: answers.append(second.await_generation(-1, has_dropped=False))),
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: coordinated.membership.next_members() is not None)
        coordinated.close()  # decides, writes down, and dies before it has told anybody
        coordinated.coordinator.form(coordinated.membership.next_members() or [])
        again = Coordinated(coordinated)
        try:
            for thread in waiting:
                thread.join(10)
            assert [answer.generation for answer in answers] == [1, 1]
            assert again.membership.members == [0, 1]
        finally:
            again.close()


@pytest.mark.parametrize("name", ["worker-2", "worker-x", "worker--1", "server-0", "worker-"])
def test_who_is_not_of_the_team_is_refused(coordinated: Coordinated, name: str) -> None:
    with coordinated.channel(name) as channel, pytest.raises(RefusedError, match="unknown-member"):
        channel.request(Join(1, "host"), timeout_s=5)
    assert coordinated.events == []


def test_messages_that_only_the_coordinator_sends_are_refused(coordinated: Coordinated) -> None:
    with coordinated.channel("worker-0") as channel:
        with pytest.raises(RefusedError, match="not-joined"):
            channel.request(Joined(1.0, 1.0), timeout_s=5)
        joined = channel.request(Join(1, "host"), timeout_s=5).message
        assert isinstance(joined, Joined)
        assert (joined.failure_timeout_s, joined.heartbeat_s) == (TIMEOUT_S, TIMEOUT_S / 5)
        with pytest.raises(RefusedError, match="unexpected"):
            channel.request(Joined(1.0, 1.0), timeout_s=5)
