"""A program that runs functions as ranks on Ray or Spark; the tests start it beside a cluster. Prints JSON lines."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from cordee.core.errors import CordeeError

STEPS = 6


def train(rate: float, *, batch_size: int) -> dict[str, Any]:
    """Fit a line on this rank's half of the data, as a Horovod script does, and return what this rank has."""
    import torch

    import cordee.horovod.torch as hvd

    hvd.init()
    data = torch.linspace(-1, 1, 2 * batch_size).unsqueeze(1)
    own = data[hvd.rank() :: hvd.size()]
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(own.double()), 3 * own.double() + 1).backward()
        optimizer.step()
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "weights": [parameter.item() for parameter in model.parameters()],
        "told": os.environ.get("TOLD", ""),
        "pid": os.getpid(),
    }


def alone(rate: float, *, batch_size: int) -> list[float]:
    """Return the weights that one process gets from all of the data."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    data = torch.linspace(-1, 1, 2 * batch_size).unsqueeze(1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data), 3 * data + 1).backward()
        optimizer.step()
    return [parameter.item() for parameter in model.parameters()]


def fail_before_meeting(rank_variable: str) -> None:
    import cordee.horovod.torch as hvd

    if os.environ[rank_variable] == "1":
        raise ValueError("no luck")
    hvd.init()


def fail_while_others_wait() -> None:
    import torch

    import cordee.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("no luck")
    hvd.allreduce(torch.ones(3))


def die() -> None:
    import torch

    import cordee.horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(3))


class Counter:
    """An executable of Ray's executor: it lives in its rank."""

    def __init__(self, start: int, *, step: int) -> None:
        import cordee.horovod.torch as hvd

        hvd.init()
        self.value, self.step = start + hvd.rank(), step

    def advance(self) -> int:
        self.value += self.step
        return self.value


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def attempt(call: Callable[[], Any]) -> None:
    """Say what a call returned, or how it failed, and how long it took."""
    began_s = time.monotonic()
    try:
        say(result=call())
    except (CordeeError, ValueError) as error:
        say(kind=type(error).__name__, error=str(error), seconds=time.monotonic() - began_s)


def run_all(run: Callable[..., list[Any]]) -> None:
    """What must hold on both."""
    arguments = {"args": (0.1,), "kwargs": {"batch_size": 4}}
    say(alone=alone(0.1, batch_size=4))
    for _ in range(2):  # processes are used again
        attempt(lambda: run(train, **arguments, num_proc=2, env={"TOLD": "so"}))
    attempt(lambda: run(functools.partial(fail_before_meeting, "RANK"), num_proc=2))
    attempt(lambda: run(fail_while_others_wait, num_proc=2))
    attempt(lambda: run(lambda: os.environ.get("TOLD", "") + os.environ["WORLD_SIZE"], num_proc=2))
    attempt(lambda: run(die, num_proc=2))
    attempt(lambda: run(train, **arguments, num_proc=1))


def on_ray() -> None:
    from cordee.horovod.ray import RayExecutor, run

    run_all(run)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2)
    executor.start(Counter, executable_args=[10], executable_kwargs={"step": 5})
    attempt(lambda: executor.execute(lambda counter: counter.advance()))
    attempt(lambda: executor.execute(lambda counter: counter.advance()))
    attempt(lambda: executor.execute_single(lambda counter: counter.value))
    attempt(lambda: executor.run(train, args=[0.1], kwargs={"batch_size": 4}))
    executor.shutdown()
    spread = RayExecutor(num_hosts=2, num_workers_per_host=1)
    spread.start()
    attempt(lambda: spread.run(lambda: os.environ["RANK"]))
    spread.shutdown()
    settings = RayExecutor.create_settings(timeout_s=300, placement_group_timeout_s=2)
    attempt(lambda: RayExecutor(settings, num_workers=3).start())


def on_spark() -> None:
    from pyspark.sql import SparkSession

    from cordee.horovod import spark

    attempt(lambda: spark.run(train, num_proc=2))  # without a session
    builder = SparkSession.builder.config("spark.ui.showConsoleProgress", "false")
    session = builder.master(sys.argv[2]).appName("horovod").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    run_all(spark.run)
    attempt(lambda: spark.run(train, num_proc=3, start_timeout=1))
    session.stop()


if __name__ == "__main__":
    {"ray": on_ray, "spark": on_spark}[sys.argv[1]]()
