"""The engine `spark`: every agent is a Spark job with one task.

Jobs are submitted from threads, each in a job group of its own, so that one agent can be cancelled. A stage in barrier
mode would abort all agents when one executor is lost; independent tasks leave the others alone (docs/decisions/0039).
Spark runs a lost task again, with the order of the first attempt. A second attempt ends at once: that reports the loss.
The engine of agents asks for another agent, with another ticket.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from cordee.cluster.engine import GRACE_S, Capacity
from cordee.cluster.engines.agent import findings_of, look_from_here, run_agent_process
from cordee.cluster.engines.agent_messages import AgentOrder
from cordee.cluster.engines.agents import AgentEnded, AgentSource, EngineRequest
from cordee.cluster.processes import describe_status
from cordee.core import env
from cordee.core.errors import CordeeError, JobError, MissingExtraError
from cordee.core.findings import Finding
from cordee.core.interrupts import keep_handlers

EXECUTORS_S = 30.0  # that executors have to register, once there is a session
QUIET_S = 8.0  # after which no further executors are expected
RETRY_S = 1.0  # after which a lost task has no slot for its second attempt
LOOK_EVERY_S = 0.3  # at the stages of agents
HINT_S = 5.0  # that a connection that has ended is taken for a sign of a loss
CONNECT_PREFIX = "sc://"
LOST = "its Spark executor was lost"


def make_source(request: EngineRequest) -> SparkSource:
    """Use the Spark session of this process, else open a session at `cluster.connect`, else where spark-submit says.

    Waits for executors. Raises JobError for a Spark that cannot be used, MissingExtraError without the package.
    """
    connect = request.job.cluster.connect
    _refuse_connect(connect or env.spark_remote())
    context, is_ours = open_context(connect, f"cordee {request.job.name}")
    source = SparkSource(context, is_ours=is_ours)
    try:
        refuse_speculation(context)
        source.await_slots(request.num_agents)
    except BaseException:
        source.close()
        raise
    return source


def check() -> Iterable[Finding]:
    """Say what is wrong with the Spark of the Spark configuration before a run: opens a session, and closes it."""
    try:
        _refuse_connect(env.spark_remote())
        context, is_ours = open_context("", "cordee doctor")
    except CordeeError as error:
        yield Finding("Spark", "problem", str(error))
        return
    source = SparkSource(context, is_ours=is_ours)
    try:
        refuse_speculation(context)
        source.await_slots(1)
        capacity = source.capacity()
        if capacity.num_slots == 0 and not capacity.may_grow:
            yield Finding("Spark", "problem", f"{source.describe()}: no slot is free", "end other jobs, or add workers")
            return
        growing = ", and dynamic allocation" if capacity.may_grow else ""
        yield Finding("Spark", "ok", f"{source.describe()}; {capacity.num_slots} free{growing}")
        here = setting_of(context, "spark.driver.host")
        with socket.create_server((here, 0)) as listener:
            port = listener.getsockname()[1]
            tasks = context.parallelize(range(capacity.num_slots), max(1, capacity.num_slots))
            yield from findings_of(tasks.map(partial(_look, here, port)).collect())
    except CordeeError as error:
        yield Finding("Spark", "problem", str(error))
    except Exception as error:  # noqa: BLE001 - Py4J passes on whatever the JVM throws
        yield Finding("Spark", "problem", reason_of(error))
    finally:
        source.close()


def _look(host: str, port: int, _: int) -> tuple[str, str, str]:
    return look_from_here(host, port)


def run_agent_task(order: str, rows: Iterable[Any]) -> Iterator[int | str | None]:
    """Be an agent until its end, and give its exit code, or why it could not start.

    Gives None at once where this is not the first attempt.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is not None and task.attemptNumber() > 0:
        yield None
        return
    try:
        yield run_agent_process(AgentOrder.from_text(order))
    except Exception as error:  # noqa: BLE001 - an attempt that fails is made again, and then hides why
        yield f"{type(error).__name__}: {error}"


class _Task(msgspec.Struct):
    """A job with one task, and the thread that waits for its end."""

    group: str
    thread: threading.Thread | None = None
    how: str | None = None  # how it ended; None while it runs or waits for a slot
    is_stopped: bool = False
    idle_since_s: float | None = None  # when a failed task was first seen that is not run again


class SparkSource(AgentSource):
    """Agents as jobs of a SparkContext."""

    name = "spark"

    def __init__(self, context: Any, *, is_ours: bool) -> None:
        """`is_ours`: this run has made the context, and stops it."""
        self._context = context
        self._is_ours = is_ours
        self._tasks: dict[int, _Task] = {}
        self._looked_s = 0.0
        self._hint_by_s = 0.0

    def describe(self) -> str:
        executors = _executors(self._context)
        num_slots = sum(executor.num_slots for executor in executors)
        origin = ", started for this run" if self._is_ours else ""
        return (
            f"Spark {self._context.version} at {self._context.master}, {len(executors)} "
            f"executor{'' if len(executors) == 1 else 's'}, {num_slots} slot{'' if num_slots == 1 else 's'}{origin}"
        )

    def capacity(self) -> Capacity:
        slots: dict[str, int] = {}
        executors = _executors(self._context)
        for executor in executors:
            slots[executor.host] = slots.get(executor.host, 0) + executor.num_slots - executor.num_running
        may_grow = setting_of(self._context, "spark.dynamicAllocation.enabled") == "true"
        here = setting_of(self._context, "spark.driver.host")
        is_alone = not may_grow and all(
            executor.host == here or executor.host.startswith("127.") for executor in executors
        )
        return Capacity(slots, may_grow=may_grow, is_limit=True, address="" if is_alone else here)

    def await_slots(self, num_slots: int) -> None:
        """Wait until there is room for so many agents, or no further executors seem to come."""
        began_s = changed_s = time.monotonic()
        num_before = -1
        while (capacity := self.capacity()).num_slots < num_slots and not capacity.may_grow:
            now_s = time.monotonic()
            if capacity.num_slots != num_before:
                num_before, changed_s = capacity.num_slots, now_s
            if now_s - began_s > EXECUTORS_S or (num_before > 0 and now_s - changed_s > QUIET_S):
                return
            if num_before > 0 and self._context.master.startswith("local"):
                return
            time.sleep(0.1)

    def start(self, order: AgentOrder) -> None:
        task = _Task(f"cordee-{order.run}-{order.number}")
        task.thread = threading.Thread(
            target=self._run, args=(task, order), name=f"cordee-spark-agent-{order.number}", daemon=True
        )
        self._tasks[order.number] = task
        task.thread.start()

    def ended(self) -> Sequence[AgentEnded]:
        """As of every source. Raises CordeeError if the Java process of the driver is gone."""
        with _talking_to_java():
            self._find_losses()
        over = [number for number, task in self._tasks.items() if task.how is not None]
        found = []
        for number in over:
            task = self._tasks.pop(number)
            assert task.how is not None
            found.append(AgentEnded(number, "" if task.is_stopped else task.how))
        return found

    def look(self) -> None:
        self._hint_by_s = time.monotonic() + HINT_S

    def stop(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None and not task.is_stopped:
            task.is_stopped = True
            with contextlib.suppress(CordeeError), _talking_to_java():  # without Java there is no job
                self._context.cancelJobGroup(task.group)

    def close(self) -> None:
        tasks = list(self._tasks.values())
        deadline_s = time.monotonic() + GRACE_S
        _join(tasks, deadline_s)  # those that were told to leave
        for number in list(self._tasks):
            self.stop(number)
        _join(tasks, time.monotonic() + 2 * GRACE_S)
        self._tasks.clear()
        if self._is_ours:
            with contextlib.suppress(CordeeError), _talking_to_java():
                self._context.stop()

    def _run(self, task: _Task, order: AgentOrder) -> None:
        """Submit the job and wait for its end. Runs in a thread of its own: job groups are of threads."""
        context = self._context
        try:
            context.setJobGroup(task.group, f"cordee agent {order.number}", interruptOnCancel=True)
            if task.is_stopped:  # before there was a job to cancel
                task.how = ""
                return
            (status,) = context.parallelize([0], 1).mapPartitions(partial(run_agent_task, order.to_text())).collect()
            task.how = _describe(status)
        except Exception as error:  # noqa: BLE001 - Py4J passes on whatever the JVM throws
            task.how = reason_of(error)

    def _find_losses(self) -> None:
        """Notice tasks that were lost and have no slot for their second attempt."""
        now_s = time.monotonic()
        is_hinted = now_s < self._hint_by_s
        if now_s - self._looked_s < (LOOK_EVERY_S / 3 if is_hinted else LOOK_EVERY_S):
            return
        self._looked_s = now_s
        tracker = self._context.statusTracker()
        for task in self._tasks.values():
            if task.how is not None or task.is_stopped:
                continue
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(task.group)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
            known = [stage for stage in stages if stage is not None]
            if not any(stage.numFailedTasks for stage in known) or any(stage.numActiveTasks for stage in known):
                task.idle_since_s = None
            elif task.idle_since_s is None:
                task.idle_since_s = now_s
            elif is_hinted or now_s - task.idle_since_s > RETRY_S:
                self._context.cancelJobGroup(task.group)
                task.how = LOST


@contextlib.contextmanager
def _talking_to_java() -> Iterator[None]:
    """Inside, the Java process of the driver is asked for something. Raises CordeeError if it is gone."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, OSError):
        raise CordeeError(
            "the Java process of the Spark driver has ended, and the executors with it: what it has printed says why "
            "(it may have been killed for its memory: spark.driver.memory)"
        ) from None


def open_context(connect: str, name: str) -> tuple[Any, bool]:
    """Return the SparkContext of this process, or a new context, and whether it is new. Raises JobError."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError:
        raise MissingExtraError("engine 'spark'", "spark") from None
    context = SparkContext._active_spark_context
    if context is not None:
        if connect and connect != context.master:
            raise JobError(
                f"this process has a Spark session at {context.master}, and cluster.connect = {connect!r}: "
                "stop the session before, or remove cluster.connect"
            )
        _refuse_shared_threads(context)
        return context, False
    builder = SparkSession.builder.appName(name).config("spark.ui.showConsoleProgress", "false")
    with keep_handlers(), env.with_default("PYSPARK_PYTHON", sys.executable):
        try:
            # Without the Java process a SparkConf is empty, whatever spark-submit or spark-defaults.conf say.
            SparkContext._ensure_initialized()
            if connect or not SparkConf().contains("spark.master"):
                builder = builder.master(connect or "local[*]")
            context = builder.getOrCreate().sparkContext
        except Exception as error:  # noqa: BLE001 - Py4J passes on whatever the JVM throws
            raise JobError(
                f"cannot open a Spark session{f' at {connect}' if connect else ''}: {reason_of(error)}"
            ) from None
    context.setLogLevel("ERROR")
    _refuse_shared_threads(context)
    return context, True


def _refuse_connect(address: str) -> None:
    if address.startswith(CONNECT_PREFIX):
        raise JobError(
            f"{address} is an address of Spark Connect, which has no jobs of single tasks (RDDs): use the master, "
            "cluster.connect = 'spark://HOST:7077', or submit the program with spark-submit"
        )


def _refuse_shared_threads(context: Any) -> None:
    from py4j.clientserver import ClientServer

    if not isinstance(context._gateway, ClientServer):
        raise JobError("PYSPARK_PIN_THREAD=false mixes the job groups of agents: remove it from the environment")


def refuse_speculation(context: Any) -> None:
    """Spark may start a copy of a task that takes long, and ends the first when the copy ends."""
    limit = setting_of(context, "spark.speculation.task.duration.threshold")
    if setting_of(context, "spark.speculation") == "true" and limit:
        raise JobError(
            f"spark.speculation.task.duration.threshold = {limit} with spark.speculation = true starts every agent a "
            "second time: remove one of them from the Spark configuration"
        )


class _Executor(msgspec.Struct, frozen=True):
    host: str
    num_slots: int
    num_running: int


def _executors(context: Any) -> list[_Executor]:
    """Return the executors that run tasks. Spark's own web page reads the same list; it has no public name (4.0)."""
    summaries = context._jsc.sc().statusStore().executorList(True)
    found = [summaries.apply(index) for index in range(summaries.size())]
    return [
        _Executor(str(one.hostPort()).rpartition(":")[0], int(one.maxTasks()), int(one.activeTasks()))
        for one in found
        if one.maxTasks() > 0 and one.hostPort()  # the driver has no slots, but in local mode; the host comes last
    ]


def setting_of(context: Any, key: str) -> str:
    return str(context.getConf().get(key) or "")


def _describe(status: int | str | None) -> str:
    """Return how an agent ended, by what its task gave; empty if it left as it was asked to."""
    if status is None:
        return LOST
    if isinstance(status, str):
        return f"an agent could not start on its Spark executor: {status}"
    return "" if status == 0 else f"the agent {describe_status(status)}"


def _join(tasks: Iterable[_Task], deadline_s: float) -> None:
    for task in tasks:
        assert task.thread is not None
        task.thread.join(max(0.0, deadline_s - time.monotonic()))


def reason_of(error: BaseException) -> str:
    """Return what went wrong, in one line: Py4J's text holds the traces of both languages."""
    text = str(error)
    if "ExecutorLostFailure" in text:
        return LOST
    if "No module named 'cordee" in text:
        return "cordee is not installed for the Python of the Spark executors: install it there, or set PYSPARK_PYTHON"
    for pattern in (r"^(?:: )?\S*(?:Error|Exception): (.+)$", r"^(.+)$"):
        if found := re.search(pattern, text.strip(), re.MULTILINE):
            return found[1].strip()
    return type(error).__name__
