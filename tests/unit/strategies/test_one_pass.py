"""Shards that are computed at once have the bits of shards that are computed one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.compute import NO_VOTES, Computation, Votes
from cordee.compute.losses import LossFunction
from cordee.core import Batch
from cordee.core.shards import share_shards
from cordee.strategies import one_pass
from cordee.strategies.one_pass import OnePass, gives_equal_bits
from cordee.strategies.shards import ShardReducer

NUM_SHARDS = 8


def mlp(inputs: int = 12, hidden: int = 16, outputs: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(inplace=True)), nn.Linear(hidden, outputs)
    )


def convolutions(channels: int = 3) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 4, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def computation() -> Computation:
    loss = LossFunction(nn.functional.cross_entropy, lambda targets: int((targets != -100).sum()), -100)
    return Computation(loss, torch.device("cpu"), "fp32", counts_classes=True)


def shards(shape: tuple[int, ...], sizes: list[int], seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.randn((size, *shape), generator=generator), torch.randint(0, 5, (size,), generator=generator))
        for size in sizes
    ]


def gradients(
    model: nn.Module,
    parts: list[Batch],
    *,
    at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
    computation: Callable[[], Computation] = computation,
) -> list[Tensor]:
    """Return the gradients and the loss of one step on one worker."""
    with monkeypatch.context() as changed:
        if not at_once:
            changed.setattr(OnePass, "layers_for", lambda *_: None)
        total = sum(part.num_samples for part in parts)
        reducer = ShardReducer(model, computation(), Team(), share_shards(NUM_SHARDS, 0, 1), total)
        torch.manual_seed(7)
        loss = reducer.step(parts, measure=True, vote=lambda: Votes(*NO_VOTES))
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*found, torch.tensor([loss.mean, loss.count, float(loss.num_correct or 0), loss.num_samples])]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 32])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (mlp, (12,)),
        (lambda: mlp(7, 9), (7,)),
        (lambda: mlp(1 * 5 * 5, 33), (1, 5, 5)),
        (convolutions, (3, 16, 16)),
        (lambda: convolutions(1), (1, 15, 15)),
    ],
    ids=["even", "odd", "images", "convolutions", "one channel"],
)
def test_a_step_has_the_bits_of_separate_passes(
    make: Callable[[], nn.Module], shape: tuple[int, ...], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes: where they do not give equal bits, the shards are computed one by one."""
    parts = shards(shape, [size] * NUM_SHARDS)
    one, other = (gradients(make(), parts, at_once=way, monkeypatch=monkeypatch) for way in (True, False))
    assert_same(one, other)


@pytest.mark.parametrize(
    ("width", "size", "activation"),
    [(5, 16, nn.ReLU), (9, 8, nn.ReLU), (9, 16, nn.ReLU)]  # views of gradients begin at odd places
    + [(33, 4, activation) for activation in (nn.SiLU, nn.Sigmoid, nn.ELU, nn.Softplus, nn.Tanh, nn.GELU)],
)
def test_values_that_the_trial_did_not_have(
    width: int, size: int, activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which a difference is rare, or depends on where a gradient lies: one step in ten or more has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), activation(), nn.Linear(width, 5))
    for seed in range(20):
        parts = shards((16,), [size] * NUM_SHARDS, seed)
        one, other = (gradients(model, parts, at_once=way, monkeypatch=monkeypatch) for way in (True, False))
        assert_same(one, other)


@pytest.mark.parametrize(
    "of",
    [lambda outputs: outputs.sum(1), lambda outputs: outputs.t().reshape(-1).cumsum(0)[: len(outputs)]],
    ids=["expanded", "transposed"],
)
def test_a_loss_whose_gradient_lies_otherwise(of: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products add in another order where a matrix is transposed."""
    loss = LossFunction(lambda outputs, targets: ((of(outputs) - targets) ** 2).mean(), len, -100)

    def own() -> Computation:
        return Computation(loss, torch.device("cpu"), "fp32", counts_classes=False)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 7))
    for seed in range(10):
        parts = shards((16,), [16] * NUM_SHARDS, seed)
        one, other = (
            gradients(model, parts, at_once=way, monkeypatch=monkeypatch, computation=own) for way in (True, False)
        )
        assert_same(one, other)


def test_uneven_and_empty_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ([17] * 3 + [16] * 5, [2] * 4 + [1] * 4, [1] * 5 + [0] * 3):
        parts = shards((12,), sizes)
        assert_same(*(gradients(mlp(), parts, at_once=way, monkeypatch=monkeypatch) for way in (True, False)))


def test_a_shard_of_which_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = shards((12,), [16] * NUM_SHARDS)
    parts[3].targets.fill_(-100)
    assert_same(*(gradients(mlp(), parts, at_once=way, monkeypatch=monkeypatch) for way in (True, False)))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("make", [mlp, convolutions], ids=["mlp", "convolutions"])
def test_how_many_shards_a_worker_has_does_not_change_them(make: Callable[[], nn.Module], num_workers: int) -> None:
    shape, model = ((12,), mlp()) if make is mlp else ((3, 16, 16), convolutions())
    parts = shards(shape, [16] * NUM_SHARDS)
    parameters = list(model.parameters())

    def rows(first: int, stop: int) -> list[list[Tensor]]:
        reducer = ShardReducer(model, computation(), Team(), share_shards(NUM_SHARDS, 0, 1), 128)
        own = parts[first:stop]
        layers = OnePass(model, computation(), parameters).layers_for(own)
        if layers is None:  # of one shard, or where the kernels differ
            found = []
            for part in own:
                grads = torch.autograd.grad(
                    nn.functional.cross_entropy(model(part.inputs), part.targets) / 8, parameters
                )
                found.append([grad.clone() for grad in grads])
            return found
        made = [reducer._take_row() for _ in own]

        def loss_of(shard: int, run: Callable[..., Any]) -> Any:
            return computation().forward_backward(run, [own[shard]], total_count=128, measure=False)

        assert reducer._one_pass.compute(layers, own, made, loss_of) is not None
        return [[view.clone() for view in row.views] for row in made]

    whole = rows(0, NUM_SHARDS)
    held = [share_shards(NUM_SHARDS, worker, num_workers) for worker in range(num_workers)]
    split = [row for own in held for row in rows(own.first, own.stop)]
    for one, other in zip(whole, split, strict=True):
        assert_same(one, other)


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (2 if inputs.max() > 3 else 1)  # depends on the other samples


def with_hook() -> nn.Module:
    model = mlp()
    model[2].register_forward_hook(lambda module, inputs, output: output - output.mean(0))
    return model


def with_gradient_hook() -> nn.Module:
    model = mlp()
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 5))
    model[2].weight = model[0].weight
    return model


def replaced() -> nn.Module:
    model = mlp()
    model[2].forward = lambda inputs: inputs[:, :5] - inputs[:, :5].mean(0)  # type: ignore[method-assign]
    return model


def frozen() -> nn.Module:
    model = mlp()
    model[2].bias.requires_grad_(False)
    return model


def unaligned() -> nn.Module:
    """Kernels may add in another order than they do for the copies that are tried."""
    model = mlp()
    model[2].weight = nn.Parameter(torch.randn(5 * 16 + 1)[1:].view(5, 16))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(mlp(), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        lambda: nn.Sequential(Doubled(12, 5)),
        with_hook,
        with_gradient_hook,
        tied,
        replaced,
        frozen,
        unaligned,
    ],
    ids=["random", "statistics", "own class", "hook", "gradient hook", "tied", "replaced", "frozen", "unaligned"],
)
def test_other_models_are_computed_shard_by_shard(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = make()
    parts = shards((12,), [16] * NUM_SHARDS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert OnePass(model, computation(), trained).layers_for(parts) is None
    gradients(model, parts, at_once=True, monkeypatch=monkeypatch)


def test_a_hook_that_comes_later_is_seen() -> None:
    model, parts = mlp(), shards((12,), [16] * NUM_SHARDS)
    found = OnePass(model, computation(), list(model.parameters()))
    before = found.layers_for(parts)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    assert found.layers_for(parts) is None
    if before is None:
        pytest.skip("the kernels of this machine give other bits at once")


def test_gradients_that_would_take_much_memory_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, parts = mlp(), shards((12,), [16] * NUM_SHARDS)
    num_bytes = NUM_SHARDS * sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(one_pass, "gives_equal_bits", lambda *_: True)
    for most, is_taken in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(one_pass, "MOST_BYTES", most)
        found = OnePass(model, computation(), list(model.parameters()))
        assert (found.layers_for(parts) is not None) == is_taken


def test_kernels_that_add_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.functional.linear

    def other_order(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) > 16:  # as a kernel for large matrices may do
            half = weight.shape[1] // 2
            return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t() + bias
        return linear(x, weight, bias)

    monkeypatch.setattr(one_pass.nn.functional, "linear", other_order)
    layers = [nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 5)]
    assert not gives_equal_bits(layers, torch.zeros(16, 64), [16] * NUM_SHARDS)


def test_the_trial_changes_neither_the_model_nor_the_random_numbers() -> None:
    layers = [nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 5)]
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    state = torch.get_rng_state()
    gives_equal_bits(layers, torch.zeros(16, 12), [16] * NUM_SHARDS)
    assert torch.equal(state, torch.get_rng_state())
    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert_same(before, after)
    assert all(parameter.grad is None for parameter in after)


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    class Nothing(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.0

    assert not gives_equal_bits([nn.Linear(12, 5), Nothing()], torch.zeros(16, 12), [16, 16])
