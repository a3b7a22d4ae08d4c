"""Measuring on a whole data set: each sample once, the model left as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cordee.compute import Computation, evaluate, make_loss
from cordee.core import Batch, Use

CPU = torch.device("cpu")


def computation(loss: str = "cross_entropy", counts_classes: bool = True, **settings: int) -> Computation:
    return Computation(make_loss(Use(loss, **settings)), CPU, "fp32", counts_classes)


def cut(inputs: Tensor, targets: Tensor, size: int) -> Iterator[Batch]:
    return map(Batch, inputs.split(size), targets.split(size))


@pytest.mark.parametrize("size", [1, 7, 10, 23, 100])
def test_the_whole_set_in_any_cut_equals_the_direct_computation(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 10)
    inputs, targets = torch.randn(23, 4), torch.randint(0, 10, (23,))
    metrics = evaluate(model, cut(inputs, targets, size), computation(), num_classes=10)
    assert metrics is not None
    outputs = model(inputs)
    best = outputs.topk(5).indices
    assert metrics.loss == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-6)
    assert metrics.accuracy == (outputs.argmax(1) == targets).sum().item() / 23
    assert metrics.top5_accuracy == sum(t in row for t, row in zip(targets.tolist(), best.tolist())) / 23
    assert metrics.num_samples == 23
    assert metrics.seconds > 0


def test_top_five_of_five_classes_says_nothing() -> None:
    metrics = evaluate(
        nn.Linear(4, 5), [Batch(torch.randn(3, 4), torch.tensor([0, 1, 4]))], computation(), num_classes=5
    )
    assert metrics is not None and metrics.top5_accuracy is None and metrics.accuracy is not None


def test_numbers_have_a_loss_and_no_accuracy() -> None:
    model = nn.Linear(4, 1)
    inputs, targets = torch.randn(5, 4), torch.randn(5)
    metrics = evaluate(model, cut(inputs, targets, 2), computation("mse", False), num_classes=None)
    assert metrics is not None and metrics.accuracy is None and metrics.top5_accuracy is None
    assert metrics.loss == pytest.approx(nn.functional.mse_loss(model(inputs).squeeze(1), targets).item(), rel=1e-6)


def test_tokens_that_are_ignored_count_nowhere() -> None:
    model = nn.Embedding.from_pretrained(torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]))
    inputs, targets = torch.tensor([[0, 1, 2], [0, 0, 2]]), torch.tensor([[0, 1, 1], [0, 0, 2]])
    metrics = evaluate(model, cut(inputs, targets, 1), computation(ignore_index=0), num_classes=3)
    assert metrics is not None
    assert metrics.accuracy == pytest.approx(2 / 3), "of the three tokens that are not 0, two are right"


def test_accuracy_over_tokens_is_a_share_with_a_loss_of_the_users_too() -> None:
    def mine(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    model = nn.Embedding.from_pretrained(torch.eye(3))
    tokens = torch.tensor([[0, 1, 2], [0, 0, 2]])
    metrics = evaluate(
        model, cut(tokens, tokens, 1), Computation(make_loss(Use(mine)), CPU, "fp32", True), num_classes=3
    )
    assert metrics is not None and metrics.accuracy == 1.0


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_in_evaluation_mode_and_then_back(mode: bool) -> None:
    seen = []
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train(mode)

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen.append((module.training, output.requires_grad))

    model.register_forward_hook(note)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, [Batch(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))], computation(), num_classes=3)
    assert (seen, model.training) == ([(False, False)], mode)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_mode_comes_back_after_an_error_as_well() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        evaluate(model, [Batch(torch.randn(2, 5), torch.tensor([0, 1]))], computation(), num_classes=3)
    assert model.training


def test_what_a_model_keeps_from_an_evaluation_can_be_trained_with() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.scale: Tensor | None = None

        def forward(self, inputs: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.full((4,), 2.0)
            return self.linear(inputs * self.scale)

    model, batch = Caching(), Batch(torch.randn(2, 4, requires_grad=True), torch.tensor([0, 1]))
    evaluate(model, [batch], computation(), num_classes=3)
    computation().forward_backward(model, [batch], total_count=2, measure=False)


def test_it_can_be_told_to_stop() -> None:
    calls = iter([False, False, True])
    model = nn.Linear(4, 3)
    batches = cut(torch.randn(9, 4), torch.zeros(9, dtype=torch.long), 1)
    assert evaluate(model, batches, computation(), num_classes=3, should_stop=lambda: next(calls)) is None
    assert len(list(batches)) == 6, "the third batch was taken and not computed"
    assert model.training


def test_no_samples_have_no_metrics() -> None:
    metrics = evaluate(nn.Linear(4, 3), [], computation(), num_classes=3)
    assert metrics is not None
    assert math.isnan(metrics.loss) and metrics.accuracy is None and metrics.num_samples == 0


def test_sums_of_a_team_are_combined() -> None:
    model = nn.Linear(4, 3)
    batch = Batch(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    alone = evaluate(model, [batch], computation(), num_classes=3)
    together = evaluate(model, [batch], computation(), num_classes=3, combine=lambda values: [2 * v for v in values])
    assert alone is not None and together is not None
    assert (together.loss, together.accuracy, together.num_samples) == (alone.loss, alone.accuracy, 12)
