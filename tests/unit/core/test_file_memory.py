"""Models whose large tensors lie in files: the same values, whatever their code does, and little memory."""

from __future__ import annotations

import errno
import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cordee.core import file_memory
from cordee.core.file_memory import FileMemory, Paging, give_back, lies_in_file, map_file, take_out, zeros_strided
from cordee.models import gpt, resnet

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files cannot be reserved here")


@pytest.fixture
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(file_memory, "RECENT_BYTES", 1)


class Odd(nn.Module):
    """Does in its constructor what models do to their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.second = nn.Linear(30, 20, bias=False)
        self.second.weight = nn.Parameter(self.first.weight.detach().T @ torch.eye(30))  # computed from another
        self.tied = nn.Linear(20, 30)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(20)
        self.register_buffer("mask", torch.ones(20, 20).tril())
        self.scale = float(self.first.weight.detach().std())  # what a method needs of the values
        self.row: list[float] = self.first.weight[0].tolist()
        self.array = self.first.weight.detach().numpy().copy()
        drawn = torch.empty(7, 9)
        self.drawn = nn.Parameter(drawn)
        nn.init.trunc_normal_(drawn, std=0.5)  # by its other name
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(16, 16)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 10), 0.5))
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.of_numpy = nn.Parameter(torch.from_numpy(np.arange(12.0).reshape(3, 4)))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.halved = nn.Parameter(torch.randn(5, 5, dtype=torch.bfloat16), requires_grad=False)
        self.kernel = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.first.weight.mul_(self.scale).add_(1.0)
            self.first.bias[:3] = 0.0
            self.tied.bias.data = self.tied.bias.data / 2
        self.apply(redraw)


def redraw(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "gpt": lambda: gpt(input_shape=(8,), num_classes=30, num_layers=2, embedding_width=32, num_heads=2),
    "resnet": lambda: resnet(input_shape=(3, 16, 16), num_classes=10),
}


def built(build: Callable[[], nn.Module], memory: FileMemory | None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    if memory is None:
        return build(), torch.get_rng_state()
    with Paging(memory):
        return build(), torch.get_rng_state()


@pytest.mark.usefixtures("_everything_is_large")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_files_is_the_same_model(name: str) -> None:
    plain, random_state = built(MODELS[name], None)
    memory = FileMemory()
    filed, random_state_of_filed = built(MODELS[name], memory)
    assert memory.problem is None
    assert torch.equal(random_state, random_state_of_filed)
    for (key, expected), (other, found) in zip(
        plain.state_dict(keep_vars=True).items(), filed.state_dict(keep_vars=True).items(), strict=True
    ):
        assert key == other and torch.equal(expected, found), key
        assert expected.stride() == found.stride() and expected.requires_grad == found.requires_grad, key
        assert found.is_leaf and not found._is_view(), key
        # NumPy's own memory is used as it is.
        assert lies_in_file(found) or key == "of_numpy" or found.ndim == 0, key
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in filed.named_parameters()]
    if isinstance(plain, Odd) and isinstance(filed, Odd):
        assert filed.tied.weight is filed.first.weight
        assert (plain.scale, plain.row) == (filed.scale, filed.row) and np.array_equal(plain.array, filed.array)


@pytest.mark.usefixtures("_everything_is_large")
def test_a_model_in_files_trains_as_any_other() -> None:
    losses = []
    for memory in (None, FileMemory()):
        model, _ = built(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), memory)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss = (model(torch.full((4, 6), step / 2)) ** 2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            give_back(model.parameters())
    assert losses[:3] == losses[3:]


def resident_bytes(tensor: Tensor) -> int:
    """Return how much of the mapping in which a tensor lies is in this process's memory."""
    address, is_it = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(number, 16) for number in first.split("-"))
            is_it = start <= address < end
        elif is_it and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("it lies in no mapping")


def test_few_pages_are_in_memory_at_any_time() -> None:
    size, peaks = 1 << 20, []
    with Paging(FileMemory()):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(64)))  # 64 MiB
        peaks.append(resident_bytes(model[0].weight))
        for number, module in enumerate(model):
            nn.init.normal_(module.weight)
            if number % 11 == 0:
                peaks.append(resident_bytes(module.weight))
    assert max(peaks) <= file_memory.RECENT_BYTES + 4 * size
    assert resident_bytes(model[0].weight) == 0
    with torch.no_grad():
        with Paging():
            model(torch.ones(2, 512))
            assert resident_bytes(model[0].weight) <= file_memory.RECENT_BYTES + 4 * size
        model(torch.ones(2, 512))
    assert resident_bytes(model[0].weight) >= 64 * size, "it measures nothing"


@pytest.mark.usefixtures("_everything_is_large")
def test_what_is_freed_is_used_again() -> None:
    memory = FileMemory()
    places = set()
    for value in range(5):
        tensor = zeros_strided((1000,), (1,), torch.empty(0), memory)
        assert not tensor.any(), "what was there before can be seen"
        places.add(tensor.fill_(value + 1).data_ptr())
        del tensor
        gc.collect()
    assert len(places) == 1
    assert os.fstat(memory._files[0]._descriptor).st_blocks == 0, "the disk still has it"


@pytest.mark.usefixtures("_everything_is_large")
def test_a_process_that_was_forked_takes_nothing_away() -> None:
    memory = FileMemory()
    kept = [zeros_strided((1000,), (1,), torch.empty(0), memory).fill_(3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads that torch has
        child = os.fork()
    if not child:
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept[0], torch.full((1000,), 3.0))


def test_where_the_disk_has_no_room_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "SMALLEST_BYTES", 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = FileMemory()
    model, _ = built(lambda: nn.Linear(4, 4), memory)
    assert memory.problem is not None and memory.problem.errno == errno.ENOSPC
    assert not lies_in_file(model.weight)
    assert torch.equal(model.weight, built(lambda: nn.Linear(4, 4), None)[0].weight)


def test_a_mapped_file_keeps_what_was_changed_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        flat = map_file(file.fileno(), 256 * 64)
    before = flat.clone()
    flat[5000] = 7
    give_back([flat])
    assert flat[5000] == 7
    flat[5000] = before[5000]
    assert torch.equal(flat, before)
    assert path.read_bytes() == bytes(range(256)) * 64


@pytest.mark.usefixtures("_everything_is_large")
def test_what_is_taken_out_has_memory_of_its_own() -> None:
    model, _ = built(lambda: nn.Linear(4, 4), FileMemory())
    before = model.weight.detach().clone()
    take_out([model.weight])
    assert not lies_in_file(model.weight) and lies_in_file(model.bias)
    assert torch.equal(model.weight, before)


def test_files_are_not_where_files_are_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.access("/dev/shm", os.W_OK) or file_memory._is_on_disk("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    monkeypatch.setattr(file_memory.tempfile, "gettempdir", lambda: "/dev/shm")
    assert file_memory._folder() in ("/var/tmp", "/dev/shm")
    if file_memory._is_on_disk("/var/tmp"):
        assert file_memory._folder() == "/var/tmp"
