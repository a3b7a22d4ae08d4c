"""Forming a generation: one that failed does not stand in the way of the next."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cordee import worker
from cordee.cluster.link import Answer
from cordee.communication.messages import Directive, Member
from cordee.core.errors import CommunicationError

_context = mp.get_context("spawn")


def meet(store: str, index: int, generation: int) -> float:
    """Form a generation of two and add something up in it."""
    order = worker.WorkerOrder(
        run_dir="",
        run_id="",
        worker_index=index,
        num_workers=2,
        address="",
        keys="",
        store=store,
        resume=False,
        failure_timeout_s=5.0,
        join_timeout_s=5.0,
    )
    members = tuple(Member(f"worker-{i}", "worker", "here", i) for i in (0, 1))
    with worker._group(order, Answer(Directive("new_generation", members), generation)):
        total = torch.tensor([1.0 + index])
        dist.all_reduce(total)
        return float(total)


@pytest.mark.timeout(120)
def test_who_waited_in_vain_meets_a_new_process_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_MEETING_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "timedelta", lambda seconds: worker.COLLECTIVE_TIMEOUT / 3600)  # half a second
        for generation in (1, 2):
            with pytest.raises(CommunicationError, match=rf"generation {generation} could not meet"):
                meet(str(tmp_path), 0, generation)
    other = _context.Process(target=meet, args=(str(tmp_path), 1, 3))
    other.start()
    try:
        monkeypatch.setattr(worker, "LEAST_MEETING_S", 30.0)
        assert meet(str(tmp_path), 0, 3) == 3.0
    finally:
        other.join(timeout=30)
    assert other.exitcode == 0
