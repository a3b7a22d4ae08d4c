"""GPUs: which one a worker takes, its random numbers, and when what was asked of it is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor


def num_gpus() -> int:
    """Return how many GPUs this process may use (CUDA_VISIBLE_DEVICES can make them fewer)."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def claim_gpu(place: int) -> int:
    """Return which GPU a worker is to take, and keep it for as long as this process lives: no other worker takes it.

    `place` is that among the workers of the run, which is not that of the host where workers are on several hosts, or
    where one replaces another. Local; without GPUs it returns `place`.
    """
    ids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(num_gpus())]
    return choose_gpu(place, ids, lock_gpu)


def choose_gpu(place: int, ids: Sequence[str], lock: Callable[[str], bool]) -> int:
    """Return the first GPU that can be had, the one of this place before all; where all are taken that one again."""
    if not ids:
        return place
    order = [(place + more) % len(ids) for more in range(len(ids))]
    return next((index for index in order if lock(ids[index])), order[0])


_held: dict[str, int] = {}  # of this process: files that stay open


def lock_gpu(gpu: str, folder: Path | None = None) -> bool:
    """Return whether this process is now, or was before, the one of this user that has this GPU."""
    if gpu in _held:
        return True
    path = (folder or Path(tempfile.gettempdir())) / f"cordee-{os.getuid()}-gpu-{gpu}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return False
    _held[gpu] = fd
    return True


def release_gpus() -> None:
    """Let others have the GPUs of this process."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.popitem()[1])


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this process, before anything is formed or drawn there. Local.

    NCCL, random numbers and torch's device meshes take the current GPU, which is the first one until this is called.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of a GPU is done, exchanges included. Nothing on CPUs, where calls wait."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Random numbers. Layers draw from the generator of the device that they compute on.


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that layers on this device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]  # there are none before CUDA was used


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the random numbers of this process: the host's, and those of the device that it computes on."""
    torch.default_generator.manual_seed(seed)  # directly: `torch.manual_seed` visits all devices, 8 µs
    if device.type == "cuda":
        generator_of(device).manual_seed(seed)


def random_state() -> list[Tensor]:
    """Return the state of the random numbers of the host, and of the current GPU where this process uses one."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(generator_of(torch.device("cuda")).get_state())
    return states


def set_random_state(states: Sequence[Tensor]) -> None:
    """Continue with what `random_state` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generator_of(torch.device("cuda")).set_state(states[1])
