"""What the tests of the data layer share: no thread or process may outlive a test, real files may be missing."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import load_data


@pytest.fixture(autouse=True, scope="session")
def one_kernel_thread() -> Iterator[None]:
    """Small tensors on many threads take many times as long where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 2
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cordee")]


@pytest.fixture
def isolated_places(tmp_path, monkeypatch):
    """No data set is found anywhere but under `tmp_path`."""
    monkeypatch.setenv("CORDEE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cordee.data.files.SYSTEM_FOLDER", tmp_path / "system")
    return tmp_path


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs_data"):
        try:
            load_data(Data(use=marker.args[0]), seed=0)
        except DataError as error:
            if "cannot find" not in str(error):
                raise
            pytest.skip(f"the files of {marker.args[0]} are not on this machine: set CORDEE_DATA to their folder")
