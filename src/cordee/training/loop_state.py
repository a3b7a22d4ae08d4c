"""What a loop of one's own continues from: models, optimizers, schedulers, tensors and plain values, by name."""

from __future__ import annotations

import copy
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from cordee import checkpoint
from cordee.checkpoint import Digest, State, pack_values, unpack_values
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.core.errors import CheckpointError, JobError, nearest

_KINDS = "loop"  # under which a state says what its names are
RESERVED = ("save", "restore")
_SAMPLED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RUN = "run"  # which run of the loop a state is of
_FROZEN = "frozen"  # the names of parameters that are not trained
_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_address = methodcaller("data_ptr")
_SCALARS = frozenset((bool, int, float, str, type(None)))


class LoopState:
    """What `team.state(...)` returns: its things are attributes. Plain values may be set, all else stays the object."""

    def __init__(
        self, contents: LoopContents, save: Callable[[Path | None], None], restore: Callable[[Path | None], bool]
    ) -> None:
        for name, value in (("_contents", contents), ("_save", save), ("_restore", restore)):
            object.__setattr__(self, name, value)

    def save(self, path: str | Path | None = None) -> None:
        """Commit, and save what is committed as a checkpoint: whole or not there. Collective; the first worker writes.

        `path` is a folder for the checkpoints of this loop; else the run directory, or where there is none
        SCRIPT-checkpoints in the working directory. Old ones are removed but for the last three.
        """
        self._save(None if path is None else Path(path))

    def restore(self, path: str | Path | None = None) -> bool:
        """Continue from the newest whole checkpoint, in the middle of an epoch where it was saved there. Collective.

        `path` is a checkpoint, a folder of checkpoints or a run directory; without it, where `save` puts them. For
        before the loop. Returns False where there is none, if no `path` is given. Raises CheckpointError if it does not
        fit.
        """
        return bool(self._restore(None if path is None else Path(path)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._contents.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._contents.assign(name, value)

    def __repr__(self) -> str:
        return f"<state: {', '.join(self._contents.names)}>"


class LoopContents:
    """The things of a state by their names. All of it is local.

    `record` keeps what is small: values, settings, schedulers, buffers. Weights and the optimizers' tensors are large,
    and change in steps of an optimizer only: `has_changed_weights` says whether they have since `note_weights`.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.stateful: dict[str, Any] = {}  # schedulers, and whatever has a state_dict
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        for name, thing in things.items():
            self._add(name, thing)
        self._parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        known = {id(parameter) for parameter in self._parameters}
        for name, optimizer in self.optimizers.items():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) not in known:
                    raise JobError(
                        f"team.state: '{name}' ({type(optimizer).__name__}) has a parameter of shape "
                        f"{tuple(parameter.shape)} of no model of the state: give its model to team.state as well"
                    )
        self.begin_run()
        self._sampled = [p for p in self._parameters if p.dtype in _SAMPLED and p.layout is torch.strided and p.numel()]
        self._sampled_at: list[int] = []  # where the parameters were when `_samples` were made, which are views of them
        self._samples: list[memoryview] = []
        self._far_samples: list[Tensor] = []  # of parameters on other devices
        self._noted_changes, self._noted_sample = 0, b""
        self._buffers = list(self._find_buffers())
        self._settings: dict[str, list[dict[str, Any]]] = {}
        self._is_trained: list[bool] = []  # of each parameter
        self._recorded_values: dict[str, Any] = {}
        self._recorded_stateful: dict[str, Any] = {}
        self._recorded_marks: list[Any] = []
        self._recorded_tensors: dict[str, Tensor] = {}
        self.record()

    @property
    def names(self) -> list[str]:
        return [*self.modules, *self.optimizers, *self.stateful, *self.tensors, *self.values]

    def get(self, name: str) -> Any:
        for things in (self.values, self.modules, self.optimizers, self.stateful, self.tensors):
            if name in things:
                return things[name]
        raise AttributeError(f"the state has no '{name}'{nearest(name, self.names)}: give it to team.state(...)")

    def assign(self, name: str, value: Any) -> None:
        """Set a plain value. Raises JobError for any other name, and for what is no plain value."""
        if name not in self.values:
            if name in self.names:
                raise JobError(f"state.{name} = …: '{name}' stays the object that team.state was given: change that")
            known = nearest(name, self.names)
            raise JobError(f"state.{name} = …: the state has no '{name}'{known}: give it to team.state")
        self._plain(name, value)
        self.values[name] = value

    def _add(self, name: str, thing: Any) -> None:
        if name.startswith("_") or name in RESERVED:
            raise JobError(f"team.state: '{name}' cannot be a name in a state")
        if isinstance(thing, nn.Module):
            _check_module(name, thing)
            self.modules[name] = thing
        elif isinstance(thing, Optimizer):
            self.optimizers[name] = thing
        elif isinstance(thing, Tensor):
            self.tensors[name] = thing
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self.stateful[name] = thing
        else:
            self.values[name] = thing

    @property
    def kinds(self) -> dict[str, list[str]]:
        """The names of each kind, as a checkpoint of the state has them."""
        return {
            "models": sorted(self.modules),
            "optimizers": sorted(self.optimizers),
            "stateful": sorted(self.stateful),
            "tensors": sorted(self.tensors),
            "values": sorted(self.values),
        }

    def begin_run(self) -> None:
        """Be a run of its own: what is saved from here on does not belong to checkpoints that there are."""
        self.run = secrets.token_hex(8)

    # What is small is kept at each commit --------------------------------------------------------------------

    def record(self) -> None:
        """Keep a copy of everything but parameters and the optimizers' tensors. Raises JobError for what cannot be."""
        # At every commit, when the step has put other things into the processor's caches: a call of a Python function
        # takes 0.5 to 1 µs there. So what is usual has none.
        self._recorded_values = self._plain_values()
        # Whole groups, parameters included, are copied faster than the settings among them.
        for name, optimizer in self.optimizers.items():
            self._settings[name] = list(map(dict, optimizer.param_groups))
        self._is_trained = list(map(_requires_grad, self._parameters))
        if self.stateful or self.tensors or self._buffers:
            self._record_small()

    def _plain_values(self) -> dict[str, Any]:
        if _SCALARS.issuperset(map(type, self.values.values())):
            return self.values.copy()
        return {name: self._plain(name, value) for name, value in self.values.items()}

    def _marks(self) -> list[Any]:
        """Return numbers that are others where a scheduler took a step or a tensor of the state was changed."""
        steps = [getattr(thing, "last_epoch", None) for thing in self.stateful.values()]
        return steps + list(map(_version, self.tensors.values()))

    def find_change(self) -> str:
        """Return what is not as it was recorded, in words, as far as that shows at little cost; else nothing."""
        if (values := self._plain_values()) != self._recorded_values:
            return f"'{next(name for name in values if values[name] != self._recorded_values[name])}'"
        for name, optimizer in self.optimizers.items():
            if optimizer.param_groups != self._settings[name]:
                return f"the settings of '{name}'"
        if (self.stateful or self.tensors) and (marks := self._marks()) != self._recorded_marks:
            names = [*self.stateful, *self.tensors]
            return (
                f"'{next(n for n, one, other in zip(names, marks, self._recorded_marks, strict=True) if one != other)}'"
            )
        return "weights" if self._noted_sample != self._sample() else ""

    def _record_small(self) -> None:
        """Keep schedulers and the like, tensors of the state and buffers."""
        changed: dict[str, Tensor] = {}
        for name, thing in self.stateful.items():
            tensors: dict[str, Tensor] = {}
            try:
                self._recorded_stateful[name] = pack_values(thing.state_dict(), name, tensors)
            except CheckpointError as error:
                raise JobError(f"state: '{name}' ({type(thing).__name__}) cannot be saved: {error}") from None
            changed |= {f"stateful.{key}": value for key, value in tensors.items()}
        # Whether they have changed cannot be known: batch norms change their statistics without counting a version up.
        changed |= dict(self._small_tensors())
        for name, tensor in changed.items():
            kept = self._recorded_tensors.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._recorded_tensors[name] = tensor.detach().clone()
            else:
                kept.copy_(tensor.detach())
        self._recorded_marks = self._marks()

    def _find_buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield the buffers that are saved: the name, the module that has it, its name there."""
        for prefix, module in self._prefixed():
            for path, owner in module.named_modules():
                for key in owner._buffers.keys() - owner._non_persistent_buffers_set:
                    yield f"model.{prefix}{path}{'.' if path else ''}{key}", owner, key

    def _plain(self, name: str, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        try:
            return encode_values({name: value})
        except CheckpointError as error:
            raise JobError(
                f"state: '{name}' cannot be saved: {error}. Keep models, optimizers, schedulers, tensors, numbers, "
                "texts, and lists and dicts of these last two in a state"
            ) from None

    def _small_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield f"tensors.{name}", tensor
        for name, owner, key in self._buffers:
            if (buffer := owner._buffers[key]) is not None:
                yield name, buffer

    def note_weights(self) -> None:
        """Note what shows later whether parameters were changed."""
        self._noted_changes = sum(map(_version, self._parameters))
        self._noted_sample = self._sample()

    @property
    def has_changed_weights(self) -> bool:
        """Whether a parameter may be another one than when `note_weights` was called."""
        # Changes through `.data` are not counted.
        return self._noted_changes != sum(map(_version, self._parameters)) or self._noted_sample != self._sample()

    def _sample(self) -> bytes:
        """Return a few numbers of each parameter: other ones where all of one were changed, also through `.data`."""
        places = list(map(_address, self._sampled))
        if places != self._sampled_at:
            samples = [_sample(parameter) for parameter in self._sampled]
            self._sampled_at = places
            self._samples = [memoryview(one.numpy()) for one in samples if one.is_cpu]  # type: ignore[arg-type]
            self._far_samples = [one for one in samples if not one.is_cpu]
        # Joining their memory takes a third of what `torch.cat` takes between two steps (12 µs for LeNet).
        own = b"".join(self._samples)
        return own + b"".join(one.cpu().numpy().tobytes() for one in self._far_samples) if self._far_samples else own

    # Whole states ---------------------------------------------------------------------------------------------

    def recorded(self, large: State | None = None) -> State:
        """Return the state as it was recorded, with the parameters and optimizer tensors of now, in their memory.

        `large` are others: a copy that was made when the state was recorded.
        """
        state = self._large() if large is None else State(large.tensors, copy.deepcopy(large.values))
        for name, settings in self._settings.items():
            groups = self._optimizer_values(state, name)["groups"]
            for group, kept in zip(groups, settings, strict=True):
                tensors: dict[str, Tensor] = {}
                packed = pack_values({key: kept[key] for key in group["settings"]}, "$settings", tensors)
                if not tensors:  # settings that are tensors, a rate say, are among the optimizer's own
                    group["settings"] = packed
        tensors = {**state.tensors, **self._recorded_tensors}
        values = {
            name: decode_values(value)[name] if isinstance(value, bytes) else value
            for name, value in self._recorded_values.items()
        }
        small = {"values": values, "stateful": {**self._recorded_stateful}, _FROZEN: self._frozen(), RUN: self.run}
        return State(tensors, {**state.values, _KINDS: self.kinds, **small})

    def _frozen(self) -> list[str]:
        frozen = {id(one) for one, is_trained in zip(self._parameters, self._is_trained, strict=True) if not is_trained}
        return [name for name, one in _Joined(self).named_parameters() if id(one) in frozen] if frozen else []

    def _large(self) -> State:
        tensors = {
            f"model.{prefix}{name}": tensor
            for prefix, module in self._prefixed()
            for name, tensor in checkpoint.model_state(module).items()
        }
        values: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            own = checkpoint.optimizer_state(optimizer, _Joined(self))
            prefix = self._prefix(name, self.optimizers)
            tensors |= {f"optimizer.{prefix}{key}": tensor for key, tensor in own.tensors.items()}
            if prefix:
                values[name] = own.values
            else:
                values = own.values
        return State(tensors, {"optimizer": values} if values else {})

    def has(self, optimizer: Optimizer) -> bool:
        return any(optimizer is known for known in self.optimizers.values())

    def is_changed_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer changes parameters of the models."""
        own = set(map(id, self._parameters))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def large_tensors(self) -> list[Tensor] | None:
        """Return the parameters and the optimizers' tensors; None where they are not all of an optimizer's state."""
        found: list[Tensor] = list(self._parameters)
        for optimizer in self.optimizers.values():
            if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
                return None
            for inner in optimizer.state.values():
                for value in inner.values():
                    if not isinstance(value, Tensor):
                        return None
                    found.append(value)
        return found

    def is_small(self, name: str) -> bool:
        """Whether a tensor of a state is recorded at each commit."""
        return name in self._recorded_tensors

    def load(self, state: State) -> None:
        """Make everything what it is in `state`, which keeps its memory. Raises CheckpointError if it does not fit."""
        kinds = state.values.get(_KINDS)
        if kinds != self.kinds:
            raise CheckpointError(f"the state does not fit: {_describe_kinds(self.kinds, kinds)}")
        weights = state.part("model").tensors
        for prefix, module in self._prefixed():
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            checkpoint.load_model_state(module, own)
        tensors = state.part("optimizer").tensors
        for name, optimizer in self.optimizers.items():
            prefix = self._prefix(name, self.optimizers)
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            checkpoint.load_optimizer_state(optimizer, _Joined(self), State(own, self._optimizer_values(state, name)))
        for name, tensor in self.tensors.items():
            given = state.tensors[f"tensors.{name}"]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise CheckpointError(f"the state does not fit: '{name}' has shape {tuple(given.shape)}, {given.dtype}")
            with torch.no_grad():
                tensor.copy_(given)
        packed, stateful = state.values["stateful"], state.part("stateful").tensors
        for name, thing in self.stateful.items():
            thing.load_state_dict(unpack_values(packed[name], {k: v.clone() for k, v in stateful.items()}))
        self.values.update(state.values["values"])
        self.run = state.values.get(RUN, "")
        if (frozen := state.values.get(_FROZEN)) is not None:  # what is trained may follow the epoch
            for name, parameter in _Joined(self).named_parameters():
                parameter.requires_grad_(name not in frozen)
        for parameter in self._parameters:
            parameter.grad = None  # of a step that did not happen
        self.record()

    def comparable(self, state: State) -> State:
        """Return what must be the same on all workers: all but the statistics of norms, which are of own samples."""
        own = {
            f"model.{prefix}{path}{'.' if path else ''}{name}"
            for prefix, module in self._prefixed()
            for path, part in module.named_modules()
            if isinstance(part, _NormBase)
            for name, _ in part.named_buffers(recurse=False)
        }
        own |= {f"stateful.{n}.{key}" for n, thing in self.stateful.items() for key in getattr(thing, "own_values", ())}
        kept = {name: tensor for name, tensor in state.tensors.items() if name not in own}
        small = {key: state.values[key] for key in ("values", "stateful", _FROZEN) if key in state.values}
        progress = {**state.values["progress"], **small}
        return State(kept, {**state.values, "progress": progress})

    def digest(self, state: State) -> Digest:
        """Return the digest of what must be the same on all workers."""
        return checkpoint.digest_state(self.comparable(state), self.buffer_names(), ("tensors", "stateful"))

    def named_values(self) -> dict[str, Tensor | float]:
        """Return what must be the same on all workers, by the names to report."""
        state = self.recorded()
        state = self.comparable(State(state.tensors, {**state.values, "progress": {}}))
        found: dict[str, Tensor | float] = {f"'{name}'": tensor for name, tensor in state.tensors.items()}
        for table in ("values", "stateful"):
            found |= {f"'{name}'": _fingerprint(value) for name, value in state.values[table].items()}
        found["which parameters are frozen"] = _fingerprint(state.values[_FROZEN])
        return found

    def buffer_names(self) -> set[str]:
        return {f"{prefix}{name}" for prefix, module in self._prefixed() for name in checkpoint.buffer_names(module)}

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name, as `summary.json` has their hash."""
        return {
            f"{prefix}{name}": value
            for prefix, module in self._prefixed()
            for name, value in module.state_dict().items()
        }

    def gradients(self) -> Iterator[Tensor | None]:
        return (parameter.grad for parameter in self._parameters)

    @property
    def num_parameters(self) -> int:
        return sum({id(p): p.numel() for p in self._parameters}.values())

    @property
    def num_trainable(self) -> int:
        return sum({id(p): p.numel() for p in self._parameters if p.requires_grad}.values())

    def _prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.modules.items():
            yield self._prefix(name, self.modules), module

    def _prefix(self, name: str, among: Mapping[str, Any]) -> str:
        """One of a kind has no prefix: a checkpoint of one model is like that of a job."""
        return "" if len(among) == 1 else f"{name}."

    def _optimizer_values(self, state: State, name: str) -> dict[str, Any]:
        values = state.values["optimizer"]
        own: dict[str, Any] = values if len(self.optimizers) == 1 else values[name]
        return own


def _check_module(name: str, module: nn.Module) -> None:
    """Raise JobError for a module with values that no commit would keep: neither parameters nor buffers."""
    known = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    known |= {key for key, _ in module.named_buffers(remove_duplicate=False)}
    odd = next(
        (f"has '{key}', which is no parameter and no buffer" for key in module.state_dict() if key not in known), ""
    )
    if not odd and all(callable(getattr(module, method, None)) for method in ("update", "compute", "reset")):
        odd = "is a metric, whose values are no buffers"
    if odd:
        raise JobError(
            f"team.state: '{name}' ({type(module).__name__}) {odd}: the loop would continue with what it has of a step "
            "that did not happen. Keep such values in buffers (register_buffer); of a metric keep the sums over all "
            "workers (team.sum, team.gather) as values of the state"
        )


class _Joined:
    """The parameters of all models of a state."""

    def __init__(self, contents: LoopContents) -> None:
        self._contents = contents

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for prefix, module in self._contents._prefixed():
            for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
                if not (remove_duplicate and id(parameter) in seen):
                    seen.add(id(parameter))
                    yield f"{prefix}{name}", parameter


def _sample(parameter: Tensor) -> Tensor:
    """Return a view of the bytes of up to four numbers that follow each other: five times as quick as others."""
    flat = parameter.detach()
    first = flat.storage_offset()
    num_there = flat.untyped_storage().nbytes() // flat.itemsize - first  # less than all of one that was expanded
    count = min(4, flat.numel(), num_there)
    return flat.as_strided((count,), (1,), first + min(flat.numel(), num_there) // 2 - count // 2).view(torch.uint8)


def _fingerprint(value: Any) -> Tensor:
    return torch.tensor(zlib.crc32(encode_values({"value": value})))


def _describe_kinds(own: dict[str, list[str]], other: Any) -> str:
    if not isinstance(other, dict):
        return "it is of no loop of one's own, but of a job"
    found = []
    for kind, names in own.items():
        theirs = other.get(kind, [])
        if names != theirs:
            found.append(
                f"this script's has the {kind} {', '.join(names) or 'none'}; it has {', '.join(theirs) or 'none'}"
            )
    return "; ".join(found)
