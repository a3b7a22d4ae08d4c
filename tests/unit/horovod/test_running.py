"""What `horovod.run` refuses before it starts anything, and how `import horovod` finds it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cordee.core.errors import JobError
from cordee.horovod import run


def work() -> None:
    raise AssertionError("nothing is to be started")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_proc": 0}, "num_proc=0 must be"),
        ({"np": -1}, "num_proc=-1 must be"),
        ({"min_num_proc": 1, "max_np": 3}, "min_num_proc=…, max_np=….*cordee run --elastic"),
        ({"hosts": "far:2", "num_proc": 2}, "hosts=….*torchrun"),
        ({"hosts": "localhost:1", "num_proc": 2}, "hosts=…"),
        ({"hosts": "localhost:4,far:2", "num_proc": 2}, "hosts=…"),
        ({"ssh_port": 22}, "ssh_port=…"),
        ({"use_mpi": True}, "use_mpi=….*MPI"),
        ({"mpi_args": "-x"}, "mpi_args=…"),
        ({"start_timeout": 30}, "start_timeout=…"),
        ({"executable": "/usr/bin/python2"}, "executable=…"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        run(work, **options)


def test_a_function_without_a_name_is_refused() -> None:
    def local() -> None: ...

    for function in (local, lambda: None):
        with pytest.raises(JobError, match="define the function at the top of a script or in a module"):
            run(function, num_proc=2)


def test_arguments_that_would_need_pickle_are_named() -> None:
    with pytest.raises(JobError, match=r"the arguments of horovod.run\[0\]\[0\]"):
        run(work, args=(object(),), num_proc=2)


def test_import_horovod_finds_all_three() -> None:
    program = """
from cordee.horovod.alias import install
install()
import horovod
from horovod.runner import run
import horovod.ray, horovod.spark
assert horovod.run is run
assert callable(horovod.spark.run) and callable(horovod.ray.RayExecutor)
for name in ("horovod.spark.keras", "horovod.ray.elastic", "horovod.mxnet.x"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert "is not part of cordee.horovod: " in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
