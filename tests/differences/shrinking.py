"""Makes a failing trial smaller, one choice at a time, as long as it still fails. Pure but for the test it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from differences import generator
from differences.generator import Table

MOST_TRIES = 60


def shrink(
    choices: Table,
    fails: Callable[[Table], bool],
    most_tries: int = MOST_TRIES,
    simpler: Callable[[Table], Iterator[Table]] = generator.simpler,
) -> Table:
    """Return a trial that fails and of which no simpler one, tried here, does."""
    tried = {json.dumps(choices, sort_keys=True)}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(choices):
            key = json.dumps(candidate, sort_keys=True)
            if key in tried:
                continue
            if len(tried) > most_tries:
                return choices
            tried.add(key)
            if fails(candidate):
                choices, is_smaller = candidate, True
                break
    return choices
