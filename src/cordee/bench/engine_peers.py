"""What Ray's and Spark's users write instead: the same LeNet under DDP, started by Ray Train and by TorchDistributor.

Run as `python -m cordee.bench.engine_peers NAME CONNECT FOLDER NUM_STEPS SAVES_EVERY` by the benchmark `engines`.
Rank 0 writes a line with the time every `LINE_EVERY` steps. With SAVES_EVERY the loop saves, and continues from what is
there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

LINE_EVERY = 20  # steps; what Cordée does unless it is told otherwise
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
    rank, folder, saves_every = dist.get_rank(), Path(config["folder"]), config["saves_every"]
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
            if step % LINE_EVERY == 0:
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
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master(connect).appName("peer").getOrCreate()
    TorchDistributor(num_processes=NUM_WORKERS, local_mode=False, use_gpu=False).run(_train_on_spark, config)
    session.stop()


def _train_on_spark(config: dict[str, Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train_ddp(config)
    dist.destroy_process_group()


PEERS = {"ray train": run_ray_train, "torchdistributor": run_torch_distributor}

if __name__ == "__main__":
    name, connect, folder, num_steps, saves_every = sys.argv[1:]
    PEERS[name](connect, {"folder": folder, "num_steps": int(num_steps), "saves_every": int(saves_every)})
