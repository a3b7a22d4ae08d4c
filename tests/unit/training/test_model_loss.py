"""What a loss counts that a model computes itself is found out, or must be said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_jobs import small_job
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.core import Job, Use
from cordee.core.errors import CordeeError, JobError, ModelError
from cordee.training.components import Components, assemble

SIZE, LENGTH, VOCABULARY = 24, 6, 5


def sequences() -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (SIZE, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens}


def numbers() -> dict[str, Tensor]:
    tokens = sequences()["tokens"]
    return {"tokens": tokens, "target": tokens.float().mean(1)}


def classes() -> dict[str, Tensor]:
    return {"tokens": sequences()["tokens"], "labels": torch.arange(SIZE) % 3}


class OwnLoss(nn.Module):
    """`kind` is what its loss is the mean over."""

    def __init__(self, kind: str, zero: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.out = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, tokens: Tensor, labels: Any = None) -> Any:
        logits = self.out(self.embed(tokens))
        flat = logits.flatten(0, 1)
        if self.kind == "labels":
            return {"loss": F.cross_entropy(flat, labels.flatten()), "logits": logits}
        if self.kind == "next_labels":
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}
        if self.kind == "classes":
            pooled = logits.mean(1)
            return SimpleNamespace(loss=F.cross_entropy(pooled, labels), logits=pooled)
        if self.kind == "numbers":
            return F.mse_loss(logits.mean((1, 2)), labels), logits
        if self.kind == "none":
            return F.cross_entropy(flat, tokens.flatten())
        if self.kind == "sum":
            return {"loss": F.cross_entropy(flat, labels.flatten(), reduction="sum")}
        return {"logits": logits} if self.kind == "without" else {"loss": flat.sum(1)}


def build(kind: str, data: Any, *, zero: bool = False, strategy: Any = None, **loss: Any) -> Components:
    table = small_job().to_dict() | {
        "model": Use(OwnLoss, kind=kind, zero=zero),
        "data": {"use": data},
        "loss": Use("model", **loss),
        "strategy": strategy or {"name": "data_parallel", "workers": 2},
    }
    return assemble(Job.from_dict(table), Team())


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("kind", "data", "count", "shift"),
    [
        ("labels", sequences, 11, 0),
        ("next_labels", sequences, 9, 1),
        ("classes", classes, 2, 0),
        ("numbers", numbers, 2, 0),
    ],
)
def test_what_is_counted_is_found_out(kind: str, data: Any, count: int, shift: int, zero: bool) -> None:
    parts = build(kind, data, zero=zero)
    loss, targets = parts.computation.loss, parts.example.targets.clone()
    if targets.dim() > 1:
        targets[0, -1] = -100
    assert loss.count(targets) == count and loss.shift == shift and not loss.is_assumed
    assert parts.computation.counts_classes == (kind != "numbers") and not parts.warnings


def test_data_without_targets_counts_samples() -> None:
    parts = build("none", lambda: {"tokens": sequences()["tokens"]})
    assert parts.example.targets is None and parts.computation.loss.count_batch(parts.example) == 2


def test_a_count_of_ones_own_is_checked_and_kept() -> None:
    parts = build("next_labels", sequences, count=lambda targets: (targets[:, 1:] != -100).sum())
    assert not parts.warnings and not parts.computation.counts_classes
    (warning,) = build("next_labels", sequences, count="samples").warnings
    assert "not the mean of those of its parts, weighted by loss.count" in warning


@pytest.mark.parametrize(
    ("kind", "data", "loss", "error", "message"),
    [
        ("sum", sequences, {}, JobError, "is not the mean of those of its parts, and with strategy .* Set loss.count"),
        ("without", sequences, {}, ModelError, "the model returns a dict of 'logits' .*, without a loss"),
        ("odd", sequences, {}, ModelError, r"the model returns a dict of 'loss' \(12,\), without a loss"),
        (
            "labels",
            sequences,
            {"argument": "label"},
            ModelError,
            r"takes \(tokens, labels=…\), .* batch has tokens, label",
        ),
        ("labels", sequences, {"count": "label"}, JobError, "loss.count = 'label' is not known; did you mean 'labels'"),
        ("labels", sequences, {"count": "nowhere:count"}, JobError, "no module 'nowhere'"),
        ("labels", sequences, {"counts": "labels"}, JobError, "loss has no setting 'counts'; did you mean 'count'"),
    ],
)
def test_bad_losses(kind: str, data: Any, loss: Any, error: type[CordeeError], message: str) -> None:
    with pytest.raises(error, match=message):
        build(kind, data, **loss)


def test_alone_a_sum_is_a_warning() -> None:
    (warning,) = build("sum", sequences, strategy={"name": "single", "workers": 1}).warnings
    assert "test_loss depends on evaluation.batch_size" in warning


def test_no_targets_and_a_loss_that_needs_them() -> None:
    table = small_job().to_dict() | {"data": {"use": {"tokens": sequences()["tokens"]}}}
    with pytest.raises(JobError, match=r"has no targets, and loss.use = 'cross_entropy' compares .*data.target"):
        assemble(Job.from_dict(table), Team())


def test_which_output_to_compare() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, self.out(inputs)

    job = small_job(model=Several, loss=Use("cross_entropy", output=1))
    assert assemble(job, Team()).computation.counts_classes
    with pytest.raises(ModelError, match=r"loss.output = 'scores', but the model returns a tuple of '0'"):
        assemble(small_job(model=Several, loss=Use("cross_entropy", output="scores")), Team())
