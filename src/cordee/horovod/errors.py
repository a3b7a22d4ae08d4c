"""Errors under the names that Horovod's scripts catch. Both are also errors of Cordée and of Python."""

from __future__ import annotations

from cordee.core.errors import CommunicationError


class HorovodInternalError(CommunicationError, RuntimeError):
    """An operation that ranks called differently, or a rank that was lost in it."""


class HorovodVersionMismatchError(ImportError):
    """Horovod raises it for a library built for another version. Here nothing is built, and nothing raises it."""
