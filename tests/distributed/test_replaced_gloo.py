"""A program that asks for gloo gets our backend, without an edit, where the user wants it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Ended, run

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(*sys.argv[1:2])
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean().backward()
    optimizer.step()
both, alone = dist.new_group(), dist.new_group([0], backend="gloo")
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank}, group=both)
groups = [dist.group.WORLD, both]
if rank == 0:
    groups.append(alone)
    total = torch.ones(2)
    dist.all_reduce(total, group=alone)
    assert total.tolist() == [1, 1]
else:
    assert alone is dist.GroupMember.NON_GROUP_MEMBER
if sys.argv[1:]:
    dist.monitored_barrier(timeout=timedelta(seconds=30))
if rank == 0:
    kinds = {type(group).__name__ for group in groups}
    print(dist.get_backend(), dist.get_backend(both), *kinds, gathered, model.module.weight.flatten().tolist())
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return str(script)


def torchrun(*command: str, **variables: str) -> Ended:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, *command], capture_output=True, text=True, timeout=120, env=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_ddp_on_gloo_and_on_its_replacement(program: str) -> None:
    usual = run("run", "-n", "2", program, "gloo")
    assert usual.code == 0, usual.stderr
    assert usual.stdout.startswith("gloo gloo ProcessGroup [{'rank': 0}, {'rank': 1}]")
    replaced = run("run", "--replace-gloo", "-n", "2", program, "gloo")
    assert replaced.code == 0, replaced.stderr
    # A sum of two numbers is the same in any order, so the weights are equal to the last bit.
    assert replaced.stdout == usual.stdout.replace("ProcessGroup", "CordeeProcessGroup")


@pytest.mark.long
def test_torchrun_and_a_program_that_names_no_backend(program: str) -> None:
    named = torchrun(program, "gloo", CORDEE_REPLACE_GLOO="1")
    assert named.code == 0, named.stderr
    assert named.stdout.startswith("gloo gloo CordeeProcessGroup")
    unnamed = torchrun(program, CORDEE_REPLACE_GLOO="1")
    assert unnamed.code == 0, unnamed.stderr
    assert " CordeeProcessGroup [{'rank': 0}" in unnamed.stdout
