"""Which device a worker computes on, with how many threads, and how much memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import psutil
import torch

from cordee.compute.gpus import num_gpus
from cordee.core.errors import JobError


def choose_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device for `training.device`; `auto` takes a GPU where there is one."""
    if setting == "cpu":
        return torch.device("cpu")
    if found := num_gpus():
        return torch.device("cuda", local_rank % found)
    if setting == "auto":
        return torch.device("cpu")
    raise JobError("training.device = 'cuda', but this torch sees no GPU: set training.device to 'auto' or 'cpu'")


def usable_cores() -> int:
    """Return how many cores this process may run on, which a container or taskset can make fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_threads(setting: int, num_local_workers: int = 1) -> int:
    """Set the number of kernel threads: `training.threads`, or this worker's share of the cores. Return it."""
    num_threads = setting or max(1, usable_cores() // num_local_workers)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return num_threads


# How much memory this process takes, and took at its peak, as Linux counts it (zeros elsewhere), and what it does with
# memory that it frees.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in glibc's malloc.h
LARGEST_KEPT = 256 << 20  # bytes; what is larger is taken from the system and given back, as ever
# The same where units of a model are gathered and freed all the time, between slices of gradients and of optimizer
# state that stay: what is kept of units fits for no other. A step of `sharded` took 2.3 times a worker's share.
LARGEST_KEPT_BESIDE_SLICES = 1 << 20
_NEVER = (1 << 31) - 1


def keep_freed(largest: int = LARGEST_KEPT) -> None:
    """Keep memory of at most `largest` bytes that is freed for what is taken next: every step takes and frees the same.

    Left to itself, glibc gives activations and gradients back to the system after each step, and the next one gets
    them again page by page, which took up to a quarter of a step's time (docs/benchmarks.md). Other C libraries are
    left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, largest)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


class MemoryWatch:
    """Remembers what the process had when it was made, and returns the most it had since."""

    def __init__(self) -> None:
        release_unused()
        self._is_known = forget_peak()
        memory = psutil.Process().memory_full_info() if self._is_known else None
        self._own_bytes = int(memory.uss) if memory else 0
        self._resident_bytes = int(memory.rss) if memory else 0

    @property
    def start_bytes(self) -> int:
        """What the process had for itself at the start: what it shares with others is not counted."""
        return self._own_bytes

    def peak_bytes(self) -> int:
        """Return the most that it had for itself since then; 0 where that is not known."""
        return self._own_bytes + max(0, peak_bytes() - self._resident_bytes) if self._is_known else 0


def release_unused() -> None:
    """Give memory that is not used back to the system, so that it does not hide what is taken later."""
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> bool:
    """Reset the process's peak; return whether that could be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed
        return False
    return True


def peak_bytes() -> int:
    """Return the most memory that the process had since its peak was forgotten, shared or not."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
