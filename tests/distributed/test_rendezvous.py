"""Forming a generation: one that failed does not stand in the way of the next."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cordee.cluster.rendezvous import meet
from cordee.core.errors import CommunicationError

_context = mp.get_context("spawn")


def add_up(folder: str, rank: int, generation: int, why_over: str = "") -> float:
    """Form a generation of two, in it another group, and add something up in that."""
    path = Path(folder) / f"generation-{generation}"
    with meet(path, rank, 2, failure_timeout_s=5.0, why_over=lambda: why_over):
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total, group=dist.new_group([0, 1]))
        return float(total)


@pytest.mark.timeout(120)
def test_who_waited_in_vain_meets_a_new_process_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicationError, match=r"generation-1 could not meet: worker 7 is gone"):
        add_up(str(tmp_path), 0, 1, why_over="worker 7 is gone")
    with monkeypatch.context() as patch:
        patch.setattr("cordee.cluster.rendezvous.RENDEZVOUS_TIMEOUT_S", 0.5)
        with pytest.raises(CommunicationError, match=r"generation-2 could not meet: nobody said .* within 0.5 s"):
            add_up(str(tmp_path), 0, 2)
    other = _context.Process(target=add_up, args=(str(tmp_path), 1, 3))
    other.start()
    try:
        assert add_up(str(tmp_path), 0, 3) == 3.0
    finally:
        other.join(timeout=30)
    assert other.exitcode == 0
