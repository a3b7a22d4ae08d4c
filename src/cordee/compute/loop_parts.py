"""The models and optimizers of one's own loop: what is known of them, and what must not differ between workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cordee.core.errors import JobError


class LoopParts:
    """Everything that was prepared but the batches."""

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._schedulers: list[LRScheduler] = []
        self._names: dict[int, str] = {}  # of parameters, by id
        self._known: list[nn.Parameter] = []  # keeps them alive, so that no other gets the id of one
        self._exchanged: set[int] = set()
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many parameters it had

    @property
    def models(self) -> list[nn.Module]:
        return list(self._models.values())

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    def add_model(self, model: nn.Module) -> bool:
        """Add a model; return False if it is known. Raises JobError for one whose shapes are not known yet."""
        if any(model is known for known in self._models.values()):
            return False
        name = f"model {len(self._models)} ({type(model).__name__})"
        for own_name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise JobError(
                    f"team.prepare: {own_name} of {name} has no shape yet: call the model with a batch once before"
                )
        self._models[name] = model
        for own_name, parameter in model.named_parameters():
            self._names.setdefault(id(parameter), f"{own_name} of {name}")
            self._known.append(parameter)
        return True

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if not any(optimizer is known for known in self._optimizers.values()):
            self._optimizers[f"optimizer {len(self._optimizers)} ({type(optimizer).__name__})"] = optimizer

    def add_scheduler(self, scheduler: LRScheduler) -> None:
        self._schedulers.append(scheduler)

    def check_kept(self, modules: Iterable[nn.Module], others: Iterable[Any]) -> None:
        """Raise JobError for what was prepared and is in no state of `modules` and `others`: it would begin again."""
        kept = {id(value) for module in modules for value in (*module.parameters(), *module.buffers())}
        kept |= set(map(id, others))
        missing: list[Any] = [
            model
            for model in self._models.values()
            if any(id(value) not in kept for value in (*model.parameters(), *model.buffers()))
        ]
        missing += [each for each in (*self._optimizers.values(), *self._schedulers) if id(each) not in kept]
        if missing:
            kind = type(missing[0])
            what = "model" if isinstance(missing[0], nn.Module) else _what(kind)
            raise JobError(
                f"the {kind.__name__} that was given to team.prepare is not in the state, and would begin again where "
                f"the loop is continued: give it to team.state({what}={what}, …) as well"
            )

    def check_optimizers(self) -> None:
        """Raise JobError if a prepared optimizer has parameters of a model that was not prepared."""
        for optimizer in self._optimizers.values():
            self.check_step(optimizer)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise JobError if an optimizer has parameters whose gradients nobody exchanges."""
        num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) == num_parameters:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise JobError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not "
                        "of a prepared model: give the model that it belongs to (an nn.Module) to team.prepare as "
                        "well, after all of its layers are there"
                    )
        self._checked[optimizer] = num_parameters

    def check_loss(self, loss: Tensor) -> None:
        """Raise JobError if a loss depends on parameters whose gradients nobody exchanges."""
        for parameter in find_parameters(loss):
            if id(parameter) not in self._names:
                raise JobError(
                    f"team.backward: the loss depends on a parameter of shape {tuple(parameter.shape)} that is not "
                    "of a prepared model: give its model to team.prepare, or turn its requires_grad off"
                )

    def record_exchanged(self, parameters: list[nn.Parameter]) -> None:
        self._exchanged |= {id(parameter) for parameter in parameters}

    def forget_exchanged(self) -> None:
        """Take no parameter for exchanged: another team begins."""
        self._exchanged.clear()

    def unexchanged(self) -> list[nn.Parameter]:
        """Return parameters that are to be trained by now and were not when their model was prepared."""
        return [
            parameter
            for model in self._models.values()
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in self._exchanged and id(parameter) in self._names
        ]

    def replicated(self) -> dict[str, Tensor | float]:
        """Return what must be the same on all workers, with the names to report.

        Trained parameters, buffers but for those of norms, which keep the statistics of each worker's samples, and
        the optimizers' state and settings.
        """
        found: dict[str, Tensor | float] = {}
        for name, model in self._models.items():
            for own_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    found[f"{own_name} of {name}"] = parameter
            for path, module in model.named_modules():
                if not isinstance(module, _NormBase):
                    prefix = f"{path}." if path else ""
                    for own_name, buffer in module.named_buffers(recurse=False):
                        found[f"{prefix}{own_name} of {name}"] = buffer
        for name, optimizer in self._optimizers.items():
            for place, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    found |= {f"{k} of group {place} of {name}": v for k, v in _numbers(key, value)}
                for parameter in group["params"]:
                    own_name = self._names.get(id(parameter), "a parameter")
                    for key, value in optimizer.state.get(parameter, {}).items():
                        found |= {f"{k} for {own_name} in {name}": v for k, v in _numbers(key, value)}
        return {
            name: value
            for name, value in found.items()
            if not isinstance(value, Tensor) or (not value.is_sparse and not value.is_quantized)
        }


def _what(kind: type) -> str:
    return "optimizer" if issubclass(kind, Optimizer) else "scheduler"


def _numbers(key: str, value: Any) -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(value, Tensor | int | float):
        yield key, value
    elif isinstance(value, tuple | list) and key != "params":
        for place, each in enumerate(value):
            yield from _numbers(f"{key}[{place}]", each)


def find_parameters(loss: Tensor) -> Iterator[nn.Parameter]:
    """Give the parameters that a loss depends on, from its graph."""
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        stack.extend(following for following, _ in node.next_functions)
