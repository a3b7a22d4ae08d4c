"""The FBNet paper's tables and search results as data (Wu et al., arXiv:1812.03443)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cordee.core.errors import ModelError, nearest

_KERNELS = (3, 5)
_EXPANSIONS = (1, 3, 6)


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """A row of the paper's table 1."""

    width: int
    """Channels that each block of the stage puts out."""
    num_blocks: int
    stride: int
    """Of the first block; the others have stride 1."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A choice from the paper's table 2; kernel 0 is the skip."""

    kernel: int = 0
    expansion: int = 0
    groups: int = 1

    @property
    def is_skip(self) -> bool:
        return self.kernel == 0

    @classmethod
    def parse(cls, name: str) -> BlockSpec:
        """Read "skip", "k<kernel>_e<expansion>" or "k<kernel>_e<expansion>_g2", or list them all."""
        if name == "skip":
            return cls()
        match = re.fullmatch(r"k([35])_e([136])(_g2)?", name)
        if match is None:
            known = ["skip", *(f"k{k}_e{e}{g}" for k in _KERNELS for e in _EXPANSIONS for g in ("", "_g2"))]
            raise ModelError(
                f"model 'fbnet' has no block '{name}'{nearest(name, known)} (the blocks are {', '.join(known)})"
            )
        return cls(kernel=int(match[1]), expansion=int(match[2]), groups=2 if match[3] else 1)


STEM_WIDTH = 16

STAGES: tuple[StageLayout, ...] = (
    StageLayout(width=16, num_blocks=1, stride=1),
    StageLayout(width=24, num_blocks=4, stride=2),
    StageLayout(width=32, num_blocks=4, stride=2),
    StageLayout(width=64, num_blocks=4, stride=2),
    StageLayout(width=112, num_blocks=4, stride=1),
    StageLayout(width=184, num_blocks=4, stride=2),
    StageLayout(width=352, num_blocks=1, stride=1),
)

WIDEST_LAST_WIDTH = 1984


def _architecture(names: str) -> tuple[BlockSpec, ...]:
    return tuple(BlockSpec.parse(name) for name in names.split())


# The blocks, stage by stage, and the width of the last 1×1 convolution. Public transcriptions of the paper's
# figure disagree on the third block of A's fifth stage and on the second of B's fourth. The choice here is the
# one whose multiply-adds on 224×224 come nearest to what the authors' README states
# (github.com/facebookresearch/mobile-vision): 249.9 M for A (stated 249.4; k5_e1 would make 239.0) and 296.6 M
# for B (stated 295.6; k5_e6, which is what their own later code has, would make 306.2). C makes 385.0 M (stated
# 383.0).
ARCHITECTURES: dict[str, tuple[tuple[BlockSpec, ...], int]] = {
    "a": (
        _architecture(
            """
            skip
            k3_e3 k3_e1 skip     skip
            k5_e6 k3_e3 k5_e1    k3_e3
            k5_e6 k5_e3 k5_e1_g2 k5_e6
            k3_e6 k5_e1_g2 k5_e3 k3_e1_g2
            k5_e6 k5_e6 k5_e3    k5_e6
            k5_e6
            """
        ),
        1504,
    ),
    "b": (
        _architecture(
            """
            k3_e1
            k3_e6 k5_e1 k3_e1    k3_e1
            k5_e6 k5_e3 k3_e6    k5_e6
            k5_e6 k5_e1 skip     k5_e3
            k5_e6 k3_e1 k5_e1    k5_e3
            k5_e6 k5_e1 k5_e6    k5_e6
            k3_e6
            """
        ),
        WIDEST_LAST_WIDTH,
    ),
    "c": (
        _architecture(
            """
            k3_e1
            k3_e6 skip  k3_e1    k3_e1
            k5_e6 k5_e3 k5_e6    k3_e6
            k5_e6 k5_e3 k5_e6    k5_e6
            k5_e6 k5_e6 k5_e6    k5_e3
            k5_e6 k5_e6 k5_e6    k5_e6
            k3_e6
            """
        ),
        WIDEST_LAST_WIDTH,
    ),
}
