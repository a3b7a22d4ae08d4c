"""Runs one of the collective tests that PyTorch ships inside a rank, on a process group of the `cordee` backend."""

from __future__ import annotations

import os
import unittest
from functools import cache
from typing import Any

import torch.distributed as dist

# Torch's tests ask in their bodies which backend it is that they were written for.
_WRITTEN_FOR_GLOO = ("no_sync",)


@cache
def _load(rank: int) -> tuple[Any, Any, dict[int, str]]:
    """Import torch's module, which reads the environment, and make a test case of its mix-in."""
    size = dist.get_world_size()
    # Tests that torch runs on gloo only are skipped, when the module is imported, by this name.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed import distributed_test

    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("cordee")

    class Case(distributed_test.DistributedTest._DistTestBase, common_utils.TestCase):  # type: ignore[misc]
        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    Case.rank, Case.world_size = rank, size
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    return Case, distributed_test, reasons


def run_torch_case(rank: int, name: str, folder: str) -> str:
    """Run a test on a group of its own; return why torch skipped it, or nothing."""
    case_type, module, reasons = _load(rank)
    size = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cordee", init_method=f"file://{folder}/{name}", rank=rank, world_size=size)
    # Tests of sub-groups say they need eight ranks, by this variable, and then use the ranks 1 and 2.
    os.environ["WORLD_SIZE"] = "8" if "_group" in name and "_full_group" not in name else str(size)
    os.environ["TEMP_DIR"] = folder
    module.BACKEND = "gloo" if any(part in name for part in _WRITTEN_FOR_GLOO) else "cordee"
    case = case_type(name)
    case.setUp()
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        return reasons[end.code]  # type: ignore[index]
    finally:
        case.tearDown()
    dist.barrier()
    return ""
