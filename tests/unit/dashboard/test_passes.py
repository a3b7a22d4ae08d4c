"""The passes of a pipeline, and its bubble beside what it would be in theory."""

from __future__ import annotations

import pytest

from cordee.dashboard.passes import SampledPasses, bubble, bubble_in_theory
from cordee.monitoring.timeline import Line, StepPasses

Row = tuple[str, int, int, float, float]


def gpipe(workers: int, microbatches: int) -> dict[str, list[Row]]:
    """Passes that are all one second long, in the order of gpipe."""
    back = microbatches + workers - 1
    return {
        f"worker {stage}": [
            *(("forward", stage, m, float(stage + m), 1.0) for m in range(microbatches)),
            *(("backward", stage, m, float(back + workers - 1 - stage + m), 1.0) for m in range(microbatches)),
        ]
        for stage in range(workers)
    }


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (3, 4), (4, 1)])
def test_the_bubble_of_equal_passes_is_that_of_theory(workers: int, microbatches: int) -> None:
    members = gpipe(workers, microbatches)
    theory = bubble_in_theory(members)
    assert theory is not None
    assert theory["bubble"] == pytest.approx((workers - 1) / (microbatches + workers - 1))
    assert bubble(members) == pytest.approx(theory["bubble"])


def test_several_copies_of_a_pipeline_and_several_stages_of_a_worker() -> None:
    copies = {f"{name} of copy {copy}": rows for copy in range(2) for name, rows in gpipe(2, 4).items()}
    assert bubble_in_theory(copies) == {"workers": 2, "stages": 2, "microbatches": 4, "bubble": 1 / 5}
    rows = [("forward", stage, m, 0.0, 1.0) for m in range(4) for stage in (0, 2)]
    others = [("forward", stage, m, 0.0, 1.0) for m in range(4) for stage in (1, 3)]
    found = bubble_in_theory({"worker 0": rows, "worker 1": others})
    assert found == {"workers": 2, "stages": 4, "microbatches": 4, "bubble": 1 / 9}


def test_a_backward_pass_in_two_halves_has_no_simple_theory() -> None:
    assert bubble_in_theory({"worker 0": [("weights", 0, 0, 0.0, 1.0)]}) is None


def line(step: int, **columns: list[int]) -> Line:
    values = {"kind": [0, 1], "stage": [0, 0], "microbatch": [0, 0], "at": [0, 5000], "spent": [5000, 5000]}
    passes = StepPasses(step=step, **{**values, **columns})
    return Line(member="worker-0", pid=1, host="h", origin_us=10**6, passes=[passes])


def test_the_newest_step_of_which_all_recorded_passes_is_shown() -> None:
    taken = SampledPasses()
    assert taken.newest() is None
    for step in (10, 20, 30):
        taken.take("worker 0", [line(step)], lambda moment: moment)
    taken.take("worker 1", [line(20, at=[5000, 9000])], lambda moment: moment)
    found = taken.newest()
    assert found is not None
    assert (found["step"], list(found["members"]), found["begin"]) == (20, ["worker 0", "worker 1"], 1.0)
    assert found["seconds"] == pytest.approx(0.014)


def test_damaged_columns_are_passed_over() -> None:
    taken = SampledPasses()
    taken.take("worker 0", [line(1, at=[]), line(2, kind=[9, 9])], lambda moment: moment)
    assert taken.newest() is None
