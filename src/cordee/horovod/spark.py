"""`horovod.spark.run`: a function as ranks in tasks of a Spark job.

Spark brings the function to its executors and the results back, as it does with any function of a job. The tasks are
one stage in barrier mode: Spark starts all of them or none, and they are of no use one by one.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cordee.cluster.engines.spark import SparkSource, reason_of, refuse_speculation, setting_of
from cordee.core.errors import JobError, MissingExtraError, TrainingError
from cordee.horovod.cluster_ranks import (
    LOOPBACK,
    Meeting,
    Outcome,
    host_of,
    number_ranks,
    report_failure,
    results_of,
    taking_part,
)
from cordee.horovod.running import refuse_given

START_TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.2
_numbers = itertools.count(1)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` Spark tasks at once; return what each rank returned, in their order.

    The function calls `hvd.init()` itself. Without `num_proc` there are as many as `spark.default.parallelism`. `env`
    are variables of the ranks. Waits up to `start_timeout` seconds (600) for free slots. `use_gloo` asks for what is so
    in any case. What ranks print is in the logs of the executors.

    Raises JobError for what cannot be done, TrainingError that names the rank where the function failed, or if an
    executor was lost: nothing is begun again.
    """
    refuse_given("horovod.spark.run", {"use_mpi": use_mpi or None, "extra_mpi_args": extra_mpi_args}, "there is no MPI")
    output = {"stdout": stdout, "stderr": stderr, "prefix_output_with_timestamp": prefix_output_with_timestamp or None}
    refuse_given("horovod.spark.run", output, "what ranks print is in the logs of the executors")
    refuse_given("horovod.spark.run", {"nics": nics}, "ranks use the addresses by which Spark knows their hosts")
    refuse_given("horovod.spark.run", {"executable": executable}, "set PYSPARK_PYTHON")
    context = _active_context()
    num_proc = int(context.defaultParallelism) if num_proc is None else num_proc
    if num_proc < 1:
        raise JobError(f"horovod.spark.run: num_proc={num_proc} must be at least 1")
    _await_slots(context, num_proc, START_TIMEOUT_S if start_timeout is None else start_timeout)
    if verbose:
        sys.stderr.write(f"horovod.spark.run: {num_proc} ranks on Spark {context.version} at {context.master}\n")
    task = partial(_be_a_rank, fn, tuple(args), dict(kwargs or {}), dict(env or {}))
    return results_of(_Job(context, num_proc).run(task), "horovod.spark.run")


def run_elastic(*args: Any, **kwargs: Any) -> Any:
    """Refused: see the message."""
    raise JobError(
        "horovod.spark.run_elastic is not part of cordee.horovod: train a job with `cordee train JOB --engine spark`, "
        "which continues without lost executors"
    )


def _active_context() -> Any:
    try:
        from pyspark import SparkContext
    except ImportError:
        raise MissingExtraError("horovod.spark", "spark") from None
    context = SparkContext._active_spark_context
    if context is None:
        raise JobError("horovod.spark.run: this process has no Spark session: make one with SparkSession.builder")
    if setting_of(context, "spark.dynamicAllocation.enabled") == "true":
        raise JobError(
            "horovod.spark.run: Spark starts tasks at once (barrier mode) only with a fixed number of executors: set "
            "spark.dynamicAllocation.enabled = false"
        )
    refuse_speculation(context)
    return context


def _await_slots(context: Any, num_proc: int, timeout_s: float) -> None:
    source = SparkSource(context, is_ours=False)
    deadline_s = time.monotonic() + timeout_s
    while (free := source.capacity().num_slots) < num_proc:
        if time.monotonic() > deadline_s or context.master.startswith("local"):
            raise JobError(
                f"horovod.spark.run: {source.describe()}: {free} free, and num_proc={num_proc}: lower num_proc, end "
                "other jobs, or add executors"
            )
        time.sleep(LOOK_EVERY_S)


class _Job:
    """The Spark job with the ranks, and the thread that waits for it: job groups are of threads."""

    def __init__(self, context: Any, num_proc: int) -> None:
        self._context, self._num_proc = context, num_proc
        self._group = f"cordee-horovod-{next(_numbers)}"
        self._outcomes: list[Outcome] = []
        self._error: Exception | None = None

    def run(self, task: Callable[[Iterable[Any]], Iterator[Outcome]]) -> list[Outcome]:
        """Return how the function ended on each rank. Raises TrainingError if an executor was lost."""
        thread = threading.Thread(target=self._collect, args=(task,), name=self._group, daemon=True)
        thread.start()
        is_lost = False
        try:
            while thread.is_alive():
                thread.join(LOOK_EVERY_S)
                if not is_lost and self._has_lost_task():  # Spark would begin the whole stage again
                    is_lost = True
                    self._context.cancelJobGroup(self._group)
        except BaseException:
            self._context.cancelJobGroup(self._group)
            raise
        if is_lost:
            raise TrainingError("horovod.spark.run: a rank was lost with its Spark executor; the others were ended")
        if self._error is not None:
            raise TrainingError(f"horovod.spark.run: {reason_of(self._error)}") from self._error
        return self._outcomes

    def _collect(self, task: Callable[[Iterable[Any]], Iterator[Outcome]]) -> None:
        try:
            self._context.setJobGroup(self._group, "horovod.spark.run", interruptOnCancel=True)
            rows = self._context.parallelize(range(self._num_proc), self._num_proc)
            self._outcomes = rows.barrier().mapPartitions(task).collect()
        except Exception as error:  # noqa: BLE001 - Py4J passes on whatever the JVM throws
            self._error = error

    def _has_lost_task(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return any(stage is not None and stage.numFailedTasks for stage in stages)


def _be_a_rank(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], env: Mapping[str, str], rows: Iterable[Any]
) -> Iterator[Outcome]:
    """Be a rank in a task of a barrier stage. An error is a result: Spark would begin the stage again."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    hosts = context.allGather(host_of(number))
    place = number_ranks(hosts)[number]
    meeting = None
    if place.rank == 0:
        own_address = context.getTaskInfos()[number].address.rpartition(":")[0] or LOOPBACK
        meeting = Meeting(LOOPBACK if len(set(hosts)) == 1 else own_address)
    places = context.allGather(f"{meeting.address} {meeting.port}" if meeting else "")
    address, port = next(text for text in places if text).split()
    try:
        with taking_part(place, address, int(port), env):
            outcome = Outcome(place.rank, fn(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - whatever the function raises is reported
        outcome = Outcome.of_error(place.rank, error)
        report_failure(address, int(port))
    context.barrier()  # the store stays until all have left
    if meeting is not None:
        meeting.close()
    yield outcome
