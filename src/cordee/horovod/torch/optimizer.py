"""`DistributedOptimizer`: a torch optimizer whose steps use the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cordee.horovod.operations import Adasum, Average, ReductionOp
from cordee.horovod.torch.compression import Compression
from cordee.horovod.torch.mpi_ops import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async, synchronize
from cordee.horovod.world import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReductionOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer, whose `step()` first reduces the gradients over all ranks. Its steps are collective.

    It stays the same object, of a class derived from its own, so that schedulers made before keep their meaning.
    `gradient_predivide_factor` splits the averaging: gradients are divided by it before they are added.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"DistributedOptimizer: a {type(optimizer).__name__} is no torch.optim.Optimizer")
    if isinstance(optimizer, _Reducing):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average only")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} must be above 0")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    if op is Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support process sets of some of the ranks")
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _check_names(optimizer, named_parameters)
    reduction = _Reduction(optimizer, names, compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    reduction.backward_passes = backward_passes_per_step
    reduction.groups = _make_groups(reduction.parameters(), groups)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Reducing, kind), {"__module__": kind.__module__})
    optimizer._reduction = reduction  # type: ignore[attr-defined]
    reduction.attach()
    return optimizer


class _Reducing(Optimizer):
    """What a distributed optimizer has beyond its own class."""

    _reduction: _Reduction

    def synchronize(self) -> None:
        """Reduce the gradients over all ranks, now. Collective. Call `step` inside of `skip_synchronize` then."""
        if self._reduction.op is not Adasum:  # which combines after the step
            self._reduction.run(self)
            self._reduction.was_synchronized = True

    @property
    def has_gradients(self) -> bool:
        """Whether backward passes were made that no step has used."""
        return bool(self._reduction.num_passes)

    def forget_step(self) -> None:
        """Forget a step that was begun and did not happen: backward passes, a reduction, weights that were kept."""
        self._reduction.num_passes.clear()
        self._reduction.was_synchronized = self._reduction.is_skipped = False
        self._reduction.forget_weights()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` does not reduce: for gradients that were changed after `synchronize` has reduced them."""
        if self._reduction.op is Adasum:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._reduction.is_skipped = True
        try:
            yield
        finally:
            self._reduction.is_skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes come before a step."""
        if passes < 1:
            raise ValueError("backward_passes_per_step must be > 0")
        self._reduction.backward_passes = passes
        self._reduction.num_passes.clear()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients. Refused between a backward pass and the step or `synchronize` that belongs to it."""
        if self._reduction.num_passes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients would be lost on this rank alone"
            )
        super().zero_grad(*args, **kwargs)


class _Reduction:
    """When and how the gradients of one optimizer are reduced."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[nn.Parameter, str],
        compression: Any,
        op: ReductionOp,
        predivide_factor: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._compression = compression
        self.op = op
        self._before = 1.0 / predivide_factor
        self._after = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self.backward_passes = 1
        self.groups: list[list[nn.Parameter]] = []
        self.num_passes: dict[nn.Parameter, int] = {}  # backward passes since the last reduction
        self.was_synchronized = False
        self.is_skipped = False
        self._hooked: set[nn.Parameter] = set()
        self._weights: list[Tensor] = []  # before a step, with Adasum

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def attach(self) -> None:
        """Watch backward passes, and reduce before each step, whoever calls it."""
        self._watch(self.parameters())
        if self.op is Adasum:
            self._optimizer.register_step_pre_hook(self._keep_weights)
            self._optimizer.register_step_post_hook(self._combine_changes)
        else:
            self._optimizer.register_step_pre_hook(self._before_step)

    def _watch(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                watched: Any = parameter  # torch's hook is not typed
                watched.register_post_accumulate_grad_hook(self._count_pass)

    def _count_pass(self, parameter: Tensor) -> None:
        passes = self.num_passes.get(parameter, 0) + 1  # type: ignore[call-overload]
        if passes > self.backward_passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.num_passes[parameter] = passes  # type: ignore[index]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(each) for each in args[1:]):
            raise ValueError(
                "DistributedOptimizer.step() takes no closure: what a closure computes is not reduced over the ranks. "
                "Call backward() before step()"
            )
        if self.is_skipped:
            self.was_synchronized = False
            return
        if self.was_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "the gradients are reduced again",
                stacklevel=3,
            )
        self.run(optimizer)
        self.was_synchronized = False

    # Adasum combines the changes that each rank's own step makes, layer by layer, as Horovod does.

    def _keep_weights(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.num_passes.clear()
        self._weights = [parameter.detach().clone() for parameter in self.parameters()]

    def _combine_changes(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = self.parameters()
        sent = [self._compression.compress(p.detach() - old) for p, old in zip(parameters, self._weights, strict=True)]
        handles = [
            allreduce_async_(change, name=f"change.{self._names[parameter]}", op=Adasum)
            for parameter, (change, _) in zip(parameters, sent, strict=True)
        ]
        with torch.no_grad():
            for parameter, old, handle, (_, context) in zip(parameters, self._weights, handles, sent, strict=True):
                parameter.copy_(old + self._compression.decompress(synchronize(handle), context))
        self._weights = []

    def forget_weights(self) -> None:
        self._weights = []

    def run(self, optimizer: Optimizer) -> None:
        """Reduce the gradients of all parameters over the ranks. Collective.

        A parameter without a gradient has one of zeros: other ranks may have one.
        """
        self.num_passes.clear()
        if not self._process_set.included():
            return
        parameters = self.parameters()
        self._watch(parameters)  # a group may have been added
        # Others may be trained by now than when the groups were made: frozen ones have no gradient to exchange.
        listed = [parameter for group in self.groups for parameter in group]
        groups = self.groups if len(listed) == len(parameters) and set(listed) == set(parameters) else [parameters]
        waits = []
        for number, group in enumerate(groups):
            dense = []
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad.is_sparse and not self._sparse_as_dense:
                    waits.append(self._start_sparse(parameter))
                else:
                    dense.append(parameter)
            if dense:
                waits.append(self._start_dense(dense, number))
        for finish in waits:
            finish()

    def _start_dense(self, parameters: Sequence[nn.Parameter], number: int) -> Any:
        gradients = [_gradient(p).to_dense() if _gradient(p).is_sparse else _gradient(p) for p in parameters]
        compressed = [self._compression.compress(gradient) for gradient in gradients]
        data = [tensor for tensor, _ in compressed]
        name = f"gradients.{number}.{self._names[parameters[0]]}"
        handle = grouped_allreduce_async_(
            data,
            name=name,
            op=self.op,
            prescale_factor=self._before,
            postscale_factor=self._after,
            process_set=self._process_set,
        )

        def finish() -> None:
            handle.wait()
            for parameter, gradient, (tensor, context) in zip(parameters, gradients, compressed, strict=True):
                reduced = self._compression.decompress(tensor, context)
                if _gradient(parameter).is_sparse:
                    parameter.grad = reduced.to_sparse()
                elif reduced is not gradient:
                    gradient.copy_(reduced)

        return finish

    def _start_sparse(self, parameter: nn.Parameter) -> Any:
        wait = sparse_allreduce_async(
            _gradient(parameter), name=f"gradient.{self._names[parameter]}", op=self.op, process_set=self._process_set
        )

        def finish() -> None:
            parameter.grad = wait()

        return finish


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _check_names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of the optimizer, as given or by its place."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {parameter: f"allreduce.noname.{index}" for index, parameter in enumerate(own)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter): model.named_parameters()")
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {duplicates}")
    by_parameter = {parameter: name for name, parameter in named}
    if missing := [index for index, parameter in enumerate(own) if parameter not in by_parameter]:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: numbers {missing} of "
            "the optimizer. Give all of them, as in model.named_parameters()"
        )
    return by_parameter


def _make_groups(
    parameters: list[nn.Parameter], groups: int | Sequence[Sequence[nn.Parameter]] | None
) -> list[list[nn.Parameter]]:
    """Return which gradients are reduced together."""
    if groups is None:
        return [parameters]
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of lists of parameters")
        if groups == 0:
            return [parameters]
        size = -(-len(parameters) // min(groups, max(1, len(parameters))))
        return [parameters[start : start + size] for start in range(0, len(parameters), size)]
    if not isinstance(groups, list | tuple) or any(not isinstance(one, list | tuple) for one in groups):
        raise ValueError("groups should be a non-negative integer or a list of lists of parameters")
    listed = [parameter for one in groups for parameter in one]
    if any(not isinstance(parameter, Tensor) for parameter in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(listed)) != len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    known = set(parameters)
    chosen = [[parameter for parameter in one if parameter in known] for one in groups]
    rest = [[parameter] for parameter in parameters if parameter not in set(listed)]
    return [one for one in [*chosen, *rest] if one]
