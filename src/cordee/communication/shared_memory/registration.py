"""The backend's settings, and making it known to torch, cheaply: torch calls `register` at every `import torch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.core.env import wants_gloo_replaced
from cordee.core.errors import CommunicationError

BACKEND_NAME = "cordee"


def register() -> None:
    """Make `init_process_group("cordee")` work in this process; calling it again changes nothing.

    The package's `torch.backends` entry point names this function, so that torch calls it by itself; call it
    yourself where that is switched off (TORCH_DEVICE_BACKEND_AUTOLOAD=0). With CORDEE_REPLACE_GLOO=1 a program that
    asks for gloo gets this backend too.
    """
    from torch.distributed import Backend

    if BACKEND_NAME.upper() not in Backend._plugins:
        Backend.register_backend(BACKEND_NAME, _create_group, extended_api=True, devices=["cpu"])
    if wants_gloo_replaced():
        _replace_gloo()


def _create_group(options: Any, settings: Any) -> Any:
    from cordee.communication.shared_memory.backend import create_group

    return create_group(options, settings)


_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """How a process group of the `cordee` backend behaves; pass as `pg_options` to `init_process_group`.

    Groups made later with `new_group` take the settings of the first group unless they get their own.
    """

    slot_bytes: int | None = None  # chunk of a collective; each member has two; None chooses by members and cores
    failure_timeout_s: float = 5.0  # a member without a sign of life for this long is called frozen
    host_id: str | None = None  # members with equal ids share memory; None finds out by itself
    shared_memory: bool = True  # False sends everything through gloo, without encryption
    address: str | None = None  # of this host, at which other hosts reach it; None tries all that it has
    encrypt: bool = False  # what goes between hosts, with a secret that is exchanged through the group's store
    connect_timeout_s: float | None = None  # for connecting to other hosts; None: as long as a collective may take
    patience_s: float = 0.002  # how long an asynchronous call may wait for peers before a thread takes it over

    def __post_init__(self) -> None:
        if self.slot_bytes is not None and (self.slot_bytes < _PAGE_BYTES or self.slot_bytes % _PAGE_BYTES):
            raise CommunicationError(
                f"slot_bytes is {self.slot_bytes}: it must be a positive multiple of {_PAGE_BYTES}"
            )
        if self.failure_timeout_s <= 0:
            raise CommunicationError(f"failure_timeout_s is {self.failure_timeout_s}: it must be above 0")
        if self.encrypt and not self.shared_memory:
            raise CommunicationError(
                "encrypt = True needs shared_memory = True: without it everything goes through gloo, in plain text"
            )


def _replace_gloo() -> None:
    """From now on, groups of this process that are to use gloo for all devices use this backend.

    Accelerate, Lightning, the Hugging Face Trainer and most other programs ask for `gloo` on CPUs, and some of them
    refuse names that they do not know. So the name stays: `torch.distributed.get_backend()` says what the program asked
    for, and the group itself is this backend's.

    Local; calling it again changes nothing. Every member of a group must do the same. A group with gloo beside another
    backend (`cpu:gloo,cuda:nccl`) is left as it is: torch gives a group of this backend no second one.
    """
    from torch.distributed import distributed_c10d as c10d

    create: Callable[..., Any] = c10d._new_process_group_helper
    if getattr(create, "replaces_gloo", False):
        return

    @functools.wraps(create)
    def create_group(
        size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: Any, options: Any = None, **more: Any
    ) -> Any:
        options = more.pop("backend_options", options)
        config = c10d.BackendConfig(c10d.Backend(backend))
        if set(config.get_device_backend_map().values()) != {c10d.Backend.GLOO}:
            return create(size, rank, ranks, backend, store, name, backend_options=options, **more)
        own_options = options if isinstance(options, BackendSettings) else None  # torch itself has none for gloo
        made = create(size, rank, ranks, BACKEND_NAME, store, name, backend_options=own_options, **more)
        group, prefix_store = made
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            # What get_backend() and get_backend_config() say, and what new_group() takes over.
            c10d._world.pg_map[group] = (backend, prefix_store)
            c10d._world.pg_backend_config[group] = str(config)
        return made

    create_group.replaces_gloo = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = create_group  # type: ignore[assignment]
