"""A small decoder-only transformer in the form of GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cordee.core.errors import ModelError
from cordee.models.building import check_at_least, check_dropout

_TOKEN_STD = 0.02
_POSITION_STD = 0.01


def gpt(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    num_layers: int = 4,
    num_heads: int = 4,
    embedding_width: int = 128,
    block_size: int = 0,
    dropout: float = 0.0,
    bias: bool = True,
    tie_embeddings: bool = True,
) -> nn.Sequential:
    """Build a model from int64 tokens (batch, T) to the next token's logits (batch, T, num_classes).

    `input_shape` is (T,) and `num_classes` the size of the vocabulary. `block_size` is the longest sequence
    the model can read, 0 for T itself. `dropout` is after the embeddings, on the attention weights and after
    each half of a layer. `bias` is for all linear layers and norms but the output, which never has one.

    With `tie_embeddings` the output layer's weight *is* the token embedding's: one parameter under two names,
    in the first block and in the last. Whoever cuts the model in between has to keep the two equal.

    The weights are GPT-2's: normal with deviation 0.02, of the positions 0.01, and of the layers that end in
    the residual stream 0.02 / √(2 · num_layers); biases are zero. 12 layers, 12 heads, width 768, 1024
    tokens and a vocabulary of 50,257 make the 124,439,808 parameters of GPT-2 small.
    """
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ModelError(
            "model 'gpt' takes tokens of shape (length,), the data has samples of shape "
            f"{tuple(input_shape)}: choose another model or data"
        )
    length = input_shape[0]
    check_at_least("gpt", "num_classes", num_classes)
    check_at_least("gpt", "num_layers", num_layers)
    check_at_least("gpt", "num_heads", num_heads)
    check_at_least("gpt", "embedding_width", embedding_width)
    check_at_least("gpt", "block_size", block_size, smallest=0)
    check_dropout("gpt", dropout)
    if embedding_width % num_heads != 0:
        divisors = [heads for heads in range(1, embedding_width + 1) if embedding_width % heads == 0]
        raise ModelError(
            f"model 'gpt' cannot split embedding_width = {embedding_width} over num_heads = {num_heads}: "
            f"set num_heads to one of {', '.join(map(str, divisors))}"
        )
    if 0 < block_size < length:
        raise ModelError(
            f"model 'gpt' with block_size = {block_size} cannot read the data's {length} tokens: "
            f"set block_size to {length} or more, or to 0 for as many as the data has"
        )

    model = nn.Sequential()
    embedding = Embedding(num_classes, block_size or length, embedding_width, dropout)
    model.add_module("embedding", embedding)
    for index in range(1, num_layers + 1):
        model.add_module(f"layer{index}", DecoderLayer(embedding_width, num_heads, dropout, bias))
    output = Output(embedding_width, num_classes, bias)
    model.add_module("output", output)
    _initialise_gpt2(model, num_layers)
    if tie_embeddings:
        output.vocabulary.weight = embedding.token.weight
    return model


class Embedding(nn.Module):
    """The sum of what each token is and where it stands."""

    def __init__(self, vocabulary_size: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point():
            raise ModelError(f"model 'gpt' takes int64 tokens, the data has {tokens.dtype}: choose data of tokens")
        length = tokens.shape[-1]
        if length > self.position.num_embeddings:
            raise ModelError(
                f"model 'gpt' can read {self.position.num_embeddings} tokens, got {length}: "
                f"set block_size to {length} or more"
            )
        positions = torch.arange(length, device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class DecoderLayer(nn.Module):
    """Attention to what came before, then a perceptron of four times the width; each normed, then added."""

    def __init__(self, width: int, num_heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = CausalSelfAttention(width, num_heads, dropout, bias)
        self.perceptron_norm = nn.LayerNorm(width, bias=bias)
        self.perceptron = Perceptron(width, dropout, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        residual: Tensor = self.perceptron(self.perceptron_norm(x))
        return x + residual


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it.

    The rows of `query_key_value` are ordered by head, then query, key, value: an even share of the rows is a
    share of whole heads, and the forward pass takes the number of heads from what it is given.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(-2))
        dropout_p = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)
        projected: Tensor = self.dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return projected


class Perceptron(nn.Module):
    """GELU, in the tanh form that GPT-2 was trained with, between two linear layers."""

    def __init__(self, width: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=bias)
        self.project = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.dropout(self.project(F.gelu(self.expand(x), approximate="tanh")))
        return projected


class Output(nn.Module):
    """The last norm and the logits over the vocabulary."""

    def __init__(self, width: int, vocabulary_size: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.vocabulary = nn.Linear(width, vocabulary_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.vocabulary(self.norm(x))
        return logits


def _initialise_gpt2(model: nn.Module, num_layers: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_TOKEN_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Embedding):
            nn.init.normal_(module.token.weight, std=_TOKEN_STD)
            nn.init.normal_(module.position.weight, std=_POSITION_STD)
    for module in model.modules():
        if isinstance(module, CausalSelfAttention | Perceptron):
            # 2 · num_layers such layers add up in the residual stream; this keeps its variance at one share.
            nn.init.normal_(module.project.weight, std=_TOKEN_STD / math.sqrt(2 * num_layers))
