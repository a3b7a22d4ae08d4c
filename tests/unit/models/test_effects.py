"""What forward passes do beside computing: done in every step of a pipeline, or refused with the line."""

from __future__ import annotations

import inspect
import random
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.cutting import Chain, make_chain
from cordee.models.effects import Kept, find_kept, mixes_samples

INPUTS = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
CALLS = [0]


class Model(nn.Module):
    """Two layers and between them what a subclass does; by default a module of its own."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle = middle if middle is not None else nn.Identity()
        self.register_buffer("mean", torch.ones(8))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))


class DecaysInPlace(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.layer(hidden) - self.mean


class Assigns(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.layer(hidden) - self.mean


class Drops(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return hidden
        return hidden + self.layer(hidden)


class Noisy(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden + torch.randn(8))


class NoisyByNumpy(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden * float(np.random.rand()))


class Frozen(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(hidden)


class Remembers(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        self.last = hidden
        return self.layer(hidden)


class AsksValues(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) if hidden.sum() > 0 else -self.layer(hidden)


def train_twice(run: Model | Chain, model: Model) -> list[Tensor]:
    """Return outputs, gradients and buffers of two training passes."""
    model.train()
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model.zero_grad()
        outputs = INPUTS
        for block in run.blocks if isinstance(run, Chain) else [run]:
            outputs = block(outputs)
        outputs.square().sum().backward()
        found += [outputs.detach(), *(torch.zeros(()) if p.grad is None else p.grad for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.parametrize("middle", [DecaysInPlace, Assigns, Drops, Noisy, NoisyByNumpy, Frozen, Remembers, AsksValues])
def test_modules_that_do_more_than_compute_are_kept_whole(middle: type[Middle]) -> None:
    torch.manual_seed(1)
    model = Model(middle())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state(), random.getstate(), vars(model.middle).keys()
    chain = make_chain(model, INPUTS)
    assert len(chain.blocks) >= 3
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (
        random.getstate(),
        vars(model.middle).keys(),
    )
    expected = train_twice(model, model)
    model.load_state_dict(start)
    for one, other in zip(train_twice(chain, model), expected, strict=True):
        torch.testing.assert_close(one, other)


class RootDrops(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.training and random.random() < 0.5:  # this line
            hidden = self.middle(hidden)
        return self.last(hidden)


class RootDropsByTorch(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.training and torch.rand(1) < 0.5:  # this line
            hidden = self.middle(hidden)
        return self.last(hidden)


class RootCounts(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.calls += 1  # this line
        return self.last(hidden)


class RootFreezes(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():  # this line
            hidden = self.first(inputs)
            if inputs.sum() > 1e9:
                hidden = hidden * 2
        return self.last(self.middle(hidden))


class RootInitialises(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        nn.init.normal_(self.mean)
        return self.last(hidden * self.mean)


class RootDecays(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.last(self.middle(hidden - self.mean))


class RootAssigns(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(self.middle(hidden - self.mean))


class RootNoisy(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs) + torch.randn(8))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RootDrops, "draws random numbers"),
        (RootDropsByTorch, "draws random numbers"),
        (RootCounts, "changes its attribute 'calls'"),
        (RootFreezes, "computes a part under torch.no_grad|symbolically traced"),
    ],
)
def test_a_model_that_does_it_itself_is_refused_with_the_line(kind: type[Model], message: str) -> None:
    model = kind(Drops() if kind is RootFreezes else None)
    with pytest.raises(ModelError, match=message) as caught:
        make_chain(model, INPUTS)
    assert model.calls == 0
    lines, start = inspect.getsourcelines(kind)
    (place,) = re.findall(r"test_effects\.py:(\d+)", str(caught.value))
    if "symbolically" not in str(caught.value):
        assert "this line" in lines[int(place) - start] or "hidden = self.first" in lines[int(place) - start]


class GlobalCounts(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        CALLS[0] += 1
        return self.last(self.first(inputs) * CALLS[0])


class BranchesOnTheBatch(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden if len(inputs) > 4 else -hidden)


class ChangesAConstant(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros(8)
        total += self.first(inputs).mean(0)
        return self.last(self.first(inputs) + total)


@pytest.mark.parametrize("kind", [GlobalCounts, BranchesOnTheBatch, RootAssigns])
def test_what_a_graph_would_freeze_is_refused(kind: type[Model]) -> None:
    with pytest.raises(ModelError, match=r"cannot be (traced|cut)"):
        make_chain(kind(), INPUTS)


@pytest.mark.parametrize("kind", [ChangesAConstant, RootInitialises, RootDecays, RootNoisy])
def test_what_torch_export_follows_is_done_in_every_pass(kind: type[Model]) -> None:
    torch.manual_seed(1)
    model = kind()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    chain = make_chain(model, INPUTS)
    found = train_twice(chain, model)
    model.load_state_dict(start)
    for one, other in zip(found, train_twice(model, model), strict=True):
        torch.testing.assert_close(one, other)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.history.append(len(hidden))
        return hidden


@pytest.mark.parametrize(
    "model", [Model(Counts()), nn.Sequential(nn.Linear(8, 8), Counts(), nn.Linear(8, 3))], ids=["traced", "sequence"]
)
def test_numbers_that_only_one_worker_would_have_are_refused(model: nn.Module) -> None:
    expected = r"\(Counts\) changes its attribute 'history' \(at .*test_effects\.py:\d+\).*register_buffer"
    with pytest.raises(ModelError, match=expected):
        make_chain(model, INPUTS)
    counter = next(module for module in model.modules() if isinstance(module, Counts))
    assert counter.history == []


class Keeps(nn.Module):
    """Remembers something of each training pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.kind, self.passes, self.last, self.mask = kind, 0, 0.0, None
        self.mean, self.noise = torch.zeros(8), torch.Generator()
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.layer(inputs)))
        self.mask = torch.ones(8) if self.mask is None else self.mask
        if not self.training:
            return hidden
        if self.kind in ("anneals", "counts", "counts, and has a buffer"):
            self.passes += 1
        if self.kind == "anneals":
            hidden = hidden / self.passes
        if self.kind == "looks":
            self.last, self.seen = float(hidden.sum()), hidden.detach()
        if self.kind == "averages":
            self.mean = self.mean + hidden.detach().mean(0)
        if self.kind in ("has a buffer", "counts, and has a buffer"):
            self.shift = self.shift + inputs.mean(0)
        if self.kind == "draws":
            hidden = hidden + torch.rand(8, generator=self.noise)
        return hidden * self.mask - self.mean - self.shift


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("nothing", None),
        ("looks", None),
        ("has a buffer", None),
        ("anneals", Kept("changes its attribute 'passes'", True, False)),
        ("counts", Kept("changes its attribute 'passes'", False, False)),
        ("counts, and has a buffer", Kept("changes its attribute 'passes'", False, False)),
        ("averages", Kept("changes its attribute 'mean'", True, False)),
        ("draws", Kept("changes its attribute 'noise'", True, True)),
    ],
)
def test_what_a_model_keeps_outside_of_buffers_is_found(kind: str, kept: Kept | None) -> None:
    inner = Keeps(kind)
    model = nn.Sequential(nn.Identity(), inner).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    found = find_kept(model, lambda: model(INPUTS))
    if kept is not None:
        kept = kept._replace(what=f"the forward pass of module '1' (Keeps) {kept.what}")
    assert found == kept
    assert inner.passes == 0 and inner.mask is None and not model.training and not inner.mean.any()
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())


class Centred(nn.Module):
    """Looks at the whole batch, always or when it is trained."""

    def __init__(self, only_trained: bool) -> None:
        super().__init__()
        self.only_trained = only_trained

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0) if self.training or not self.only_trained else inputs


@pytest.mark.parametrize(
    ("middle", "mixes"),
    [
        (Centred(False), True),
        (Centred(True), True),
        (nn.BatchNorm1d(8), False),  # which has settings of its own
        (nn.LayerNorm(8), False),
        (nn.Dropout(0.5), False),
        (nn.Sequential(nn.Dropout(0.5), Centred(True)), True),
        (nn.RReLU(), False),  # draws random numbers when it is trained
        (DecaysInPlace(), False),
    ],
)
def test_whether_samples_depend_on_each_other(middle: nn.Module, mixes: bool) -> None:
    model = Model(middle)
    before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert mixes_samples(model, INPUTS) is mixes
    assert model.training and middle.training and torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
