"""Where processes of one launch meet, whatever launched them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cordee.core import env
from cordee.core.errors import JobError


def find_place() -> env.Place | None:
    """Return the place that `cordee run`, torchrun, mpirun or srun gave this process; None if it runs alone."""
    if (place := env.place()) is not None:
        return place
    if not env.is_launched():
        return None
    task = env.launched_task()
    return env.Place(task.rank, task.world_size, task.local_rank, task.tasks_per_host)


def open_store(place: env.Place) -> Any:
    """Return the store where the processes meet; None where torch finds it by itself."""
    if env.place() is not None:
        return None
    task = env.launched_task()
    address, port = env.meeting_point()
    if address and port:
        return dist.TCPStore(address, port, place.world_size, place.rank == 0)  # type: ignore[attr-defined]
    if not task.is_one_host:
        raise JobError(
            f"hvd.init: {task.describe()}: set MASTER_ADDR and MASTER_PORT on all processes, the address and a free "
            "port of the first host, so that they can meet"
        )
    if not (launch := env.launch_name(task)):
        raise JobError(f"hvd.init: {task.launcher} gives its launches no id: set MASTER_ADDR and MASTER_PORT")
    folder = env.cache_folder() / "meetings"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", launch)
    return dist.FileStore(str(Path(folder) / name), place.world_size)  # type: ignore[attr-defined]
