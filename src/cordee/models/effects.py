"""What a forward pass does beside computing its output, and tracing that notices it.

A traced graph repeats what was computed with its input. What Python did while it was traced is done once: numbers
drawn, attributes and buffers changed, branches taken. Modules that do such things are kept whole, so that their own
code runs in every step; where the model's outermost forward pass does, the model cannot be traced.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from cordee.core.batch import tensors_in

_OF_TORCH = set(vars(nn.Module()))  # what every module has
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LARGEST_COMPARED = 1000  # entries of a list or dict
_LARGEST_STATE = 1 << 20  # numbers of a parameter without a gradient that may be a state; a larger one is a weight
_DRAWS = "draws random numbers outside of what is traced, which would be the same in every step"
_MODE = "computes a part under torch.no_grad or autocast, which tracing does not see"


class EffectError(Exception):
    """A forward pass does something that a traced graph would not repeat; says what, and where."""


class WatchingTracer(fx.Tracer):
    """Traces a model, and notes by module what its code did that the graph has not."""

    def __init__(self, model: nn.Module, whole: set[nn.Module]) -> None:
        super().__init__()
        self.effects: dict[nn.Module, str] = {}
        self._whole = whole
        self._stack: list[tuple[nn.Module, Hashable]] = [(model, _mode())]
        self._random = random_state()
        self._before = {module: own_state(module) for module in model.modules()}

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward pass is being traced."""
        return self._stack[-1][0]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._record_random_state()  # of the caller
        self._stack.append((m, _mode()))
        result = super().call_module(m, forward, args, kwargs)  # after an error the stack shows where it was
        self._record_random_state()
        self._stack.pop()
        return result

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        mode = _mode()
        if kind not in ("placeholder", "output") and mode != self._stack[0][1]:
            # Whoever changed the mode was entered in another one.
            culprit = next(module for module, entered in reversed(self._stack) if entered != mode)
            self.effects.setdefault(culprit, _MODE)
        return super().create_node(kind, *args, **kwargs)

    def finish(self) -> None:
        """Note what the modules have changed in themselves."""
        self._record_random_state()
        for module, before in self._before.items():
            if changed := _first_change(before, own_state(module)):
                self.effects.setdefault(module, f"changes its {changed}, which would be done only once")

    def _record_random_state(self) -> None:
        now = random_state()
        if now != self._random:
            self._random = now
            self.effects.setdefault(self.innermost, _DRAWS)


def trace_without_effects(model: nn.Module, *, keep_untraceable: bool) -> fx.GraphModule:
    """Return the model as a graph; modules with effects, and with `keep_untraceable` those that fail, are kept whole.

    The model's attributes are left as they were. Raises EffectError, or what tracing raised, if the outermost forward
    pass is the one concerned.
    """
    whole: set[nn.Module] = set()
    while True:
        tracer = WatchingTracer(model, whole)
        culprits = {}
        try:
            with unchanged(model), torch.enable_grad():
                graph = tracer.trace(model)
                made = fx.GraphModule(tracer.root, graph, type(model).__name__)
                tracer.finish()
            culprits = tracer.effects
        except Exception:
            if not keep_untraceable or tracer.innermost is model or tracer.innermost in whole:
                raise
            culprits = {tracer.innermost: ""}
        if not culprits:
            break
        for module, what in culprits.items():
            if module is model or module in whole:
                again = WatchingTracer(model, whole)
                place = _find_line(functools.partial(again.trace, model), module, model)
                raise EffectError(f"the forward pass of {_named(model, module)} {what}{place}")
        whole.update(culprits)
    with unchanged(model), torch.enable_grad():
        tracer = WatchingTracer(model, whole)
        graph = tracer.trace(model)
        second = fx.GraphModule(tracer.root, graph)
    if _signature(made) != _signature(second):
        raise EffectError(f"tracing the forward pass of {_named(model, model)} twice gives two different graphs")
    return made


def check_same_training(model: nn.Module, traced: nn.Module, inputs: Tensor) -> None:
    """Raise EffectError unless both train alike: outputs, gradients and buffers of two passes. Local, no effect."""
    tolerance = 2e-2 if torch.is_autocast_enabled(inputs.device.type) else 1e-3
    own, other = _train_twice(model, model, inputs), _train_twice(traced, model, inputs)
    for (name, one), (_, two) in zip(own, other, strict=True):
        if (one is None) != (two is None):
            raise EffectError(f"the traced model has {'no' if two is None else 'a'} {name}, the model itself differs")
        if one is None or two is None:
            continue
        scale = max(float(one.abs().max()) if one.numel() else 0.0, 1e-6)
        if one.shape != two.shape or not torch.allclose(one, two, rtol=0.0, atol=tolerance * scale, equal_nan=True):
            raise EffectError(f"the traced model computes something else than the model itself: the {name} differs")


def refuse_python_state(model: nn.Module, inputs: Tensor) -> None:
    """Raise EffectError if training changes numbers that modules keep as plain attributes. Local, no effect.

    Only the worker that computes a stage would change them, and others evaluate the model too.
    """
    found: list[tuple[nn.Module, str]] = []
    with unchanged(model), contextlib.suppress(Exception):  # what fails in training says so itself
        model.train()
        model(inputs)  # what is kept from the first pass on, such as a size, may stay
        before = {module: own_state(module, only_plain=True) for module in model.modules()}
        model(inputs)
        for module, state in before.items():
            after = own_state(module, only_plain=True)
            if changed := _first_change(state, {key: after.get(key, value) for key, value in state.items()}):
                found.append((module, changed))
    for module, changed in found:
        place = _find_line(functools.partial(model, inputs), module, model)
        raise EffectError(
            f"the forward pass of {_named(model, module)} changes its {changed}{place}, which only the worker that has "
            "its stage would see: keep such a number in a buffer (register_buffer)"
        )


class Kept(NamedTuple):
    """Something that a model keeps from pass to pass beside its buffers."""

    what: str  # in words
    has_effect: bool  # the next pass computes something else for it
    is_generator: bool  # it is random numbers of its own


def find_kept(model: nn.Module, compute: Callable[[], Any]) -> Kept | None:
    """Return what training passes change of a model that is neither buffer nor parameter. Local, no effect.

    `compute` makes a forward pass, of the same samples each time.

    Of what has no effect on the next pass only whole numbers are told: they may count up to something. The rest is kept
    to be looked at.
    """
    with unchanged(model), torch.no_grad(), contextlib.suppress(Exception):  # what fails in training says so itself
        model.train()
        compute()  # what is kept from the first pass on, such as a size or a mask, may stay
        buffers = [
            (m, {name: (b, b.clone()) for name, b in m._buffers.items() if b is not None}) for m in model.modules()
        ]
        before = {module: _kept_state(module) for module in model.modules()}
        first = _numbers_of(compute)
        changed: list[tuple[str, nn.Module, str]] = []
        for module, state in before.items():
            after = _kept_state(module)
            keys = [key for key in after if key in state and state[key] != after[key]]
            changed += [(str(after[key][0]), module, key) for key in keys]
        if not changed:
            return None
        for module, own in buffers:
            module._buffers.update({name: buffer.copy_(value) for name, (buffer, value) in own.items()})
        second = _numbers_of(compute)
        scale = max(float(first.abs().max()), 1e-6)
        has_effect = not torch.allclose(first, second, rtol=0.0, atol=1e-5 * scale, equal_nan=True)
        kind, module, key = min(changed, key=lambda change: _RANKS.get(change[0], 2))
        if has_effect or isinstance(own_attributes(module)[key], int):
            what = f"the forward pass of {_named(model, module)} changes its attribute '{key}'"
            return Kept(what, has_effect, kind == "generator")
    return None


_RANKS = {"plain": 0, "generator": 1}  # which change is told of, where there are several


def changed_parameter(model: nn.Module, compute: Callable[[], Any]) -> str | None:
    """Return the name of a parameter without a gradient that training passes change. Local, no effect.

    Other libraries keep running statistics and states of random numbers so. Workers share such changes of buffers only.
    """
    fixed = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not fixed:
        return None
    with unchanged(model), torch.no_grad(), contextlib.suppress(Exception):  # what fails in training says so itself
        model.train()
        before = {name: parameter._version for name, parameter in fixed.items()}
        compute()
        return next((name for name, parameter in fixed.items() if parameter._version != before[name]), None)
    return None


def _kept_state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {key: _frozen(value) for key, value in own_attributes(module).items()}


def _numbers_of(compute: Callable[[], Any]) -> Tensor:
    """Return all that a pass with fixed random numbers gives, in one row."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors_in(compute())])


def mixes_samples(model: nn.Module, inputs: Tensor) -> bool:
    """Whether the output of a sample depends on the other samples of its batch. Local, no effect.

    Batch norms are left out: how they see the batch is a setting. A mode in which the model draws random numbers, or
    keeps something that the next output depends on, is not looked at.
    """
    with unchanged(model), torch.no_grad(), contextlib.suppress(Exception):  # what fails in training says so itself
        for is_training in (False, True):
            model.train(is_training)
            for module in model.modules():
                if isinstance(module, (_BatchNorm, _DropoutNd)):
                    module.eval()
            torch.manual_seed(0)
            before = random_state()
            whole: Tensor = model(inputs).detach().clone()
            if random_state() != before or not torch.equal(model(inputs), whole):
                continue
            parts = torch.cat([model(sample).detach().clone() for sample in inputs.unsqueeze(1)])
            limit = 1e-3 * max(float(whole.abs().max()), 1e-6)
            if not torch.allclose(whole, parts, rtol=0.0, atol=limit, equal_nan=True):
                return True
    return False


def refuse_replaced_buffers(model: nn.Module, inputs: Tensor) -> None:
    """Raise EffectError if a pass puts other tensors in the places of buffers: a graph holds on to the first ones."""
    with unchanged(model), torch.no_grad():
        before = {module: dict(module._buffers) for module in model.modules()}
        for is_training in (True, False):
            model.train(is_training)
            model(inputs)
        for module, buffers in before.items():
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    raise EffectError(
                        f"the forward pass of {_named(model, module)} assigns to its buffer '{name}': change it in "
                        f"place (self.{name}.copy_(…))"
                    )


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, a model may be tried out: attributes, buffers, mode and random numbers are put back afterwards.

    So are small parameters without a gradient, which a forward pass may change.
    """
    modes = [(module, module.training) for module in model.modules()]
    attributes = [
        (module, {k: (v, _contents(v)) for k, v in own_attributes(module).items()}) for module in model.modules()
    ]
    places = [(module, dict(module._buffers)) for module in model.modules()]
    fixed = (each for each in model.parameters() if not each.requires_grad and each.numel() <= _LARGEST_STATE)
    values = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *fixed)]
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, kept in attributes:
            for key in own_attributes(module).keys() - kept.keys():
                del vars(module)[key]
            for key, (value, contents) in kept.items():
                vars(module)[key] = value
                _restore_contents(value, contents)
        for module, buffers in places:
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for module, mode in modes:
            module.training = mode


def random_state() -> Hashable:
    """Return the state of Python's, NumPy's and torch's generators, to be compared."""
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), tuple(rest)


def own_state(module: nn.Module, *, only_plain: bool = False) -> Mapping[str, Hashable]:
    """Return what a module holds itself, by description, to be compared; its numbers and texts with `only_plain`."""
    own = own_attributes(module).items()
    # torch.fx keeps tensors that are made in a forward pass at the model, for the graph.
    state = {f"attribute '{key}'": _frozen(value) for key, value in own if not key.startswith("_tensor_constant")}
    if only_plain:
        return {key: value for key, value in state.items() if value[0] == "plain"}
    for kind, tensors in (("buffer", module._buffers), ("parameter", module._parameters)):
        for key, tensor in tensors.items():
            state[f"{kind} '{key}'"] = _frozen(tensor)
    return state


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module keeps beside parameters, buffers, modules and what every module has."""
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH}


def _frozen(value: Any) -> tuple[Any, ...]:
    """Return something that differs when the value is another, or was changed in place as far as can be seen."""
    if isinstance(value, _PLAIN):
        return "plain", value
    if isinstance(value, Tensor):
        return "identity", id(value), value._version
    if isinstance(value, torch.Generator):
        return "generator", value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return "generator", value.getstate()
    if isinstance(value, np.random.Generator):
        return "generator", repr(value.bit_generator.state)
    if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) <= _LARGEST_COMPARED:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        frozen = tuple(_frozen(item) for item in items)
        return ("plain" if all(item[0] == "plain" for item in frozen) else "object"), type(value).__name__, frozen
    return "object", id(value)


def _contents(value: Any) -> Any:
    if isinstance(value, (list, dict, set)):
        return value.copy()
    return value.getstate() if isinstance(value, random.Random) else None


def _restore_contents(value: Any, contents: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(contents)
    elif isinstance(value, (list, dict, set)) and value != contents:
        value.clear()
        value.extend(contents) if isinstance(value, list) else value.update(contents)


def _first_change(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> str | None:
    return next((key for key in {**before, **after} if before.get(key) != after.get(key)), None)


def _mode() -> Hashable:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
    )


def _train_twice(passes: Callable[[Tensor], Any], model: nn.Module, inputs: Tensor) -> list[tuple[str, Tensor | None]]:
    """Return outputs, gradients and buffers of two training passes with fixed random numbers, by name."""
    found: list[tuple[str, Tensor | None]] = []
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with unchanged(model), torch.enable_grad():
            model.train()
            for turn in range(2):
                torch.manual_seed(turn)
                random.seed(turn)
                np.random.seed(turn)
                for parameter, _ in kept:
                    parameter.grad = None
                outputs = passes(inputs)
                if outputs.requires_grad:
                    weights = torch.linspace(-1.0, 1.0, outputs.numel(), device=outputs.device).view_as(outputs)
                    (outputs * weights).sum().backward()
                found.append(("output", outputs.detach().clone()))
                for name, parameter in model.named_parameters():
                    gradient = parameter.grad
                    dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
                    found.append((f"gradient of '{name}'", None if dense is None else dense.clone()))
                found += [(f"buffer '{name}'", buffer.detach().clone()) for name, buffer in model.named_buffers()]
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    return found


def _signature(traced: fx.GraphModule) -> list[Hashable]:
    """Return the operations and constants of a graph, to be compared."""
    operations: list[Hashable] = []
    for node in traced.graph.nodes:
        operations.append((node.op, str(node.target), str(node.args), str(node.kwargs)))
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            constant = getattr(traced, str(node.target))
            operations.append((tuple(constant.shape), str(constant.dtype), str(constant.tolist())))
    return operations


def _named(model: nn.Module, module: nn.Module) -> str:
    name = next((name for name, one in model.named_modules() if one is module), "")
    kind = type(module).__name__
    return f"module '{name}' ({kind})" if name else f"the model {kind}"


def _find_line(run: Callable[[], Any], module: nn.Module, model: nn.Module) -> str:
    """Run again, line by line, and return where the module, a mode or a generator was changed, if it is found."""
    folders = (str(Path(torch.__file__).parent), str(Path(random.__file__).parent), str(Path(np.__file__).parent))
    own_file = __file__
    last: list[tuple[str, int]] = []
    found: list[tuple[str, int]] = []

    def state() -> Hashable:
        return _mode(), random_state(), tuple(own_state(module).items())

    before = state()

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        if last and not found and state() != before:
            found.append(last[-1])
        last[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return None if found else follow

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return None if name == own_file or name.startswith((*folders, "<")) else follow

    was_tracing = sys.gettrace()
    with unchanged(model), torch.enable_grad(), contextlib.suppress(Exception):
        model.train()
        sys.settrace(enter)
        try:
            run()
        finally:
            sys.settrace(was_tracing)
    return f" (at {found[0][0]}:{found[0][1]})" if found else ""
