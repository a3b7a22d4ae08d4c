"""The rounds of a simulation on a virtual clock: who is asked, who arrives, who is late. Pure.

How long a client takes follows from its samples and the settings of the clock, not from its training. So all that
happens is known before anything is computed, and is the same whoever computes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cordee.core.errors import JobError
from cordee.core.seeds import derive_seed
from cordee.strategies.federated.algorithms import Algorithm
from cordee.strategies.federated.sampling import draw_clients
from cordee.strategies.federated.settings import FederatedSettings


@dataclass(frozen=True)
class Task:
    """A client that arrives in time: its place in the sum, and from which round it began."""

    place: int
    client: int
    base: int  # updates of the server that are in what the client was sent


@dataclass(frozen=True)
class Round:
    """What happens in a round; of an asynchronous algorithm, in an update of the server."""

    number: int  # from 0
    num_places: int  # in the sum
    tasks: tuple[Task, ...]
    asked: tuple[int, ...]
    late: tuple[int, ...]
    dropped: tuple[int, ...]
    clock_s: float  # virtual time at its end
    needs_from: int  # later rounds have no client that began before this round


@dataclass(frozen=True)
class Schedule:
    """Yields the rounds of a job. Starting anywhere gives the same rounds as starting at 0."""

    settings: FederatedSettings
    algorithm: Algorithm
    seed: int
    sizes: Sequence[int]  # samples of each client
    batch_size: int  # of a client

    def check(self) -> None:
        """Raise JobError where all clients are late in every round: an asynchronous update would wait for ever."""
        times_s = [self.duration_s(client) for client in range(len(self.sizes))]
        if min(times_s) > self.settings.deadline_s:
            raise JobError(
                f"strategy.deadline = {self.settings.deadline!r} is over before any client is done: the fastest takes "
                f"{min(times_s):g} s of the virtual clock. Set a longer deadline, or smaller times in strategy.clock"
            )
        num_in_time = sum(seconds <= self.settings.deadline_s for seconds in times_s)
        if self.algorithm.discount is not None and num_in_time < (goal := self.settings.num_asked(len(self.sizes))):
            raise JobError(
                f"strategy.deadline = {self.settings.deadline!r}: {num_in_time} of the clients are ever in time, and "
                f"an update of the server takes the differences of {goal}. Set a longer deadline, or a smaller "
                "strategy.clients_per_round"
            )

    def rounds(self, first: int = 0) -> Iterator[Round]:
        """Yield all rounds from `first` on."""
        every = self._asynchronous() if self.algorithm.discount is not None else self._synchronous()
        for one in every:
            if one.number >= first:
                yield one

    def duration_s(self, client: int) -> float:
        """Return how long a client takes in a round, in virtual seconds."""
        settings, clock = self.settings, self.settings.parts.clock
        is_slow = _draw(self.seed, "straggler", client) < clock.stragglers
        samples = self.sizes[client] * (settings.local_epochs or 1)
        if settings.local_steps is not None:
            per_epoch = -(-self.sizes[client] // self.batch_size)  # the last batch of an epoch may be smaller
            epochs, steps = divmod(settings.local_steps, per_epoch)
            samples = epochs * self.sizes[client] + min(steps * self.batch_size, self.sizes[client])
        return (samples * clock.sample_seconds + clock.overhead_seconds) * (clock.slowdown if is_slow else 1.0)

    def _fails(self, client: int, number: int) -> bool:
        failures = self.settings.parts.clock.failures
        return failures > 0 and _draw(self.seed, "failure", client, number) < failures

    def _synchronous(self) -> Iterator[Round]:
        clock_s, deadline_s = 0.0, self.settings.deadline_s
        for number in range(self.settings.rounds):
            asked = draw_clients(self.settings, len(self.sizes), self.seed, number)
            dropped = [client for client in asked if self._fails(client, number)]
            times = {client: self.duration_s(client) for client in asked if client not in dropped}
            late = [client for client, seconds in times.items() if seconds > deadline_s]
            tasks = [
                Task(place, client, number)
                for place, client in enumerate(asked)
                if client in times and times[client] <= deadline_s
            ]
            # A server knows of nobody that it failed: it waits for the deadline where there is one.
            waits = [min(seconds, deadline_s) for seconds in times.values()]
            clock_s += deadline_s if dropped and deadline_s < float("inf") else max(waits, default=0.0)
            yield Round(
                number, len(asked), tuple(tasks), tuple(asked), tuple(late), tuple(dropped), clock_s, number + 1
            )

    def _asynchronous(self) -> Iterator[Round]:
        settings = self.settings
        num_clients = len(self.sizes)
        goal = settings.num_asked(num_clients)
        concurrency = min(num_clients, self.algorithm.concurrency or 2 * goal)
        under_way: list[tuple[float, int, int, int]] = []  # when it arrives, number of the request, client, base
        busy: set[int] = set()
        num_requests, clock_s = 0, 0.0
        for number in range(settings.rounds):
            tasks: list[Task] = []
            asked: list[int] = []
            late: list[int] = []
            dropped: list[int] = []
            while len(tasks) < goal:
                # Who has arrived waits for the update: from the same parameters would come the same difference.
                arrived = {task.client for task in tasks}
                while len(busy) < concurrency and len(busy | arrived) < num_clients:
                    client = self._draw_free(busy | arrived, num_requests)
                    heapq.heappush(under_way, (clock_s + self.duration_s(client), num_requests, client, number))
                    busy.add(client)
                    asked.append(client)
                    num_requests += 1
                clock_s, request, client, base = heapq.heappop(under_way)
                busy.remove(client)
                if self._fails(client, request):
                    dropped.append(client)
                elif settings.deadline != "" and self.duration_s(client) > settings.deadline_s:
                    late.append(client)
                else:
                    tasks.append(Task(len(tasks), client, base))
            oldest = min((base for _, _, _, base in under_way), default=number + 1)
            yield Round(number, goal, tuple(tasks), tuple(asked), tuple(late), tuple(dropped), clock_s, oldest)

    def _draw_free(self, taken: set[int], request: int) -> int:
        """Return one of the other clients, each with the same probability."""
        free = [client for client in range(len(self.sizes)) if client not in taken]
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "asked", request))
        return free[int(torch.randint(len(free), (1,), generator=generator))]


def _draw(seed: int, *place: int | str) -> float:
    """Return a number from 0 to 1 that depends on its place only."""
    return derive_seed(seed, *place) / 2**63
