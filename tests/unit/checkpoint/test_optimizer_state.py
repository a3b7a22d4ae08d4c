"""Each optimizer of torch, saved to disk and loaded again, continues bit for bit as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cordee.checkpoint import (
    State,
    load,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    save,
    weights_sha256,
)
from cordee.core.errors import CheckpointError

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

CASES: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam lr tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS line search": lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
}


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table((inputs[:, 0].abs() * 10).long() % 20)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=generator)
        targets = torch.randint(3, (16,), generator=generator)

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            dtype = next(model.parameters()).dtype
            loss = nn.functional.cross_entropy(model(inputs.to(dtype)), targets)
            loss.backward()
            return loss

        optimizer.step(closure)


def through_disk(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    parts = State.join(model=State(model_state(model), {}), optimizer=optimizer_state(optimizer, model))
    return load(save(root, 4, parts, keep=1))


def test_every_optimizer_of_torch_is_among_the_cases() -> None:
    classes = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert classes == {case.split()[0] for case in CASES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_restored_optimizer_goes_on_bit_for_bit(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (Sparse() if case == "SparseAdam" else Dense()).to(dtype)
    fresh = copy.deepcopy(model)
    optimizer = CASES[case](model.parameters())
    train(model, optimizer, 0, 4)
    state = through_disk(tmp_path, model, optimizer)
    train(model, optimizer, 4, 7)

    restored = CASES[case](fresh.parameters())
    load_model_state(fresh, state.part("model").tensors)
    load_optimizer_state(restored, fresh, state.part("optimizer"))
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    train(fresh, restored, 4, 7)

    assert weights_sha256(model_state(fresh)) == weights_sha256(model_state(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors.items()), "the state was changed"
    again = optimizer_state(restored, fresh)
    expected = optimizer_state(optimizer, model)
    assert again.values == expected.values
    assert weights_sha256(again.tensors) == weights_sha256(expected.tensors)


def test_order_and_grouping_of_the_parameters_may_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dense()
    fresh = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    train(model, optimizer, 0, 4)
    state = through_disk(tmp_path, model, optimizer)
    train(model, optimizer, 4, 7)

    backwards = list(fresh.parameters())[::-1]
    restored = torch.optim.Adam([{"params": backwards[:2]}, {"params": backwards[2:]}], lr=0.5)
    load_model_state(fresh, state.part("model").tensors)
    load_optimizer_state(restored, fresh, state.part("optimizer"))
    assert [(group["lr"], group["betas"]) for group in restored.param_groups] == [(0.02, (0.8, 0.9))] * 2
    train(fresh, restored, 4, 7)
    assert weights_sha256(model_state(fresh)) == weights_sha256(model_state(model))


def test_groups_with_different_settings_cannot_be_merged() -> None:
    model = Dense()
    parameters = list(model.parameters())
    grouped = torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.2}])
    state = optimizer_state(grouped, model)
    merged = torch.optim.SGD(parameters, lr=0.3)
    with pytest.raises(CheckpointError, match=r"'body\.0\.weight' and 'body\.0\.bias' had different"):
        load_optimizer_state(merged, model, state)
    assert merged.param_groups[0]["lr"] == 0.3


def test_a_scheduled_rate_and_the_names_given_to_torch_survive() -> None:
    model = Dense()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    train(model, optimizer, 0, 1)
    schedule.step()
    state = optimizer_state(optimizer, model)
    restored = torch.optim.SGD(model.parameters(), lr=9.0)
    load_optimizer_state(restored, model, state)
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert restored.param_groups[0]["initial_lr"] == 0.1


def test_a_tied_weight_is_known_by_any_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self, swap: bool) -> None:
            super().__init__()
            names = ("head", "embedding") if swap else ("embedding", "head")
            for name in names:
                self.add_module(name, nn.Linear(6, 6, bias=False))
            self.head.weight = self.embedding.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(inputs))

    model, swapped = Tied(swap=False), Tied(swap=True)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    state = optimizer_state(optimizer, model)
    restored = torch.optim.Adam(swapped.parameters())
    load_optimizer_state(restored, swapped, state)
    assert torch.equal(restored.state[swapped.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])


def test_what_does_not_fit_is_named() -> None:
    model = Dense()
    adam = torch.optim.Adam(model.parameters())
    state = optimizer_state(adam, model)
    with pytest.raises(CheckpointError, match="is of Adam, the job uses SGD"):
        load_optimizer_state(torch.optim.SGD(model.parameters()), model, state)
    with pytest.raises(CheckpointError, match=r"'body\.0\.bias' is not optimized"):
        load_optimizer_state(torch.optim.Adam([model.body[0].weight]), model, state)
    fewer = optimizer_state(torch.optim.Adam([model.body[0].weight]), model)
    with pytest.raises(CheckpointError, match=r"'body\.3\.bias' is missing"):
        load_optimizer_state(adam, model, fewer)
    wider = Dense()
    wider.body[3] = nn.Linear(8, 4)
    with pytest.raises(CheckpointError, match=r"'body\.3\.weight' had shape \(3, 8\), has \(4, 8\)"):
        load_optimizer_state(torch.optim.Adam(wider.parameters()), wider, state)
    with pytest.raises(CheckpointError, match=r"shape \(2,\) that is not one of Dense"):
        optimizer_state(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), model)
    with pytest.raises(CheckpointError, match="malformed"):
        load_optimizer_state(adam, model, State({}, {"optimizer": "Adam"}))


def test_lbfgs_refuses_another_order() -> None:
    model = Dense()
    optimizer = torch.optim.LBFGS(model.parameters())
    train(model, optimizer, 0, 1)
    state = optimizer_state(optimizer, model)
    with pytest.raises(CheckpointError, match="in the order in which they were saved"):
        load_optimizer_state(torch.optim.LBFGS(list(model.parameters())[::-1]), model, state)


def test_state_that_cannot_be_saved_is_named() -> None:
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.body[0].weight]["hook"] = object()
    with pytest.raises(CheckpointError, match=r"'body\.0\.weight\.hook' is a object"):
        optimizer_state(optimizer, model)
