"""How many bytes this process has given to sockets, encryption and headers included. Shared memory is not counted."""

from __future__ import annotations

import threading

_MOST_LINKS = 1000  # that are counted apart
OTHERS = "others"


class Traffic:
    """Counts that several threads add to: of all bytes, and of each link, which is named by its other end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._links: dict[str, int] = {}

    def add(self, num_bytes: int, to: str = "") -> None:
        """Count bytes that were sent; without `to`, before the other end has said its name, they are of no link."""
        with self._lock:
            self._num_bytes += num_bytes
            if to:
                if to not in self._links and len(self._links) >= _MOST_LINKS:
                    to = OTHERS
                self._links[to] = self._links.get(to, 0) + num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def take_links(self) -> dict[str, int]:
        """Return the bytes of each link since the last call."""
        with self._lock:
            found, self._links = self._links, {}
        return found


SENT = Traffic()
