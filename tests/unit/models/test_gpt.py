from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cordee.core.errors import ModelError
from cordee.models import gpt
from cordee.models.gpt import CausalSelfAttention

GPT2_SMALL = {"num_layers": 12, "num_heads": 12, "embedding_width": 768}


def small(**arguments: Any) -> nn.Sequential:
    torch.manual_seed(0)
    settings = {"num_layers": 2, "num_heads": 2, "embedding_width": 16, **arguments}
    return gpt(input_shape=(8,), num_classes=11, **settings)


def test_parameters_of_gpt2_small(num_parameters: Callable[..., int]) -> None:
    arguments: dict[str, Any] = {"input_shape": (1024,), "num_classes": 50_257, **GPT2_SMALL}
    tied = num_parameters(gpt, **arguments)
    assert tied == 124_439_808
    assert num_parameters(gpt, **arguments, tie_embeddings=False) == tied + 50_257 * 768
    # Per layer 4 + 1 widths of biases in the perceptron, 3 + 1 in the attention, 2 in the norms; 1 at the end.
    assert num_parameters(gpt, **arguments, bias=False) == tied - (12 * 11 + 1) * 768


@pytest.mark.parametrize("length", [1, 5, 8])
def test_logits_for_every_position(length: int) -> None:
    model = small()
    tokens = torch.randint(11, (3, length))
    logits = model(tokens)
    assert logits.shape == (3, length, 11)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_future_tokens_do_not_change_past_logits() -> None:
    model = small().eval()
    tokens = torch.randint(11, (4, 8))
    with torch.no_grad():
        expected = model(tokens)
        for cut in range(1, 8):
            changed = tokens.clone()
            changed[:, cut:] = (changed[:, cut:] + 1) % 11
            logits = model(changed)
            # The kernels may group the sums otherwise, so equal up to rounding; a leak would be of order 0.1.
            torch.testing.assert_close(logits[:, :cut], expected[:, :cut], rtol=0, atol=1e-6)
            assert not torch.allclose(logits[:, cut:], expected[:, cut:], atol=1e-3)


def test_gradient_reaches_only_the_past() -> None:
    model = small().eval()
    embedded = model[0](torch.randint(11, (1, 8))).detach().requires_grad_()
    model[1:](embedded)[0, 3].sum().backward()
    assert embedded.grad is not None
    reached = embedded.grad[0].abs().sum(dim=-1) > 0
    assert reached.tolist() == [True] * 4 + [False] * 4


def test_position_matters() -> None:
    with torch.no_grad():
        logits = small().eval()(torch.full((1, 8), 5))
    assert not torch.allclose(logits[0, 0], logits[0, 7], atol=1e-4)


def test_tied_embeddings_are_one_parameter() -> None:
    model = small()
    assert model.get_parameter("output.vocabulary.weight") is model.get_parameter("embedding.token.weight")
    clone = copy.deepcopy(model)
    assert clone.get_parameter("output.vocabulary.weight") is clone.get_parameter("embedding.token.weight")
    untied = small(tie_embeddings=False)
    assert not torch.equal(
        untied.get_parameter("output.vocabulary.weight"), untied.get_parameter("embedding.token.weight")
    )


def test_weights_are_drawn_as_in_gpt2() -> None:
    torch.manual_seed(0)
    model = gpt(input_shape=(64,), num_classes=500, num_layers=8, num_heads=4, embedding_width=64)
    expected = {
        "embedding.token.weight": 0.02,
        "embedding.position.weight": 0.01,
        "layer1.attention.query_key_value.weight": 0.02,
        "layer8.perceptron.expand.weight": 0.02,
        "layer1.attention.project.weight": 0.02 / math.sqrt(16),
        "layer8.perceptron.project.weight": 0.02 / math.sqrt(16),
    }
    for name, std in expected.items():
        # At least 4096 weights: the deviation of their deviation is about 1 %; 5 % is more than four of them.
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.05), name
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name


def test_untrained_model_guesses_evenly() -> None:
    with torch.no_grad():
        model = gpt(input_shape=(16,), num_classes=65).eval()
        tokens = torch.randint(65, (4, 17), generator=torch.Generator().manual_seed(0))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(65), abs=0.2)


def test_a_share_of_the_rows_is_a_share_of_the_heads() -> None:
    """What tensor parallelism relies on: halves of the weights compute halves of the heads."""
    torch.manual_seed(0)
    whole = CausalSelfAttention(16, num_heads=4, dropout=0.0, bias=False)
    x = torch.randn(2, 6, 16)
    total = torch.zeros_like(x)
    for rows, columns in [(slice(0, 24), slice(0, 8)), (slice(24, 48), slice(8, 16))]:
        half = copy.deepcopy(whole)
        half.query_key_value.weight = nn.Parameter(whole.query_key_value.weight[rows])
        half.project.weight = nn.Parameter(whole.project.weight[:, columns])
        total = total + half(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-6)


def test_block_size() -> None:
    assert small().get_parameter("embedding.position.weight").shape == (8, 16)
    longer = small(block_size=12)
    assert longer(torch.zeros(1, 12, dtype=torch.int64)).shape == (1, 12, 11)
    with pytest.raises(ModelError, match="can read 12 tokens, got 13: set block_size to 13 or more"):
        longer(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ModelError, match="block_size = 4 cannot read the data's 8 tokens: set block_size to 8"):
        small(block_size=4)


def test_floats_are_not_tokens() -> None:
    with pytest.raises(ModelError, match=r"takes int64 tokens, the data has torch\.float32"):
        small()(torch.zeros(1, 8))


@pytest.mark.parametrize("name", ["num_layers", "num_heads", "embedding_width"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} = 0: it must be 1 or more"):
        small(**{name: 0})


def test_refusals() -> None:
    with pytest.raises(
        ModelError, match="embedding_width = 16 over num_heads = 3: set num_heads to one of 1, 2, 4, 8, 16"
    ):
        small(num_heads=3)
    for shape in [(), (0,), (1, 28, 28)]:
        with pytest.raises(ModelError, match=r"takes tokens of shape \(length,\)"):
            gpt(input_shape=shape, num_classes=11)
