"""Which device a worker computes on, and with how many threads."""

from __future__ import annotations

import os

import torch

from cordee.core.errors import JobError


def choose_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device for `training.device`; `auto` takes a GPU where there is one."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise JobError("training.device = 'cuda', but this torch sees no GPU: set training.device to 'auto' or 'cpu'")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def usable_cores() -> int:
    """Return how many cores this process may run on, which a container or taskset can make fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_threads(setting: int, num_local_workers: int = 1) -> int:
    """Set the number of kernel threads: `training.threads`, or this worker's share of the cores. Return it."""
    num_threads = setting or max(1, usable_cores() // num_local_workers)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return num_threads
