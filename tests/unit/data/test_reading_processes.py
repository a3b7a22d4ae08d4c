from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
from user_data import Drawing, Dying, Failing, Slow, Stream

from cordee.core.errors import DataError
from cordee.core.settings import Data
from cordee.data import Loader, load_data


def loader(dataset, **settings) -> Loader:
    source = load_data(Data(use=dataset), seed=0).train
    return Loader(source, batch_size=6, seed=3, shuffle=True, **settings)


@pytest.mark.parametrize(("make", "processes"), [(Drawing, 1), (Drawing, 2), (Stream, 1)])
def test_same_batches_as_without_processes(make, processes):
    dataset = make(20)
    for first_batch in (0, 2):
        here = list(loader(dataset).batches(1, first_batch))
        there = list(loader(dataset, processes=processes).batches(1, first_batch))
        assert len(here) == len(there) == 4 - first_batch
        for one, other in zip(here, there):
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


def test_generator_of_the_process_is_not_drawn_from():
    state = torch.get_rng_state()
    list(loader(Drawing(20), processes=1).batches(0))
    assert torch.equal(state, torch.get_rng_state())


def test_closing_leaves_no_process():
    batches = loader(Slow(200, num_classes=200), processes=2).batches(0)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    start = time.monotonic()
    batches.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - start < 3


def test_interrupt_reaches_the_trainer_and_not_the_readers():
    batches = loader(Slow(60, num_classes=60), processes=1).batches(0)
    next(batches)
    (child,) = multiprocessing.active_children()
    os.kill(child.pid, signal.SIGINT)
    assert len(list(batches)) == 9


def test_failing_sample_is_named():
    with pytest.raises(DataError, match=r"reading sample 13 of the training set raised OSError: cannot open") as caught:
        list(loader(Failing(20, num_classes=20), processes=2).batches(0))
    assert "user_data.py" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_failing_stream_is_named():
    with pytest.raises(DataError, match="reading sample 7 of the training set raised ValueError"):
        list(loader(Stream(10, fail_at=7), processes=1).batches(0))


def test_process_that_dies_is_an_error_and_not_a_hang():
    with pytest.raises(DataError, match="a process that reads the data ended"):
        list(loader(Dying(20, num_classes=20), processes=1).batches(0))
    assert multiprocessing.active_children() == []


def test_death_of_a_process_disturbs_nothing_else():
    before = signal.getsignal(signal.SIGCHLD)
    batches = loader(Slow(60, num_classes=60), processes=1).batches(0)
    next(batches)
    (child,) = multiprocessing.active_children()
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.3)  # a handler would raise here
    assert signal.getsignal(signal.SIGCHLD) == before
    with pytest.raises(DataError, match="a process that reads the data ended"):
        list(batches)


@pytest.mark.parametrize("kind", [ConnectionResetError, EOFError, BrokenPipeError])
def test_process_that_dies_while_it_hands_a_batch_over_is_the_same_error(monkeypatch, kind):
    """Torch then fails to receive the batch's memory from it, before it notices the death."""

    def fail(_):
        raise kind("at the wrong moment")

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__next__", fail)
    with pytest.raises(DataError, match=r"a process that reads the data ended.*data.processes = 0"):
        list(loader(Slow(20, num_classes=20), processes=1).batches(0))
    assert multiprocessing.active_children() == []
