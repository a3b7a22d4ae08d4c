"""Telling the loss of a peer from an error of one's own."""

from __future__ import annotations

import torch.distributed as dist

from cordee.core.errors import CommunicationError

_MARK = f"{CommunicationError.__name__}: "
_GLOO = "/gloo/"


def find_lost_peer(error: BaseException | None) -> CommunicationError | None:
    """Return the communication error that `error` is or comes from; None if it has another reason."""
    while error is not None:
        if isinstance(error, CommunicationError):
            return error
        if isinstance(error, dist.DistBackendError):
            return CommunicationError(str(error))
        # torch passes an error of a future's callback on as text, with the traceback in it.
        if isinstance(error, RuntimeError) and _MARK in str(error):
            return CommunicationError(str(error).split(_MARK, 1)[1].partition("\n")[0])
        # Between hosts gloo speaks for itself, with the place in its source: "[…/gloo/transport/tcp/pair.cc:553] …".
        if isinstance(error, RuntimeError) and _GLOO in str(error):
            said = str(error).partition("] ")[2] or str(error)
            return CommunicationError(f"the exchange with the other hosts failed: {said.partition('. ')[0]}")
        error = error.__cause__ or error.__context__
    return None
