"""Saving while training goes on: the state is copied, and a thread writes the copy."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cordee.checkpoint.state import State, require_plain
from cordee.checkpoint.tensor_file import memory_of
from cordee.checkpoint.writing import save
from cordee.core.errors import StorageError
from cordee.core.fault_points import reach


@dataclass(frozen=True)
class Saved:
    """What became of one checkpoint: where it is, or why it is not there."""

    step: int
    seconds: float  # that writing it took
    stall_s: float  # that training stood still for it
    path: Path | None = None
    problem: StorageError | None = None


@dataclass(frozen=True)
class Request:
    """A checkpoint to be saved."""

    step: int
    state: State
    keep: int  # how many are left
    protected: Collection[int]  # steps that are left besides
    since_s: float  # when training stopped for it, by `time.perf_counter`


class CheckpointWriter:
    """Writes one checkpoint at a time into `root`, in a thread or at once.

    With a thread, `start` returns when the state is copied: the caller may change its tensors. The copy is kept and
    used again, so the first one costs memory and the others only time. A process that ends before `wait` loses
    the checkpoint being written, and only that.
    """

    def __init__(self, root: Path, on_saved: Callable[[Saved], None]) -> None:
        """`on_saved` is called by whoever writes: the thread, or `write`."""
        self._root = root
        self._on_saved = on_saved
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._error: Exception | None = None

    @property
    def step(self) -> int | None:
        """The step whose checkpoint is being written, if one is."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    def start(self, request: Request) -> None:
        """Have it saved by a thread. Waits for the one before; raises CheckpointError if the state cannot be saved."""
        self.wait()
        staged = replace(request, state=self._stage(request.state))
        reach("checkpoint.staged")
        stall_s = time.perf_counter() - request.since_s
        self._step = request.step
        # A daemon: a process that is told to end at once does not wait for the disk.
        self._thread = threading.Thread(
            target=self._write_apart, args=(staged, stall_s), name="cordee-checkpoint", daemon=True
        )
        self._thread.start()

    def write(self, request: Request) -> None:
        """Save it before returning, without a copy. Waits for the one before."""
        self.wait()
        self._write(request, None)

    def wait(self) -> None:
        """Return when nothing is being written. Raises what the writing raised, but for a disk's refusal."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, request: Request, stall_s: float | None) -> None:
        started_s = time.perf_counter()
        path: Path | None = None
        problem: StorageError | None = None
        try:
            path = save(self._root, request.step, request.state, keep=request.keep, protected=request.protected)
        except StorageError as error:
            problem = error
        reach("checkpoint.written")
        now_s = time.perf_counter()
        stall_s = now_s - request.since_s if stall_s is None else stall_s
        self._on_saved(Saved(request.step, now_s - started_s, stall_s, path, problem))

    def _write_apart(self, request: Request, stall_s: float) -> None:
        try:
            self._write(request, stall_s)
        except Exception as error:  # noqa: BLE001 - for the thread that trains
            self._error = error

    def _stage(self, state: State) -> State:
        """Return a copy on the CPU. Names of one weight share a copy as they share the weight."""
        tensors: dict[str, Tensor] = {}
        first_names: dict[object, str] = {}
        for name, tensor in state.tensors.items():
            require_plain(name, tensor)
            first = first_names.setdefault(memory_of(tensor), name)
            tensors[name] = self._copy(name, tensor.detach()) if first == name else tensors[first]
        self._copies = {name: tensors[name] for name in first_names.values()}
        return State(tensors, copy.deepcopy(state.values))

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        target = self._copies.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
        return target.copy_(tensor)
