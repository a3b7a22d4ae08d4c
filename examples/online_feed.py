"""Puts a file of new samples into a folder again and again, for examples/online.toml to train on.

python examples/online_feed.py incoming --files 40 --every 0.5
"""

import argparse
import time
from pathlib import Path

import numpy as np

SAMPLES = 100


def make(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points in three clouds that drift on a circle: what was learnt from old files grows stale."""
    dice = np.random.default_rng(index)
    targets = dice.integers(0, 3, SAMPLES)
    angles = 2 * np.pi * (targets / 3 + index / 200)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1) + 0.3 * dice.normal(size=(SAMPLES, 2))
    return points.astype(np.float32), targets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two files")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for index in range(options.files):
        inputs, targets = make(index)
        unfinished = options.folder / "unfinished"  # nobody reads it before it has its name
        with unfinished.open("wb") as file:
            np.savez(file, x=inputs, y=targets)
        unfinished.rename(options.folder / f"{index:06}.npz")
        time.sleep(options.every)
    (options.folder / "END").touch()  # no more will come


if __name__ == "__main__":
    main()
