"""One's own training loop on many workers: `with cordee.join() as team`.

The same script runs alone under `python`, and as a member under `cordee run` and `torchrun`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cordee.cluster import Team
from cordee.communication.shared_memory import register
from cordee.compute import share_threads
from cordee.core import env
from cordee.core.importing import stop_import
from cordee.loop.team import LoopTeam
from cordee.runs.script.member import ScriptMember, present_member


@contextlib.contextmanager
def join() -> Iterator[LoopTeam]:
    """Join the processes this one was started with, or be alone; leave again at the end.

    Under `cordee run` and torchrun a `torch.distributed` group is formed unless the script has one already:
    over shared memory on CPUs, NCCL where every worker has a GPU. A lost worker is an error that names it.
    At the end the workers' models are compared: TrainingError if they are not the same. Under `cordee run --elastic`
    the workers meet where the loop begins, in a function with `@team.elastic`.
    """
    stop_import("cordee.join")
    if (member := present_member()) is not None:
        with _joined_elastic(member) as team:
            yield team
        return
    place = env.place()
    if place is None or place.world_size == 1:
        team = LoopTeam(Team())
        with _watching(team):
            yield team
        return
    is_ours = not dist.is_initialized()
    if is_ours:
        register()
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
        if has_gpus:
            torch.cuda.set_device(place.local_rank)
        share_threads(0, place.local_world_size)
        dist.init_process_group("cpu:cordee,cuda:nccl" if has_gpus else "cordee")
    team = LoopTeam(
        Team(
            worker_index=place.rank,
            num_workers=place.world_size,
            num_local_workers=place.local_world_size,
            local_rank=place.local_rank,
        )
    )
    try:
        with _watching(team):
            yield team
            if dist.is_initialized():
                team.compare()
    except BaseException:
        if is_ours:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                dist.destroy_process_group()
        raise
    if is_ours and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _joined_elastic(member: ScriptMember) -> Iterator[LoopTeam]:
    """Until its loop begins a worker knows its number and with how many the run was started: it has no group yet."""
    spec = member.spec
    team = LoopTeam(Team(worker_index=spec.index, num_workers=spec.num_local, num_local_workers=spec.num_local), member)
    with _watching(team), team.closing():
        yield team
        if not team.is_waiting:
            team.compare()


@contextlib.contextmanager
def _watching(team: LoopTeam) -> Iterator[None]:
    watch = register_optimizer_step_pre_hook(team._check_step)
    try:
        yield
    finally:
        watch.remove()
