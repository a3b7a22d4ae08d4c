"""The backend's settings, and making it known to torch, cheaply: torch calls `register` at every `import torch`."""

from __future__ import annotations

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
        from cordee.communication.shared_memory.gloo_replacement import replace_gloo

        replace_gloo()


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
    meeting_timeout_s: float | None = None  # for connecting to other hosts; None: as long as a collective may take
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
