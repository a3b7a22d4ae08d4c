"""Horovod's API on two workers: LeNet beside DDP on gloo, and TensorFlow's all-reduce beside the same through gloo.

Horovod itself does not build here; on CPUs its users have gloo. TensorFlow's users have `tf.distribute` as well.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cordee.bench.harness import Clock, Contestant, Loop, Place, compete, free_port, goal_outcome, median_ratio
from cordee.bench.loops import LEARNING_RATE, build, image_data, torch_loop, train_by_hand
from cordee.core import env
from cordee.core.errors import MissingExtraError
from cordee.core.settings import Data

NUM_WORKERS = 2
BATCH_SIZE = 32  # per worker
LENET_STEPS = 300  # per round
REDUCTIONS = 100  # per round
FLOATS = 1 << 20  # 4 MB
SETTINGS = {
    "workers": NUM_WORKERS,
    "batch_size_per_worker": BATCH_SIZE,
    "lenet_steps_per_round": LENET_STEPS,
    "tensorflow_reductions_per_round": REDUCTIONS,
    "tensorflow_bytes": 4 * FLOATS,
}


LENET, EAGER, GRAPH = "horovod/lenet", "horovod/tensorflow eagerly", "horovod/tensorflow in a graph"
MIRRORED = "MultiWorkerMirroredStrategy"
# How many times as fast as whom; None beside whom there is no goal.
GOALS: dict[str, dict[str, float | None]] = {
    LENET: {"ddp on gloo": 1.3},
    EAGER: {"gloo": 5.0, MIRRORED: None},
    GRAPH: {"gloo": 2.5, MIRRORED: None},
}


def measures(rounds: int, say: Callable[[str], None]) -> dict[str, Callable[[], dict[str, list[float]]]]:
    """Return what is measured, by the names of the cases."""
    return {
        LENET: lambda: measure_lenet(rounds, say),
        EAGER: lambda: measure_tensorflow(False, rounds, say),
        GRAPH: lambda: measure_tensorflow(True, rounds, say),
    }


def rows(raw: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield what a person reads of the figures that are there: how many times as fast as the peer."""
    for case, peer, goal in ((case, peer, goal) for case, goals in GOALS.items() for peer, goal in goals.items()):
        ours, theirs = raw.get(f"{case}: cordee"), raw.get(f"{case}: {peer}")
        if ours and theirs and len(ours) == len(theirs):
            ratio = median_ratio(ours, theirs)
            yield {
                "case": case,
                "contestant": peer,
                "unit": "times as fast",
                "median": ratio,
                "worst": min(a / b for a, b in zip(ours, theirs, strict=True)),
                "goal": goal,
                "outcome": "" if goal is None else goal_outcome(ratio >= goal),
            }


def measure_lenet(rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Return samples per second of `hvd.DistributedOptimizer` and of DDP on gloo, in each round."""
    settings: dict[str, Any] = {"model": "lenet", "data": image_data(), "batch_size": BATCH_SIZE}
    loops: dict[str, Loop] = {"cordee": partial(_hvd_loop, **settings), "ddp on gloo": partial(torch_loop, **settings)}
    contestants = {name: Contestant(loop, NUM_WORKERS, LENET_STEPS, BATCH_SIZE) for name, loop in loops.items()}
    return compete(contestants, rounds, say)[0]


def measure_tensorflow(is_graph: bool, rounds: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Return all-reduces of 4 MB per second and worker, of a TensorFlow tensor, eagerly or in a `tf.function`."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingExtraError("the case 'horovod/tensorflow' of the benchmark 'frameworks'", "tensorflow")
    loops: dict[str, Loop] = {
        name: partial(_tensorflow_loop, backend=name, is_graph=is_graph) for name in ("cordee", "gloo")
    }
    loops[MIRRORED] = partial(_mirrored_loop, is_graph=is_graph)
    contestants = {name: Contestant(loop, NUM_WORKERS, REDUCTIONS, 1) for name, loop in loops.items()}
    return compete(contestants, rounds, say)[0]


def _hvd_loop(place: Place, clock: Clock, *, model: str, data: Data, batch_size: int) -> None:
    """The loop of a Horovod script, otherwise that of DDP."""
    import cordee.horovod.torch as hvd
    from cordee.communication.shared_memory import register

    register()
    dist.init_process_group("cordee", init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    hvd.init()
    network = build(model)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(network.parameters(), lr=LEARNING_RATE), named_parameters=network.named_parameters()
    )
    train_by_hand(place, clock, network, optimizer, data, batch_size)


def _tensorflow_loop(place: Place, clock: Clock, *, backend: str, is_graph: bool) -> None:
    from cordee.communication.shared_memory import register

    register()
    dist.init_process_group(backend, init_method=place.rendezvous, rank=place.rank, world_size=place.size)
    import cordee.horovod.tensorflow as hvd
    from cordee.horovod.tensorflow.arrays import call, tf

    def reduce_on_gloo(data: Tensor) -> list[Tensor]:
        own = data.clone()  # TensorFlow's tensors are immutable
        dist.all_reduce(own)
        return [own.div_(place.size)]

    def reduce(value: Any) -> Any:
        if backend == "gloo":
            return call(reduce_on_gloo, [value], [value.shape], "gloo")[0]
        return hvd.allreduce(value)

    if backend != "gloo":
        hvd.init()
    step = tf.function(reduce) if is_graph else reduce
    value = tf.fill([FLOATS], float(place.rank))
    while True:
        clock.tick()
        step(value)


def _mirrored_loop(place: Place, clock: Clock, *, is_graph: bool) -> None:
    """TensorFlow's own all-reduce between processes, on its own connections."""
    folder = Path(place.folder)
    own = folder / f"port-{place.rank}"
    own.with_suffix(".new").write_text(str(free_port()))
    own.with_suffix(".new").rename(own)
    files = [folder / f"port-{rank}" for rank in range(place.size)]
    for file in files:
        clock.wait_for(file)
    cluster = {"worker": [f"127.0.0.1:{file.read_text()}" for file in files]}
    task = {"type": "worker", "index": place.rank}
    env.adopt({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), "TF_CPP_MIN_LOG_LEVEL": "3"})
    from cordee.horovod.tensorflow.arrays import tf

    tf.get_logger().setLevel("ERROR")  # eagerly it advises at every step to use a graph
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == place.size
    value = tf.fill([FLOATS], float(place.rank))

    def reduce() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, value)

    def run() -> Any:
        return strategy.run(reduce)

    step = tf.function(run) if is_graph else run
    while True:
        clock.tick()
        step()
