"""All shards of a worker in one pass through the model, where that gives the bits of a pass for each shard.

For models that are chains of layers which treat every sample by itself. The layers compute all samples at once; only
the gradients of their parameters, and activations with an exponential, are computed shard by shard. Whether the other
kernels give a sample the same bits beside others as alone depends on the sizes: it is tried once for each, on random
numbers, and a model that fails is computed shard by shard as any other.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from cordee.communication.exchange import GradientRow
from cordee.compute import Computation, Loss
from cordee.compute.computation import aligned, is_aligned
from cordee.core import Batch

log = logging.getLogger("cordee.strategies")

MOST_SIZES = 4  # that are tried: the usual one, and those of last batches
# Of the gradients of all shards, which are in memory at once, where separate passes need a few of them. Larger models
# compute long enough for their passes not to matter.
MOST_BYTES = 64 << 20
LEAST_NONZERO = 0.05  # of a gradient's numbers, for a comparison of it to say something
# Layers without parameters whose output for a sample depends on this sample only, and on nothing random.
_EXACT = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Flatten, nn.AvgPool2d, nn.MaxPool2d)
# Of these the last few numbers of a tensor are computed by other code than the rest. The results differ for some values
# only, so that no trial shows it: each shard is computed by itself.
_BY_SHARD = (nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus)

Bounds = Sequence[tuple[int, int]]  # of each shard, in the rows of all of them


class Sink(NamedTuple):
    """Where the gradients of a layer's parameters go, shard by shard."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None
    bounds: Bounds


class OnePass:
    """Computes several shards at once. Local."""

    def __init__(self, model: nn.Module, computation: Computation, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._computation = model, computation
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._row_bytes = sum(parameter.nbytes for parameter in parameters)
        self._is_plain = (
            computation.device.type == "cpu"
            and computation.precision == "fp32"
            and computation.memory_format == "contiguous"
            and computation.scale is None
            and computation.compiler is None
            and computation.loss.argument is None
        )
        self._proven: dict[tuple[object, ...], bool] = {}

    def layers_for(self, parts: Sequence[Batch]) -> list[nn.Module] | None:
        """Return the layers of the model in their order; None where these shards must be computed one by one."""
        is_small = len(parts) * self._row_bytes <= MOST_BYTES
        layers = self._layers() if self._is_plain and is_small and len(parts) > 1 else None
        if layers is None or not all(_is_plain_batch(part) and part.num_samples for part in parts):
            return None
        sizes = tuple(part.num_samples for part in parts)
        like = parts[0].inputs
        key = (sizes, like.shape[1:], tuple(map(id, layers)))
        if key not in self._proven:
            self._proven[key] = len(self._proven) < MOST_SIZES and gives_equal_bits(layers, like, sizes)
            log.info("shards of %s samples are computed %s", sizes, "at once" if self._proven[key] else "one by one")
        return layers if self._proven[key] else None

    def compute(
        self,
        layers: Sequence[nn.Module],
        parts: Sequence[Batch],
        rows: Sequence[GradientRow],
        loss_of: Callable[[int, Callable[..., Any]], Loss],
    ) -> list[Loss] | None:
        """Put the gradients of shards, a part each, into `rows`; return their losses.

        `loss_of` computes the loss of a shard, and the gradient of the outputs that the given function returns. Where
        nothing of a shard counts, so that its parameters have no gradient, or where the gradient of the outputs is no
        tensor as those that were tried (a loss of transposed outputs, say), the shards must be computed one by one:
        returns None.
        """
        bounds = _bounds([part.num_samples for part in parts])
        inputs = torch.cat([part.inputs for part in parts])
        outputs = forward(layers, inputs, self._sinks(layers, rows, bounds), bounds)
        whole = outputs.detach()
        losses, gradients = [], []
        for shard, (start, stop) in enumerate(bounds):
            own = aligned(whole[start:stop]).requires_grad_()
            is_usual: list[bool] = []
            own.register_hook(  # type: ignore[no-untyped-call]
                lambda found, usual=is_usual: usual.append(found.is_contiguous() and is_aligned(found))
            )
            losses.append(loss_of(shard, lambda *_, own=own, **__: own))
            if own.grad is None or is_usual != [True]:
                return None
            gradients.append(own.grad)
        outputs.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
        return losses

    def _layers(self) -> list[nn.Module] | None:
        """Return the layers in their order; None where one is not known, is used twice, or has hooks."""
        if _has_hooks_for_all():
            return None
        layers: list[nn.Module] = []
        if not _flatten(self._model, layers):
            return None
        own = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
        is_whole = len(own) == len(self._places) and {id(parameter) for parameter in own} == self._places.keys()
        is_plain = all(
            p.requires_grad
            and p.dtype is torch.float32
            and is_aligned(p)  # as the copies are that are tried
            and not p._backward_hooks
            and not getattr(p, "_post_accumulate_grad_hooks", None)
            for p in own
        )
        return layers if is_whole and is_plain else None

    def _sinks(self, layers: Sequence[nn.Module], rows: Sequence[GradientRow], bounds: Bounds) -> dict[int, Sink]:
        return sinks_of(layers, self._places, [row.views for row in rows], bounds)


def gives_equal_bits(layers: Sequence[nn.Module], like: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether one pass over all samples gives each shard the bits of its own pass, for sizes as these.

    Copies of the layers are tried on random numbers: weights that are zero, as some are at the start, would hide
    everything. The order in which kernels add up depends on sizes and alignment, not on values.
    """
    generator = torch.Generator().manual_seed(0)
    layers = copy.deepcopy(list(layers))
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
                parameter.grad = None
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5)
    bounds = _bounds(sizes)
    inputs = torch.randn((sum(sizes), *like.shape[1:]), generator=generator)
    parameters = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]
    try:
        found = [[torch.zeros_like(parameter) for parameter in parameters] for _ in sizes]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        outputs = forward(layers, inputs.clone(), sinks_of(layers, places, found, bounds), bounds)
        cotangent = torch.randn(outputs.shape, generator=generator)
        outputs.backward(cotangent)  # type: ignore[no-untyped-call]
        for (start, stop), together in zip(bounds, found, strict=True):
            alone: Any = inputs[start:stop].clone()
            for layer in layers:
                alone = layer(alone)
            gradients = torch.autograd.grad(alone, parameters, cotangent[start:stop].clone())
            if not torch.equal(alone, outputs[start:stop]):
                return False
            for one, other in zip(together, gradients, strict=True):
                if not torch.equal(one, other) or one.count_nonzero() < LEAST_NONZERO * one.numel():
                    return False
    except RuntimeError:
        return False  # a kernel that does not know such sizes
    return True


def forward(layers: Sequence[nn.Module], inputs: Tensor, sinks: dict[int, Sink], bounds: Bounds) -> Tensor:
    """Return what the layers make of all samples. The backward pass fills the sinks, and no `.grad`."""
    x = inputs
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Linear):
            x = _Linear.apply(x, layer.weight, layer.bias, sinks[place])  # type: ignore[no-untyped-call]
        elif isinstance(layer, nn.Conv2d):
            way = (layer.stride, layer.padding, layer.dilation, layer.groups)
            x = _Convolution.apply(x, layer.weight, layer.bias, way, sinks[place])  # type: ignore[no-untyped-call]
        elif isinstance(layer, _BY_SHARD):
            parts = x.split([stop - start for start, stop in bounds])  # type: ignore[no-untyped-call]
            x = torch.cat([layer(aligned(part)) for part in parts])
        else:
            x = layer(x)
    return x


class _Linear(torch.autograd.Function):
    """A linear layer of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        if x.dim() != 2:
            raise RuntimeError("rows of one dimension only")
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        weights, biases, bounds = ctx.sink
        for shard, (start, stop) in enumerate(bounds):
            own = aligned(gradient[start:stop])
            with _room(weights[shard]) as room:
                torch.mm(own.t(), aligned(x[start:stop]), out=room)
            if biases is not None:
                with _room(biases[shard]) as room:
                    torch.sum(own, 0, out=room)
        return gradient.mm(weight) if ctx.needs_input_grad[0] else None, None, None, None


class _Convolution(torch.autograd.Function):
    """A convolution of images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: tuple[Any, ...], sink: Sink) -> Tensor:
        stride, padding, dilation, groups = way
        ctx.save_for_backward(x, weight)
        ctx.way, ctx.sink = way, sink
        return nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        weights, biases, bounds = ctx.sink
        sizes = None if biases is None else [weight.shape[0]]

        def of(gradient: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
            stride, padding, dilation, groups = ctx.way
            none = [0] * len(stride)
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
                gradient, x, weight, sizes, stride, padding, dilation, False, none, groups, wanted
            )
            return found

        for shard, (start, stop) in enumerate(bounds):
            _, own, bias = of(aligned(gradient[start:stop]), aligned(x[start:stop]), [False, True, sizes is not None])
            weights[shard].copy_(own)
            if biases is not None:
                biases[shard].copy_(bias)
        inner = of(gradient, x, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        return inner, None, None, None, None


@contextmanager
def _room(view: Tensor) -> Iterator[Tensor]:
    """Give memory for a result that goes into `view`.

    Matrix products give other bits where their results begin at other alignments.
    """
    room = view if is_aligned(view) else torch.empty_like(view)
    yield room
    if room is not view:
        view.copy_(room)


def _flatten(module: nn.Module, layers: list[nn.Module]) -> bool:
    """Add the layers of a chain; return whether all of them are known, and nothing of theirs was replaced."""
    if "forward" in vars(module) or _has_hooks(module) or module._buffers:
        return False
    kind = type(module)
    if kind is nn.Sequential:
        return all(_flatten(child, layers) for child in module._modules.values() if child is not None)
    layers.append(module)
    if kind is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return kind is nn.Linear or (kind in _EXACT + _BY_SHARD and not getattr(module, "return_indices", False))


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _has_hooks_for_all() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def sinks_of(
    layers: Sequence[nn.Module], places: Mapping[int, int], rows: Sequence[Sequence[Tensor]], bounds: Bounds
) -> dict[int, Sink]:
    """Return where the gradients of each layer go: `places` says where a row has those of a parameter, by its id."""

    def of(parameter: Tensor) -> list[Tensor]:
        return [row[places[id(parameter)]] for row in rows]

    return {
        place: Sink(of(layer.weight), None if layer.bias is None else of(layer.bias), bounds)
        for place, layer in enumerate(layers)
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _is_plain_batch(part: Batch) -> bool:
    inputs = part.inputs
    return isinstance(inputs, Tensor) and inputs.dtype is torch.float32 and inputs.is_contiguous()
