from __future__ import annotations

import os

import pytest
import torch

from cordee.compute import choose_device, share_threads, usable_cores
from cordee.core.errors import JobError


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu") == choose_device("auto") == torch.device("cpu")
    with pytest.raises(JobError, match=r"this torch sees no GPU: set training.device to 'auto' or 'cpu'"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cpu") == torch.device("cpu")
    assert [choose_device(setting, 3) for setting in ("auto", "cuda")] == [torch.device("cuda", 1)] * 2


def test_cores_are_those_this_process_may_use() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_threads_are_set_or_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.compute.devices.usable_cores", lambda: 8)
    assert share_threads(3) == torch.get_num_threads() == 3
    assert share_threads(0) == torch.get_num_threads() == 8
    assert share_threads(0, num_local_workers=3) == torch.get_num_threads() == 2
    assert share_threads(0, num_local_workers=99) == torch.get_num_threads() == 1
