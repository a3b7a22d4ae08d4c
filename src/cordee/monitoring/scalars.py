"""The numbers of a run that can be drawn over its steps, under the names that all sinks give them."""

from __future__ import annotations

from cordee.monitoring.events import AnyEvent, Evaluation, Logged, Step

_SCALARS: dict[type, dict[str, str]] = {
    Step: {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "lr": "train/lr",
        "samples_per_second": "train/samples_per_second",
    },
    Evaluation: {
        "test_loss": "test/loss",
        "test_accuracy": "test/accuracy",
        "test_top5_accuracy": "test/top5_accuracy",
    },
}


def scalars_of(event: AnyEvent) -> dict[str, float]:
    """Return the numbers of an event by their names, such as `train/loss`; what was not measured is left out. Pure.

    Only events that have a `step` have numbers.
    """
    found: dict[str, float | None] = {}
    if isinstance(event, Step | Evaluation):
        found = {name: getattr(event, field) for field, name in _SCALARS[type(event)].items()}
    if isinstance(event, Evaluation):
        found |= {f"test/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, Logged):
        found = {f"logged/{name}": value for name, value in event.values.items()}
    return {name: float(value) for name, value in found.items() if value is not None}
