"""What a server does with pushes and pulls: a state machine over its pieces, without I/O.

Synchronously (`staleness = 0`) the gradients of a step are kept until all its units have come, added in the order of
their shares, and applied once: the outcome does not depend on who came first. Otherwise each push is applied as it
comes. Each unit counts once for each piece, whoever sends it and however often.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cordee.checkpoint import State
from cordee.compute import OptimizerRecipe
from cordee.core.errors import CommunicationError
from cordee.core.shards import Block, add_up
from cordee.parameters.placement import Piece
from cordee.parameters.push_log import PushLog
from cordee.parameters.shared_values import SMALLEST_BYTES, SharedValues, StoredValues
from cordee.parameters.updaters import SliceOptimizer
from cordee.strategies.parameter_server.messages import Push, Pushed
from cordee.strategies.parameter_server.settings import ParameterServerSettings

log = logging.getLogger(__name__)

MAX_AGE = 1000  # the histogram's last entry counts this age and above


class FixedSum(NamedTuple):
    """Reproducible mode: a step always has `num_shards`, added as a tree; gradients come divided by `nominal`."""

    num_shards: int
    nominal: int

    def add(self, parts: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """Return the sum of the shards in the order of the tree; a shard without samples counts as zeros."""

        def leaf(block: Block) -> Tensor | None:
            if block.stop - block.first > 1:
                return None
            part = parts.get(block.first)
            return torch.zeros_like(like) if part is None else part.clone()

        total: Tensor = add_up(Block(0, self.num_shards), leaf, torch.Tensor.add_)
        return total


class Staged(NamedTuple):
    """One share of a step that waits for the others."""

    weight: float  # what the gradient is the mean over: items, or their weights
    gradient: Tensor | None  # None: it was refused
    unused: frozenset[int]


class PieceState(StoredValues):
    """One piece: its parameters, their optimizer, and what waits to be applied."""

    def __init__(
        self,
        piece: Piece,
        values: Tensor,
        recipe: OptimizerRecipe,
        settings: ParameterServerSettings,
        fixed: FixedSum | None = None,
    ) -> None:
        assert values.numel() == piece.length
        memory = None
        try:
            if settings.compression == "none" and values.nbytes >= SMALLEST_BYTES:
                memory = SharedValues(values.nbytes, f"piece {piece.index}")
                values = memory.tensor(tuple(values.shape), values.dtype).copy_(values)
        except CommunicationError as error:
            log.info("piece %d is not in shared memory: %s", piece.index, error)
        super().__init__(values, memory)
        self.piece = piece
        self._settings = settings
        self._fixed = fixed
        self._gradient = torch.zeros_like(values)
        self._gradients: list[Tensor] = []  # of the slices: views of the gradient
        self._unused: frozenset[int] = frozenset()  # slices that the gradient says nothing of
        self._has_items = True  # the step counts; False where every label of the batch is ignored
        slices: list[tuple[str, Tensor]] = []
        for one in piece.slices:
            at, shape = one.offset - piece.start, one.shape if one.is_whole else (one.length,)
            slices.append((one.name, values[at : at + one.length].view(shape)))
            self._gradients.append(self._gradient[at : at + one.length].view(shape))
        self.optimizer = SliceOptimizer(recipe, slices)
        self.applied = PushLog()  # the units
        self._staged: dict[int, dict[int, Staged]] = {}  # step -> share
        self._waiting: int | None = None  # step that is complete here, and waits to be applied
        self._level = 0  # of a schedule that follows a metric, in the step that waits
        self._completed: tuple[int, tuple[float, ...]] = (-1, ())  # (unit, norms) of the last completion
        self._seen: dict[str, Tensor] = {}  # what each worker pulled last, for delay compensation

    def push(self, push: Push, gradient: Tensor) -> Pushed:
        """Take a gradient in. It is copied if it is kept."""
        if gradient.shape != self.values.shape:
            raise CommunicationError(
                f"piece {self.piece.index} has {self.values.numel()} numbers, the gradient of {push.worker} has "
                f"{gradient.numel()}: the model of the worker is another one"
            )
        self.applied.forget_below(push.floor)
        if self.applied.has(push.unit):
            unit, norms = self._completed
            return Pushed("known", norms if unit == push.unit else ())
        is_finite = math.isfinite(float(gradient.sum()))  # the sum of finite numbers may overflow: look closer then
        if not is_finite and not bool(torch.isfinite(gradient).all()):
            return self._refuse(push)
        if self._settings.is_synchronous:
            return self._stage(push, gradient)
        self.applied.add(push.unit)
        self._apply_alone(push, gradient)
        return Pushed("applied")

    def pull(self, worker: str, apply_step: int = -1, scale: float = 1.0) -> Tensor:
        """Return the parameters: this piece's own memory, to be copied before the next push."""
        self.apply_pending(apply_step, scale)
        if self._settings.delay_compensation:
            seen = self._seen.get(worker)
            if seen is None:
                self._seen[worker] = self.values.clone()
            else:
                seen.copy_(self.values)
        return self.values

    def waits_for(self, step: int) -> bool:
        return self._waiting == step

    def apply_pending(self, step: int, scale: float) -> None:
        """Apply the step that waits for this; a step that was applied before is passed over."""
        if not self.waits_for(step):
            return
        self._waiting = None
        if scale != 1.0:
            self._gradient.mul_(scale)
        self._step(step)

    def forget(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def dump(self) -> State:
        """Return all that `restore` needs to continue exactly here; tensors share memory."""
        tensors = {"values": self.values, "gradient": self._gradient}
        tensors |= {f"seen.{worker}": seen for worker, seen in self._seen.items()}
        staged = []
        for step, parts in self._staged.items():
            for share, part in parts.items():
                staged.append((step, share, part.weight, part.gradient is not None, sorted(part.unused)))
                if part.gradient is not None:
                    tensors[f"staged.{step}.{share}"] = part.gradient
        plain = {
            "version": self.version,
            "applied": self.applied.dump(),
            "staged": staged,
            "waiting": self._waiting,
            "level": self._level,
            "unused": sorted(self._unused),
            "has_items": self._has_items,
            "completed": self._completed,
        }
        return State.join(piece=State(tensors, plain), optimizer=self.optimizer.dump())

    def restore(self, state: State) -> None:
        """Become what another was when it made a dump."""
        tensors, plain = state.part("piece")
        with self.changing(0, self.length):
            self.values.copy_(tensors["values"])
        self._gradient.copy_(tensors["gradient"])
        self._seen = {
            name.removeprefix("seen."): tensor.clone() for name, tensor in tensors.items() if name.startswith("seen.")
        }
        self.version = plain["version"]
        self.applied = PushLog.restored(plain["applied"])
        self._staged = {}
        for step, share, items, has_gradient, unused in plain["staged"]:
            gradient = tensors[f"staged.{step}.{share}"].clone() if has_gradient else None
            self._staged.setdefault(step, {})[share] = Staged(items, gradient, frozenset(unused))
        self._waiting, self._level = plain["waiting"], plain["level"]
        self._unused, self._has_items = frozenset(plain["unused"]), plain["has_items"]
        self._completed = (plain["completed"][0], tuple(plain["completed"][1]))
        self.optimizer.restore(state.part("optimizer"))

    def _refuse(self, push: Push) -> Pushed:
        detail = f"the gradient of {push.worker} for unit {push.unit} (step {push.step + 1}) is not finite"
        if self._settings.is_synchronous:
            outcome = self._stage(push, None)
            return Pushed("refused", outcome.norms, detail)
        self.applied.add(push.unit)
        return Pushed("refused", detail=detail)

    def _stage(self, push: Push, gradient: Tensor | None) -> Pushed:
        self.applied.add(push.unit)
        staged = self._staged.setdefault(push.step, {})
        is_last = len(staged) + 1 == push.num_shares
        kept = gradient if gradient is None or is_last else gradient.clone()
        staged[push.share] = Staged(push.count, kept, frozenset(push.unused))
        if not is_last:
            return Pushed("staged")
        # Steps are complete in order; what is left of earlier ones lacks a part that was lost with a server.
        self._staged = {step: parts for step, parts in self._staged.items() if step > push.step}
        has_any = self._combine(staged)
        norms = self._norms() if self._settings.clip_norm and has_any else ()
        if has_any:
            # Not before all servers have all of the step: if a worker is lost in the middle of its pushes, another
            # computes its part again, and must find the parameters as they were everywhere.
            self._waiting, self._level = push.step, push.level
        self._completed = (push.unit, norms)
        return Pushed("applied", norms)

    def _norms(self) -> tuple[float, ...]:
        return tuple(
            -1.0 if at in self._unused else float(torch.linalg.vector_norm(gradient))
            for at, gradient in enumerate(self._gradients)
        )

    def _combine(self, staged: Mapping[int, Staged]) -> bool:
        """Write the aggregate of the gradients, in order, to the gradient buffer; False if there is none."""
        parts = {share: part.gradient for share, part in sorted(staged.items()) if part.gradient is not None}
        if not parts:
            return False
        counts = {share: staged[share].weight for share in parts}
        total, out = sum(counts.values()), self._gradient
        self._has_items = total > 0
        self._unused = frozenset.intersection(*(staged[share].unused for share in parts))
        if self._fixed is not None:
            out.copy_(self._fixed.add(parts, out))
            # As the others add them (strategies/shards.py): sums of weights are rounded in the order of the tree too.
            summands = {share: torch.tensor(float(count)) for share, count in counts.items()}
            total = float(self._fixed.add(summands, torch.tensor(0.0)))
            if total and total != self._fixed.nominal:
                out.mul_(self._fixed.nominal / total)
            return True
        if total:
            parts = {share: gradient for share, gradient in parts.items() if counts[share]}
        for position, (share, gradient) in enumerate(parts.items()):
            weight = {"weighted": counts[share] / total if total else 0.0, "mean": 1 / len(parts), "sum": 1.0}[
                self._settings.aggregate
            ]
            if position == 0:
                torch.mul(gradient, weight, out=out) if weight != 1.0 else out.copy_(gradient)
            else:
                out.add_(gradient, alpha=weight)
        return True

    def _apply_alone(self, push: Push, gradient: Tensor) -> None:
        settings, age = self._settings, self.version - push.base
        self._gradient.copy_(gradient)
        self._unused, self._has_items = frozenset(push.unused), push.count > 0
        seen = self._seen.get(push.worker)
        if settings.delay_compensation and seen is not None:
            # DC-ASGD: the change of the gradient since, to first order, with g * g for the Hessian.
            drift = torch.sub(self.values, seen)
            self._gradient.addcmul_(drift.mul_(gradient), gradient, value=settings.delay_compensation)
        factor = 1.0 / max(1, age) if settings.staleness_lr == "inverse" else 1.0
        self._level = push.level
        self._step(push.step, factor)

    def _step(self, step: int, factor: float = 1.0) -> None:
        self.version += 1
        if not self._has_items:  # as `single` skips such a step: not even a moving average of the weights moves
            return
        if self._settings.weight_decay:
            self._gradient.add_(self.values, alpha=self._settings.weight_decay)
        self.optimizer.set_rate(step, factor, self._level)
        with self.changing(0, self.length):
            # Like `single`, which leaves parameters without a gradient alone.
            self.optimizer.step(None if at in self._unused else one for at, one in enumerate(self._gradients))


class ParameterShard:
    """All pieces of one server, and what workers tell it of their buffers."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        values: Callable[[Piece], Tensor],
        recipe: OptimizerRecipe,
        settings: ParameterServerSettings,
        fixed: FixedSum | None = None,
    ) -> None:
        self.pieces: Mapping[int, PieceState] = {
            piece.index: PieceState(piece, values(piece), recipe, settings, fixed) for piece in pieces
        }
        self._fixed = fixed
        self.agreed: dict[str, Tensor] = {}
        """In reproducible mode, the buffers that all workers start a step from; empty before the first."""
        self._staged_extras: dict[int, tuple[int, dict[int, dict[str, Tensor]]]] = {}
        """Step -> how many shares it has, and the buffers of those that came."""
        self._next_agreed: tuple[int, dict[str, Tensor]] | None = None  # of a step that waits to be applied
        self._agreed_step = -1  # that `agreed` is of
        self.ages = [0]
        self._new_ages: dict[str, tuple[int, int, int]] = {}  # by worker: how many, their sum, the highest
        self._first = min(self.pieces)
        self._extras: dict[str, tuple[int, dict[str, Tensor]]] = {}  # worker -> (unit, its buffers)
        self._residuals: dict[tuple[str, int], tuple[int, Tensor]] = {}
        """(worker, piece) -> the step at which it was sent, and what compression had left out by then."""

    def piece(self, index: int) -> PieceState:
        state = self.pieces.get(index)
        if state is None:
            raise CommunicationError(f"piece {index} is not on this server, which has {sorted(self.pieces)}")
        return state

    def push(self, push: Push, gradient: Tensor) -> Pushed:
        state = self.piece(push.piece)
        age = state.version - push.base
        outcome = state.push(push, gradient)
        if push.piece == self._first and outcome.outcome in ("applied", "staged"):
            self._record_age(push.worker, max(age, 0))
        return outcome

    def keep_extras(self, worker: str, unit: int, buffers: dict[str, Tensor]) -> None:
        """Record the buffers of a worker's model, the newest of each worker."""
        if worker not in self._extras or self._extras[worker][0] < unit:
            self._extras[worker] = (unit, {name: value.clone() for name, value in buffers.items()})

    def keep_residual(self, worker: str, step: int, piece: int, left: Tensor) -> None:
        """Record what compression has left out of a worker's gradients of a piece, when the servers had `step`."""
        if left.shape != self.piece(piece).values.shape:
            raise CommunicationError(
                f"piece {piece} has {self.piece(piece).values.numel()} numbers, not {left.numel()}"
            )
        self._residuals[worker, piece] = (step, left.clone())

    def residuals_of(self, piece: int, step: int = -1, worker: str = "") -> dict[str, Tensor]:
        """Return what was left out of gradients of a piece, by worker: of one, or of those that sent it at `step`."""
        return {
            name: left
            for (name, number), (sent_at, left) in self._residuals.items()
            if number == piece and (name == worker or (not worker and sent_at == step))
        }

    def agree_on_extras(self, step: int, share: int, num_shares: int, buffers: dict[str, Tensor]) -> None:
        """Take the buffers of one shard of a step; when all are there, their mean is what the next step starts from.

        Not before `apply_pending_extras`: see `PieceState`.
        """
        assert self._fixed is not None
        newest = self._agreed_step if self._next_agreed is None else self._next_agreed[0]
        if step <= newest:
            return  # sent again, or by a worker that was given up: the step is complete
        _, staged = self._staged_extras.setdefault(step, (num_shares, {}))
        staged[share] = {name: value.clone() for name, value in buffers.items()}
        if len(staged) < num_shares:
            return
        self._staged_extras = {later: shares for later, shares in self._staged_extras.items() if later > step}
        agreed = {}
        for name, value in staged[min(staged)].items():
            if value.is_floating_point():
                parts = {share: own[name].double() for share, own in staged.items()}
                total = self._fixed.add(parts, parts[min(staged)])
                agreed[name] = (total / len(staged)).to(value.dtype)
            else:
                agreed[name] = value
        self._next_agreed = (step, agreed)

    def waits_for_extras(self, step: int) -> bool:
        return self._next_agreed is not None and self._next_agreed[0] <= step

    def apply_pending_extras(self, step: int) -> None:
        """Start from what was agreed on in this step."""
        if self.waits_for_extras(step):
            assert self._next_agreed is not None
            self._agreed_step, self.agreed = self._next_agreed
            self._next_agreed = None

    def dump_extras(self) -> State:
        """Return all that `restore_extras` needs to be where this one is; tensors share memory."""
        tensors: dict[str, Tensor] = {}

        def put(buffers: Mapping[str, Tensor]) -> list[str]:
            tensors.update((str(number), value) for number, value in enumerate(buffers.values(), len(tensors)))
            return list(buffers)

        values = {
            "agreed": (self._agreed_step, put(self.agreed)),
            "next": None if self._next_agreed is None else (self._next_agreed[0], put(self._next_agreed[1])),
            "staged": [
                (step, num_shares, share, put(buffers))
                for step, (num_shares, staged) in self._staged_extras.items()
                for share, buffers in staged.items()
            ],
            "kept": [(worker, unit, put(buffers)) for worker, (unit, buffers) in self._extras.items()],
            "residuals": [
                (worker, piece, step, put({"": left})) for (worker, piece), (step, left) in self._residuals.items()
            ],
            "ages": self.ages,
        }
        return State(tensors, values)

    def restore_extras(self, state: State) -> None:
        """Become what another was when it made a dump."""
        left, plain = iter(state.tensors.values()), state.values

        def take(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: next(left).clone() for name in names}

        self._agreed_step, self.agreed = plain["agreed"][0], take(plain["agreed"][1])
        self._next_agreed = None if plain["next"] is None else (plain["next"][0], take(plain["next"][1]))
        self._staged_extras = {}
        for step, num_shares, share, names in plain["staged"]:
            self._staged_extras.setdefault(step, (num_shares, {}))[1][share] = take(names)
        self._extras = {worker: (unit, take(names)) for worker, unit, names in plain["kept"]}
        self._residuals = {
            (worker, piece): (step, take(names)[""]) for worker, piece, step, names in plain["residuals"]
        }
        self.ages = list(plain["ages"])

    def extras(self) -> dict[str, Tensor]:
        """Return the mean over the workers of each floating-point buffer; of others the newest worker's.

        Before a worker has pushed any, they are those that the run starts from.
        """
        if self._fixed is not None or not self._extras:
            return self.agreed
        newest = max(self._extras.values(), key=lambda entry: entry[0])[1]
        workers = [self._extras[worker][1] for worker in sorted(self._extras)]
        averaged = {}
        for name, value in newest.items():
            if value.is_floating_point() and len(workers) > 1:
                averaged[name] = torch.stack([buffers[name].double() for buffers in workers]).mean(0).to(value.dtype)
            else:
                averaged[name] = value
        return averaged

    def forget(self, worker: str) -> None:
        """Drop what is kept for a worker that will not come back."""
        if len(self._extras) > 1:
            self._extras.pop(worker, None)
        self._residuals = {key: kept for key, kept in self._residuals.items() if key[0] != worker}
        for state in self.pieces.values():
            state.forget(worker)

    def take_ages(self) -> dict[str, tuple[int, int, int]]:
        """Return how old gradients were since the last call, by worker: how many, the sum of their ages, the highest.

        May be called by another thread: a gradient that comes meanwhile may be left out.
        """
        taken, self._new_ages = self._new_ages, {}
        return taken

    def _record_age(self, worker: str, age: int) -> None:
        age = min(age, MAX_AGE)
        count, total, highest = self._new_ages.get(worker, (0, 0, 0))
        self._new_ages[worker] = count + 1, total + age, max(highest, age)
        if age >= len(self.ages):
            self.ages += [0] * (age + 1 - len(self.ages))
        self.ages[age] += 1
