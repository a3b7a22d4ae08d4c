"""Forward and backward passes over the parts of a batch, weighted so that the parts make the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cordee.compute.compiling import Compiler
from cordee.compute.loss_scale import LossScale
from cordee.compute.losses import LossFunction, require_even_parts
from cordee.compute.outputs import anchor
from cordee.core import tree
from cordee.core.batch import PLAIN_CALL, Batch, Call, Pieces


class Votes(NamedTuple):
    """How many workers want to stop after this step, and why. They travel with the gradients."""

    interrupt: int = 0
    time: int = 0


NO_VOTES = Votes()

_ALIGNMENT_BYTES = 64  # of what torch allocates


@dataclass(frozen=True, slots=True)
class Loss:
    """What a step computed: the mean loss over `count`, and how many of `num_items` were right if that was measured."""

    mean: float
    count: float  # of items, or the sum of their weights
    num_correct: int | None = None
    num_samples: int = 0
    votes: Votes = NO_VOTES
    num_items: int = 0  # that `num_correct` is out of

    def summands(self) -> list[float]:
        """Return what has to be added up over the workers, beside their votes, for `from_totals`."""
        measured = [float(self.num_correct or 0), float(self.num_items)]
        return [self.mean * self.count, float(self.count), *measured, float(self.num_samples)]

    @classmethod
    def from_totals(cls, totals: Sequence[float], *, has_accuracy: bool) -> Loss:
        """Return the loss of all workers: `totals` are their summands and behind them their votes."""
        loss_sum, count, num_correct, num_items, num_samples, *votes = totals
        return cls(
            loss_sum / count if count else 0.0,
            count,
            int(num_correct) if has_accuracy else None,
            int(num_samples),
            Votes(*(int(vote) for vote in votes)),
            int(num_items),
        )

    @classmethod
    def join(cls, losses: Sequence[Loss]) -> Loss:
        """Return the loss of several parts, without votes."""
        totals = [sum(column) for column in zip(*(loss.summands() for loss in losses), strict=True)]
        return cls.from_totals([*totals, *NO_VOTES], has_accuracy=all(loss.num_correct is not None for loss in losses))

    @property
    def accuracy(self) -> float | None:
        return None if self.num_correct is None or not self.num_items else self.num_correct / self.num_items


@dataclass(frozen=True)
class Computation:
    """How a worker computes: the loss, the device, the precision. The same for every strategy."""

    loss: LossFunction
    device: torch.device
    precision: str  # "fp32", "bf16" or "fp16"
    counts_classes: bool  # targets are classes, so that accuracy means something
    scale: LossScale | None = None  # with fp16; strategies divide gradients by it
    call: Call = PLAIN_CALL  # how the model takes nested inputs
    memory_format: str = "contiguous"  # or "channels_last": of images while they are computed
    compiler: Compiler | None = None  # of the passes of training, where they are compiled

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.half)

    @property
    def half(self) -> torch.dtype:
        """What autocast computes in."""
        return torch.float16 if self.precision == "fp16" else torch.bfloat16

    def to_device(self, batch: Batch) -> Batch:
        if self.device.type != "cpu":
            batch = batch.map(lambda tensor: tensor.to(self.device, non_blocking=True))
        if self.memory_format == "contiguous":
            return batch
        return Batch(tree.map_leaves(self.in_format, batch.inputs), batch.targets)

    def in_format(self, value: Any) -> Any:
        """Return images in the memory format that they are computed in, and anything else as it is.

        Convolutions and what follows them keep the format of their input. Weights stay contiguous: kernels reorder
        them for each pass anyway (docs/decisions/0067).
        """
        if self.memory_format == "contiguous" or not is_image(value):
            return value
        if value.shape[1] > 1:
            return value.contiguous(memory_format=torch.channels_last)
        # Images of one channel lie in both ways at once: kernels choose by the strides.
        height, width = value.shape[2:]
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))

    def outputs(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Return what the model makes of a batch; it is given the targets too where it computes the loss itself."""
        return self.call(model, batch.inputs, self.loss.keywords(batch.targets))

    def count_right(self, outputs: Any, targets: Tensor, top: int = 1) -> int:
        """Return for how many labels that the loss counts the right class is among the `top` highest."""
        return count_correct(*self.compared(outputs, targets), top=top, ignored=self.loss.ignored)

    def compared(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and the labels or numbers that they are of, place by place."""
        shift, predicted = self.loss.shift, self.loss.predictions(outputs)
        return (predicted[:, :-shift], targets[:, shift:]) if shift else (predicted, targets)

    def forward_backward(
        self,
        model: Callable[..., Any],
        parts: Sequence[Batch],
        *,
        total_count: float,
        measure: bool,
        is_share: bool = False,
        join: Callable[[], None] | None = None,
    ) -> Loss:
        """Add the gradient of the mean loss over `total_count` to the parameters' gradients.

        `parts` may be only some of what is counted (the others being computed elsewhere): each is weighted by its
        count, so the sum over everybody's parts is the gradient of the whole batch; `is_share` says so where
        `total_count` is that of these parts alone. Returns the loss of these
        parts alone, as a mean over their own items. Empty parts are passed over. Models that communicate inside
        need as many passes on every worker: `join` makes one for an empty part.
        """
        count, num_items, num_samples = 0.0, 0, 0
        losses: list[Tensor] = []
        part_counts: list[float] = []
        right: list[Tensor] = []
        for part in parts:
            if not part.num_samples:
                if join is not None:
                    join()
                continue
            # Before it is moved: what is asked of a GPU is waited for.
            part_count = self.loss.count_batch(part)
            if is_measured := measure and self.counts_classes and part_count != 0:
                num_items += self.loss.num_items(part.targets)
            part = self.to_device(part)
            targets = part.targets
            num_samples += part.num_samples
            run = model if self.compiler is None else self.compiler.of(model, part.num_samples)
            with self.autocast():
                outputs = self.outputs(run, part)
                loss = self.loss.of(outputs, targets)
                if is_share or part_count != total_count:
                    require_even_parts(self.loss, outputs, targets)
            if part_count == 0:
                if join is not None:
                    anchor(outputs).backward()  # type: ignore[no-untyped-call]
                continue
            share = loss if part_count == total_count else loss * (part_count / total_count)
            (share if self.scale is None else share * self.scale.factor).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            part_counts.append(part_count)
            count += part_count
            if is_measured:
                right.append(find_correct(*self.compared(outputs, targets), ignored=self.loss.ignored))
        means, sums = read_numbers([losses, right], self.device)
        mean = (
            sum(one * part_count for one, part_count in zip(means, part_counts, strict=True)) / count if count else 0.0
        )
        measured = int(sum(sums)) if measure and self.counts_classes else None
        return Loss(mean, count, measured, num_samples, num_items=num_items)


def is_image(value: Any) -> bool:
    """Return whether this is a batch of images, or of what convolutions make of them."""
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def split_batch(batch: Batch | Pieces, num_parts: int) -> list[Batch]:
    """Cut a batch into `num_parts` parts whose sizes differ by at most one; those of a small batch may be empty.

    One that comes in pieces was cut so when it was read.
    """
    if isinstance(batch, Pieces):
        assert len(batch) == num_parts, (len(batch), num_parts)
        return list(batch)
    if num_parts == 1:
        return [batch.map(aligned)]
    if isinstance(batch.inputs, Tensor) and isinstance(batch.targets, Tensor):
        parts = zip(batch.inputs.tensor_split(num_parts), batch.targets.tensor_split(num_parts), strict=True)
        return [Batch(aligned(inputs), aligned(targets)) for inputs, targets in parts]
    return [part.map(aligned) for part in batch.cut(num_parts)]


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that begins at the alignment of memory that torch allocates.

    At other alignments kernels add in another order: a linear layer of 5 inputs gives other bits for the same rows at
    another place of a batch.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


def find_unsound(batch: Batch | Pieces) -> tuple[int, str] | None:
    """Return the first sample, by its row, that has a value which is not finite, and whether it is input or target."""
    found, first = [], 0
    for piece in batch if isinstance(batch, Pieces) else [batch]:
        for values, part in ((piece.inputs, "input"), (piece.targets, "target")):
            for leaf in tree.leaves(values):
                if leaf.is_floating_point() and len(leaf):
                    rows = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(dim=1).nonzero()
                    found += [(first + int(row), part) for row in rows[:1, 0]]
        first += piece.num_samples
    return min(found, default=None)


def read_numbers(scalars: Sequence[Sequence[Tensor]], device: torch.device) -> list[list[float]]:
    """Return the values of tensors of one number each. A GPU is waited for once, not for each of them."""
    if device.type == "cpu":
        return [[scalar.item() for scalar in row] for row in scalars]
    if not any(scalars):
        return [[] for _ in scalars]
    values = iter(torch.stack([scalar.double() for row in scalars for scalar in row]).cpu().tolist())
    return [[next(values) for _ in row] for row in scalars]


def count_correct(outputs: Tensor, targets: Tensor, top: int = 1, ignored: int | None = None) -> int:
    """Return for how many targets, but those of the class `ignored`, the right class is among the `top` highest."""
    return int(find_correct(outputs, targets, top, ignored))


def find_correct(outputs: Tensor, targets: Tensor, top: int = 1, ignored: int | None = None) -> Tensor:
    """Return the same as a tensor, so that a GPU need not be waited for."""
    with torch.no_grad():
        if top == 1:
            is_right = outputs.argmax(dim=-1) == targets
        else:
            best = outputs.topk(min(top, outputs.shape[-1]), dim=-1).indices
            is_right = (best == targets.unsqueeze(-1)).any(dim=-1)
        return (is_right if ignored is None else is_right & (targets != ignored)).sum()


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> float:
    """Scale gradients so that their norm, taken over all of them, is at most `clip_norm`; return it as it was."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm, error_if_nonfinite=False))
