"""The files of a federated run between two checkpoints: what clients are sent, what they return, and what they keep.

They are in the folder `rounds` of the run directory. What a task writes follows from what it reads: done again, it
writes the same. Files outlive the process that wrote them, not the host: after that the run continues from its
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cordee.checkpoint import State
from cordee.core.errors import StorageError
from cordee.runs.federated.round_files import VALUES, RoundFiles
from cordee.strategies.federated.aggregation import Contribution
from cordee.strategies.federated.algorithms import Vectors
from cordee.strategies.federated.client import Sent


class RoundNumbers(msgspec.Struct):
    """What is told of a client's round beside its update, or the sum over clients in the order of their places."""

    loss_sum: float = 0.0
    loss_count: float = 0.0
    norm_sum: float = 0.0  # of differences, before they are bounded
    norm_max: float = 0.0
    num_bytes: int = 0  # that were sent to the server
    num_trained: int = 0  # samples of all steps
    tests: list[tuple[int, int, int]] = []  # of each client: samples set aside, right before, right after training

    def add(self, other: RoundNumbers) -> RoundNumbers:
        """Return the sum."""
        return RoundNumbers(
            self.loss_sum + other.loss_sum,
            self.loss_count + other.loss_count,
            self.norm_sum + other.norm_sum,
            max(self.norm_max, other.norm_max),
            self.num_bytes + other.num_bytes,
            self.num_trained + other.num_trained,
            [*self.tests, *other.tests],
        )


class Spool:
    """Reads and writes the files of one run. Any process of the run may."""

    def __init__(self, files: RoundFiles) -> None:
        self._files = files

    def clear(self) -> None:
        """Remove everything: the run begins, or continues from a checkpoint."""
        self._files.clear()

    # What clients are sent, and what the server keeps.

    def write_sent(self, sent: Sent) -> None:
        self._write(f"sent-{sent.round}", sent.vectors)

    def read_sent(self, number: int) -> Sent:
        return Sent.of(number, self._read(f"sent-{number}")[0])

    def has_sent(self, number: int) -> bool:
        return self._files.has(f"sent-{number}")

    def write_server(self, number: int, state: State) -> None:
        self._write(f"server-{number}", state.tensors, state.values)

    def read_server(self, number: int) -> State:
        return State(*self._read(f"server-{number}"))

    # What clients return.

    def write_leaf(self, number: int, place: int, contribution: Contribution, numbers: RoundNumbers) -> None:
        self._write_sum(f"leaf-{number}-{place}", contribution, numbers)

    def read_leaf(self, number: int, place: int) -> tuple[Contribution, RoundNumbers]:
        return self._read_sum(f"leaf-{number}-{place}")

    def read_columns(self, number: int, places: Iterable[int], start: int, stop: int) -> Tensor:
        """Return the columns [start, stop) of the differences of a round, unweighted, one row for each place."""
        rows = []
        for place in places:
            with self._opened(f"leaf-{number}-{place}") as file:
                weight = json.loads(file.metadata()[VALUES])["weight"]
                rows.append(file.get_slice("difference")[start:stop] / weight)
        return torch.stack(rows)

    def write_block(self, number: int, block: int, contribution: Contribution | None, numbers: RoundNumbers) -> None:
        if contribution is None:
            self._write(f"block-{number}-{block}", {}, {"is_empty": True})
        else:
            self._write_sum(f"block-{number}-{block}", contribution, numbers)

    def read_block(self, number: int, block: int) -> tuple[Contribution | None, RoundNumbers]:
        with self._opened(f"block-{number}-{block}") as file:
            if json.loads(file.metadata()[VALUES]).get("is_empty"):
                return None, RoundNumbers()
        return self._read_sum(f"block-{number}-{block}")

    def has_block(self, number: int, block: int) -> bool:
        return self._files.has(f"block-{number}-{block}")

    def remove_leaves(self, number: int, places: Iterable[int]) -> None:
        self._files.remove(f"leaf-{number}-{place}" for place in places)

    def remove_before(self, number: int, oldest: int) -> None:
        """Remove what rounds before `number` left, and what clients were sent before `oldest`."""
        old = []
        for name in self._files.names():
            kind, _, rest = name.partition("-")
            of_round = rest.partition("-")[0]
            if of_round.isdecimal() and int(of_round) < (oldest if kind == "sent" else number):
                old.append(name)
        self._files.remove(old)

    # What clients keep.

    def write_state(self, client: int, number: int, state: Vectors) -> None:
        """Keep what a client has after a round, and of earlier rounds the last only."""
        self._write(f"clients/{client}/{number}", state)
        older = sorted(self._rounds_of(client, number))[:-1]
        self._files.remove(f"clients/{client}/{each}" for each in older)

    def read_state(self, client: int, number: int) -> Vectors:
        """Return what a client kept from before a round; empty if it had none."""
        before = self._rounds_of(client, number)
        return self._read(f"clients/{client}/{max(before)}")[0] if before else {}

    def clients(self) -> list[int]:
        """Return the clients that keep something."""
        return sorted(int(name) for name in self._files.names("clients") if name.isdecimal())

    def _rounds_of(self, client: int, before: int) -> list[int]:
        names = self._files.names(f"clients/{client}")
        return [int(name) for name in names if name.isdecimal() and int(name) < before]

    # Files.

    def _write_sum(self, name: str, contribution: Contribution, numbers: RoundNumbers) -> None:
        summed = {f"summed.{key}": vector for key, vector in contribution.summed.items()}
        tensors = {"difference": contribution.difference, "buffers": contribution.buffers, **summed}
        values = {
            "weight": contribution.weight,
            "weighted_scale": contribution.weighted_scale,
            "num_samples": contribution.num_samples,
            "num_clients": contribution.num_clients,
            "numbers": msgspec.to_builtins(numbers),
        }
        self._write(name, tensors, values)

    def _read_sum(self, name: str) -> tuple[Contribution, RoundNumbers]:
        tensors, values = self._read(name)
        summed = {key.removeprefix("summed."): t for key, t in tensors.items() if key.startswith("summed.")}
        numbers = msgspec.convert(values.pop("numbers"), RoundNumbers)
        return Contribution(tensors["difference"], tensors["buffers"], summed, **values), numbers

    def _write(self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None) -> None:
        self._files.write(name, tensors, values or {})

    def _read(self, name: str) -> tuple[Vectors, dict[str, Any]]:
        with self._opened(name) as file:
            # Copies: what is mapped would change with the file.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - no mapping
            return tensors, json.loads(file.metadata()[VALUES])

    @contextlib.contextmanager
    def _opened(self, name: str) -> Any:
        path = self._files.find(name)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error
