"""The exchange of gradients by itself: what each member ends up with, for any of the ways gradients can be missing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool
from torch import Tensor, nn

from cordee.communication.exchange import AccumulatingExchange, GradientExchange, OverlappedExchange, broadcast
from cordee.core.errors import TrainingError

pytestmark = pytest.mark.timeout(60)


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def exchange_uneven(index: int, size: int) -> list[Any]:
    """Member i has i + 1 items with gradients 10, 10, …; members hold sums divided by the nominal count of 6."""
    weight, double, frozen = parameter(0, 0), parameter(0, dtype=torch.float64), parameter(0).requires_grad_(False)
    exchange = GradientExchange([weight, frozen, double], num_extras=2)
    outcomes = []
    for nominal in (6, 12):
        for each in (weight, double):
            each.grad = torch.full_like(each, 10.0 * (index + 1) / nominal)
        totals = exchange.reduce([float(index + 1), 0.5], count_at=0, nominal_count=nominal)
        outcomes.append((totals, weight.grad.tolist(), double.grad.tolist(), frozen.grad))
    return outcomes


def test_the_gradient_is_the_mean_over_all_items_however_they_are_shared_out(three: ProcessPool) -> None:
    for outcome in three.run(exchange_uneven):
        for totals, weight, double, frozen in outcome:
            assert totals == [6.0, 1.5]
            assert weight == pytest.approx([10.0, 10.0], rel=1e-6)
            assert double == pytest.approx([10.0], rel=1e-12)
            assert frozen is None


def exchange_with_gaps(index: int, size: int) -> tuple[Any, ...]:
    everybody, somebody, nobody = parameter(0), parameter(0), parameter(0)
    exchange = GradientExchange([everybody, somebody, nobody], num_extras=1)
    # Twice, so that what the first exchange left in the buffer would show.
    for _ in range(2):
        everybody.grad = torch.tensor([1.0])
        somebody.grad = torch.tensor([5.0]) if index == 1 else None
        nobody.grad = None
        exchange.reduce([1.0], count_at=0, nominal_count=size)
    return everybody.grad.item(), somebody.grad.item(), nobody.grad


def test_who_has_no_gradient_adds_nothing_and_what_nobody_has_stays_none(three: ProcessPool) -> None:
    assert three.run(exchange_with_gaps) == [(3.0, 5.0, None)] * 3


class Layers(nn.Module):
    """Five layers: one in double precision, one that not every member uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.rare, self.unused = (nn.Linear(8, 8) for _ in range(4))
        self.exact = nn.Linear(8, 8).double()

    def forward(self, inputs: Tensor, *, uses_rare: bool) -> Tensor:
        hidden = self.exact(self.first(inputs).double()).float()
        return self.last(self.rare(hidden) if uses_rare else hidden)  # type: ignore[no-any-return]


def train_layers(index: int, overlaps: bool) -> tuple[list[Any], list[int]]:
    """Return what each step gives, and how many segments were on their way before the gradients were complete.

    Members differ in how many passes they make, and in what they use.
    """
    model = Layers()
    parameters = list(model.parameters())
    exchange = OverlappedExchange(parameters, 1, 100) if overlaps else GradientExchange(parameters, 1)
    outcomes, num_early = [], []
    for step in range(4):
        model.zero_grad()
        torch.manual_seed(100 * step + index)
        uses_rare = index == 0 or step == 3
        if isinstance(exchange, OverlappedExchange):
            exchange.begin()
        num_passes = 0 if (step, index) == (2, 1) else 1 + step % 2
        for number in range(num_passes):
            outputs = model(torch.randn(3, 8), uses_rare=uses_rare)
            if isinstance(exchange, OverlappedExchange) and number == num_passes - 1:
                used = [model.first, model.exact, model.last, *([model.rare] if uses_rare else [])]
                exchange.expect([parameter for layer in used for parameter in layer.parameters()])
            outputs.square().sum().backward()
        if isinstance(exchange, OverlappedExchange):
            num_early.append(len(exchange._works))
        totals = exchange.reduce([1.0], count_at=0, nominal_count=2)
        outcomes.append((totals, [None if p.grad is None else p.grad.tolist() for p in parameters]))
    return outcomes, num_early


def exchange_both_ways(index: int, size: int) -> tuple[list[Any], list[Any], list[int]]:
    flat, _ = train_layers(index, overlaps=False)
    return flat, *train_layers(index, overlaps=True)


def test_an_exchange_during_the_backward_pass_has_the_same_bits(three: ProcessPool) -> None:
    members = three.run(exchange_both_ways)
    for flat, overlapped, _ in members:
        assert flat == overlapped == members[0][0]
    early = [num_early for _, _, num_early in members]
    assert min(early[0]) > 0, "some are on their way before the backward pass has ended"
    assert early[1][2] == 0, "none are where there is no pass"


def change_late(index: int, size: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    exchange = OverlappedExchange(list(model.parameters()), 0, 100)
    hidden = model[1](model[0](torch.ones(2, 8)))

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            model[2](torch.ones(1, 8)).sum().backward()

    hidden.register_hook(again)
    exchange.begin()
    outputs = model[2](hidden * 1.0)
    exchange.expect(model.parameters())
    with pytest.raises(TrainingError) as caught:
        outputs.sum().backward()
    exchange.begin()  # what was on its way arrives
    dist.barrier()
    return str(caught.value)


def test_a_gradient_that_changes_after_it_was_sent_is_an_error(three: ProcessPool) -> None:
    for said in three.run(change_late):
        assert "a gradient changed after it was sent" in said and "strategy.reducer = 'flat'" in said


def let_go(index: int, size: int) -> int:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    exchange = OverlappedExchange(list(model.parameters()), 0, 100)
    before = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())  # type: ignore[attr-defined]
    assert before > 0
    gc.disable()
    del exchange
    gc.enable()
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())  # type: ignore[attr-defined]


def test_an_exchange_that_is_let_go_leaves_no_hooks(three: ProcessPool) -> None:
    assert three.run(let_go) == [0, 0, 0]


def exchange_twice(index: int, size: int) -> list[float]:
    """Gradients that add up over two exchanges, the second in two parts, one of which counts for nothing."""
    weight, rare = parameter(0), parameter(0)
    exchange = AccumulatingExchange([weight, rare], num_extras=1, is_first=index == 0)
    exchange.begin_pass()
    (weight * 1.0 + rare * 7.0).sum().backward()
    exchange.end_pass()
    assert exchange.reduce_local([1.0]) == [float(size)]
    leftovers = []
    for factor, is_kept in ((10.0, True), (float("nan"), False), (20.0, True)):
        leftovers.append(exchange.begin_pass(is_kept=is_kept))
        (weight * factor).sum().backward()
        exchange.end_pass(is_kept=is_kept)
        assert exchange.local_parameters() == [weight] and exchange.has_local
    assert leftovers == [2.0 + 14.0, 14.0, 14.0], "what is common, and nothing else"
    exchange.reduce_local([1.0])
    assert not exchange.has_local
    return [weight.grad.item(), rare.grad.item()]


def test_what_is_summed_already_is_not_summed_again(two: ProcessPool) -> None:
    assert two.run(exchange_twice) == [[2.0 + 60.0, 14.0]] * 2


def exchange_parts_of_some(index: int, size: int) -> list[Any]:
    """The first exchange leaves a common gradient; then the last member alone adds to it, and all drop another's."""
    weight, dropped = parameter(0), parameter(0)
    exchange = AccumulatingExchange([weight, dropped], num_extras=0, is_first=index == 0)
    for factor in (1.0, 100.0):
        exchange.begin_pass()
        if factor == 1.0 or index == size - 1:
            (weight * factor).sum().backward()
        (dropped * 5.0).sum().backward()
        exchange.end_pass()
        if factor == 100.0:
            dropped.grad = None  # as zero_grad does, between a part and the exchange
        exchange.reduce_local([])
    return [weight.grad.item(), dropped.grad]


def test_a_part_of_one_member_is_added_to_what_all_have(three: ProcessPool) -> None:
    assert [each[0] for each in three.run(exchange_parts_of_some)] == [103.0] * 3


def broadcast_many(index: int, size: int) -> list[Any]:
    whole = torch.arange(6.0).reshape(2, 3) * (1 if index == 0 else -1)
    tensors = [
        whole.t(),
        torch.tensor(7 if index == 0 else 0),
        torch.tensor([index == 0]),
        torch.empty(0),
        nn.Parameter(torch.full((2,), float(index))),
        torch.tensor([float(index)], dtype=torch.bfloat16),
    ]
    broadcast(tensors)
    return [tensor.tolist() for tensor in tensors]


def test_everybody_gets_the_first_members_values(three: ProcessPool) -> None:
    first, *others = three.run(broadcast_many)
    assert first[0] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert first[1:] == [7, [True], [], [0.0, 0.0], [0.0]]
    assert others == [first, first]


def test_a_model_without_anything_to_train_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="nothing to train"):
        GradientExchange([], num_extras=1)
