"""The loss of a peer is found however it is wrapped, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cordee.communication.exchange import find_lost_peer
from cordee.core.errors import CommunicationError, TrainingError


def wrapped(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:
            raise TrainingError("step 3 raised") from error
    except TrainingError as error:
        return error


@pytest.mark.parametrize("kind", [CommunicationError, dist.DistBackendError])
def test_it_is_found_as_it_is_and_wrapped(kind: type[Exception]) -> None:
    for error in (kind("rank 1 died"), wrapped(kind("rank 1 died"))):
        found = find_lost_peer(error)
        assert isinstance(found, CommunicationError) and str(found) == "rank 1 died"


def test_it_is_found_where_torch_has_made_it_a_text() -> None:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_exception(CommunicationError("rank 1 died"))
    then = future.then(lambda done: done.value())
    with pytest.raises(RuntimeError) as caught:
        then.wait()
    found = find_lost_peer(caught.value)
    assert found is not None and str(found) == "rank 1 died"


@pytest.mark.parametrize("error", [None, ValueError("x"), RuntimeError("x"), wrapped(KeyError("x"))])
def test_other_errors_are_not(error: Exception | None) -> None:
    assert find_lost_peer(error) is None
