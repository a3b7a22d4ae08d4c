"""`horovod.run`: a function of a script or module on several processes of this host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import run_python

pytestmark = pytest.mark.timeout(200)

PROGRAM = """
import sys
import torch
import {horovod} as horovod
import {horovod}.torch as hvd

def total(value, *, factor=1):
    hvd.init()
    print("printed by rank", hvd.rank())
    mean = hvd.allreduce(torch.tensor([float(value + hvd.rank())]))
    return {{"rank": hvd.rank(), "size": hvd.size(), "mean": mean * factor, "pair": (1, "a")}}

def fails_before_init():
    import os
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    hvd.init()

def returns_a_lock():
    import threading
    return threading.Lock()

{call}
"""


def program(folder: Path, call: str, horovod: str = "cordee.horovod") -> str:
    file = folder / "program.py"
    file.write_text(PROGRAM.format(call=call, horovod=horovod))
    return str(file)


def test_results_come_back_in_the_order_of_ranks(tmp_path: Path) -> None:
    ended = run_python(program(tmp_path, "print(horovod.run(total, (1,), {'factor': 2}, np=2))"))
    assert ended.code == 0, ended.stderr
    expected = [{"rank": rank, "size": 2, "mean": "tensor([3.])", "pair": (1, "a")} for rank in range(2)]
    assert str(expected).replace("'tensor([3.])'", "tensor([3.])") in ended.stdout
    assert ended.stdout.count("printed by rank") == 2  # and the script is not executed again by the workers


def test_as_horovod_with_output_in_files(tmp_path: Path) -> None:
    """The workers of a program that imports `horovod` find it as well."""
    options = f"num_proc=2, hosts='localhost:2', output_filename={str(tmp_path / 'out')!r}"
    call = f"print(len(horovod.run(total, args=[1], {options})))"
    ended = run_python("-m", "cordee.horovod", program(tmp_path, call, "horovod"))
    assert ended.code == 0 and ended.stdout == "2\n", ended.stdout + ended.stderr
    for rank in range(2):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == f"printed by rank {rank}\n"


def test_a_rank_that_fails_is_named_while_others_wait_for_it(tmp_path: Path) -> None:
    ended = run_python(program(tmp_path, "horovod.run(fails_before_init, num_proc=2)"))
    assert ended.code == 1
    assert "ValueError: no luck" in ended.stderr
    assert "TrainingError: worker 1 exited with code 1; the others were ended" in ended.stderr


def test_a_result_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    ended = run_python(program(tmp_path, "horovod.run(returns_a_lock)"))
    assert ended.code == 1
    assert re.search(r"what \S+program\.py:returns_a_lock returned on rank 0", ended.stderr), ended.stderr
