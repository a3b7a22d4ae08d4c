"""This backend for programs that ask for gloo, without an edit.

Accelerate, Lightning, the Hugging Face Trainer and most other programs ask for `gloo` on CPUs, and some of them refuse
names that they do not know. So the name stays: `torch.distributed.get_backend()` says what the program asked for, and
the group itself is this backend's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cordee.communication.shared_memory.registration import BACKEND_NAME, BackendSettings


def replace_gloo() -> None:
    """From now on, groups of this process that are to use gloo for all devices use this backend.

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
