from __future__ import annotations

import itertools
import threading
import time

import pytest

from cordee.data.loader import in_background


def is_running() -> bool:
    return any(thread.name == "cordee-prefetch" for thread in threading.enumerate())


def test_order_and_none_values_are_kept():
    assert list(in_background(lambda: iter([1, None, 3]), ahead=2)) == [1, None, 3]
    assert not is_running()


def test_stays_within_its_lead():
    made = []

    def produce():
        for number in range(100):
            made.append(number)
            yield number

    numbers = in_background(produce, ahead=3)
    next(numbers)
    time.sleep(0.1)
    assert len(made) <= 5  # one taken, three waiting, one in the hand
    numbers.close()


def test_error_comes_in_its_place():
    def produce():
        yield 1
        raise ValueError("broken")

    numbers = in_background(produce, ahead=2)
    assert next(numbers) == 1
    with pytest.raises(ValueError, match="broken"):
        next(numbers)
    assert not is_running()


def test_close_does_not_wait_for_a_full_queue():
    numbers = in_background(lambda: itertools.count(), ahead=1)
    next(numbers)
    time.sleep(0.02)
    start = time.monotonic()
    numbers.close()
    assert time.monotonic() - start < 0.5
    assert not is_running()


def test_dropping_the_generator_ends_the_thread():
    numbers = in_background(lambda: itertools.count(), ahead=1)
    next(numbers)
    del numbers
    assert not is_running()
