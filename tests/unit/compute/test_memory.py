"""What a process does with memory that it frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from cordee.compute.devices import keep_freed

if sys.argv[1] == "kept":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step = lambda: [torch.ones(size << 18) for size in (1, 5, 40)]  # 1, 5 and 40 MB
for _ in range(10):  # until there is room for all
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) // 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_a_step_frees_the_next_one_takes() -> None:
    kept, left = (_faults_per_step(how) for how in ("kept", "left"))
    assert kept * 5 < left, "pages that a step had to get from the system"


def _faults_per_step(how: str) -> int:
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
