"""Jobs that strategies which split a model are compared with `single` on, and how they are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from driving import Outcome, Table, job, largest_difference, train_alone, train_together
from process_pool import ProcessPool

LARGEST_DIFFERENCE = 1e-5  # of weights after 50 steps of SGD in single precision: sums are taken in another order
SMALL_IMAGES = {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 10, "size": 50, "test_size": 21}
TOKENS = {"use": "synthetic", "kind": "tokens", "shape": [16], "num_classes": 30, "size": 97, "test_size": 21}

JOBS: dict[str, Table] = {
    # 97 = 3 · 32 + 1: all but one worker have nothing to do in the last step of an epoch.
    "mlp": job(data={"size": 97}, model={"use": "mlp", "hidden": [32, 16]}),
    "mlp, momentum and clipping": job(
        optimizer={"use": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4},
        training={"clip_norm": 0.3, "accumulate": 2},
        data={"size": 70},
    ),
    "lenet": job(
        model={"use": "lenet"},
        data={"use": "synthetic", "shape": [1, 28, 28], "num_classes": 10, "size": 66, "test_size": 23},
        optimizer={"use": "sgd", "lr": 0.02},
    ),
    # In double precision, and with a rate at which the loss falls: see test_data_parallel.
    "resnet20": job(
        model={"use": "networks:double_resnet"},
        data=SMALL_IMAGES,
        optimizer={"use": "sgd", "lr": 0.05},
        training={"batch_size": 16},
    ),
    # The output layer's weight is the embedding's; of the tokens of class 3, which the loss does not count, shares
    # of one size have unequal numbers.
    "gpt": job(
        model={"use": "gpt", "num_layers": 2, "embedding_width": 32},
        data=TOKENS,
        optimizer={"use": "sgd", "lr": 0.01},
        loss={"use": "cross_entropy", "ignore_index": 3},
    ),
}


class References:
    """What one worker makes of each job, computed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Outcome] = {}

    def __call__(self, table: Table) -> Outcome:
        key = repr(table)
        if key not in self._known:
            self._known[key] = train_alone(table, self._folder / str(len(self._known)))
        return self._known[key]


def check_equal(pool: ProcessPool, table: Table, strategy: Table, alone: Outcome, run_dir: Path) -> list[Outcome]:
    """Train with the strategy and compare weights, every step's events and the evaluation with one worker's."""
    together = train_together(pool, {**table, "strategy": strategy}, run_dir)
    assert largest_difference(alone, together[0]) <= LARGEST_DIFFERENCE
    assert len(alone.losses()) == 50
    np.testing.assert_allclose(together[0].losses(), alone.losses(), rtol=2e-5, atol=2e-6)
    for key in ("accuracy", "lr", "samples", "epoch", "step"):
        assert [e[key] for e in together[0].of("step")] == [e[key] for e in alone.of("step")], key
    norms = [(e["gradient_norm"], f["gradient_norm"]) for e, f in zip(together[0].of("step"), alone.of("step"))]
    # A gradient that has become small is a sum of large terms: it has fewer right digits than the weights.
    assert all(a == b or a == pytest.approx(b, rel=1e-4) for a, b in norms), norms
    (measured,), (expected,) = together[0].of("evaluation"), alone.of("evaluation")
    assert measured["samples"] == expected["samples"] == table["data"]["test_size"]
    assert measured["test_accuracy"] == expected["test_accuracy"]
    assert measured["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
    return together
