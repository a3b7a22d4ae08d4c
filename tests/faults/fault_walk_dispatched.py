"""Walks the fault points of runs with parameter servers: in step, two replicas of each server, reproducible.

    PYTHONPATH=tests:tests/faults python -m fault_walk_dispatched [--point P] [--scenario S] [--sample]

Of a server and its follower, `server-0` and `server-0.1`, the one that joins first serves: faults are for `server-0*`,
whichever it is. Where both pass a point, the first is there on every other visit. What takes the place of a process has
the next number (`server-0.2`, `worker-2`). What happens in a scenario by itself is one loss; the fault that is tried is
another.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL

from fault_trials import Scenario, Trial, Walker, job_text
from walking import DEATHS, Walk, cases, main, of

from cordee.cluster.control import scale_run
from cordee.core.errors import CordeeError
from cordee.core.fault_points import Fault, visits
from warm_launch import WarmServer

WITH_SERVERS = """name = "parameter_server"
servers = 2
replicas = 2"""
JOB = job_text('use = "parts:Net"', WITH_SERVERS, steps=8, save_every=3, training="shards = 2")
# Batch norms, so that workers have buffers to agree on.
NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
"""
STEP = "worker.computed"
PAIR = "server-0*"
HOLD = Fault(STEP, "worker-*", "hold", 9)  # 2 in each step


def _hold_until(is_so: Callable[[Trial], object]) -> Callable[[Trial], None]:
    """Have a worker wait in the middle of a step until something is so, or has become impossible."""

    def drive(trial: Trial) -> None:
        trial.until_held(HOLD)
        trial.until(lambda: is_so(trial))
        trial.release(HOLD)

    return drive


def _has_new_worker(trial: Trial) -> bool:
    """Whether a worker that was not there at the start has asked for work."""
    asked = {process for point, process in visits(trial.faults) if point == "dispatched.ask.takework"}
    return bool(asked - {"worker-0", "worker-1"})


def _has_new_follower(trial: Trial) -> bool:
    return trial.num_visits("dispatch.paired", "coordinator") > 2  # two at the start


def _has_new_evaluator(trial: Trial) -> bool:
    return trial.num_visits("dispatched.ask.join", "evaluator") > 1


def _scale(num_workers: int, is_so: Callable[[Trial], object]) -> Callable[[Trial], None]:
    def drive(trial: Trial) -> None:
        trial.until_held(HOLD)
        trial.scale(num_workers)
        trial.until(lambda: is_so(trial))
        trial.release(HOLD)

    return drive


def _ask_for_threads(trial: Trial) -> None:
    """The coordinator refuses it: workers of parameter servers keep their threads."""
    trial.until_held(HOLD)
    with contextlib.suppress(CordeeError):
        scale_run(trial.run_dir, 2, threads=2)
    trial.release(HOLD)


def _join(trial: Trial) -> None:
    trial.until_held(HOLD)
    trial.join()
    trial.until(lambda: _has_new_worker(trial))
    trial.release(HOLD)


def _kill_coordinator(trial: Trial) -> None:
    trial.until_held(HOLD)
    before = len(trial.events("coordinator_started"))
    trial.signal(trial.pid_of("coordinator_started"), SIGKILL)
    trial.until(lambda: len(trial.events("coordinator_started")) > before)
    trial.release(HOLD)


def _interrupt(trial: Trial) -> None:
    trial.until_held(HOLD)
    trial.process.send_signal(SIGINT)
    trial.release(HOLD)


def _wake(trial: Trial) -> None:
    trial.until_held(HOLD)
    trial.until(lambda: trial.events("worker_lost"))
    before = trial.num_visits("dispatched.ask.join", "worker-1")
    trial.signal(trial.pid_of("worker_started", 1), SIGCONT)
    trial.until(lambda: trial.num_visits("dispatched.ask.join", "worker-1") > before)
    trial.release(HOLD)


SCENARIOS = {
    "plain": Scenario(),
    "final save": Scenario(settings=("checkpoint.every_steps=1000",)),
    "worker lost": Scenario(_hold_until(_has_new_worker), (Fault(STEP, "worker-1", "kill", 2), HOLD)),
    "server lost": Scenario(_hold_until(_has_new_follower), (Fault("server.received.push", PAIR, "kill", 9), HOLD)),
    "follower lost": Scenario(_hold_until(_has_new_follower), (Fault("server.received.push", PAIR, "kill", 10), HOLD)),
    "follower dropped": Scenario(_hold_until(_has_new_follower), (Fault("server.passed_on", PAIR, "error", 5), HOLD)),
    "evaluator lost": Scenario(
        _hold_until(_has_new_evaluator), (Fault("evaluator.read", "evaluator", "kill", 1), HOLD)
    ),
    "leave": Scenario(
        _hold_until(lambda trial: trial.events("worker_left")), (Fault(STEP, "worker-1", "leave", 2), HOLD)
    ),
    "server leaves": Scenario(_hold_until(_has_new_follower), (Fault("server.received.push", PAIR, "leave", 9), HOLD)),
    "follower leaves": Scenario(
        _hold_until(_has_new_follower), (Fault("server.received.push", PAIR, "leave", 10), HOLD)
    ),
    "bad request": Scenario(_ask_for_threads, (HOLD,)),
    "scale out": Scenario(_scale(3, _has_new_worker), (HOLD,)),
    "scale in": Scenario(_scale(1, lambda trial: trial.events("scale")), (HOLD,)),
    "join": Scenario(_join, (HOLD,)),
    "coordinator": Scenario(_kill_coordinator, (HOLD,)),
    # Its last journal entry has commands, which those of later turns mostly have not.
    "coordinator at first": Scenario(base=(Fault("coordinator.committed", "coordinator", "kill", 1),)),
    "interrupt": Scenario(_interrupt, (HOLD,), ends_early=True),
    "resume": Scenario(resumes="interrupt"),
    "woken": Scenario(_wake, (Fault(STEP, "worker-1", "freeze", 2), HOLD), settings=("cluster.max_restarts=0",)),
}


def _asked(*kinds: str) -> list[str]:
    return [f"dispatched.{when}.{kind}" for kind in kinds for when in ("ask", "answered")]


def _called(*kinds: str) -> list[str]:
    return [f"client.{when}.{kind}" for kind in kinds for when in ("call", "answered")]


def _handled(*kinds: str) -> list[str]:
    return [f"server.{when}.{kind}" for kind in kinds for when in ("received", "answering")]


# Where nothing can fail but the process itself: a decision, or an answer that is lost only with its connection, which
# the other side notices.
TURNS = (
    of("plain", "coordinator", 1, 2, 10, 20),
    of("worker lost", "coordinator", 15, 20, 25),
    of("server lost", "coordinator", 15, 20, 25),
    of("follower dropped", "coordinator", 20, 25),
    of("evaluator lost", "coordinator", 20, 25),
    of("leave", "coordinator", 12, 18),
    of("server leaves", "coordinator", 20, 25),
    of("scale out", "coordinator", 20, 25),
    of("coordinator", "coordinator", 25),
    of("interrupt", "coordinator", 15, 20),
    of("resume", "coordinator", 5),
)
WORKERS = (
    of("plain", "worker-0", 1, 2),
    of("plain", "worker-1", 1, 2),
    of("worker lost", "worker-2", 1),
    of("server lost", "worker-0", 3),
    of("join", "joiner", 1),
)
ONCE = (  # each worker passes these once
    of("plain", "worker-0", 1),
    of("plain", "worker-1", 1),
    of("worker lost", "worker-2", 1),
    of("scale out", "worker-2", 1),
    of("join", "joiner", 1),
)
LATE = (  # what took the place of one is there
    of("server lost", PAIR, 20, 21),
    of("follower lost", PAIR, 20, 21),
    of("follower dropped", PAIR, 20, 21),
)
BOTH = (of("plain", PAIR, 1, 2, 3, 4), of("worker lost", PAIR, 9, 10), *LATE)
FIRST = (of("plain", PAIR, 1, 2), of("worker lost", PAIR, 4), of("server lost", PAIR, 13))
FOLLOWER = (of("plain", PAIR, 1, 2), of("plain", "server-1*", 1), of("server lost", "server-0.2", 1))
SNAPSHOT = (of("plain", PAIR, 1, 2), of("final save", PAIR, 1))
NEW_FOLLOWER = (
    of("plain", PAIR, 1),
    of("plain", "server-1*", 1),
    of("server lost", "server-0.2", 1),
    of("follower lost", "server-0.2", 1),
    of("follower dropped", "server-0.2", 1),
)
HANDING_OVER = (of("plain", PAIR, 1), of("plain", "server-1*", 1))
EVALUATOR = (of("plain", "evaluator", 1, 2), of("final save", "evaluator", 1), of("server lost", "evaluator", 2))
SAVING = (of("plain", "evaluator", 1, 2, 3), of("final save", "evaluator", 1))

WALK: dict[str, Walk] = {
    **{point: Walk(WORKERS) for point in (*_asked("takework"), *_called("push", "pull", "pushextras", "pullextras"))},
    **{point: Walk(WORKERS, DEATHS) for point in ("worker.computed", "worker.pushed")},
    **{point: Walk((*ONCE, of("plain", "evaluator"))) for point in _asked("askservers", "bye")},
    **{
        point: Walk((*ONCE, *NEW_FOLLOWER, of("plain", "server-0"), of("plain", "evaluator")))
        for point in _asked("join")
    },
    **{point: Walk(ONCE) for point in _asked("event")},
    **{point: Walk(EVALUATOR) for point in _asked("askevaluatortask", "snapshottaken", "evaluatortaskdone")},
    **{point: Walk(EVALUATOR) for point in _called("snapshot", "snapshotextras")},
    **{point: Walk(EVALUATOR, DEATHS) for point in ("evaluator.read", "evaluator.measured", "evaluator.saved")},
    **{point: Walk((of("server leaves", PAIR), of("follower leaves", PAIR))) for point in _asked("handover")},
    "dispatched.ask.followerlost": Walk(
        (of("follower dropped", PAIR), of("follower lost", PAIR)),
        loses_updates=(("follower lost", "kill"), ("follower lost", "freeze")),  # both are dead then
    ),
    # From there on the first server is alone: that is not what two replicas are for.
    "dispatched.answered.followerlost": Walk((of("follower dropped", PAIR), of("follower lost", PAIR)), ("error",)),
    **{point: Walk(BOTH) for point in _handled("push", "pushextras")},
    **{point: Walk((*FIRST, of("plain", "server-1*"))) for point in _handled("pull")},
    **{point: Walk(FIRST) for point in _handled("pullextras")},
    **{point: Walk(SNAPSHOT) for point in _handled("snapshot", "snapshotextras")},
    **{point: Walk(FOLLOWER) for point in _handled("applypending")},
    **{point: Walk((of("worker lost", PAIR, 1, 2), of("worker lost", "server-1*", 1))) for point in _handled("fence")},
    **{point: Walk(HANDING_OVER) for point in _handled("adopt")},
    **{f"server.adopt.{what}": Walk(HANDING_OVER) for what in ("connect", "piece", "extras", "done")},
    **{point: Walk(NEW_FOLLOWER) for point in _handled("load", "loadextras")},
    **{
        point: Walk((of("plain", PAIR, 1, 2, 7), of("plain", "server-1*", 3), of("follower dropped", PAIR, 24)))
        for point in ("server.pass_on", "server.passed_on")
    },
    "workers.admitted": Walk((of("join", "coordinator"),), DEATHS),
    "dispatch.loss": Walk(
        tuple(of(f"{who} lost", "coordinator") for who in ("worker", "server", "follower", "evaluator")), DEATHS
    ),
    "dispatch.fence": Walk((of("worker lost", "coordinator", 1, 2),)),
    "dispatch.pair": Walk((of("plain", "coordinator", 1, 2), of("server lost", "coordinator", 3)), DEATHS),
    "dispatch.paired": Walk((of("plain", "coordinator", 1, 2), of("server lost", "coordinator", 3)), DEATHS),
    "coordinator.back": Walk((of("coordinator", "coordinator"),), DEATHS),
    **{
        f"coordinator.{where}": Walk((of("plain", "coordinator"), of("coordinator", "coordinator", 2)), DEATHS)
        for where in ("listening", "control_written")
    },
    "coordinator.heard": Walk((*TURNS, of("plain", "coordinator", 40)), DEATHS),
    **{point: Walk(TURNS, DEATHS) for point in ("coordinator.decided", "coordinator.committed")},
    **{point: Walk(TURNS, DEATHS) for point in ("journal.written", "launcher_link.command")},
    "coordinator.over": Walk((of("plain", "coordinator"),), DEATHS),
    # Without a journal, a coordinator that dies cannot be replaced.
    "journal.write": Walk(tuple(place for place in TURNS if place.scenario != "coordinator")),
    "dispatch.answer.joined": Walk(
        (of("plain", "coordinator", 1, 2, 7), of("follower dropped", "coordinator", 8)), DEATHS
    ),
    "dispatch.answer.servers": Walk((of("plain", "coordinator", 1, 2), of("server lost", "coordinator", 6)), DEATHS),
    "dispatch.answer.work": Walk((of("plain", "coordinator", 1, 2, 9), of("worker lost", "coordinator", 8)), DEATHS),
    "dispatch.answer.evaluatortask": Walk(
        (of("plain", "coordinator", 1, 2, 4), of("evaluator lost", "coordinator", 2)), DEATHS
    ),
    "dispatch.answer.leave": Walk(
        (
            of("plain", "coordinator", 1, 2),
            of("leave", "coordinator"),
            of("server leaves", "coordinator"),
            of("follower leaves", "coordinator"),
        ),
        DEATHS,
    ),
    "dispatch.answer.acknowledged": Walk(
        (of("plain", "coordinator", 1, 2), of("worker lost", "coordinator", 3)), DEATHS
    ),
    "dispatch.answer.accepted": Walk(
        (
            of("plain", "coordinator", 1, 2, 4),
            of("scale out", "coordinator"),
            of("join", "coordinator"),
            of("follower dropped", "coordinator", 1, 2),
        ),
        DEATHS,
    ),
    "dispatch.answer.refused": Walk((of("bad request", "coordinator"),), DEATHS),
    **{
        point: Walk((of("plain", "coordinator"),), DEATHS)
        for point in ("dispatch.shut_down", "dispatch.shut_down_done")
    },
    "launcher_link.listen": Walk((of("plain", "coordinator"), of("coordinator", "coordinator", 2))),
    "launcher_link.again": Walk((of("coordinator at first", "coordinator"),), DEATHS),
    **{point: Walk((of("plain", "coordinator"),), DEATHS) for point in ("launcher_link.end", "launcher_link.ended")},
    **{
        f"checkpoint.{where}": Walk(SAVING, ends_early=("error",))
        for where in ("folder", "file", "values", "manifest", "rename", "renamed", "saved")
    },
    **{
        f"checkpoint.{where}": Walk((of("plain", "evaluator", 1, 2),), ends_early=("error",))
        for where in ("remove", "removing")
    },
}


def make_walker(server: WarmServer, folder: Path) -> Walker:
    return Walker(server, folder, "parameter_server", JOB, SCENARIOS, NET)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"parameter_server": make_walker}, lambda walker: cases(WALK)))
