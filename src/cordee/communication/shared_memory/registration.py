"""Making the backend known to torch, cheaply: torch calls `register` at every `import torch`."""

from __future__ import annotations

from typing import Any

BACKEND_NAME = "cordee"


def register() -> None:
    """Make `init_process_group("cordee")` work in this process; calling it again changes nothing.

    The package's `torch.backends` entry point names this function, so that torch calls it by itself; call it
    yourself where that is switched off (TORCH_DEVICE_BACKEND_AUTOLOAD=0).
    """
    from torch.distributed import Backend

    if BACKEND_NAME.upper() not in Backend._plugins:
        Backend.register_backend(BACKEND_NAME, _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, settings: Any) -> Any:
    from cordee.communication.shared_memory.backend import create_group

    return create_group(options, settings)
