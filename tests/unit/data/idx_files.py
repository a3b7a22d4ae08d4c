"""Small files in the format of MNIST."""

from __future__ import annotations

import gzip
import struct

import torch

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(values: torch.Tensor) -> bytes:
    return bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + values.numpy().tobytes()


def contents(num_train: int = 6, num_test: int = 4, size: int = 28) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        pixels = torch.randint(0, 256, (count, size, size), generator=generator).to(torch.uint8)
        made[f"{prefix}-images-idx3-ubyte"] = idx(pixels)
        made[f"{prefix}-labels-idx1-ubyte"] = idx((torch.arange(count) % 10).to(torch.uint8))
    return made


def write(folder, files: dict[str, bytes], *, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz" if zipped else folder / name).write_bytes(gzip.compress(content) if zipped else content)
