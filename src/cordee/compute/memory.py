"""How much memory this process takes, and took at its worst, by Linux's own books; zeros where there are none.

And what it does with memory that it frees.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import psutil

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in glibc's malloc.h
LARGEST_KEPT = 256 << 20  # bytes; what is larger is taken from the system and given back, as ever
_NEVER = (1 << 31) - 1


def keep_freed() -> None:
    """Keep memory that is freed for what is taken next: every step takes and frees the same.

    Left to itself, glibc gives activations and gradients back to the system after each step, and the next one gets
    them again page by page, which took up to a quarter of a step's time (docs/benchmarks.md). Other C libraries are
    left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


class MemoryWatch:
    """Remembers what the process had when it was made, and tells the most it had since."""

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
    """Start the process's peak anew; return whether that could be done."""
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
