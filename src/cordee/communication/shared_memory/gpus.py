"""Where operations on CUDA tensors go: to NCCL where every member has a GPU of its own, else to gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig, PrefixStore, Store

from cordee.communication.shared_memory.liveness import forget_waits, watch_waits
from cordee.core.errors import CommunicationError

NCCL, GLOO = "nccl", "gloo"


def own_gpu() -> str:
    """Return an id of the GPU that this process computes on, which no other GPU of the host has; "" if none is used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_backend(places: Sequence[tuple[str, str]], asked: str = "") -> str:
    """Return what does operations on CUDA tensors, given each member's host and GPU, and what the program asked for.

    NCCL refuses two members on one GPU, and waits for a member that has none.
    """
    if asked:
        if asked not in (NCCL, GLOO):
            raise CommunicationError(
                f"CUDA tensors are exchanged by nccl or gloo, not by '{asked}': change the group's backend"
            )
        return asked
    return NCCL if all(gpu for _, gpu in places) and len(set(places)) == len(places) else GLOO


def asked_backend(group: dist.ProcessGroup) -> str:
    """Return what the program named for CUDA tensors, as in `init_process_group("cpu:cordee,cuda:nccl")`; or ""."""
    try:
        config = dist.get_backend_config(group)
    except (KeyError, RuntimeError, ValueError):
        return ""  # not known to torch by a name
    return str(BackendConfig(dist.Backend(config)).get_device_backend_map().get("cuda", ""))


class GpuOperations:
    """What does a group's operations on CUDA tensors, formed by the first of them: collective then, as they are."""

    def __init__(self, form: Callable[[str], Any] | None) -> None:
        """`form` is given what the program named for CUDA tensors, or "", and returns torch's backend or None."""
        self._form = form
        self._forming = threading.RLock()
        self._formed: Any = None  # torch's backend, or None for gloo
        self._is_formed = False
        self._reason = ""  # for which it is of no use any more

    def get(self, group: dist.ProcessGroup) -> Any:
        """Return torch's backend, or None for the group's gloo. Raises CommunicationError after `abandon`.

        The group is not kept: a cycle would keep its shared memory until the collector runs.
        """
        with self._forming:
            if self._reason:
                raise CommunicationError(self._reason)
            if not self._is_formed:
                asked = asked_backend(group)
                self._formed = self._form(asked) if self._form is not None and asked != GLOO else None
                self._is_formed = True
                watch_waits(self)
            return self._formed

    def abandon(self, reason: str) -> None:
        """Have kernels that wait for lost members end. What they leave in tensors is of no use: the step is dropped."""
        with self._forming:
            is_first, self._reason = not self._reason, self._reason or reason
            if is_first and self._formed is not None:
                self._formed.abort()

    def close(self) -> None:
        forget_waits(self)
        with self._forming:
            if self._formed is not None and not self._reason:
                self._formed.shutdown()
            self._reason = self._reason or "the process group was destroyed"


class PlainNccl:
    """A group of NCCL's alone, made with `new_group`. It is given up with all others as long as this is kept."""

    def __init__(self, group: Any) -> None:
        self.group = group
        watch_waits(self)

    def abandon(self, reason: str) -> None:
        self.group.abort()


def uses_nccl(group: Any) -> bool:
    """Return whether a group's operations on CUDA tensors are NCCL's. Raises CommunicationError where it cannot be."""
    operations = getattr(group, "gpu_operations", None)
    return operations is not None and operations.get(group) is not None


def form_nccl(store: Store, rank: int, size: int, timeout: timedelta, job_ranks: Sequence[int], name: str) -> Any:
    """Return NCCL's backend for a group. Members connect when they first call it. Raises CommunicationError."""
    if not dist.is_nccl_available():
        raise CommunicationError("CUDA tensors are to be exchanged by NCCL, and this torch was built without it")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(job_ranks)
    options.group_name = name
    formed = nccl(PrefixStore("cuda", store), rank, size, options)
    formed._set_sequence_number_for_group()
    return formed
