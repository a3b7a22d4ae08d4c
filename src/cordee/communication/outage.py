"""A network that does not get through, for `cordee chaos`: messages wait at both ends of this process's channels.

As behind a broken switch nothing is lost for good: TCP keeps what was sent and delivers it when the line is back.
What goes through shared memory is not touched.
"""

from __future__ import annotations

import signal
import time

from cordee.core.env import takes_faults

OUTAGE_S = 2.0

_until_s = 0.0


def is_on() -> bool:
    """Whether nothing gets through now."""
    return _until_s > 0.0 and time.monotonic() < _until_s


def begin(seconds: float) -> None:
    global _until_s
    _until_s = time.monotonic() + seconds


def install() -> None:
    """Have SIGUSR1 cut this process off for a while, if the run is one that takes faults."""
    if takes_faults():
        signal.signal(signal.SIGUSR1, lambda number, frame: begin(OUTAGE_S))
