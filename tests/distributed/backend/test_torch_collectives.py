"""The collective tests that PyTorch ships, run by three ranks on the `cordee` backend."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backend_pool import ProcessPool
from torch_cases import run_torch_case

SELECTED = re.compile(
    r"reduce|cast|gather|scatter|all_to_all|barrier|send|recv|group|coalesc|future|no_sync|CPU|_cpu|rank"
)

pytestmark = pytest.mark.long
NEEDS_GPU = re.compile(r"cuda|nccl|SyncBatchNorm")
# What is left out, and why: all but the second fail on gloo in this setting as well.
LEFT_OUT = {
    "test_barrier_timeout_global": "forms the default group of the launcher's variables, which are not set here",
    "test_monitored_barrier": "torch refuses monitored_barrier on every backend but its own gloo",
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_batch_isend_irecv_op_err": "needs a GPU, and does not say so",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL, and does not say so",
}


def names() -> list[str]:
    """The tests of torch's module, read without importing it: that needs an environment of its own."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    (outer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DistributedTest")
    (base,) = (node for node in outer.body if isinstance(node, ast.ClassDef))
    found = [node.name for node in base.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [name for name in found if SELECTED.search(name) and not NEEDS_GPU.search(name)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[], ProcessPool]]:
    """Three ranks that stay; after a test that failed, others."""
    pools: list[ProcessPool] = []

    def current() -> ProcessPool:
        if not pools or not all(process.is_alive() for process in pools[-1].processes):
            pools.append(ProcessPool(3))
        return pools[-1]

    current()
    yield current
    for each in pools:
        each.__exit__()


@pytest.mark.parametrize("name", names())
def test_of_torch(pool: Callable[[], ProcessPool], name: str, tmp_path: Path) -> None:
    for part, reason in LEFT_OUT.items():
        if part in name:
            pytest.skip(reason)
    ranks = pool()
    (tmp_path / "test_dir").mkdir()  # torch's tests write there
    try:
        skipped = ranks.run(run_torch_case, name, str(tmp_path))
    except BaseException:
        ranks.__exit__()
        raise
    if all(skipped):
        pytest.skip(f"torch: {skipped[0]}")


def test_enough_were_found() -> None:
    """Torch may rename its tests: then the selection above is to be looked at again."""
    assert len(names()) > 100
