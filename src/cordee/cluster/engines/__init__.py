"""Where processes come from: the engines, and how one is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from cordee.cluster.engine import GRACE_S, Engine, stop_processes


@contextlib.contextmanager
def open_engine(preload: Sequence[str] = (), name: str = "local") -> Iterator[Engine]:
    """Inside, an engine is there whose processes have imported the modules of `preload`. Leaving ends all of them."""
    from cordee.cluster.engines.local import LocalEngine  # here: fork servers run a module of this package

    engine = {"local": LocalEngine}[name](preload)
    grace_s = 0.2  # after an error nobody waits for what processes still have to say
    try:
        yield engine
        grace_s = GRACE_S
    finally:
        try:
            stop_processes(engine, grace_s)
        finally:
            engine.close()
