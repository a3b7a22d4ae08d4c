"""The place in a script's batches: kept, found again by another process or team, and refused where it cannot be."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from cordee.core.errors import DataError
from cordee.data.shared_batches import Place, Progress, SharedBatches, place_of

DATA = TensorDataset(torch.arange(20))


class Ready:
    """Batches that are made already, which begin again each time."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(20).split(3))


class Hidden(Sampler[int]):
    """Draws from random numbers that nobody can put back."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=3, shuffle=True)


def with_generator() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5))


def with_replacement() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, replacement=True, num_samples=50, generator=torch.Generator().manual_seed(5))
    return DataLoader(DATA, batch_size=3, sampler=sampler)


class DrawnOneByOne(Sampler[list[int]]):
    """Draws each batch of indices when it is asked for."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield torch.randint(20, (3,), generator=self.generator).tolist()


def drawn_one_by_one() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=DrawnOneByOne())


class Stream(IterableDataset[torch.Tensor]):
    """Draws each sample when it is asked for."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(24):
            yield torch.randint(100, (), generator=self.generator)


def streamed() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=3)


def share(batches: Iterable[Any], worker: int = 0, num_workers: int = 1, seed: int = 7) -> SharedBatches:
    progress = Progress()
    progress.is_kept = True
    return SharedBatches(batches, worker, num_workers, seed, progress=progress)


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch[0] if isinstance(batch, list | tuple) else batch).tolist()
    return found


def through_message(place: Place) -> Place:
    return msgspec.convert(msgspec.json.decode(msgspec.json.encode(place)), Place)


MAKERS = [shuffled, with_generator, with_replacement, drawn_one_by_one, streamed, Ready]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("num_taken", [0, 1, 4, 7])
def test_another_process_continues_in_the_middle_of_an_epoch(make: Callable[[], Any], num_taken: int) -> None:
    one = share(make())
    first_epoch = [numbers(batch) for batch in one]
    iterator = iter(one)
    taken = [numbers(batch) for batch in islice(iterator, num_taken)]
    place = through_message(place_of(one.mark()))
    rest = [numbers(batch) for batch in iterator]
    third = [numbers(batch) for batch in one]
    other = share(make(), seed=99)
    other.continue_from(place, 7)
    assert place_of(other.mark()) == place  # kept again before anything was taken
    assert [numbers(batch) for batch in other] == rest
    assert [numbers(batch) for batch in other] == third
    assert make is Ready or first_epoch != [*taken, *rest]


def with_processes(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(DATA, num_workers=1, persistent_workers=True, generator=generator, **options)


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    "options", [{"batch_size": 3, "shuffle": True}, {"batch_sampler": DrawnOneByOne()}], ids=["at once", "one by one"]
)
def test_processes_that_read_ahead_continue_with_the_same_batches(options: dict[str, Any], num_before: int) -> None:
    def make() -> DataLoader[Any]:
        fresh = {key: DrawnOneByOne() if key == "batch_sampler" else value for key, value in options.items()}
        return with_processes(**fresh)

    one = share(make())
    for _ in range(num_before):
        _ = list(one)
    iterator = iter(one)
    _ = list(islice(iterator, 2))
    place = place_of(one.mark())
    rest = [numbers(batch) for batch in iterator]
    following = [numbers(batch) for batch in one]
    other = share(make())
    other.continue_from(place, 7)
    assert [numbers(batch) for batch in other] == rest
    assert [numbers(batch) for batch in other] == following
    one.continue_from(place, 7)  # in the process that has iterated already
    assert [numbers(batch) for batch in one] == rest
    assert [numbers(batch) for batch in one] == following
    del one, other, iterator
    gc.collect()  # ends the processes


@pytest.mark.parametrize("make", MAKERS)
def test_another_number_of_workers_takes_what_is_left_once(make: Callable[[], Any]) -> None:
    one = share(make())
    iterator = iter(one)
    _ = list(islice(iterator, 2))
    place = place_of(one.mark())
    rest = sorted(number for batch in iterator for number in numbers(batch))
    found = []
    for worker in range(2):
        other = share(make())
        other.share_among(worker, 2)
        other.continue_from(place, 7)
        for batch in other:
            found += [] if other.is_standing_in else numbers(batch)
    assert sorted(found) == rest


def test_an_epoch_that_is_over_is_not_given_again() -> None:
    one = share(shuffled())
    iterator = iter(one)
    _ = list(islice(iterator, 7))  # all of it, and the loop has not noticed
    other = share(shuffled())
    other.continue_from(place_of(one.mark()), 7)
    assert list(other) == []
    assert [numbers(batch) for batch in other] == [numbers(batch) for batch in one]


def test_an_order_that_cannot_be_found_again_is_refused() -> None:
    loader = DataLoader(DATA, batch_size=3, sampler=Hidden())
    one = share(loader)
    iterator = iter(one)
    _ = list(islice(iterator, 3))
    other = share(loader)
    other.continue_from(place_of(one.mark()), 7)
    with pytest.raises(DataError, match="are not the first ones now"):
        _ = list(other)


def test_an_iterator_cannot_be_continued() -> None:
    one = share(iter(torch.arange(20).split(3)))
    iterator = iter(one)
    next(iterator)
    place = place_of(one.mark())
    with pytest.raises(DataError, match="cannot be continued"):
        share(iter(torch.arange(20).split(3))).continue_from(place, 7)


def test_an_iteration_of_an_earlier_attempt_is_refused() -> None:
    one = share(shuffled())
    iterator = iter(one)
    next(iterator)
    one._progress.begin_attempt(0, 0)
    with pytest.raises(DataError, match="begun before the loop"):
        next(iterator)


def test_two_loops_over_one_loader_have_no_place() -> None:
    one = share(shuffled())
    pair = zip(one, one, strict=True)
    next(pair)
    with pytest.raises(DataError, match="two loops over one loader"):
        place_of(one.mark())
