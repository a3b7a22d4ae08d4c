"""Text files for language models: sequences of tokens, cut out of one long stream by number.

Tokens are bytes, or what a tokenizer of the user's makes of the text. Its tokens are kept in the cache folder, so that
any sequence can be read without the ones before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from cordee.core.batch import Batch
from cordee.core.env import cache_folder
from cordee.core.errors import DataError, JobError, StorageError
from cordee.core.importing import last_line_of
from cordee.core.references import name_of, resolve
from cordee.data.source import Splits
from cordee.data.storage import DataFile, find_data_files

_SUFFIXES = (".txt", ".text", ".md")
_NUM_BYTES = 256  # tokens of a text without a tokenizer
# A tokenizer gets pieces of about this size, cut after a line, so that its memory does not grow with the file.
_PIECE_BYTES = 1 << 16
_NUM_COMPARED = 4  # pieces that are tokenized again where tokens are taken from the cache
_MOST_TOKENS = 1 << 31
_VERSION = 1


def text(
    path: str,
    sequence: int = 128,
    test: str | None = None,
    root: str | None = None,
    tokenizer: Any = None,
    vocabulary: int | None = None,
    python_path: Sequence[str] = (),
) -> Splits:
    """Sequences of `sequence` tokens of text files; targets are the tokens that follow each of them.

    Files are one stream, in the order of their names. Sequence i begins at token i * `sequence`; tokens at the end that
    are too few for one are left out. `tokenizer` is a callable (or an object with `encode`) that makes whole numbers of
    a text, or a class of such. `vocabulary` is how many tokens there are, where the tokenizer does not say so.
    """
    if sequence < 1:
        raise JobError(f"data.sequence = {sequence} must be at least 1")
    if vocabulary is not None and (vocabulary < 2 or vocabulary > _MOST_TOKENS):
        raise JobError(f"data.vocabulary = {vocabulary} must be at least 2 and at most {_MOST_TOKENS}")
    if tokenizer is None and vocabulary is not None and vocabulary < _NUM_BYTES:
        raise JobError(f"data.vocabulary = {vocabulary}: tokens are bytes, which are {_NUM_BYTES}; remove it")
    encoder = None if tokenizer is None else Encoder(tokenizer, vocabulary, python_path)
    sources, highest = [], 0
    for key, where in (("path", path), ("test", test)):
        if where is None:
            continue
        files = find_data_files(where, _SUFFIXES, key=key, root=root)
        if encoder is None:
            segments, largest = [_Segment(file, file.size, np.dtype(np.uint8)) for file in files], _NUM_BYTES - 1
        else:
            segments, largest = tokenized(files, encoder)
        sources.append(TextSource(segments, sequence, f"data.{key} = {where!r}"))
        highest = max(highest, largest)
    declared = vocabulary or (None if encoder is None else encoder.num_tokens)
    return Splits(
        train=sources[0],
        test=sources[1] if len(sources) > 1 else None,
        input_shape=(sequence,),
        num_classes=declared or max(highest + 1, 2),
        name="text",
    )


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A file of tokens."""

    file: DataFile
    num_tokens: int
    dtype: np.dtype[Any]


class TextSource:
    """Sequences of a stream of tokens, read from where they are."""

    reads_at_once = False

    def __init__(self, segments: Sequence[_Segment], sequence: int, what: str, kept: Tensor | None = None) -> None:
        """`kept` are the sequences to use, None for all."""
        self._segments, self._sequence, self._what, self._kept = segments, sequence, what, kept
        self._ends = np.cumsum([segment.num_tokens for segment in segments])
        total = int(self._ends[-1])
        if total <= sequence:
            raise DataError(
                f"{what} has {total} tokens, and one sequence needs {sequence + 1} (data.sequence = {sequence}, and "
                f"the token after it): set data.sequence to at most {max(1, total - 1)}, or give more text"
            )
        self.num_samples: int | None = (total - 1) // sequence if kept is None else len(kept)
        self.input_shape: tuple[int, ...] = (sequence,)

    def take(self, indices: Tensor) -> TextSource:
        kept = indices if self._kept is None else self._kept.index_select(0, indices)
        return TextSource(self._segments, self._sequence, self._what, kept)

    def first(self, num_samples: int) -> TextSource:
        return self.take(torch.arange(min(num_samples, self.num_samples or 0)))

    def gather(self, indices: Tensor) -> Batch:
        length = self._sequence + 1
        rows = np.empty((len(indices), length), dtype=np.int64)
        starts = (indices if self._kept is None else self._kept.index_select(0, indices)).numpy() * self._sequence
        first = np.searchsorted(self._ends, starts, side="right").tolist()
        last = np.searchsorted(self._ends, starts + length - 1, side="right").tolist()
        wanted: dict[int, list[int]] = {}  # rows by segment: a sequence may be of several
        for row, (from_segment, to_segment) in enumerate(zip(first, last)):
            for segment in range(from_segment, to_segment + 1):
                wanted.setdefault(segment, []).append(row)
        for segment, of_segment in wanted.items():
            begin = int(self._ends[segment]) - self._segments[segment].num_tokens
            with _reading(self._segments[segment]) as read:
                for row in of_segment:
                    start = max(begin, int(starts[row]))
                    stop = min(int(self._ends[segment]), int(starts[row]) + length)
                    place = start - int(starts[row])
                    rows[row, place : place + stop - start] = read(start - begin, stop - start)
        tokens = torch.from_numpy(rows)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def read(self, indices: Tensor, positions: Tensor, seed: int) -> Batch:
        """Return samples as `gather` does: nothing in them is drawn."""
        return self.gather(indices)


@contextlib.contextmanager
def _reading(segment: _Segment) -> Iterator[Callable[[int, int], Any]]:
    """Give a function that returns tokens of a file: from the first, so many."""
    file, width = segment.file, segment.dtype.itemsize
    file.check_unchanged()
    with file.open() as opened:

        def read(first: int, count: int) -> Any:
            opened.seek(first * width)
            content = opened.read(count * width)
            if len(content) != count * width:
                raise DataError(f"{file.url} is shorter than at the start: do not change data that is trained on")
            return np.frombuffer(content, dtype=segment.dtype)

        yield read


# A tokenizer of the user's, and its tokens in the cache.


class Encoder:
    """A tokenizer of the user's, whose answers are checked."""

    def __init__(self, tokenizer: Any, vocabulary: int | None, python_path: Sequence[str]) -> None:
        self.name = name_of(tokenizer)
        is_made = not isinstance(tokenizer, str) and hasattr(tokenizer, "encode")
        made = tokenizer if is_made else resolve("data.tokenizer", tokenizer, {}, python_path=python_path)
        if isinstance(made, type):
            made = self._call(made)
        encode = getattr(made, "encode", made)
        if not callable(encode):
            raise JobError(
                f"data.tokenizer = {self.name!r} is a {type(made).__name__} that cannot be called, and has no encode"
            )
        self._encode = encode
        self.digest = _source_digest(made)
        self.num_tokens = vocabulary or _declared_tokens(made)

    def encode(self, piece: str, where: str) -> Any:
        """Return the tokens of a text as an array of int64. Raises DataError that names the place."""
        answer = self._call(lambda: self._encode(piece), where)
        answer = getattr(answer, "ids", answer)  # as the library `tokenizers` has it
        try:
            tokens = np.asarray(answer.tolist() if isinstance(answer, Tensor) else answer)
        except Exception as error:
            raise DataError(self._nonsense(f"a {type(answer).__name__}", where)) from error
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
            kind = f"a {type(answer).__name__}" + (f" of {tokens.dtype}, shape {tokens.shape}" if tokens.ndim else "")
            raise DataError(self._nonsense(kind, where))
        tokens = tokens.astype(np.int64)
        limit = self.num_tokens or _MOST_TOKENS
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= limit):
            wrong = tokens[(tokens < 0) | (tokens >= limit)][0]
            raise DataError(
                f"data.tokenizer = {self.name!r} gave the token {wrong} for {where}: tokens are from 0 to {limit - 1} "
                f"({'its vocabulary' if self.num_tokens else 'the most there can be'})"
            )
        return tokens

    def _nonsense(self, kind: str, where: str) -> str:
        return f"data.tokenizer = {self.name!r} gave {kind} for {where}: it must give a list of whole numbers"

    def _call(self, function: Callable[[], Any], where: str = "") -> Any:
        try:
            return function()
        except Exception as error:
            place = f" for {where}" if where else ""
            raise DataError(
                f"data.tokenizer = {self.name!r} raised {type(error).__name__}{place}: {error}{last_line_of(error)}"
            ) from error


def _source_digest(tokenizer: Any) -> str:
    """Return a digest of the file that has the tokenizer's code; empty where there is none."""
    code = tokenizer if inspect.isroutine(tokenizer) else type(tokenizer)
    try:
        return hashlib.sha256(Path(inspect.getfile(code)).read_bytes()).hexdigest()[:12]
    except (OSError, TypeError):  # written in another language, or at a prompt
        return ""


def _declared_tokens(tokenizer: Any) -> int | None:
    """Return how many tokens a tokenizer says there are, as the usual libraries do."""
    for name in ("vocab_size", "n_vocab", "num_tokens"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    asked = getattr(tokenizer, "get_vocab_size", None)
    return int(asked()) if callable(asked) else None


class _Kept(msgspec.Struct, frozen=True):
    """What is known of tokens in the cache."""

    num_tokens: int
    highest: int
    dtype: str
    pieces: list[tuple[int, int, int, int]]  # file, first byte, bytes, first token: some of them, to be compared


def tokenized(files: Sequence[DataFile], encoder: Encoder) -> tuple[list[_Segment], int]:
    """Return the tokens of the files, and the highest one. The first time takes as long as the tokenizer does.

    Processes that ask at the same time wait for one of them. Tokens in the cache are those of the same code, and are
    compared with what the tokenizer makes of some pieces today; a tokenizer that was changed is asked for all again.
    """
    key = hashlib.sha256(
        "\n".join(
            [
                f"{_VERSION} {encoder.name} {encoder.digest} {encoder.num_tokens}",
                *(f"{f.url} {f.size} {f.stamp}" for f in files),
            ]
        ).encode()
    ).hexdigest()[:24]
    place = cache_folder() / "data" / "tokens"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"{key}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = place / key
            kept = _find_kept(folder)
            if kept is None or not _is_same(folder, kept, files, encoder):
                kept = _tokenize(folder, files, encoder)
    except OSError as error:
        raise StorageError(f"cannot keep tokens in {place}: {error.strerror or error}; set CORDEE_CACHE") from error
    tokens = find_data_files(str(folder / "tokens"), (), key="tokenizer")
    return [_Segment(tokens[0], kept.num_tokens, np.dtype(kept.dtype))], kept.highest


def _find_kept(folder: Path) -> _Kept | None:
    try:
        kept = msgspec.json.decode((folder / "about.json").read_bytes(), type=_Kept)
        size = (folder / "tokens").stat().st_size
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return kept if size == kept.num_tokens * np.dtype(kept.dtype).itemsize else None


def _is_same(folder: Path, kept: _Kept, files: Sequence[DataFile], encoder: Encoder) -> bool:
    """Whether the tokenizer makes the same of some pieces as is kept."""
    dtype = np.dtype(kept.dtype)
    with (folder / "tokens").open("rb") as opened:
        for number, start, length, first in kept.pieces:
            file = files[number]
            tokens = encoder.encode(_decoded(file.read(start, length), file, start), f"{file.url}, byte {start}")
            opened.seek(first * dtype.itemsize)
            if opened.read(len(tokens) * dtype.itemsize) != tokens.astype(dtype).tobytes():
                return False
    return True


def _tokenize(folder: Path, files: Sequence[DataFile], encoder: Encoder) -> _Kept:
    dtype = np.dtype(np.uint16 if encoder.num_tokens is not None and encoder.num_tokens <= 1 << 16 else np.uint32)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        count, highest = 0, -1
        pieces: list[tuple[int, int, int, int]] = []
        with (made / "tokens").open("wb") as output:
            for number, file in enumerate(files):
                for start, content in _pieces(file):
                    tokens = encoder.encode(_decoded(content, file, start), f"{file.url}, byte {start}")
                    if tokens.size == 0:
                        continue
                    pieces.append((number, start, len(content), count))
                    output.write(tokens.astype(dtype).tobytes())
                    count, highest = count + len(tokens), max(highest, int(tokens.max()))
        if count == 0:
            raise DataError(f"data.tokenizer = {encoder.name!r} gave no token for any of {len(files)} files")
        chosen = sorted({round(at) for at in np.linspace(0, len(pieces) - 1, _NUM_COMPARED)})
        kept = _Kept(count, highest, dtype.str, [pieces[at] for at in chosen])
        (made / "about.json").write_bytes(msgspec.json.encode(kept))
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)
        return kept
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _pieces(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield a file in pieces that end after a line, or else after a word, or else after a character."""
    start, rest = 0, b""
    with file.open() as opened:
        while True:
            content = rest + _read_some(opened, _PIECE_BYTES - len(rest))
            if len(content) < _PIECE_BYTES:
                if content:
                    yield start, content
                return
            cut = content.rfind(b"\n") + 1 or content.rfind(b" ") + 1 or _last_character(content)
            yield start, content[:cut]
            start, rest = start + cut, content[cut:]


def _read_some(opened: IO[bytes], length: int) -> bytes:
    """Read so much, or all that is left."""
    content = b""
    while len(content) < length and (more := opened.read(length - len(content))):
        content += more
    return content


def _last_character(content: bytes) -> int:
    """Return where the last character of UTF-8 begins, which may be cut off."""
    cut = len(content) - 1
    while cut > 1 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _decoded(content: bytes, file: DataFile, start: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.url} is not UTF-8 text: {error.reason} at byte {start + error.start}. Convert it, or leave "
            "data.tokenizer out: then tokens are bytes"
        ) from error
