"""What all builders promise alike."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cordee.models
from cordee.core.errors import ModelError
from cordee.models import BUILTIN_MODELS

# Small settings of each model, and the data they are for.
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"input_shape": (4,), "num_classes": 3, "hidden": (8, 8), "dropout": 0.5},
    "lenet": {"input_shape": (1, 28, 28), "num_classes": 10},
    "resnet": {"input_shape": (3, 16, 16), "num_classes": 10, "depth": 20},
    "wide_resnet": {"input_shape": (3, 16, 16), "num_classes": 10, "depth": 10, "widen_factor": 1, "dropout": 0.3},
    "fbnet": {"input_shape": (3, 16, 16), "num_classes": 10, "width": 0.25, "dropout": 0.2},
    "gpt": {
        "input_shape": (8,),
        "num_classes": 11,
        "num_layers": 2,
        "num_heads": 2,
        "embedding_width": 16,
        "dropout": 0.1,
    },
}
WITH_DROPOUT = [name for name, arguments in SMALL.items() if "dropout" in arguments]


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BUILTIN_MODELS[name](**SMALL[name])


def samples(name: str, num_samples: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (num_samples, *SMALL[name]["input_shape"])
    if name == "gpt":
        return torch.randint(SMALL[name]["num_classes"], shape, generator=generator)
    return torch.randn(shape, generator=generator)


def test_public_names() -> None:
    public = {name for name in vars(cordee.models) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(cordee.models, name), types.ModuleType)}
    assert set(cordee.models.__all__) == {"BUILTIN_MODELS", *BUILTIN_MODELS}
    assert set(cordee.models.__all__) <= public
    assert public - modules <= set(cordee.models.__all__)
    assert list(BUILTIN_MODELS) == list(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_signature_can_be_checked_against_a_job_file(name: str) -> None:
    builder = BUILTIN_MODELS[name]
    hints = typing.get_type_hints(builder)
    parameters = inspect.signature(builder).parameters
    assert list(parameters)[:2] == ["input_shape", "num_classes"]
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        hint = hints[parameter.name]
        is_plain = hint in (int, float, bool, str) or typing.get_origin(hint) is typing.Literal
        assert is_plain or hint in (tuple[int, ...], tuple[str, ...]), parameter.name
        if parameter.name not in ("input_shape", "num_classes"):
            assert parameter.default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", SMALL)
def test_is_a_chain_of_named_blocks(name: str) -> None:
    model = build(name).eval()
    assert isinstance(model, nn.Sequential)
    x = samples(name)
    with torch.no_grad():
        whole = model(x)
        for _, block in model.named_children():
            x = block(x)
    assert torch.equal(x, whole)


@pytest.mark.parametrize("name", SMALL)
def test_may_be_cut_before_any_block(name: str) -> None:
    """A stage starts from a leaf that wants a gradient, which no block may overwrite."""
    model = build(name)
    x = samples(name)
    for _, block in model.named_children():
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        kept = x.detach().clone()
        out = block(x)
        assert torch.equal(x, kept)
        assert isinstance(out, Tensor)
        if out.requires_grad:
            out.sum().backward()
        x = out


@pytest.mark.parametrize("name", SMALL)
def test_seed_decides_weights_and_outputs(name: str) -> None:
    first, again, other = build(name, seed=7), build(name, seed=7), build(name, seed=8)
    for (key, value), (_, same) in zip(first.state_dict().items(), again.state_dict().items()):
        assert torch.equal(value, same), key
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    torch.manual_seed(0)
    expected = first(samples(name))
    torch.manual_seed(0)
    assert torch.equal(again(samples(name)), expected)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_is_random_in_training_only(name: str) -> None:
    model, x = build(name), samples(name)
    torch.manual_seed(0)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range(name: str, dropout: float) -> None:
    with pytest.raises(ModelError, match=f"'{name}'.* dropout = .*at least 0 and less than 1"):
        BUILTIN_MODELS[name](**{**SMALL[name], "dropout": dropout})


@pytest.mark.parametrize("name", SMALL)
def test_no_classes(name: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}' cannot have num_classes = 0: it must be 1 or more"):
        BUILTIN_MODELS[name](**{**SMALL[name], "num_classes": 0})


@pytest.mark.parametrize("name", ["lenet", "resnet", "wide_resnet", "fbnet"])
@pytest.mark.parametrize("shape", [(), (784,), (28, 28), (0, 28, 28), (1, 3, 28, 28)])
def test_samples_that_are_not_images(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=rf"'{name}' takes images of shape \(channels, height, width\)"):
        BUILTIN_MODELS[name](**{**SMALL[name], "input_shape": shape})
