"""Memory for tensors of a model that does not fit: in temporary files, of which few pages need to be in memory.

A tensor here is an ordinary one: the system reads what is looked at, and takes pages back when it needs them. That is
right for whatever code does with the tensor. `give_back` and `Paging` only see to it that few pages are in this process
at any time; they change no value. The files have no names, and end with the process at the latest.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST_BYTES = 256 << 10  # a tensor with less stays in ordinary memory
RECENT_BYTES = 16 << 20  # that `Paging` leaves in memory, beside the tensors of one operation
_FILE_BYTES = 256 << 20  # of the first file; they hold nothing but what is reserved in them
_PAGEOUT = 21  # MADV_PAGEOUT: as MADV_DONTNEED, but what was changed is kept
_IN_MEMORY = ("tmpfs", "ramfs")
_WITHOUT_VALUES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class FileMemory:
    """Reserves memory in temporary files."""

    def __init__(self) -> None:
        self.problem: OSError | None = None  # why `Paging` has left something in ordinary memory
        self._files: list[_File] = []

    def zeros(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of zeros in a file. Raises OSError where there is no room on the disk."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = next((file for file in self._files if file.has_room(size)), None)
        if file is None:
            # Twice as large each time: a process may have few files open.
            file = _File(max(size, _FILE_BYTES << len(self._files)))
            self._files.append(file)
        view = file.reserve(size)
        return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes).untyped_storage()  # which keeps the view


def zeros_strided(shape: Sequence[int], stride: Sequence[int], like: Tensor, memory: FileMemory) -> Tensor:
    """Return zeros of this shape, with the type and device of `like`; in a file if they are many and there is room."""
    num_bytes = _extent(shape, stride) * like.element_size()
    if like.device.type == "cpu" and num_bytes >= SMALLEST_BYTES:
        with contextlib.suppress(OSError):
            return torch.empty(0, dtype=like.dtype).set_(memory.zeros(num_bytes), 0, shape, stride)
    return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device).zero_()


class _File:
    """A file without a name, mapped as a whole. Lasts as long as a storage in it does."""

    def __init__(self, num_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=_folder(), prefix="cordee-") as file:
            os.ftruncate(file.fileno(), num_bytes)  # a hole, which takes no room
            self.pages = mmap.mmap(file.fileno(), num_bytes)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._used, self._size = 0, num_bytes
        self._process = os.getpid()
        self._free: dict[int, list[int]] = {}  # by size: where something was that is used no more
        _register(self.pages, num_bytes, is_private=False)

    def has_room(self, num_bytes: int) -> bool:
        return bool(self._free.get(num_bytes)) or self._used + num_bytes <= self._size

    def reserve(self, num_bytes: int) -> memoryview:
        """Return so many bytes, which the disk has room for: writing into a hole of a full one ends the process."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError("this system cannot reserve room in files")
        is_new = not self._free.get(num_bytes)
        start = self._used if is_new else self._free[num_bytes][-1]
        os.posix_fallocate(self._descriptor, start, num_bytes)
        if is_new:
            self._used += num_bytes
        else:
            self._free[num_bytes].pop()
        view = memoryview(self.pages)[start : start + num_bytes]
        weakref.finalize(view, self._release, start, num_bytes).atexit = False
        return view

    def _release(self, start: int, num_bytes: int) -> None:
        if os.getpid() != self._process:
            return  # a process that was forked, which has no word in what the other has
        with contextlib.suppress(OSError):  # a file system without holes: then it is used no more
            self.pages.madvise(mmap.MADV_REMOVE, start, num_bytes)  # also where another process has the file mapped
            self._free.setdefault(num_bytes, []).append(start)


def map_file(descriptor: int, num_bytes: int) -> Tensor:
    """Return the bytes of a file, which are read when they are looked at; changes stay in this process."""
    pages = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _register(pages, num_bytes, is_private=True)
    return torch.frombuffer(pages, dtype=torch.uint8)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Give the pages of those tensors back that lie in files; their values are read again when they are looked at."""
    for tensor in tensors:
        if _is_plain(tensor):
            _give_back(tensor.data_ptr(), _extent(tensor.shape, tensor.stride()) * tensor.element_size())


def lies_in_file(tensor: Tensor) -> bool:
    return _is_plain(tensor) and _find(tensor.data_ptr()) is not None


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is large enough for a file."""
    return tensor.nbytes >= SMALLEST_BYTES


def take_out(tensors: Iterable[Tensor]) -> None:
    """Let those of the tensors that lie in files have ordinary memory of their own."""
    for tensor in tensors:
        if lies_in_file(tensor):
            own = tensor.data.clone()
            give_back([tensor])
            tensor.data = own


class Paging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, few pages of the tensors that lie in files are in memory. Local to this thread.

    With `memory`, what an operation makes lies in files as well, if it is large. Everything has the same values as
    outside.
    """

    supports_higher_order_operators = True  # torch.cond and the like: they are computed as outside

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch.compile may look through the mode, which changes no result."""
        return True

    def __init__(self, memory: FileMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._recent: dict[int, int] = {}  # where tensors begin that may be in memory, and their size

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._forget()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._memory is not None and isinstance(func, OpOverload):
            result = _moved(result, func, [*_tensors_in(args), *_tensors_in(kwargs)], self._memory)
        for tensor in _tensors_in((args, kwargs, result)):
            if _is_plain(tensor) and _is_large(tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if _find(storage.data_ptr()) is None:
            return
        self._recent[storage.data_ptr()] = storage.nbytes()
        if sum(self._recent.values()) > RECENT_BYTES:
            self._forget()

    def _forget(self) -> None:
        """Give back what was used, and pages beside it that the system has mapped with it."""
        for start in self._recent:
            if (found := _find(start)) is not None:
                _give_back(found[1].start, found[1].num_bytes)
        self._recent.clear()


def _moved(result: Any, func: Any, given: list[Tensor], memory: FileMemory) -> Any:
    """Return the result of an operation with its large new tensors in files."""
    returns = func._schema.returns
    if isinstance(result, Tensor) and len(returns) == 1:
        return _moved_one(result, func, returns[0], given, memory)
    if isinstance(result, tuple) and len(returns) == len(result):
        pairs = zip(result, returns, strict=True)
        return tuple(_moved_one(one, func, place, given, memory) for one, place in pairs)
    return result


def _moved_one(result: Any, func: Any, place: Any, given: list[Tensor], memory: FileMemory) -> Any:
    if type(result) is not Tensor or place.alias_info is not None or not _is_plain(result):
        return result
    if not _is_large(result) or result.is_conj() or result.is_neg():
        return result
    storage = result.untyped_storage()
    if any(storage.data_ptr() == _start_of(other) for other in given) or _find(storage.data_ptr()) is not None:
        return result  # not new
    try:
        moved = memory.zeros(storage.nbytes())
    except OSError as error:
        memory.problem = memory.problem or error
        return result
    if func._overloadpacket.__name__ not in _WITHOUT_VALUES:
        moved.copy_(storage)
    return _laid_out(result, moved)


def _start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of this process, and all of its numbers there."""
    return type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _is_large(tensor: Tensor) -> bool:
    return not tensor.is_quantized and tensor.untyped_storage().nbytes() >= SMALLEST_BYTES


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    other = torch.empty(0, dtype=tensor.dtype)
    return other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many numbers of the memory lie between the first and the last of a tensor, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors_in(inner)
    elif isinstance(value, Mapping):
        yield from _tensors_in(tuple(value.values()))


def _folder() -> str:
    """Return where temporary files are on a disk, if there is such a place."""
    usual = tempfile.gettempdir()
    return next((each for each in (usual, "/var/tmp") if os.access(each, os.W_OK) and _is_on_disk(each)), usual)


def _is_on_disk(folder: str) -> bool:
    place = Path(folder).resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    # Of several at one place the last one is seen.
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint), default=None)
    return mount is None or mount.fstype not in _IN_MEMORY


# What is mapped in this process: where it begins, how large it is, and whether changes of it are in no file.


class _Mapped:
    def __init__(self, start: int, num_bytes: int, is_private: bool) -> None:
        self.start, self.num_bytes, self.is_private = start, num_bytes, is_private

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.num_bytes


_mapped: weakref.WeakKeyDictionary[mmap.mmap, _Mapped] = weakref.WeakKeyDictionary()


def _register(pages: mmap.mmap, num_bytes: int, *, is_private: bool) -> None:
    start = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    _mapped[pages] = _Mapped(start, num_bytes, is_private)


def _find(address: int) -> tuple[mmap.mmap, _Mapped] | None:
    return next((each for each in _mapped.items() if each[1].holds(address)), None)


def _give_back(address: int, num_bytes: int) -> None:
    found = _find(address)
    if found is None:
        return
    pages, mapped = found
    start = (address - mapped.start) // mmap.PAGESIZE * mmap.PAGESIZE
    length = min(address - mapped.start + num_bytes, mapped.num_bytes) - start
    with contextlib.suppress(OSError):  # an older system has no such advice
        pages.madvise(_PAGEOUT if mapped.is_private else mmap.MADV_DONTNEED, start, length)
