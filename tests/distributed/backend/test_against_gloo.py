"""Every operation gives what gloo gives, for random types, shapes, roots and ways of calling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_cases import DTYPES, OPERATIONS, REDUCTIONS, Case, run_case
from backend_pool import ProcessPool
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cordee.communication.shared_memory import BackendSettings

# Small slots, so that most sizes travel in several chunks.
SMALL_SLOTS = BackendSettings(slot_bytes=8192)

sizes = st.one_of(st.integers(0, 40), st.sampled_from([1023, 2048, 2049, 40_001]))
shapes = st.one_of(sizes.map(lambda size: (size,)), st.tuples(st.integers(0, 30), st.integers(1, 30)))
cases = st.builds(
    Case,
    operation=st.sampled_from(OPERATIONS),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=shapes,
    reduction=st.sampled_from(REDUCTIONS),
    root=st.integers(0, 3),
    seed=st.integers(0, 1000),
    is_async=st.booleans(),
    is_strided=st.booleans(),
)


def on_hosts(*names: str, encrypt: bool) -> list[BackendSettings]:
    return [BackendSettings(host_id=name, slot_bytes=8192, encrypt=encrypt) for name in names]


# Members of one host, and of several: with the same number on each or not, in order or mixed up.
PLACES = {
    "2 members": SMALL_SLOTS,
    "3 members": SMALL_SLOTS,
    "1 + 1, encrypted": on_hosts("left", "right", encrypt=True),
    "2 + 1": on_hosts("left", "right", "left", encrypt=False),
    "1 + 1 + 1, encrypted": on_hosts("left", "middle", "right", encrypt=True),
}


@pytest.fixture(scope="module", params=PLACES)
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    places = PLACES[request.param]
    with ProcessPool(len(places) if isinstance(places, list) else int(request.param[0]), places) as made:
        yield made
        made.leave()


def is_meaningful(case: Case) -> bool:
    """Whether gloo, the reference, can do it too."""
    reduces = case.operation in (
        "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    )  # fmt: skip
    if not reduces:
        return True
    is_float = DTYPES[case.dtype].is_floating_point
    if case.reduction in ("BAND", "BOR", "BXOR"):
        return not is_float
    if case.reduction == "AVG":
        return is_float
    # Gloo adds booleans as bytes, which makes values that are neither true nor false.
    return case.dtype != "bool" or case.reduction in ("MIN", "MAX")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_results_equal_those_of_gloo(pool: ProcessPool, case: Case) -> None:
    assume(is_meaningful(case))
    pool.run(run_case, case)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_once_with_a_megabyte(pool: ProcessPool, operation: str) -> None:
    pool.run(run_case, Case(operation, "float32", (300_001,), "SUM", 1, 7, False, False))
