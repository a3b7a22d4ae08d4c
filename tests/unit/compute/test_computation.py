"""Forward and backward passes: parts make the whole, precision, accuracy, clipping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cordee.compute import Computation, Loss, clip_gradients, make_loss, split_batch
from cordee.compute.computation import count_correct
from cordee.core import Batch, Use

CPU = torch.device("cpu")
# Sums of a few dozen float32 products in another order: a few units in the last place.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def computation(loss: Use | None = None, precision: str = "fp32", counts_classes: bool = True) -> Computation:
    return Computation(make_loss(loss or Use("cross_entropy")), CPU, precision, counts_classes)


def gradients(
    model: nn.Module, compute: Computation, parts: list[Batch], total: int, measure: bool = False
) -> tuple[Loss, list[Tensor]]:
    model.zero_grad()
    loss = compute.forward_backward(model, parts, total_count=total, measure=measure)
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_accumulated_parts_equal_the_full_batch(num_parts: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = Batch(torch.randn(10, 4), torch.randint(0, 3, (10,)))
    compute = computation()
    whole_loss, whole = gradients(model, compute, [batch], 10, measure=True)
    parts_loss, parts = gradients(model, compute, split_batch(batch, num_parts), 10, measure=True)
    torch.testing.assert_close(parts, whole, **TOLERANCE)
    assert parts_loss.mean == pytest.approx(whole_loss.mean, rel=1e-6)
    assert (parts_loss.count, parts_loss.num_correct) == (whole_loss.count, whole_loss.num_correct)
    assert whole_loss.num_samples == parts_loss.num_samples == 10


def test_accumulated_tokens_equal_the_full_batch_however_many_each_part_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    inputs, targets = torch.randint(0, 5, (4, 6)), torch.randint(0, 5, (4, 6))
    targets[0, 1:], targets[1], targets[2, :3] = -100, -100, -100  # 1, 0, 3 and 6 tokens that count
    batch, compute = Batch(inputs, targets), computation()
    whole_loss, whole = gradients(model, compute, [batch], 10)
    parts_loss, parts = gradients(model, compute, split_batch(batch, 4), 10)
    torch.testing.assert_close(parts, whole, **TOLERANCE)
    assert whole_loss.count == parts_loss.count == 10
    assert parts_loss.mean == pytest.approx(whole_loss.mean, rel=1e-6)
    expected = nn.functional.cross_entropy(model(inputs)[targets >= 0], targets[targets >= 0]).item()
    assert whole_loss.mean == pytest.approx(expected, rel=1e-6)


def test_some_parts_give_their_share_of_the_whole_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch, compute = Batch(torch.randn(5, 4), torch.randint(0, 3, (5,))), computation()
    _, whole = gradients(model, compute, [batch], 5)
    first, rest = Batch(batch.inputs[:2], batch.targets[:2]), Batch(batch.inputs[2:], batch.targets[2:])
    one_loss, one = gradients(model, compute, [first], 5)
    _, other = gradients(model, compute, [rest], 5)
    torch.testing.assert_close([a + b for a, b in zip(one, other)], whole, **TOLERANCE)
    assert one_loss.mean == pytest.approx(compute.loss.mean(model(first.inputs), first.targets).item(), rel=1e-6)


def test_nothing_to_learn_from_gives_no_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    batch = Batch(torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), -100))
    loss, found = gradients(model, computation(), [batch, Batch(batch.inputs[:0], batch.targets[:0])], 0, measure=True)
    assert (loss.mean, loss.count, loss.accuracy, found) == (0.0, 0, None, [])


@given(st.integers(0, 20), st.integers(1, 8))
def test_parts_are_even_and_in_order(num_samples: int, num_parts: int) -> None:
    batch = Batch(torch.arange(num_samples).view(-1, 1), torch.arange(num_samples))
    parts = split_batch(batch, num_parts)
    sizes = [part.num_samples for part in parts]
    assert len(parts) == num_parts
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)


def test_accuracy_is_measured_when_asked_for_and_meaningful() -> None:
    model, batch = nn.Linear(2, 2, bias=False), Batch(torch.eye(2), torch.tensor([0, 0]))
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    assert gradients(model, computation(), [batch], 2, measure=True)[0].accuracy == 0.5
    assert gradients(model, computation(), [batch], 2, measure=False)[0].accuracy is None
    numbers = Batch(torch.eye(2), torch.zeros(2, 2))
    unclassed = computation(Use("mse"), counts_classes=False)
    assert gradients(model, unclassed, [numbers], 2, measure=True)[0].accuracy is None


def test_ignored_classes_are_never_right() -> None:
    # A model that always says 0: right on every padding token, which must not count.
    outputs, targets = torch.tensor([[[1.0, 0.0]] * 4]), torch.tensor([[0, 0, 1, 1]])
    assert count_correct(outputs, targets) == 2
    assert count_correct(outputs, targets, ignored=0) == 0
    assert count_correct(outputs, targets, top=5, ignored=0) == 2


def test_top_five() -> None:
    outputs = torch.arange(10.0).repeat(3, 1)
    assert count_correct(outputs, torch.tensor([9, 5, 4]), top=5) == 2
    assert count_correct(outputs[:, :3], torch.tensor([0, 1, 2]), top=5) == 3


def test_bf16_computes_in_bf16_and_keeps_float32_weights() -> None:
    torch.manual_seed(0)
    seen = []
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = Batch(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    loss, found = gradients(model, computation(precision="bf16"), [batch], 8)
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(g.dtype == torch.float32 for g in found)
    reference, _ = gradients(model, computation(), [batch], 8)
    assert loss.mean != reference.mean
    assert loss.mean == pytest.approx(reference.mean, rel=2e-2)  # 8 bits of precision


def test_clipping_scales_all_gradients_by_their_joint_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(torch.cat([p.grad for p in parameters[:2]]), torch.tensor([0.6, 0.8]))
    assert clip_gradients(parameters, 10.0) == pytest.approx(1.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6]))
    parameters[0].grad = torch.tensor([math.inf])
    assert math.isinf(clip_gradients(parameters, 1.0))


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_parts_have_the_bits_that_they_would_have_alone(num_parts: int) -> None:
    """Kernels add in another order at another alignment: a row of 5 numbers begins at every one."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(5, 4), torch.randn(17, 5)
    whole = Batch(rows[1:], torch.zeros(16, dtype=torch.int64))
    parts = split_batch(whole, num_parts)
    for part in parts:
        assert torch.equal(layer(part.inputs), layer(part.inputs.clone()))
        assert part.inputs.data_ptr() % 64 == 0 and part.targets.data_ptr() % 64 == 0
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
