"""A worker that trains alone for some steps, and then agrees with the others (docs/decisions/0045).

What all members have the same of is what they agreed on last: the *start* of the outer step, its optimizer, and the
buffers. What a worker did alone since then is its own: its parameters, its optimizer, and what its shares counted.
A member that is lost takes only its own with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordee.checkpoint import State, load_model_state, load_optimizer_state, model_state, optimizer_state
from cordee.cluster import Team
from cordee.communication.compression import ErrorFeedback
from cordee.communication.exchange import broadcast
from cordee.compute import Computation, Loss, OptimizerRecipe, Votes
from cordee.core import Batch, Job
from cordee.core.errors import JobError
from cordee.core.fault_points import reach
from cordee.strategies.buffers import SharedBuffers, SyncedBatchNorm, buffers_of
from cordee.strategies.local_sgd.differences import DifferenceExchange, Sent, common_dtype, cut_fragments
from cordee.strategies.local_sgd.group import Group, check_groups
from cordee.strategies.local_sgd.settings import LocalSgdSettings
from cordee.strategies.outer import OuterStep
from cordee.strategies.single import Replica
from cordee.strategies.strategy import Requirements, TrainsAlone, Update, require_samples

_ITEMS_AT, _SAMPLES_AT = 3, 4  # of `Loss.summands`


@dataclass
class Window:
    """What this worker's shares counted since all agreed last."""

    num_steps: int = 0
    summands: list[float] = field(default_factory=lambda: Loss(0.0, 0.0).summands())

    def add(self, loss: Loss) -> None:
        self.num_steps += 1
        self.summands = [sum(pair) for pair in zip(self.summands, loss.summands(), strict=True)]


@dataclass
class Carried:
    """What a worker did alone, taken along from one team to the next."""

    start: dict[str, Tensor]
    ends: dict[str, Tensor]
    buffers: list[Tensor]
    counts: list[float]
    turn: int
    window: Window


@dataclass
class Pending:
    """What members have agreed on, to be applied by `update`."""

    means: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)  # by fragment
    count: float = 0.0  # of items that the means are from, on all workers


class LocalSgd(Replica, TrainsAlone):
    """Every worker takes steps of its own with its share of each batch; every so often all agree."""

    def __init__(self, job: Job, settings: LocalSgdSettings, computation: Computation) -> None:
        super().__init__(job.training.clip_norm)
        # Of the job, not of a team: after a loss groups may be smaller, and of different sizes.
        if reason := check_groups(job.strategy.workers, settings.workers_per_group):
            raise JobError(f"strategy.workers_per_group = {settings.workers_per_group} is {reason}")
        self.sync_every = settings.steps_alone
        self._settings = settings
        self._computation = computation
        self._batch_size = job.training.batch_size
        self._nominal_count = float(job.training.batch_size * settings.sync_every)
        self._python_path = job.python_path
        self._team = Team()
        self._carried: Carried | None = None
        self._is_apart = False  # the model is not what all agreed on last
        self._aside: dict[str, Tensor] | None = None  # this worker's own parameters, while the model is the common one
        self._window = Window()
        self._flight: Sent | None = None
        self._lr = 0.0
        self._feedback: list[ErrorFeedback | None] = []  # by fragment: what compression left out of what was sent
        self._tried: dict[int, Sent] = {}  # by fragment: of an agreement that this worker does not know the end of
        self._saved_residual: dict[str, Tensor] = {}

    def requirements(self, job: Job) -> Requirements:
        workers = job.strategy.workers
        require_samples(job, workers)
        if job.training.ema:
            raise JobError(
                f"training.ema = {job.training.ema} does not go with strategy 'local_sgd': between two exchanges each "
                "worker has weights of its own, of which there is no common average: leave out training.ema, or use "
                "another strategy"
            )
        if job.training.precision == "fp16":
            raise JobError(
                "training.precision = 'fp16' scales the loss by what all workers see in every step, and the workers of "
                "this strategy train alone: set precision = 'bf16' or 'fp32'"
            )
        return Requirements(num_workers=workers, num_data_shards=workers)

    def check(self, model: nn.Module, recipe: OptimizerRecipe, example: Batch) -> None:
        trained = _trained(model)
        OuterStep(trained, self._settings.outer, python_path=self._python_path)
        cut_fragments({name: tensor.nbytes for name, tensor in trained.items()}, self._settings.fragments)

    def setup(self, model: nn.Module, recipe: OptimizerRecipe, team: Team, example: Batch) -> None:
        self._carry()
        self._team, self._flight = team, None
        self._adopt(model.to(self._computation.device), recipe)
        if team.num_workers > 1:
            reach("setup.begun")
            broadcast([*model.parameters(), *model.buffers()])
            reach("setup.shared")
        trained = _trained(model)
        self._trained = trained
        self._outer = OuterStep(trained, self._settings.outer, python_path=self._python_path)
        sizes = {name: tensor.nbytes for name, tensor in trained.items()}
        self._fragments = cut_fragments(sizes, self._settings.fragments)
        shapes = [{name: trained[name].shape for name in names} for names in self._fragments]
        self._dtype = common_dtype(list(trained.values()))
        compression = self._settings.compression
        if not self._feedback:
            is_plain = compression.use == "none"
            self._feedback = [
                None if is_plain else compression.feedback([*own.values()], self._dtype) for own in shapes
            ]
        for feedback in self._feedback:
            if feedback is not None:
                feedback.move_to(self._computation.device)
        self._exchanges = [
            DifferenceExchange(own, team, self._nominal_count, feedback)
            for own, feedback in zip(shapes, self._feedback, strict=True)
        ]
        self._buffers = SharedBuffers(
            buffers_of(model, left_out=SyncedBatchNorm),
            is_first=team.is_first,
            keeps_first=self._settings.batch_norm == "local",
        )
        self._turn = 0  # how often members have agreed: which fragment is next
        self._pending = Pending()
        self._begin_apart()
        self._group: Group | None = None
        if self._settings.workers_per_group > 1 and team.num_workers > 1:
            self._group = Group(team, self._settings.workers_per_group, model, self._optimizer, self._batch_size)

    def _begin_apart(self) -> None:
        """Begin as the others do: with what all agreed on, and nothing of one's own."""
        self._is_apart, self._aside, self._window = False, None, Window()
        self._counts = [0.0] * len(self._fragments)  # of items since each fragment was sent

    # Steps that a worker takes alone.

    @property
    def has_window(self) -> bool:
        return self._window.num_steps > 0

    def train_alone(self, microbatches: Sequence[Batch], *, step: int, measure: bool) -> None:
        self._carried, self._saved_residual = None, {}
        self._put_back()
        if not self.has_window:
            self._buffers.begin()
        loss, count = self._compute(microbatches, measure)
        self._window.add(loss)
        self._is_apart = True
        self._lr = (super().update(step) if count else super().skip(step)).lr
        self._counts = [before + loss.count for before in self._counts]
        if self._settings.delay and self._window.num_steps == self.sync_every - self._settings.delay:
            self._flight = self._send(self._turn % len(self._fragments), keep=True)

    def _compute(self, microbatches: Sequence[Batch], measure: bool) -> tuple[Loss, float]:
        """Compute the gradient of a step; return the loss of this worker's share, and the items of the gradient."""
        group = self._group
        if group is not None and group.is_whole:
            loss = self._computation.forward_backward(
                self.model, microbatches, total_count=group.nominal_count, measure=measure
            )
            return loss, group.sum_gradients(loss.count)
        count = sum(self._computation.loss.count_batch(part) for part in microbatches)
        loss = self._computation.forward_backward(
            self.model, microbatches, total_count=count, measure=measure, is_share=True
        )
        return loss, loss.count

    def _send(self, fragment: int, *, keep: bool) -> Sent:
        count = self._counts[fragment]
        return self._exchanges[fragment].begin(self._outer.start, self._trained, count, self._dtype, keep=keep)

    def drop_window(self) -> None:
        with torch.no_grad():
            for name, start in self._outer.start.items():
                self._trained[name].copy_(start)
        self._buffers.undo()
        self._begin_apart()

    # Where all agree.

    def agree(self, vote: Callable[[], Votes], *, is_end: bool) -> Loss:
        summands = self._window.summands
        turn = self._turn % len(self._fragments)
        fragments = range(len(self._fragments)) if is_end else [turn]
        flags = self._buffers.flags(has_samples=summands[_SAMPLES_AT] > 0)
        flight, self._flight = self._flight, None
        if flight is not None and is_end:  # the steps taken since it was sent count as well: everything is sent again
            self._exchanges[turn].drop(flight)
            flight = None
        sent = {turn: flight} if flight is not None else {}
        counts = [sent[number].count if number in sent else self._counts[number] for number in fragments]
        numbers = [*summands, *vote(), *flags]
        rows = self._team.gather_numbers([*numbers, *counts])
        reach("agree.gathered")
        for number in fragments:
            if number not in sent:
                sent[number] = self._send(number, keep=False)
        means: dict[str, Tensor] = {}
        self._tried, total = sent, 0.0
        for place, number in enumerate(fragments):
            counted = [row[len(numbers) + place] for row in rows]
            total += sum(counted)
            means |= self._exchanges[number].finish(sent[number], counted)
        totals = [sum(row[place] for row in rows) for place in range(len(numbers))]
        self._buffers.agree(totals[len(numbers) - len(flags) :])
        reach("agree.exchanged")
        self._pending = Pending(means, sent, total)
        measured = totals[_ITEMS_AT] > 0 and self._computation.counts_classes
        return Loss.from_totals(totals[: len(numbers) - len(flags)], has_accuracy=measured)

    @torch.no_grad()
    def update(self, step: int) -> Update:
        pending = self._pending
        self._outer.step(pending.means)
        start = self._outer.start
        for number, sent in pending.sent.items():
            for name in self._fragments[number]:
                # What was learnt while the fragment was on its way stays.
                since = self._trained[name] - sent.ends[name] if sent.ends else None
                self._trained[name].copy_(start[name])
                if since is not None:
                    self._trained[name].add_(since)
            self._counts[number] -= sent.count
            self._exchanges[number].commit(sent)
        return self._end_window()

    def skip(self, step: int) -> Update:
        """Leave out a window in which no worker counted anything. A fragment may have been learnt in earlier ones."""
        return self.update(step) if self._pending.count else self._end_window()

    def _end_window(self) -> Update:
        self._pending, self._window, self._tried = Pending(), Window(), {}
        self._turn += 1
        self._is_apart = any(self._counts) or len(self._fragments) > 1
        return Update(self._lr)

    def forward_backward(self, microbatches: Sequence[Batch], *, measure: bool, vote: Callable[[], Votes]) -> Loss:
        raise NotImplementedError("members of this strategy train alone, and agree")

    # What is common, and what is this worker's own.

    @torch.no_grad()
    def consolidate(self) -> None:
        if self._is_apart and self._aside is None:
            self._aside = {name: tensor.detach().clone() for name, tensor in self._trained.items()}
            for name, start in self._outer.start.items():
                self._trained[name].copy_(start)

    @torch.no_grad()
    def _put_back(self) -> None:
        if self._aside is not None:
            for name, own in self._aside.items():
                self._trained[name].copy_(own)
            self._aside = None

    def prepare_save(self) -> None:
        """Have the first worker know the mean of what compression left out on each. Collective."""
        self._saved_residual = {}
        for names, feedback in zip(self._fragments, self._feedback, strict=True):
            if feedback is None:
                continue
            mean = feedback.zeros() if feedback.left is None else feedback.left.clone()
            if self._team.num_workers > 1:
                dist.all_reduce(mean)
                mean.div_(self._team.num_workers)
            sizes = [self._trained[name].numel() for name in names]
            self._saved_residual |= dict(zip(names, torch.split(mean, sizes), strict=True))

    def agreed_state(self) -> State:
        return State.join(
            model=State(self._common_weights(), {}),
            optimizer=self._outer.state_dict(),
            local_sgd=State({}, {"turn": self._turn}),
        )

    def _common_weights(self) -> dict[str, Tensor]:
        weights = model_state(self.model)
        if not self._is_apart:
            return weights
        start = self._outer.start
        common = {id(self._trained[name]): tensor for name, tensor in start.items()}
        if self.has_window:
            common |= {id(now): then for now, then in self._buffers.starts()}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in common:
                weights[name] = common[id(value)]
        return weights

    def state_dict(self) -> State:
        return State.join(
            model=State(self._common_weights(), {}),
            optimizer=optimizer_state(self._optimizer, self.model),
            outer=self._outer.state_dict(),
            residual=State(dict(self._saved_residual), {}),
            local_sgd=State({}, {"turn": self._turn}),
        )

    def load_state_dict(self, state: State) -> None:
        load_model_state(self.model, state.part("model").tensors)
        load_optimizer_state(self._optimizer, self.model, state.part("optimizer"))
        self._outer.set_start(self._trained)
        self._outer.load_state_dict(state.part("outer"))
        self._turn = int(state.part("local_sgd").values.get("turn", 0))
        self._begin_apart()
        self._buffers.begin()
        self._load_residual(state.part("residual").tensors)
        self._restore()

    def _load_residual(self, saved: dict[str, Tensor]) -> None:
        """Have each worker begin with the mean, which adds up to the same whatever their number."""
        for names, feedback in zip(self._fragments, self._feedback, strict=True):
            if feedback is not None and all(name in saved for name in names):
                left = torch.cat([saved[name].reshape(-1) for name in names])
                feedback.left = left.to(self._computation.device, self._dtype)

    def _carry(self) -> None:
        """Take what this worker did alone out of the model, which is about to be overwritten. Local."""
        if not self._is_apart:
            return
        self._put_back()
        self._carried = Carried(
            {name: tensor.clone() for name, tensor in self._outer.start.items()},
            {name: tensor.detach().clone() for name, tensor in self._trained.items()},
            [now.clone() for now, _ in self._buffers.starts()],
            self._counts,
            self._turn,
            self._window,
        )
        self._is_apart, self._window = False, Window()

    @torch.no_grad()
    def _restore(self) -> None:
        """Take up again what this worker did alone, as far as it began with what the members agree on now."""
        carried, start = self._carried, self._outer.start
        if carried is None:
            return
        for number, names in enumerate(self._fragments):
            if all(torch.equal(carried.start[name], start[name]) for name in names):
                for name in names:
                    self._trained[name].copy_(carried.ends[name])
                self._counts[number] = carried.counts[number]
                self._is_apart = True
            elif number in self._tried and self._turn == carried.turn + 1:
                self._exchanges[number].commit(self._tried[number])  # the others have what this worker sent
        self._tried = {}
        if carried.turn == self._turn and self._is_apart:
            self._window = carried.window
            for (now, _), own in zip(self._buffers.starts(), carried.buffers, strict=True):
                now.copy_(own)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
