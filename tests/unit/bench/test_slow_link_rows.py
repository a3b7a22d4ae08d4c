"""What the figures of a slow link make of a contestant, also of one that never reaches the accuracy."""

from __future__ import annotations

from cordee.bench.slow_link import _rows


def figures(case: str, seconds: list[float], accuracy: float, loss: float, num_bytes: float) -> dict[str, list[float]]:
    found = {"seconds_to_accuracy": seconds, "accuracy": [accuracy], "loss": [loss], "bytes": [num_bytes]}
    return {f"{case}: {name}": values for name, values in found.items()}


def test_peers_are_those_of_the_same_work_and_an_accuracy_that_was_not_reached_is_no_figure() -> None:
    raw = {
        **figures("lenet/ddp", [60.0], 0.83, 0.4, 300e6),
        **figures("lenet/ddp_powersgd", [9.0], 0.84, 0.4, 25e6),
        **figures("lenet/local_sgd_int4", [4.0], 0.835, 0.4, 1.5e6),
        **figures("resnet20/ddp", [400.0], 0.85, 0.4, 800e6),
        **figures("resnet20/local_sgd_int4", [], 0.7, 0.8, 4e6),
        **figures("gpt/data_parallel", [], 0.0, 2.0, 400e6),
        **figures("gpt/diloco", [], 0.0, 2.05, 3e6),
    }
    rows = {(row["work"], row["contestant"]): row for row in _rows(raw)}
    fast = rows["lenet", "local_sgd_int4"]
    assert (fast["times_sooner_than_ddp"], fast["times_sooner_than_ddp_powersgd"]) == (15.0, 2.25)
    assert (fast["times_fewer_bytes"], fast["outcome"]) == (200.0, "reached")
    never = rows["resnet20", "local_sgd_int4"]
    assert (never["seconds_to_accuracy"], never["times_sooner_than_ddp"], never["outcome"]) == (None, None, "MISSED")
    assert rows["gpt", "diloco"]["outcome"] == "reached"
    assert rows["lenet", "ddp"]["outcome"] == ""
