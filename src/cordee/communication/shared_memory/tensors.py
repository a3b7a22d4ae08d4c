"""Tensors as the collectives want them: flat, contiguous, without history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of this process."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements in one row: the same memory where that is possible, else a copy."""
    tensor = _without_history(tensor)
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.contiguous().view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in one row: the same memory where that is possible, else a copy."""
    flat = flatten(tensor)
    if flat.dtype is torch.uint8:
        return flat
    if flat.stride(0) != 1:  # possible with none or one element, and refused by `view`
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> Callable[[], None] | None:
    """Return what copies results into tensors whose `flats` are copies, or None if none is."""
    copies = [
        (_without_history(tensor), flat)
        for tensor, flat in zip(tensors, flats, strict=True)
        if not tensor.is_contiguous()
    ]
    if not copies:
        return None

    def copy_back() -> None:
        for tensor, flat in copies:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    return copy_back


def _without_history(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that may be written to in any mode and thread."""
    if tensor.is_inference():
        return torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    return tensor.detach() if tensor.requires_grad else tensor
