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


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("prefetch", [0, 2, 7])
def test_samples_that_are_asked_for_are_the_same_whoever_reads_them(processes, prefetch):
    """As workers of `parameter_server` read the units that they are handed out."""
    dataset = Drawing(20)
    whole = [list(loader(dataset).batches(epoch)) for epoch in (0, 1)]
    on_demand = loader(dataset, processes=processes, prefetch=prefetch)
    started = set()
    for epoch, first in ((0, 0), (0, 2), (1, 1), (0, 1)):
        parts = [(6 * batch, min(20, 6 * batch + 6)) for batch in range(first, 4)]
        read = list(on_demand.read(epoch, parts))
        assert len(read) == len(parts)
        for one, other in zip(read, whole[epoch][first:], strict=True):
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        started |= {child.pid for child in multiprocessing.active_children()}
    assert len(started) == 3 * processes, "they stay for an epoch"
    on_demand.close()
    assert multiprocessing.active_children() == []


def test_processes_that_read_on_demand_begin_again_after_one_did_not_want_the_rest():
    on_demand = loader(Drawing(20), processes=2)
    expected = list(loader(Drawing(20)).batches(0))
    batches = on_demand.read(0, [(0, 6), (6, 12)])
    next(batches)
    batches.close()
    (batch,) = on_demand.read(0, [(12, 18)])
    assert torch.equal(batch.inputs, expected[2].inputs)
    on_demand.close()


def test_a_failing_sample_is_named_where_processes_read_on_demand():
    on_demand = loader(Failing(20, num_classes=20), processes=2)
    with pytest.raises(DataError, match=r"reading sample 13 of the training set raised OSError: cannot open"):
        list(on_demand.read(0, [(0, 20)]))
    assert multiprocessing.active_children() == []
