"""Text files as sequences of tokens."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from table_files import load
from test_tables import everything, refused

from cordee.core.errors import DataError, JobError
from cordee.core.settings import Data
from cordee.data import Loader, load_data

WORDS = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CORDEE_CACHE", str(cache))
    return cache


def by_length(text: str) -> list[int]:
    """The tokens of a text: the lengths of its words."""
    return [len(word) for word in text.split()]


class Letters:
    vocab_size = 300

    def encode(self, text: str) -> list[int]:
        return [min(ord(letter), 299) for letter in text]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_sequences_of_bytes_cross_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "abcde")
    write(tmp_path / "b.txt", "f")
    write(tmp_path / "c.txt", "ghijklmnop")
    splits = load("text", path=tmp_path, sequence=4)
    assert (splits.num_classes, splits.input_shape, splits.train.num_samples) == (256, (4,), 3)
    inputs, targets = everything(splits.train)
    assert [bytes(row).decode() for row in inputs.tolist()] == ["abcd", "efgh", "ijkl"]
    assert [bytes(row).decode() for row in targets.tolist()] == ["bcde", "fghi", "jklm"]
    assert inputs.dtype == targets.dtype == torch.int64
    picked = splits.train.gather(torch.tensor([2, 0]))
    assert [bytes(row).decode() for row in picked.inputs.tolist()] == ["ijkl", "abcd"]


def test_order_parts_processes_and_shares(tmp_path: Path) -> None:
    splits = load("text", path=write(tmp_path / "a.txt", WORDS * 50), sequence=8, test_fraction=0.2, train_limit=200)
    assert splits.test is not None and splits.train.num_samples == 200
    settings = {"batch_size": 6, "seed": 0, "shuffle": True}
    whole, parts = (
        list(Loader(splits.train, **settings).batches(1)),
        list(Loader(splits.train, processes=2, **settings).batches(1)),
    )
    assert len(whole) == 34
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole, parts, strict=True))
    resumed = list(Loader(splits.train, **settings).batches(1, 30))
    assert torch.equal(resumed[0].inputs, whole[30].inputs)


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS * 10_000)  # of several pieces
    splits = load("text", path=path, sequence=9, tokenizer=by_length)
    assert splits.num_classes == 6 and splits.train.num_samples == (90_000 - 1) // 9
    assert splits.train.gather(torch.tensor([9_000])).inputs.tolist() == [[3, 5, 5, 3, 5, 4, 3, 4, 3]]
    declared = load("text", path=path, sequence=9, tokenizer=by_length, vocabulary=50)
    assert declared.num_classes == 50
    letters = load("text", path=path, tokenizer=Letters, test=write(tmp_path / "t.md", "ü" * 500))
    assert letters.num_classes == 300 and everything(letters.test)[0].unique().tolist() == [252]


def test_tokens_are_kept_and_made_again_when_text_or_tokenizer_change(tmp_path: Path) -> None:
    calls = []

    class Counting:
        shift = 0

        def encode(self, text: str) -> list[int]:
            calls.append(len(text))
            return [len(word) + self.shift for word in text.split()]

    tokenizer = Counting()
    path = write(tmp_path / "a.txt", WORDS * 20_000)

    def first() -> list[int]:
        data = Data(use="text", args={"path": str(path), "sequence": 4, "tokenizer": tokenizer})
        return load_data(data, seed=0).train.gather(torch.tensor([0])).inputs.flatten().tolist()

    assert first() == [3, 5, 5, 3]
    made = len(calls)
    assert first() == [3, 5, 5, 3] and len(calls) == made + 4  # some pieces are compared
    tokenizer.shift = 10
    assert first() == [13, 15, 15, 13]
    write(path, "a " * 100)
    assert first() == [11, 11, 11, 11]


def test_code_that_changes_for_a_rare_word_makes_all_tokens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces that are compared do not have the word."""
    code = "def encode(text):\n    return [{rare} if word == 'rare' else 1 for word in text.split()]\n"
    path = write(tmp_path / "a.txt", WORDS * 60_000 + "rare\n" * 9 + WORDS * 9_000)
    monkeypatch.syspath_prepend(str(tmp_path))
    for rare in (2, 30):
        write(tmp_path / "rare_words.py", code.format(rare=rare))
        sys.modules.pop("rare_words", None)
        importlib.invalidate_caches()
        tokens = load("text", path=path, sequence=9, tokenizer="rare_words:encode").train
        assert tokens.gather(torch.tensor([60_000])).inputs.flatten().tolist() == [rare] * 9
    sys.modules.pop("rare_words")


def _count(folder: str, results: Any) -> None:
    results.put(load("text", path=folder, sequence=4, tokenizer=by_length).train.num_samples)


def test_processes_that_tokenize_at_the_same_time_wait_for_one(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", WORDS * 5_000)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_count, args=(str(tmp_path), results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert found == [(45_000 - 1) // 4] * 3


def test_text_of_an_fsspec_storage() -> None:
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/texts/a.txt", WORDS.encode())
        splits = load("text", path="memory://texts", sequence=8)
        assert bytes(everything(splits.train)[0][0].tolist()).decode() == WORDS[:8]
        tokens = load("text", path="memory://texts", sequence=4, tokenizer=by_length)
        assert everything(tokens.train)[0].tolist() == [[3, 5, 5, 3], [5, 4, 3, 4]]
    finally:
        memory.rm("/texts", recursive=True)


# Bad input


def test_text_that_is_too_short_or_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh")
    refused(
        r"data.path = .* has 8 tokens, and one sequence needs 129 .*set data.sequence to at most 7",
        use="text",
        path=path,
    )
    assert load("text", path=path, sequence=7).train.num_samples == 1
    refused(r"has 8 tokens, and one sequence needs 9", use="text", path=path, sequence=8)
    refused(r"data.sequence = 0 must be at least 1", JobError, use="text", path=path, sequence=0)
    refused(r"a.txtt' does not exist; did you mean 'a.txt'", use="text", path=tmp_path / "a.txtt")
    refused(r"data.vocabulary = 100: tokens are bytes, which are 256", JobError, use="text", path=path, vocabulary=100)
    write(path, "")
    refused(r"a.txt is empty \(0 bytes\)", use="text", path=path)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (None, r"gave a NoneType"),
        ("words", r"gave a str"),
        ([0.5, 1.5], r"gave a list of float64"),
        ([[1, 2], [3, 4]], r"gave a list of int64, shape \(2, 2\)"),
        ([[1], [2, 3]], r"gave a list for"),
        (["a"], r"gave a list of <U1"),
        ([1, -2], r"gave the token -2 for .*a.txt, byte 0: tokens are from 0"),
        ([1, 70], r"gave the token 70 .*: tokens are from 0 to 63 \(its vocabulary\)"),
        ([], r"gave no token for any of 1 files"),
    ],
)
def test_tokenizers_that_give_nonsense(answer: Any, match: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS)
    refused(match, use="text", path=path, tokenizer=lambda text: answer, vocabulary=64)


def test_tokenizers_that_fail(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS)

    def fails(text: str) -> list[int]:
        raise KeyError("brown")

    refused(r"raised KeyError for .*a.txt, byte 0: 'brown' \(at .*test_text.py", use="text", path=path, tokenizer=fails)
    refused(r"data.tokenizer.*no module 'nothing'", JobError, use="text", path=path, tokenizer="nothing:here")
    path.write_bytes(b"abc\xffdef" * 100)
    refused(r"a.txt is not UTF-8 text: .* at byte 3", use="text", path=path, tokenizer=by_length)
    assert load("text", path=path, sequence=8).train.num_samples == 87  # bytes are bytes


def test_a_file_that_changes_under_training_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", WORDS * 10)
    splits = load("text", path=path, sequence=8)
    write(path, WORDS)
    with pytest.raises(DataError, match="was changed while it is trained on"):
        splits.train.gather(torch.tensor([40]))
