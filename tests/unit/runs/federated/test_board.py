"""The tasks of rounds, handed out in any order, with workers that are lost and coordinators that come back."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from cordee.core import Job
from cordee.runs.federated.board import BLOCK_PLACES, Board, BoardState, TaskKey
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.strategy import settings_of


def make_schedule(num_clients: int, rounds: int, **strategy: object) -> Schedule:
    job = Job.from_dict({
        "model": {"use": "mlp"},
        "data": {"use": "synthetic", "shape": [2], "num_classes": 2, "size": num_clients},
        "strategy": {"name": "federated", "rounds": rounds, "partition": {"clients": num_clients}, **strategy},
    })  # fmt: skip
    settings = settings_of(job)
    return Schedule(settings, make_algorithm(settings.use, job.python_path), job.seed, [1] * num_clients, 4)


@pytest.mark.parametrize("seed", range(20))
def test_each_task_is_done_once_whoever_is_lost_and_sums_wait_for_their_places(seed: int) -> None:
    draw, rounds = random.Random(seed), 3
    num_clients = draw.randint(1, 5 * BLOCK_PLACES)
    asked = draw.choice([None, draw.randint(1, num_clients)])
    schedule = make_schedule(num_clients, rounds, **({} if asked is None else {"clients_per_round": asked}))
    merges = draw.random() < 0.7
    state = BoardState()
    board = Board(schedule, state, merges=merges)
    in_hand: dict[str, TaskKey] = {}
    done: Counter[TaskKey] = Counter()
    while board.round is not None:
        worker = f"worker-{draw.randrange(4)}"
        if draw.random() < 0.02:  # the coordinator is killed, and another comes back with what was written down
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=BoardState)
            board = Board(schedule, state, merges=merges)
        if worker not in in_hand:
            key = board.take(worker)
            if key is not None:
                assert key not in in_hand.values() and not done[key], "it is in another's hands, or done"
                if key.kind == "merge":
                    places = range(*board.blocks[key.place])
                    assert all(done[TaskKey("client", key.round, p)] for p in places if p in asked_places(board))
                if key.kind == "finish":
                    assert all(done[TaskKey("client", key.round, p)] for p in asked_places(board))
                    assert not merges or all(done[TaskKey("merge", key.round, b)] for b in range(len(board.blocks)))
                in_hand[worker] = key
            else:
                assert in_hand, "nobody has a task, and none is handed out"
        elif draw.random() < 0.2:  # it is lost
            assert board.requeue(worker) == in_hand.pop(worker)
        else:
            key = in_hand.pop(worker)
            is_refused = key.kind == "client" and draw.random() < 0.1
            assert board.finish(worker, key, is_refused=is_refused)
            assert key.kind in ("prepare", "finish") or not board.finish(worker, key), "counts once"
            done[key] += 1
            if key.kind == "finish":
                assert not in_hand
                board.advance()
    assert done[TaskKey("prepare", 0)] == 1
    for number, one in zip(range(rounds), schedule.rounds(0), strict=False):
        for task in one.tasks:
            assert done[TaskKey("client", number, task.place)] == 1
        assert done[TaskKey("finish", number)] == 1


def asked_places(board: Board) -> set[int]:
    assert board.round is not None
    return {task.place for task in board.round.tasks}


def test_a_hand_out_does_not_look_at_every_client_again() -> None:
    """With 10,000 clients, looking at each of them for each task took more time than their training."""
    num_clients = 2000
    board = Board(make_schedule(num_clients, 1), BoardState(stage="round"), merges=True)

    class CountedOrder(list[int]):
        num_looks = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            self.num_looks += 1
            return super().__getitem__(index)

    board._order = order = CountedOrder(board._order)
    for _ in range(num_clients):
        while (key := board.take("worker-0")) is not None and key.kind == "merge":
            board.finish("worker-0", key)
        assert key is not None and key.kind == "client"
        board.finish("worker-0", key)
    assert order.num_looks <= 3 * num_clients
