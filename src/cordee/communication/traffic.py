"""How many bytes this process has given to sockets, encryption and headers included. Shared memory is not counted."""

from __future__ import annotations

import threading


class Traffic:
    """A count that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


SENT = Traffic()
