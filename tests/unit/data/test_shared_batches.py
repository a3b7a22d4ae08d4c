"""Which samples each worker gets of a script's batches: those that the script's own loader would have given."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cordee.core.errors import DataError
from cordee.data.shared_batches import Progress, SharedBatches

NUM_SAMPLES = 29
DATA = TensorDataset(torch.arange(NUM_SAMPLES), torch.arange(NUM_SAMPLES) * 2.0)


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self.data_source)))


class EvenFirst(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, NUM_SAMPLES, 2), *range(1, NUM_SAMPLES, 2)])


class Growing:
    """A batch sampler with batches of another size each, and no length."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        yield from ((0,), (1, 2), (3, 4, 5), (6, 7, 8, 9))


class Doubled(DataLoader):
    """Does as it likes."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [part.repeat(2) for part in batch]


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, 8),
    "last dropped": lambda: DataLoader(DATA, 8, drop_last=True),
    "reversed": lambda: DataLoader(DATA, 8, sampler=Reversed(DATA)),
    "subclass of the random one": lambda: DataLoader(DATA, 8, sampler=EvenFirst(DATA)),
    "some of the samples": lambda: DataLoader(DATA, 8, sampler=SequentialSampler(range(20))),
    "own generator": lambda: DataLoader(DATA, 8, shuffle=True, generator=seeded()),
    "with replacement": lambda: DataLoader(
        DATA, 8, sampler=RandomSampler(DATA, replacement=True, num_samples=50, generator=seeded())
    ),
    "weighted": lambda: DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * 29, 40, generator=seeded())),
    "own batches": lambda: DataLoader(DATA, batch_sampler=Growing()),
    "own sampler, torch's batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Reversed(DATA), 5, True)),
    "own loader": lambda: Doubled(DATA, 8),
    "iterable": lambda: DataLoader(Numbers(), 8),
}


def share(make: Callable[[], Any], num_workers: int, epochs: int = 2) -> list[list[list[int]]]:
    """Return the samples of each batch as the workers have them together, and check what their shares say."""
    progresses = [Progress() for _ in range(num_workers)]
    workers = [
        SharedBatches(make(), index, num_workers, seed=7, progress=progress)
        for index, progress in enumerate(progresses)
    ]
    outcome = []
    for _ in range(epochs):
        outcome.append([])
        for parts in zip(*workers, strict=True):
            whole: list[int] = []
            for worker, part in zip(workers, parts, strict=True):
                assert len({len(column) for column in part}) == 1
                if num_workers > 1:
                    assert len(part[0]) == max(1, worker.share.num_own)
                whole += [] if worker.is_standing_in else part[0].tolist()
            assert num_workers == 1 or {worker.share.num_all for worker in workers} == {len(whole)}
            outcome[-1].append(whole)
        assert len({progress.digest for progress in progresses}) == 1
        assert not any(progress.open for progress in progresses)
    return outcome


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_order_is_that_of_the_scripts_own_loader(kind: str, num_workers: int) -> None:
    plain = LOADERS[kind]()
    expected = [[batch[0].tolist() for batch in plain] for _ in range(2)]
    assert share(LOADERS[kind], num_workers) == expected


DRAWN: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(DATA, 8, shuffle=True),
    "shuffled, last dropped": lambda: DataLoader(DATA, 8, shuffle=True, drop_last=True),
    "subset": lambda: DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(3, 13))),
    "twice as many": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=58)),
    "weighted": lambda: DataLoader(DATA, 8, sampler=WeightedRandomSampler([0.0, *[1.0] * 28], 40)),
    "of other data": lambda: DataLoader(DATA, 8, sampler=RandomSampler(range(10))),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_what_draws_from_the_processs_numbers_draws_alike_on_any_number_of_workers(kind: str) -> None:
    alone = share(DRAWN[kind], 1)
    assert share(DRAWN[kind], 2) == share(DRAWN[kind], 3) == alone
    assert alone[0] != alone[1], "another order in each epoch"
    plain = [batch[0].tolist() for batch in DRAWN[kind]()]
    assert [len(batch) for batch in plain] == [len(batch) for batch in alone[0]]
    if kind in ("shuffled", "subset"):
        assert sorted(chain(*plain)) == sorted(chain(*alone[0]))
    seen = set(chain(*alone[0]))
    assert (kind != "weighted" or 0 not in seen) and (kind != "of other data" or seen == set(range(10)))


def test_two_shuffled_loaders_have_orders_of_their_own() -> None:
    first, second = (SharedBatches(LOADERS["in order"](), 0, 1, 7, number=n) for n in range(2))
    assert [b[0].tolist() for b in first] == [b[0].tolist() for b in second]
    first, second = (SharedBatches(DRAWN["shuffled"](), 0, 1, 7, number=n) for n in range(2))
    assert [b[0].tolist() for b in first] != [b[0].tolist() for b in second]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_reading_processes_and_loops_that_are_left_early(is_persistent: bool) -> None:
    loader = DataLoader(DATA, 8, shuffle=True, num_workers=2, persistent_workers=is_persistent)
    batches = SharedBatches(loader, 1, 2, seed=7)
    expected = SharedBatches(DataLoader(DATA, 8, shuffle=True), 1, 2, seed=7)
    for length in (2, 4, 1, 4):
        for number, (batch, other) in enumerate(zip(batches, expected)):
            assert torch.equal(batch[0], other[0]) and batches.share == expected.share
            if number + 1 == length:
                break
    if is_persistent:  # or its processes would end whenever the garbage collector comes by
        batches._own_loader[0]._iterator._shutdown_workers()


def test_loops_over_the_same_loader_inside_of_each_other() -> None:
    progress = Progress()
    batches = SharedBatches(LOADERS["in order"](), 0, 2, 7, progress=progress)
    for outer in batches:
        if len(outer[0]) == 4:
            assert [len(inner[0]) for inner in batches] == [4, 4, 4, 3]
            (one,) = progress.open
            assert one.share == (4, 8), "the inner one's last batch is not the present one"


def test_workers_with_another_order_are_told_apart() -> None:
    def drawing() -> list[int]:
        return torch.randperm(NUM_SAMPLES).tolist()

    class Unseeded(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(drawing())

    for make in (lambda: DataLoader(DATA, 8, sampler=Unseeded(DATA)), lambda: Doubled(DATA, 8, shuffle=True)):
        digests = set()
        for index in range(2):
            progress = Progress()
            next(iter(SharedBatches(make(), index, 2, 7, progress=progress)))
            digests.add(progress.digest)
        assert len(digests) == 2


def test_what_the_loader_has_is_still_there() -> None:
    batches = SharedBatches(LOADERS["in order"](), 0, 2, 7)
    assert len(batches) == 4 and batches.dataset is DATA and batches.batch_size == 8
    with pytest.raises(AttributeError):
        _ = batches.no_such_thing


# Batches that are cut -----------------------------------------------------------------------------------------


def cut(*batches: Any, index: int = 1, num_workers: int = 2) -> list[Any]:
    return list(SharedBatches(list(batches), index, num_workers, 7))


def test_rows_of_everything_that_has_them() -> None:
    Pair = collections.namedtuple("Pair", "x y")
    batch = {
        "x": torch.arange(8).reshape(4, 2),
        "pair": Pair(np.arange(4), torch.arange(4.0)),
        "texts": ["a", "b", "c", "d"],
        "boxes": [torch.zeros(n, 4) for n in (1, 4, 0, 2)],
        "classes": ["cat", "dog", "bird"],
        "scale": torch.tensor(2.0),
        "split": "train",
        "step": 7,
    }
    (own,) = cut(batch)
    assert own["x"].tolist() == [[4, 5], [6, 7]] and own["pair"].x.tolist() == own["pair"].y.tolist() == [2, 3]
    assert own["texts"] == ["c", "d"] and [len(each) for each in own["boxes"]] == [0, 2]
    assert own["classes"] == batch["classes"] and own["scale"] == 2 and (own["split"], own["step"]) == ("train", 7)


def test_tensors_without_a_row_for_each_sample_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"batch\['pos'\] has 6 rows and batch\['x'\] has 4: .*Keep what has none out"):
        cut({"x": torch.zeros(4, 2), "pos": torch.arange(6)})
    with pytest.raises(DataError, match=r"batch\[1\]\['b'\]\[0\] has 1 rows and batch\[0\] has 4"):
        cut([torch.zeros(4), {"b": (np.zeros((1, 4)), 3)}])
    with pytest.raises(DataError, match=r"batch\[1\] is a Counter|batch\[1\] is a set, of which a worker cannot"):
        cut((torch.zeros(4), {1, 2}))


def test_alone_nothing_is_looked_at() -> None:
    odd = [{"x": torch.zeros(4, 2), "pos": torch.arange(6)}, "text", object()]
    assert all(given is own for given, own in zip(cut(*odd, index=0, num_workers=1), odd, strict=True))


def test_a_list_that_could_be_either_is_refused_unless_batches_before_have_told() -> None:
    def pairs(size: int) -> Any:
        return [[torch.zeros(size), torch.ones(size)], torch.zeros(size)]

    with pytest.raises(DataError, match=r"batch\[0\] has 2 entries, as many as the batch has samples"):
        cut(pairs(2))
    assert [len(own[0][0]) for own in cut(pairs(4), pairs(2))] == [2, 1]


def test_batches_without_a_tensor_are_refused() -> None:
    with pytest.raises(DataError, match="a batch is a dict without a tensor"):
        cut({"text": ["a", "b"]})
