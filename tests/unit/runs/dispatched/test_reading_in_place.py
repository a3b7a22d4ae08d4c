"""A worker reads the parameters of a server on its host where they are, through real calls in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from cordee.communication.calls import CallServer, Connection
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import make_keys
from cordee.compute import make_optimizer_recipe
from cordee.compute.schedules import constant
from cordee.core.references import Use
from cordee.parameters.calls import ServerCalls
from cordee.parameters.placement import make_layout
from cordee.parameters.shared_values import ValuesView
from cordee.strategies.parameter_server.client import ParameterClient
from cordee.strategies.parameter_server.messages import LIMITS, PARAMETERS, Push
from cordee.strategies.parameter_server.service import ParameterService
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import ParameterShard
from cordee.strategies.parameter_server.state import flatten_parameters

MODEL = nn.Linear(600, 600)  # 1.4 MB: one piece, in two blocks of shared memory
LAYOUT = make_layout(MODEL, 1, can_split=True)
FLAT = flatten_parameters(MODEL, LAYOUT)
RECIPE = make_optimizer_recipe(Use("sgd", lr=1.0), constant(), lr_scale="none", num_shares=1)


@contextmanager
def connected(settings: ParameterServerSettings, start: float = 0.0) -> Iterator[Connection]:
    """A server whose parameters are those of the model plus `start`."""
    shard = ParameterShard(
        LAYOUT.pieces, lambda piece: FLAT[piece.start : piece.stop].clone() + start, RECIPE, settings, None
    )
    service = ParameterService(shard, LAYOUT, settings, is_fixed=False)
    server_keys, (client_keys,) = make_keys()
    speaker = Speaker(run="run", name="server-0", incarnation=1)
    is_over = threading.Event()
    with CallServer("tcp://127.0.0.1:*", speaker, PARAMETERS, server_keys, service.handle, limits=LIMITS) as server:
        thread = threading.Thread(target=server.run, args=(is_over.is_set,))
        thread.start()
        worker = Speaker(run="run", name="worker-0", incarnation=1)
        try:
            yield Connection(server.address, worker, PARAMETERS, client_keys, failure_timeout_s=10, limits=LIMITS)
        finally:
            is_over.set()
            thread.join()


def pushed(client: ParameterClient, unit: int) -> None:
    (piece,) = LAYOUT.pieces
    push = Push(piece.index, unit, unit, 0, 1, 1.0, client.base(piece), 0)
    assert client.start_push(piece, torch.ones_like(FLAT), push).result().outcome == "applied"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to read in place succeeded."""
    found: list[bool] = []
    read = ValuesView.read

    def noting(view: ValuesView, first: int, target: memoryview, stamp: int) -> bool:
        found.append(read(view, first, target, stamp))
        return found[-1]

    monkeypatch.setattr(ValuesView, "read", noting)
    return found


def check(flat: Tensor, num_steps: int, start: float = 0.0) -> None:
    assert torch.allclose(flat, FLAT + start - num_steps)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_parameters_are_read_where_they_are(reads: list[bool], compression: str) -> None:
    settings = ParameterServerSettings(staleness="unbounded", compression=compression)  # type: ignore[arg-type]
    with connected(settings) as connection:
        client = ParameterClient(LAYOUT, settings, ServerCalls(lambda server: connection, 10))
        flat = torch.zeros_like(FLAT)
        for unit in range(3):
            client.pull(flat)
            assert (flat - (FLAT - unit)).abs().max() < (1e-5 if compression == "none" else 1e-2)
            assert client.base(LAYOUT.pieces[0]) == unit
            pushed(client, unit)
        client.close()
    assert reads == ([True, True] if compression == "none" else []), "sent at first, and where they are compressed"


def test_parameters_that_change_meanwhile_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ParameterServerSettings(staleness="unbounded")
    with connected(settings) as connection:
        client = ParameterClient(LAYOUT, settings, ServerCalls(lambda server: connection, 10))
        flat = torch.zeros_like(FLAT)
        client.pull(flat)
        monkeypatch.setattr(ValuesView, "read", lambda *_: False)
        pushed(client, 0)
        client.pull(flat)
        check(flat, 1)
        client.close()


def test_the_memory_of_a_server_that_took_over_is_mapped_anew(reads: list[bool]) -> None:
    settings = ParameterServerSettings(staleness="unbounded")
    with connected(settings) as first, connected(settings, start=100.0) as second:
        serving = [first]
        client = ParameterClient(LAYOUT, settings, ServerCalls(lambda server: serving[0], 10))
        flat = torch.zeros_like(FLAT)
        for _ in range(2):
            client.pull(flat)
            check(flat, 0)
        serving[0] = second
        first.close()
        for _ in range(2):
            client.pull(flat)
            check(flat, 0, start=100.0)
        assert reads == [True, True], "sent at first by each server, and then read"
        client.close()
