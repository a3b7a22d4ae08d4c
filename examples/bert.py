"""A small BERT of transformers, made from a configuration: digits as sentences of 64 words, one for each pixel.

Needs the package transformers. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

PADDING, NUM_WORDS = 0, 18  # brightness is from 0 to 16; words are from 1 on


class Sentences(Dataset[dict[str, Any]]):
    """The pixels of a digit, without the dark ones at its end: sentences of different lengths."""

    num_classes = 10

    def __init__(self, *, is_test: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self._chosen = [index for index in range(len(labels)) if (index % 5 == 4) == is_test]
        self._pixels, self._labels = pixels.astype(int), labels

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._chosen[index]
        words = [1 + int(value) for value in self._pixels[sample]]
        while words[-1] == 1:
            words.pop()
        return {"input_ids": words, "labels": int(self._labels[sample])}


def sentences() -> tuple[Sentences, Sentences]:
    return Sentences(is_test=False), Sentences(is_test=True)


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest sentence of the share, and mask what is padded."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    words = [sample["input_ids"] + [PADDING] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(words)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def classifier(num_classes: int, width: int = 32, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=NUM_WORDS,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=64,
            num_labels=num_classes,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
