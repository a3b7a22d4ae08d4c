"""The files of CIFAR-10's "Python version", read without running anything that is in them.

They are written in Python's serialisation format, whose usual reader calls whatever function a file names.
This one is a small interpreter over the opcodes that `pickletools.genops` lists: it knows plain values,
containers, and the two calls by which NumPy writes an array of bytes, which it carries out itself as data.
Everything else is refused, so the worst a file can do is not to be read.
"""

from __future__ import annotations

import enum
import math
import pickletools
from typing import Any

import torch
from torch import Tensor

from cordee.core.errors import DataError

IMAGE_BYTES = 3 * 32 * 32


def read_python_batch(content: bytes, name: str) -> tuple[Tensor, list[int]]:
    """Return the images (n, 3072) as uint8 and the labels of one file; DataError, with `name`, if it is not one."""
    try:
        held = _Interpreter().run(content)
        if not isinstance(held, dict):
            raise _RefusedError(f"it holds a {type(held).__name__}, not a dict")
        values = {_text(key): value for key, value in held.items()}
        images, labels = values.get("data"), values.get("labels")
        if not isinstance(images, _Array) or images.pixels is None or images.pixels.dim() != 2:
            raise _RefusedError("it has no two-dimensional array 'data'")
        if images.pixels.shape[1] != IMAGE_BYTES:
            raise _RefusedError(f"images have {images.pixels.shape[1]} bytes, expected {IMAGE_BYTES}")
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise _RefusedError("it has no list of numbers 'labels'")
        if len(labels) != len(images.pixels):
            raise _RefusedError(f"it has {len(images.pixels)} images but {len(labels)} labels")
    except Exception as error:
        raise DataError(f"{name} is not a batch of CIFAR-10's Python version: {error}; get the file again") from error
    return images.pixels, labels


class _RefusedError(Exception):
    """A file that is not of the format."""


class _Name(enum.Enum):
    """The only names a file may mention."""

    RECONSTRUCT = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()


_NAMES = {
    "numpy.core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Name.RECONSTRUCT,  # as NumPy 2 writes it
    "numpy ndarray": _Name.NDARRAY,
    "numpy dtype": _Name.DTYPE,
}


class _ByteType:
    """Stands for numpy.dtype("u1")."""


class _Array:
    """Stands for a NumPy array, empty until its state is set."""

    pixels: Tensor | None = None

    def set_state(self, state: Any) -> None:
        version, shape, element, is_fortran, content = state
        if version != 1 or not isinstance(element, _ByteType) or is_fortran is not False:
            raise _RefusedError("an array that is not of bytes in C order")
        content = content.encode("latin-1") if isinstance(content, str) else content
        if not isinstance(content, bytes) or not all(type(size) is int and size > 0 for size in shape):
            raise _RefusedError("an array without its bytes")
        if math.prod(shape) != len(content):
            raise _RefusedError(f"an array of {' × '.join(map(str, shape))} with {len(content)} bytes")
        self.pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {
    "BININT", "BININT1", "BININT2",
    "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip


class _Interpreter:
    """One pass over a file. `run` returns what it holds; any exception means that it is refused."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise _RefusedError("it ends early")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(self._checked(stack[-count:], count))]
        elif name == "TUPLE":
            values = self._pop_to_mark()
            stack.append(tuple(values))
        elif name in ("APPEND", "APPENDS"):
            values = [stack.pop()] if name == "APPEND" else self._pop_to_mark()
            self._top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._pop_last_two() if name == "SETITEM" else self._pop_to_mark()
            self._top(dict).update(zip(values[::2], values[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise _RefusedError(f"it names {argument.replace(' ', '.')!r}, which this format does not need")
            stack.append(_NAMES[argument])
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._called(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _ByteType):
                self._top(_Array).set_state(state)
        elif name != "PROTO":
            raise _RefusedError(f"it uses {name}, which this format does not need")

    def _called(self, function: Any, arguments: Any) -> Any:
        if function is _Name.RECONSTRUCT and arguments[0] is _Name.NDARRAY:
            return _Array()
        if function is _Name.DTYPE and _text(arguments[0]) == "u1":
            return _ByteType()
        raise _RefusedError("it calls what this format does not need")

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise _RefusedError("a mark is missing")

    def _pop_last_two(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def _top(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise _RefusedError(f"a {kind.__name__} is missing")
        return self._stack[-1]

    def _checked(self, values: list[Any], count: int) -> list[Any]:
        if len(values) != count or _MARK in values:
            raise _RefusedError("a value is missing")
        return values


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value
