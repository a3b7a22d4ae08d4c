"""The main function of a worker process: join the run, train in one team after the other, say how it went."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec

from cordee.cluster import Team
from cordee.cluster.member_link import MemberSpec, open_timeline
from cordee.cluster.members import WORKER_PREFIX
from cordee.cluster.messages import StepReached, WorkerSummary
from cordee.cluster.rendezvous import BetweenHosts, CoordinatorStore, meet
from cordee.communication.exchange import find_lost_peer
from cordee.communication.keys import ClientKeys
from cordee.communication.shared_memory.gloo_sockets import shut_gloo_sockets
from cordee.communication.shared_memory.liveness import abandon_groups
from cordee.communication.shared_memory.rounds import CallsDifferError
from cordee.compute.devices import MemoryWatch
from cordee.compute.gpus import claim_gpu, use_device
from cordee.core import fault_points
from cordee.core.errors import CommunicationError, TrainingError
from cordee.data.source import check_same
from cordee.monitoring import AnyEvent, Monitor, events, setup_logging
from cordee.monitoring.timeline import Timeline
from cordee.runs.checkpoints import open_store
from cordee.runs.team.link import Answer, TeamLink
from cordee.training.components import assemble
from cordee.training.session import Session

log = logging.getLogger("cordee.worker")


class LinkSink:
    """Passes events of this worker on to the one monitor of the run. The first of a team speaks for it."""

    def __init__(self, link: TeamLink, worker: int) -> None:
        self._link = link
        self._worker = worker
        self.is_first = False

    def emit(self, event: AnyEvent) -> None:
        is_own = isinstance(event, events.Commit) or (isinstance(event, events.Warned) and not self.is_first)
        if is_own:
            self._link.emit(msgspec.structs.replace(event, worker=self._worker))
        elif self.is_first or isinstance(event, events.Checkpoint):  # which may be finished by one that was the first
            self._link.emit(event)

    def refresh(self, step: int, loss: SupportsFloat | None) -> None:
        self._link.step = step
        if self.is_first:
            self._link.report(StepReached(step, None if loss is None else float(loss)))

    def close(self) -> None:
        pass


def main(argument: dict[str, Any]) -> int:
    """Work until the run ends; return the exit code. Called in a fresh fork of the fork server."""
    return 0 if work(msgspec.convert(argument, MemberSpec)) is None else 1


def work(spec: MemberSpec) -> Exception | None:
    """Work until the run ends; return why this worker could not continue, if it could not."""
    memory = MemoryWatch()
    fault_points.identify(spec.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher asks, when it is time
    log_file = spec.log_file
    with setup_logging(log_file), TeamLink(spec) as link, contextlib.closing(open_timeline(spec, link)) as timeline:
        timeline.enter("starting")
        member = _Member(spec, link, log_file, memory, timeline)

        def record(error: Exception) -> None:
            log.error("worker %d cannot continue", spec.index, exc_info=error)

        return take_part(spec, link, member.work, lambda: member.step, record)


def take_part(
    spec: MemberSpec,
    link: TeamLink,
    work: Callable[[], None],
    read_step: Callable[[], int],
    record: Callable[[Exception], None],
) -> Exception | None:
    """Join the run, work, and leave; return why this worker could not continue, if it could not.

    An error is recorded by `record`, and reported to the coordinator with the step that `read_step` returns.
    """
    try:
        link.join()
        with leaving_in_order(link, also_on_interrupt=spec.is_external):
            work()
        link.leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        record(error)
        link.step = read_step()
        reason = find_lost_peer(error) or error
        link.fail(reason)
        return reason
    return None


class _Member:
    """This worker, from one generation to the next."""

    def __init__(
        self, spec: MemberSpec, link: TeamLink, log_file: Path, memory: MemoryWatch, timeline: Timeline
    ) -> None:
        self._spec, self._link, self._log_file, self._memory = spec, link, log_file, memory
        self._timeline = timeline
        self._run_dir = Path(spec.run_dir)
        self._session: Session | None = None
        self._answer: Answer | None = None
        self._num_returns = 0
        self._reason = ""  # why the last generation ended, unless it was asked to halt

    @property
    def step(self) -> int:
        return self._session.step if self._session else 0

    def work(self) -> None:
        """Train until the run is over for this worker: at its end, or because it is let go."""
        spec, link = self._spec, self._link
        index = min(spec.index, spec.num_local - 1)
        job = spec.load_job()
        local_rank = index if job.training.device == "cpu" else claim_gpu(spec.index)
        places = Team(index, spec.num_local, num_local_workers=spec.num_local, local_rank=local_rank)
        self._timeline.enter("loading")
        parts = assemble(job, places)
        use_device(parts.computation.device)  # groups find out which GPU it is when they are formed
        if spec.data:
            check_same(spec.data, parts.splits)
        sink = LinkSink(link, spec.index)
        monitor = Monitor([sink], member=f"worker {spec.index}", timeline=self._timeline)
        with open_store(spec, link) as store, monitor:
            self._session = session = Session(
                parts,
                monitor,
                self._run_dir,
                should_stop=lambda: link.is_stop_asked,
                should_pause=lambda: link.is_pause_asked,
                report=link.report,
                memory=self._memory,
                store=store,
            )
            with contextlib.closing(session):
                if not self._train_on(session, sink):
                    return
            summary = session.summarise(None)
        link.report(WorkerSummary(summary))

    def _train_on(self, session: Session, sink: LinkSink) -> bool:
        """Train in one team after the other; return whether the run has ended, and not just for this worker."""
        while True:
            if self._answer is None:
                self._answer = self._await(session, has_dropped=session.has_dropped)
            answer, self._answer = self._answer, None
            if answer.directive.action == "leave":
                if answer.directive.reason:
                    raise CommunicationError(answer.directive.reason)
                return False
            assert answer.directive.action == "new_generation", answer
            if self._train(session, sink, answer):
                return True

    def _train(self, session: Session, sink: LinkSink, answer: Answer) -> bool:
        """Train as a member of the generation that `answer` calls for; return whether the run has ended."""
        self._reason = ""
        lost: CommunicationError
        try:
            with form_group(self._spec, answer, self._link) as team:
                sink.is_first = team.is_first
                return session.train(
                    team,
                    may_load=self._spec.resume or team.generation > 1,
                    log_file=self._log_file,
                    is_end=self._is_end,
                )
        except CommunicationError as error:
            lost = error
        if isinstance(lost, CallsDifferError):  # raised out of the handler: it does not come from a lost member
            raise TrainingError(
                f"the workers have made different calls at step {session.step + 1}: {lost}. What callbacks, models and "
                "metrics of your own exchange is for every worker, not only for the first"
            )
        self._reason = str(lost)
        log.warning("generation %d is over at step %d: %s", answer.generation, session.step, lost)
        return False

    def _await(self, session: Session, *, has_dropped: bool) -> Answer:
        """Wait for what to do next; one that was given up meanwhile begins again."""
        self._timeline.enter("joining")
        returns = self._num_returns
        if returns != self._link.num_returns:
            session.forget()
        answer = self._link.await_generation(session.ready_step, has_dropped=has_dropped, reason=self._reason)
        self._num_returns = self._link.num_returns
        if returns != self._num_returns:
            session.forget()
        return answer

    def _is_end(self) -> bool:
        """Ask what a halt that the team agreed on is for: the end of the run, or another team."""
        assert self._session is not None
        self._answer = self._await(self._session, has_dropped=False)
        if self._answer.directive.action != "finish":
            return False
        self._answer = None
        return True


@contextlib.contextmanager
def form_group(spec: MemberSpec, answer: Answer, link: TeamLink) -> Iterator[Team]:
    """Form the group of a generation, and give it up afterwards. Collective."""
    members, generation = answer.directive.members, answer.generation
    rank = [member.name for member in members].index(spec.name)
    beside = [i for i, member in enumerate(members) if member.host_id == members[rank].host_id]
    with contextlib.ExitStack() as stack:
        between: BetweenHosts | None = None
        # Members meet in a file of the run's host, or through the coordinator.
        is_wide = spec.is_remote or len(beside) < len(members)

        def stop_waiting() -> None:  # who is waited for may live, and never come
            abandon_groups(link.why_generation_ended(generation))
            if is_wide:
                shut_gloo_sockets()

        stack.enter_context(link.on_generation_end(generation, stop_waiting))
        if is_wide:
            keys = ClientKeys.from_text(spec.client_keys)
            store = CoordinatorStore(spec.coordinator_address, spec.run_id, spec.index, keys, generation)
            encrypt = spec.load_job().cluster.encrypts
            between = BetweenHosts(stack.enter_context(store), spec.host_address, encrypt)
            how = "encrypted" if encrypt else "not encrypted: cluster.encrypt = false"
            log.info("generation %d has members on another host; what goes between hosts is %s", generation, how)
        group = meet(
            Path(spec.store) / f"generation-{generation}",
            rank,
            len(members),
            failure_timeout_s=spec.failure_timeout_s,
            why_over=lambda: link.why_generation_ended(generation),
            between=between,
        )
        stack.enter_context(group)
        yield Team(
            worker_index=rank,
            num_workers=len(members),
            num_local_workers=len(beside),
            local_rank=beside.index(rank),
            generation=generation,
            members=tuple(int(member.name.removeprefix(WORKER_PREFIX)) for member in members),
            threads=answer.directive.threads,
        )


@contextlib.contextmanager
def leaving_in_order(link: TeamLink, *, also_on_interrupt: bool) -> Iterator[None]:
    """Inside, the first SIGTERM (a spot instance, Slurm, Kubernetes) asks to leave; the second ends the process."""
    numbers = [signal.SIGTERM, signal.SIGINT] if also_on_interrupt else [signal.SIGTERM]

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        link.ask_to_leave()

    previous = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous):
            signal.signal(number, handler)
