"""A process that computes on a GPU which is not there: torch's fake tensors, and its fake process group.

Shapes, types and devices are as on a GPU; there are no values. What asks for a value gets the same answer each time,
and is counted: on a GPU it waits for all that was computed before. What is on another device than it must be is an
error of torch's, as on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cordee.strategies import data_parallel, sharded

NUM_GPUS = 4
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


# A torch without CUDA has nothing that answers for GPUs, and autograd asks for streams before it does anything. So the
# virtual functions that it asks are put in the place of CUDA's: copies of what does nothing for "meta", with some that
# answer. Their places are those of torch 2.13: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/
# AcceleratorHooksInterface.h and CUDAHooksInterface.h. The code is that of x86-64: a device or a stream is returned in
# registers, which ctypes cannot do.
_CUDA, _META, _NUM_ENTRIES = 1, 14, 48
_GIVEN_DEVICE = bytes.fromhex("0fb7c6 31d2 c3")  # the default stream of the device that is asked for, or that device
_GIVEN_STREAM = bytes.fromhex("4889f0 c3")
_kept: list[Any] = []


def _number(value: int) -> bytes:
    return bytes([0xB8, value, 0, 0, 0, 0xC3])


_GUARD = {
    0: _number(_CUDA),
    1: _GIVEN_DEVICE,
    2: _number(_CUDA),
    3: _number(0),
    4: _number(0),  # type, current device
    5: _GIVEN_DEVICE,
    6: _GIVEN_DEVICE,
    7: _GIVEN_DEVICE,
    8: _GIVEN_DEVICE,
    9: _GIVEN_STREAM,  # streams
    11: _number(0),
    12: _number(0),
    13: _number(0),
    14: _number(1),
    15: _number(NUM_GPUS),  # events, deviceCount
}
_HOOKS = {  # isBuilt, isAvailable, hasPrimaryContext, init, deviceCount, current device, hasCUDA
    2: _number(1),
    3: _number(1),
    4: _number(0),
    5: _number(0),
    6: _number(NUM_GPUS),
    7: _number(0),
    8: _number(0),
    16: _number(1),
}


def pretend_cuda() -> None:
    """Let autograd take tensors that say that they are on GPUs. It stays for this process; without effect with CUDA."""
    if _kept or torch.backends.cuda.is_built():
        return
    folder = Path(torch.__file__).parent / "lib"
    guards = (ctypes.c_void_p * 32).in_dll(
        ctypes.CDLL(str(folder / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guard = ctypes.c_void_p(_changed_table(guards[_META], _GUARD))
    guards[_CUDA] = ctypes.addressof(guard)
    get_hooks = ctypes.CDLL(str(folder / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    ctypes.c_void_p.from_address(get_hooks()).value = _changed_table(get_hooks(), _HOOKS)
    _kept.append(guard)


def _changed_table(address: int | None, answers: dict[int, bytes]) -> int:
    """Return the address of a copy of an object's virtual functions, of which some only answer."""
    entries = (ctypes.c_void_p * _NUM_ENTRIES).from_address(ctypes.c_void_p.from_address(address or 0).value or 0)
    table = (ctypes.c_void_p * _NUM_ENTRIES)(*entries)
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    for place, function in answers.items():
        code[16 * place : 16 * place + len(function)] = function
        table[place] = start + 16 * place
    _kept.extend([table, code])
    return ctypes.addressof(table)


class Answers(TorchDispatchMode):
    """Answers what asks for values. `waits` counts what asked a GPU; `copies` says what was copied from
    where to where, how many numbers, and whether nobody waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.copies: list[tuple[str, str, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS and any(isinstance(arg, FakeTensor) for arg in args):
            self.waits += any(isinstance(arg, torch.Tensor) and arg.device.type == "cuda" for arg in args)
            if func is WAITS[1]:
                return False
            return 2.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten._pin_memory.default:
            return args[0].clone()
        if func is torch.ops.aten.is_pinned.default:
            return True
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            source, target = args[0].device.type, torch.device(kwargs["device"]).type
            if source != target:
                self.copies.append((source, target, args[0].numel(), bool(kwargs.get("non_blocking"))))
                self.waits += target == "cpu"
        return func(*args, **kwargs)


class FakeGenerator(torch.Generator):
    """Of a GPU, on the host in truth. Remembers the seeds that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeds.append(seed)
        return super().manual_seed(seed)


class FakeStream:
    """A stream or an event: calls are in order anyway."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.device_index = 0

    def record_event(self, event: Any = None) -> FakeStream:
        return FakeStream()

    def wait_event(self, event: Any = None) -> None:
        pass

    wait_stream = record = wait_event

    def synchronize(self) -> None:
        pass

    wait = synchronize

    def query(self) -> bool:
        return True


class FakeDdp(nn.Module):
    """In the place of torch's DDP, whose parts in C++ look into memory that fake tensors have not got."""

    def __init__(self, module: nn.Module, *, device_ids: list[int], **settings: Any) -> None:
        super().__init__()
        assert {p.device for p in module.parameters()} == {torch.device("cuda", index) for index in device_ids}
        self.module = module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.module(*args, **keywords)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


class FakeGpus:
    """What is asked of torch.cuda, and what was asked."""

    def __init__(self) -> None:
        self.current: int | None = None
        self.generators = [FakeGenerator() for _ in range(NUM_GPUS)]
        self.num_synchronized = 0
        self.answers = Answers()

    def set_device(self, device: torch.device) -> None:
        self.current = torch.device(device).index

    def synchronize(self, device: Any = None) -> None:
        self.num_synchronized += 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_cuda()
        monkeypatch.setattr("cordee.compute.devices.num_gpus", lambda: NUM_GPUS)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current or 0)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(self.generators))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_GPUS)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        for name in ("Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, FakeStream)
        for name in ("current_stream", "default_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: FakeStream())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(nn.Module, "to", _move)
        for name in ("__init__", "__getitem__", "from_group"):
            monkeypatch.setattr(DeviceMesh, name, _on_real_tensors(getattr(DeviceMesh, name)))
        monkeypatch.setattr(sharded, "init_device_mesh", _on_real_tensors(sharded.init_device_mesh))
        monkeypatch.setattr(data_parallel, "DistributedDataParallel", FakeDdp)
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.amp.autocast_mode, "amp_definitely_not_available", lambda: False, raising=False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)

    @contextlib.contextmanager
    def computing(self) -> Iterator[Answers]:
        """Inside, tensors are fake."""
        with FakeTensorMode(allow_non_fake_inputs=True), self.answers:
            yield self.answers


def _on_real_tensors(function: Any) -> Any:
    """Return a function that computes with values: meshes of devices are tensors of numbers."""

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **keywords)

    return run


def _move(module: nn.Module, device: Any) -> nn.Module:
    """Move a model as torch does for real tensors: parameters stay one where they are one."""
    moved: dict[int, Any] = {}

    def move(tensor: Any, is_trained: bool | None) -> Any:
        if tensor is None or tensor.device == torch.device(device):
            return tensor
        if id(tensor) not in moved:
            there = tensor.detach().to(device)
            moved[id(tensor)] = there if is_trained is None else nn.Parameter(there, requires_grad=is_trained)
        return moved[id(tensor)]

    for each in module.modules():
        for name, parameter in each._parameters.items():
            each._parameters[name] = move(parameter, None if parameter is None else parameter.requires_grad)
        for name, buffer in each._buffers.items():
            each._buffers[name] = move(buffer, None)
    return module


@contextlib.contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is a member of a group whose other members are not there, and answer at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
