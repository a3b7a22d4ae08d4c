"""The dispatcher of a served run: hands out work as the staleness allows, calls for snapshots, decides when to stop.

Workers ask for work and wait for the answer, which comes when they may go on. At certain steps nothing is handed out
until all that was is committed; then the evaluator reads a snapshot that holds exactly those steps.

Nothing is sent before `flush`, so that what it follows from can be written down first. A dispatcher that comes back
is given the `Memory` of the one before; whoever had no answer asks again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cordee.cluster.control import CONTROL_NAME
from cordee.cluster.stragglers import Stragglers
from cordee.communication.channel import Received, ServerChannel
from cordee.communication.messages import Accepted, Enlist, Event, Failure, Heartbeat, Message, Refused, Scale
from cordee.compute import Metrics
from cordee.core.errors import CommunicationError, JobError
from cordee.data import Ledger, Unit
from cordee.progress import Progress
from cordee.served.memory import Hearing, Memory, Outcome, StepSum
from cordee.served.messages import (
    AskOrder,
    AskServers,
    Bye,
    Join,
    Joined,
    Leave,
    Order,
    OrderDone,
    Servers,
    SnapshotTaken,
    TakeWork,
    Work,
)
from cordee.served.plan import RunPlan
from cordee.served.posts import Post, Posts

Emit = Callable[..., None]


@dataclass
class Dispatcher:
    """Answers the processes of one run over a channel. `serve` never blocks for longer than asked."""

    channel: ServerChannel
    plan: RunPlan
    ledger: Ledger
    progress: Progress
    emit: Emit  # an event for the run's file
    show: Callable[[int, float], None]  # step and loss for the progress bar
    failure_timeout_s: float
    num_servers: int
    wants_followers: bool
    elapsed_s: Callable[[], float]
    rate: Callable[[int], float | None]
    min_workers: int = 1
    obey: Callable[[Scale | Enlist], str] | None = None  # somebody with the control file wants something
    memory: Memory | None = None  # of the one before
    failures: list[tuple[str, Failure]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.memory is None:
            committed = self.ledger.committed_steps
            barrier = self.plan.next_barrier(committed)
            posts = Posts([Post() for _ in range(self.num_servers)])
            self._memory = Memory(progress=self.progress, posts=posts, barrier=barrier, counted=committed)
        else:
            self._memory = self.memory
            self.progress = self._memory.progress
            self.plan.policy.patience = self.progress.patience
            assert self._memory.ledger is not None
            self.ledger.go_on_from(self._memory.ledger)
            for name, hearing in self._memory.hearings.items():
                hearing.heard_s = time.monotonic()  # nobody could be heard meanwhile
                self.channel.fence(name, hearing.incarnation - 1)
        self._waiting: dict[str, Received] = {}  # worker -> its request for work
        self._asking: list[Received] = []  # requests for the list of servers
        self._desk: Received | None = None  # the evaluator, when it is free
        self._replies: list[tuple[Received, Message]] = []
        self._taken_s: dict[int, float] = {}  # not of those before: how long they had is not known
        self._stragglers = Stragglers()
        self._window = (self.progress.samples, time.perf_counter())

    def recall(self) -> Memory:
        """Return what the next one must know."""
        self._memory.ledger = self.ledger.state
        return self._memory

    @property
    def has_pending(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._replies)

    def flush(self) -> None:
        """Send what is to be sent. One that is gone is passed over: its exit will tell, or it asks again."""
        replies, self._replies = self._replies, []
        for received, message in replies:
            with contextlib.suppress(CommunicationError):
                self.channel.reply(received, message)

    @property
    def hearings(self) -> dict[str, Hearing]:
        return self._memory.hearings

    @property
    def outcome(self) -> Outcome:
        return self._memory.outcome

    @property
    def is_over(self) -> bool:
        return self._memory.is_over

    @property
    def training_s(self) -> float | None:
        """Seconds from the first unit of work to the newest step; None before there is one."""
        first_s, last_s = self._memory.first_work_s, self._memory.last_step_s
        return None if first_s is None or last_s is None else last_s - first_s

    @property
    def addresses(self) -> list[str]:
        """Where the servers are that serve."""
        return [self.hearings[name].address for name in self._memory.posts.serving]

    @property
    def is_ready(self) -> bool:
        """Whether all servers serve, and at the start all followers follow."""
        return self._memory.posts.is_ready(wants_followers=self.wants_followers)

    def unfollowed(self) -> list[tuple[int, str, str]]:
        """Return the servers whose followers wait to be given everything: index, address, follower's address."""
        return [
            (index, self.hearings[serving].address, self.hearings[follower].address)
            for index, serving, follower in self._memory.posts.unfollowed()
        ]

    def is_served(self, index: int) -> bool:
        return bool(self._memory.posts.posts[index].serving)

    def note_following(self, index: int) -> None:
        self._memory.posts.posts[index].is_following = True
        self._tell_servers()

    def serve(self, timeout_s: float) -> None:
        """Handle what has come in, waiting at most `timeout_s` for the first message."""
        received = self.channel.receive(timeout_s)
        while received is not None:
            self._handle(received)
            received = self.channel.receive(0.0)
        self._drop_late()
        if not self.is_over:
            self._let_go()
        self._go_on()

    def stop(self, reason: str) -> None:
        """End the run after the steps that were begun."""
        if self._memory.is_final:
            return
        self.outcome.stopped_by = reason
        self._memory.is_final = True
        ledger = self.ledger
        begun = ledger.highest_step_taken
        if ledger.next_share:
            begun += 1
        self._memory.barrier = min(self._memory.barrier, max(begun, ledger.committed_steps))

    def give_up(self, verdict: str) -> None:
        """Have what is there saved, and end the run early, which `verdict` says why."""
        self.outcome.verdict = verdict
        self.stop("interrupt")

    @property
    def is_ending(self) -> bool:
        """Whether the run ends with the steps that are begun: there is no more work to hand out."""
        return self._memory.is_final or self.ledger.is_complete

    def lose(self, name: str) -> list[Unit]:
        """Forget a process that ended; return the units of work it had in hand."""
        hearing = self.hearings.pop(name, None)
        self._stragglers.forget(name)
        self._waiting.pop(name, None)
        units = self.ledger.put_back(name)
        self._memory.posts.lose(name)
        if hearing is not None and hearing.role == "evaluator":
            self._desk = None
            if self._memory.is_order_open:  # the next one is given its order
                self._order_again()
        return units

    def _handle(self, received: Received) -> None:
        name = received.envelope.sender
        hearing = self.hearings.get(name)
        message = received.message
        if name == CONTROL_NAME and isinstance(message, Scale | Enlist) and self.obey is not None:
            try:
                self._reply(received, Accepted(self.obey(message)))
            except JobError as error:
                self._reply(received, Refused("refused", str(error)))
            return
        if hearing is None and not isinstance(message, Join):
            self._reply(received, Refused("unknown-process", name))
            return
        if hearing is not None:
            hearing.heard_s = time.monotonic()
        match message:
            case Join():
                self._join(received, message)
            case AskServers():
                self._asking.append(received)
                self._tell_servers()
            case TakeWork():
                if message.done >= 0:
                    self._commit(name, message)
                self.ledger.put_back(name)  # who asks has nothing in hand: it did not hear the last answer
                assert hearing is not None
                hearing.is_leaving |= message.leaves
                self._waiting[name] = received
            case AskOrder():
                self._desk = received
                if self._memory.is_order_open:
                    self._order_again()  # it did not hear the last answer
            case SnapshotTaken(ages=ages):
                self._reply(received, Joined(self.failure_timeout_s))
                self.outcome.ages = ages
                self._memory.reading = False
                self._memory.stall_s = time.perf_counter() - (self._memory.paused_s or time.perf_counter())
            case OrderDone():
                if message.number == self._memory.num_orders and self._memory.is_order_open:
                    self._finish_order(message)
                self._reply(received, Joined(self.failure_timeout_s))
            case Heartbeat(step=step):
                assert hearing is not None
                hearing.step = step
            case Event(type=kind, fields=fields, number=number):
                assert hearing is not None
                if number > hearing.num_events:
                    hearing.num_events = number
                    self.emit(kind, **fields)
                self._reply(received, Joined(self.failure_timeout_s))
            case Failure():
                self.failures.append((name, message))
                self._reply(received, Joined(self.failure_timeout_s))
            case Bye():
                assert hearing is not None
                hearing.is_done = True
                self._reply(received, Joined(self.failure_timeout_s))
            case other:
                self._reply(received, Refused("unexpected", type(other).__name__))

    def _join(self, received: Received, join: Join) -> None:
        name = received.envelope.sender
        known = self.hearings.get(name)
        if known is not None and known.incarnation == received.envelope.incarnation:
            self._reply(received, Joined(self.failure_timeout_s))  # it did not hear the first time
            return
        self.hearings[name] = Hearing(join.role, join.index, join.pid, received.envelope.incarnation, time.monotonic())
        if join.role == "server":
            if join.index >= self.num_servers:
                self._reply(received, Refused("unknown-process", f"there is no server {join.index}"))
                return
            self.hearings[name].address, self.hearings[name].public = join.address, join.public
            self._memory.posts.join(join.index, name)
        self._reply(received, Joined(self.failure_timeout_s))
        self.emit("worker_started", worker=join.index, pid=join.pid, host=join.host, role=join.role)
        self._tell_servers()

    def _tell_servers(self) -> None:
        if not self.is_ready:
            return
        far = tuple(self.hearings[name].public for name in self._memory.posts.serving)
        for received in self._asking:
            is_far = isinstance(received.message, AskServers) and received.message.is_far
            self._reply(received, Servers(self._memory.posts.version, far if is_far else tuple(self.addresses)))
        self._asking = []

    def _commit(self, worker: str, done: TakeWork) -> None:
        if not self.ledger.commit(done.done):
            return
        self._memory.num_refused_in_a_row = self._memory.num_refused_in_a_row + 1 if done.refused else 0
        if done.refused:  # by one server or by all of them: told once
            self.emit("warning", message=f"{done.refused}: it is refused, and the step goes on without it")
        self._note_pace(worker, done.done)
        before = self._memory.counted
        sums = self._memory.sums.setdefault(done.done // self.ledger.num_shares, StepSum())
        if math.isfinite(done.loss_sum):
            sums.loss_sum += done.loss_sum
            sums.count += done.count
        sums.num_correct += max(done.num_correct, 0)
        sums.num_samples += done.num_samples
        sums.squares += done.squares
        sums.num_refused += bool(done.refused)
        sums.num_units += 1
        for step in range(before, self.ledger.committed_steps):
            self._close_step(step, self._memory.sums.pop(step))

    def _note_pace(self, worker: str, number: int) -> None:
        taken_s = self._taken_s.pop(number, None)
        if taken_s is None:
            return
        step = self.plan.steps_after(number // self.ledger.num_shares + 1)
        slow = self._stragglers.hear(worker, step, time.monotonic() - taken_s)
        if slow is not None:
            index = self.hearings[worker].index
            self.emit("straggler", worker=index, step=step, seconds=slow.seconds, median_seconds=slow.median_s)
            self.emit("warning", message=slow.describe())

    def _close_step(self, step: int, sums: StepSum) -> None:
        plan, progress = self.plan, self.progress
        self._memory.counted = step + 1
        self._memory.last_step_s = time.perf_counter()
        if plan.is_first_of_epoch(step):
            progress.loss_sum, progress.loss_count = 0.0, 0
        progress.step = plan.steps_after(step + 1)
        progress.epoch, progress.batch = plan.place_after(step + 1)
        progress.samples += sums.num_samples
        progress.loss_sum += sums.loss_sum
        progress.loss_count += sums.count
        if plan.settings.is_in_step:
            scale = min(1.0, plan.clip_norm / (math.sqrt(sums.squares) + 1e-6)) if plan.clip_norm else 1.0
            self._memory.settle = (step, scale)
        loss = sums.loss_sum / sums.count if sums.count else math.nan
        self.outcome.last_step_loss = loss
        self.show(progress.step, loss)
        if step % plan.report_every == 0:
            samples, since_s = self._window
            now_s = time.perf_counter()
            self._window = (progress.samples, now_s)
            self.emit(
                "step",
                step=progress.step,
                epoch=plan.epoch_of(step) + 1,
                loss=loss,
                accuracy=sums.num_correct / sums.count if sums.count and plan.counts_classes else None,
                lr=self.rate(step * plan.push_every),
                gradient_norm=math.sqrt(sums.squares) if plan.clip_norm else None,
                samples=progress.samples,
                samples_per_second=(progress.samples - samples) / max(now_s - since_s, 1e-9),
            )

    def _go_on(self) -> None:
        """Order a snapshot where one is due, move on where that is allowed, and hand out work."""
        ledger = self.ledger
        if self.is_over or not self.is_ready:
            return
        if ledger.committed_steps >= self._memory.barrier:
            self._memory.paused_s = self._memory.paused_s or time.perf_counter()
            is_last = self._memory.is_final or ledger.is_complete
            is_ordered = self._memory.has_ordered_last if is_last else self._memory.ordered_step == self._memory.barrier
            if not is_ordered:
                self._order(is_last)
            if is_last:  # there is no more work, and the evaluator can use the cores
                self._send_home()
            if (
                is_last
                or self._memory.reading
                or self._memory.deciding
                or self._memory.ordered_step != self._memory.barrier
            ):
                return
            self._memory.barrier = self.plan.next_barrier(ledger.committed_steps)
            self._memory.paused_s = None
        self._hand_out()

    @property
    def active_workers(self) -> list[str]:
        """The workers that are there to stay."""
        here = [(name, one) for name, one in self.hearings.items() if one.role == "worker"]
        return [name for name, one in here if not (one.is_leaving or one.is_done)]

    def _let_go(self) -> None:
        """Send those home that are to leave, unless nobody could go on without them."""
        leaving = [name for name in self._waiting if self.hearings[name].is_leaving]
        if not leaving or self._memory.is_final:
            return
        if len(self.active_workers) < max(1, self.min_workers):
            # They stay for as long as it takes to save.
            self.give_up(f"{', '.join(leaving)} had to leave, and too few workers are left to go on")
            return
        for name in leaving:
            hearing = self.hearings[name]
            self._reply(self._waiting.pop(name), Leave())
            if not hearing.has_left:
                hearing.has_left = True
                self.emit("worker_left", worker=hearing.index, step=self.progress.step)

    def _hand_out(self) -> None:
        ledger, staleness = self.ledger, self.plan.max_staleness
        limit = self._memory.barrier
        if len(self.active_workers) < self.min_workers and not self._memory.is_final:
            return  # others are waited for
        if staleness is not None:
            limit = min(limit, ledger.committed_steps + staleness + 1)
        for name in list(self._waiting):
            unit = ledger.take(name, limit_step=limit)
            if unit is None:
                return
            received = self._waiting.pop(name)
            if self._memory.first_work_s is None:
                self._memory.first_work_s = time.perf_counter()
                self._window = (self.progress.samples, self._memory.first_work_s)
            self._taken_s[unit.number] = time.monotonic()
            settles, scale = self._memory.settle
            work = Work(
                unit=unit.number,
                step=unit.step,
                share=unit.share,
                num_shares=unit.num_shares,
                epoch=unit.epoch,
                start=unit.start,
                stop=unit.stop,
                floor=ledger.committed_steps * ledger.num_shares,
                settles=settles,
                scale=scale,
            )
            self._reply(received, work)

    def _order(self, is_last: bool) -> None:
        """Have the evaluator read the servers as they are now, if it is free."""
        if self._desk is None:
            return
        plan, step, progress = self.plan, self._memory.barrier, self.progress
        is_interrupted = self.outcome.stopped_by == "interrupt"
        evaluates = plan.evaluates(step, is_last=is_last and not is_interrupted)
        evaluates &= progress.evaluated_at != progress.step  # unless that was just done
        saves = plan.saves(step, is_last=is_last) and self._memory.saved_step != progress.step
        if is_last and not evaluates and not saves:
            self._end()
            return
        progress.elapsed_s = self.elapsed_s()
        settles, scale = self._memory.settle
        self._memory.num_orders += 1
        self._memory.ordered_at = (progress.step, progress.epoch, progress.batch, progress.samples)
        self._memory.ordered_loss = progress.train_loss
        order = Order(
            number=self._memory.num_orders,
            step=progress.step,
            evaluate=evaluates,
            save=saves,
            progress=msgspec.json.encode(progress).decode(),
            settles=settles,
            scale=scale,
        )
        desk, self._desk = self._desk, None
        self._reply(desk, order)
        self._memory.ordered_step = step
        self._memory.reading = self._memory.is_order_open = True
        self._memory.has_ordered_last = is_last
        self._memory.deciding = is_last or (evaluates and plan.has_verdicts)

    def _order_again(self) -> None:
        memory = self._memory
        memory.reading = memory.deciding = memory.has_ordered_last = memory.is_order_open = False
        memory.ordered_step = -1

    def _finish_order(self, done: OrderDone) -> None:
        self._memory.reading = self._memory.is_order_open = False
        outcome, plan, progress = self.outcome, self.plan, self.progress
        outcome.weights_sha256 = done.weights_sha256
        step, epoch, batch, samples = self._memory.ordered_at
        self.emit("commit", step=step, epoch=epoch, batch=batch, samples=samples, weights_sha256=done.weights_sha256)
        outcome.problem = done.problem
        if done.problem:
            self.emit("warning", message=f"checkpoint at step {done.step} was not saved: {done.problem}")
        elif done.path:
            self._memory.saved_step = done.step
            self.emit("checkpoint", step=done.step, path=done.path, seconds=done.seconds, stall_s=self._memory.stall_s)
            outcome.stall_s += self._memory.stall_s
        if done.metrics:
            metrics = msgspec.json.decode(done.metrics, type=Metrics)
            outcome.metrics = metrics
            told = progress.describe_evaluation(metrics) | {"train_loss": self._memory.ordered_loss}
            self.emit("evaluation", step=done.step, epoch=max(1, epoch if batch == 0 else epoch + 1), **told)
            reason = progress.take_evaluation(metrics, done.step, plan.policy)
            if reason is not None and not self._memory.is_final and not self.ledger.is_complete:
                self.stop(reason)  # what is begun meanwhile is finished; where training waited, nothing is
        self._memory.deciding = False
        if self._memory.has_ordered_last:
            self._end()

    def _end(self) -> None:
        self._memory.is_over = True
        self._send_home()

    def _send_home(self) -> None:
        for name in list(self._waiting):
            self._reply(self._waiting.pop(name), Leave())

    def dismiss(self) -> None:
        """Tell whoever asks that there is nothing more to do."""
        self._send_home()
        if self._desk is not None:
            desk, self._desk = self._desk, None
            self._reply(desk, Leave())

    def _drop_late(self) -> None:
        limit_s = self.plan.drop_late_s
        if not limit_s:
            return
        now = time.monotonic()
        for number, taken_s in list(self._taken_s.items()):
            if now - taken_s > limit_s and number in self.ledger.taken:
                worker, unit = self.ledger.taken[number]
                self.ledger.give_up(number)
                del self._taken_s[number]
                late = f"{worker} is late with its part of step {unit.step + 1} ({now - taken_s:.1f} s)"
                self.emit("warning", message=f"{late}: another does it")

    @property
    def has_only_refusals(self) -> bool:
        """Whether servers have refused everything for a while: the run will not get anywhere."""
        return self._memory.num_refused_in_a_row >= 100

    def _reply(self, received: Received, message: Message) -> None:
        self._replies.append((received, message))
