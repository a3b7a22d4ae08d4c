"""What users write instead: the same LeNet under DDP, started by torchrun, Ray Train and TorchDistributor.

Run as `python -m cordee.bench.engine_peers NAME CONNECT FOLDER NUM_STEPS LINE_EVERY SAVES_EVERY` by the benchmark
`engines`. Each rank writes a line with the time every LINE_EVERY steps. With SAVES_EVERY the loop saves, and continues
from what is there. NAME may also be a bare start, `bare ray` for instance: as many processes on that cluster, which
import torch, write a line and end.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from cordee.core import env

BATCH_SIZE = 32  # of one worker
NUM_WORKERS = 2


def train_ddp(config: dict[str, Any]) -> None:
    """Be one rank. The process group is there already."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from cordee.bench.harness import Place
    from cordee.bench.loops import LEARNING_RATE, build, image_data, own_batches, train_tensors

    torch.set_num_threads(1)
    rank, folder = dist.get_rank(), Path(config["folder"])
    line_every, saves_every = config["line_every"], config["saves_every"]
    network, saved = build("lenet"), folder / "saved.pt"
    step = 0
    if saves_every and saved.exists():
        state = torch.load(saved, weights_only=True)
        network.load_state_dict(state["model"])
        step = state["step"]
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    place = Place(rank, dist.get_world_size(), str(folder))
    with (folder / f"events-{rank}.jsonl").open("a", buffering=1) as events:
        for inputs, targets in own_batches(place, *train_tensors(image_data()), BATCH_SIZE):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % line_every == 0:
                events.write(json.dumps({"type": "step", "step": step, "time": time.time()}) + "\n")
            if saves_every and rank == 0 and step % saves_every == 0:
                torch.save({"model": network.state_dict(), "step": step}, folder / "saved.new")
                (folder / "saved.new").replace(saved)
            if step >= config["num_steps"]:
                return


def run_ray_train(connect: str, config: dict[str, Any]) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(connect, log_to_driver=False)
    TorchTrainer(
        train_ddp,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=config["folder"], failure_config=FailureConfig(max_failures=3)),
    ).fit()


def run_torch_distributor(connect: str, config: dict[str, Any]) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    session = _spark_session(connect)
    TorchDistributor(num_processes=NUM_WORKERS, local_mode=False, use_gpu=False).run(train_on_gloo, config)
    session.stop()


def train_on_gloo(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train_ddp(config)
    dist.destroy_process_group()


def run_below_torchrun(_connect: str, config: dict[str, Any]) -> None:
    """Be one of the processes that torchrun has started."""
    train_on_gloo(config)


def start_bare(folder: str, rank: int) -> int:
    """Be a process that could train."""
    import torch.distributed as dist

    assert dist.is_available()
    line = {"type": "step", "step": 1, "time": time.time()}
    (Path(folder) / f"events-{rank}.jsonl").write_text(json.dumps(line) + "\n")
    return rank


def start_bare_below_torchrun(_connect: str, config: dict[str, Any]) -> None:
    place = env.place()
    assert place is not None
    start_bare(config["folder"], place.rank)


def start_bare_ray(connect: str, config: dict[str, Any]) -> None:
    import ray

    ray.init(connect, log_to_driver=False)
    start = ray.remote(num_cpus=1, max_retries=0)(start_bare)
    ray.get([start.remote(config["folder"], rank) for rank in range(NUM_WORKERS)])


def start_bare_spark(connect: str, config: dict[str, Any]) -> None:
    session = _spark_session(connect)
    ranks = session.sparkContext.parallelize(range(NUM_WORKERS), NUM_WORKERS)
    ranks.map(partial(start_bare, config["folder"])).collect()
    session.stop()


def _spark_session(connect: str) -> Any:
    from pyspark.sql import SparkSession

    with env.with_default("PYSPARK_PYTHON", sys.executable):
        return SparkSession.builder.master(connect).appName("peer").getOrCreate()


PEERS = {
    "torchrun": run_below_torchrun,
    "ray train": run_ray_train,
    "torchdistributor": run_torch_distributor,
    "bare torchrun": start_bare_below_torchrun,
    "bare ray": start_bare_ray,
    "bare spark": start_bare_spark,
}

if __name__ == "__main__":
    name, connect, folder, *counts = sys.argv[1:]
    num_steps, line_every, saves_every = map(int, counts)
    settings = {"folder": folder, "num_steps": num_steps, "line_every": line_every, "saves_every": saves_every}
    PEERS[name](connect, settings)
