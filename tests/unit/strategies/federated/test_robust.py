"""Robust aggregation against its definitions, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cordee.core.errors import TrainingError
from cordee.strategies.federated import robust
from cordee.strategies.federated.robust import aggregate
from cordee.strategies.federated.settings import RobustSettings


def rows(num: int, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(num, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(updates: Tensor, use: str, wrong: float = 0.2) -> Tensor:
    settings = RobustSettings(use=use, wrong=wrong)  # type: ignore[arg-type]
    return aggregate(settings, lambda start, stop: updates[:, start:stop], *updates.shape)


def krum_scores(updates: Tensor, num_wrong: int) -> list[float]:
    """Blanchard et al. 2017: the sum of the squared distances to the n - f - 2 closest others."""
    scores = []
    for i, one in enumerate(updates):
        distances = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(updates) if j != i)
        scores.append(sum(distances[: len(updates) - num_wrong - 2]))
    return scores


@pytest.mark.parametrize(("num", "wrong", "num_wrong"), [(10, 0.2, 2), (10, 0.3, 3), (7, 0.25, 1), (5, 0.0, 0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_krum_is_the_update_with_the_smallest_score(
    num: int, wrong: float, num_wrong: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robust, "_CHUNK_NUMBERS", 3 * num)  # columns are read in several pieces
    updates = rows(num, seed=seed)
    scores = krum_scores(updates, num_wrong)
    assert torch.equal(of(updates, "krum", wrong), updates[scores.index(min(scores))])
    best = sorted(range(num), key=lambda i: scores[i])[: num - num_wrong]
    torch.testing.assert_close(of(updates, "multi_krum", wrong), updates[best].mean(dim=0))


@pytest.mark.parametrize("use", ["krum", "multi_krum", "median", "trimmed_mean", "geometric_median"])
def test_wrong_updates_do_not_move_a_rule_far(use: str) -> None:
    honest = 1.0 + 0.1 * rows(8)
    updates = torch.cat([honest[:3], torch.full((1, 7), -1e6), honest[3:], torch.full((1, 7), 1e6)]).double()
    assert float((of(updates, use) - 1.0).abs().max()) < 0.5


def test_a_share_of_the_updates_is_the_number_that_it_means() -> None:
    """0.29 times 100 is 28.999999999999996."""
    updates = rows(100, length=1)
    ordered = updates.sort(dim=0).values
    assert torch.equal(of(updates, "trimmed_mean", 0.29), ordered[29:71].mean(dim=0))


def test_krum_refuses_too_few_updates() -> None:
    with pytest.raises(TrainingError, match=r"at least 2 · f \+ 3 updates .* a round has 6 with f = 2"):
        of(rows(6), "krum", 0.4)
