"""Walks the fault points of team runs: every point, every process that passes it, two visits, every action.

    PYTHONPATH=tests:tests/faults python -m fault_walk [--strategy data_parallel] [--point P] [--scenario S]

`WALK` says for each point where it is passed. An entry is also needed for a point that only another kind of run passes
(`fault_walk_dispatched.py`): a test fails for a point that has none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from signal import SIGCONT

from fault_trials import FAIL, Scenario, Trial, Walker, job_text
from team_actions import interrupt, join, kill_coordinator, scale, until_size
from walking import DEATHS, Walk, cases, main, of

from cordee.cluster.control import TOKEN_FILE
from cordee.core.fault_points import Fault
from warm_launch import WarmServer

MODEL = """use = "mlp"
hidden = [16]
dropout = 0.1"""
JOB = job_text(MODEL, 'name = "data_parallel"', steps=12, save_every=4)
STEP = "step.begun"
HOLD_0 = Fault(STEP, "worker-0", "hold", 5)
HOLD_0_LATE = Fault(STEP, "worker-0", "hold", 7)
HOLD_1 = Fault(STEP, "worker-1", "hold", 7)


def _hear_of_loss(trial: Trial) -> None:
    """Who is held does not notice the loss by itself: it hears of it."""
    trial.until_held(HOLD_0)
    trial.until(lambda: trial.num_visits("link.generation_ended", "worker-0"))
    trial.release(HOLD_0)


def _wake(trial: Trial) -> None:
    trial.until_held(HOLD_0_LATE)
    trial.signal(trial.pid_of("worker_started", 1), SIGCONT)
    trial.until_members(2, "worker-0")
    trial.release(HOLD_0_LATE)


def _leave_damaged(folder: Path) -> None:
    """A checkpoint that is damaged stands where the run is going to save one."""
    damaged = folder / "run" / "checkpoints" / "step-8"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")


def _hide_directory(folder: Path) -> None:
    """Processes cannot find out that they have the run directory: the coordinator writes and reads for them."""
    (folder / "run" / TOKEN_FILE).mkdir(parents=True, exist_ok=True)


STORAGE = "storage"
STORED = (f"checkpoint.storage='{STORAGE}'",)


def _make_storage(folder: Path) -> None:
    (folder / STORAGE).mkdir()


def _put_two(trial: Trial) -> None:
    """The first checkpoint is in the storage before the next is saved: then there is one to remove."""
    trial.until_held(HOLD_0)
    trial.until(lambda: trial.num_visits("storage.put_done", "launcher"))
    trial.release(HOLD_0)


def _lose_directory(folder: Path) -> None:
    """Another machine, which has what was put into the storage and no run directory."""
    shutil.copytree(folder.parent / "saved-stored and interrupted" / STORAGE, folder / STORAGE)
    shutil.rmtree(folder / "run")


# The model of the job, and a mistake in it that shows when the first checkpoint is there.
FAILING = """
import os
from cordee.models.mlp import mlp
def net(input_shape, num_classes, hidden, dropout):
    model = mlp(input_shape=input_shape, num_classes=num_classes, hidden=hidden, dropout=dropout)
    model.register_forward_pre_hook(check)
    return model
def check(model, inputs):
    if os.path.exists("fail") and os.path.exists("run/checkpoints/step-4"):
        raise ZeroDivisionError("the user's own mistake")
"""


def _make_mistake(folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING)
    (folder / FAIL).touch()


SCENARIOS = {
    "plain": Scenario(),
    "final save": Scenario(settings=("checkpoint.every_steps=1000",)),
    "loss": Scenario(until_size(2, HOLD_0_LATE), (Fault(STEP, "worker-1", "kill", 4), HOLD_0_LATE)),
    "told of a loss": Scenario(_hear_of_loss, (Fault(STEP, "worker-1", "kill", 5), HOLD_0)),
    "loss of the first": Scenario(until_size(2, HOLD_1), (Fault(STEP, "worker-0", "kill", 4), HOLD_1)),
    "scale out": Scenario(scale(3, HOLD_0), (HOLD_0,)),
    "join": Scenario(join(3, HOLD_0), (HOLD_0,)),
    "leave": Scenario(until_size(1, HOLD_0), (Fault(STEP, "worker-1", "leave", 4), HOLD_0)),
    "scale in": Scenario(scale(1, HOLD_0), (HOLD_0,)),
    "coordinator": Scenario(kill_coordinator(HOLD_0), (HOLD_0,)),
    "interrupt": Scenario(interrupt(HOLD_0), (HOLD_0,), ends_early=True),
    "failure": Scenario(settings=("model.use='failing:net'",), prepare=_make_mistake, ends_early=True),
    "resume": Scenario(resumes="interrupt"),
    "resume over a damaged one": Scenario(resumes="interrupt", prepare=_leave_damaged),
    "remote": Scenario(prepare=_hide_directory),
    "remote resume": Scenario(resumes="interrupt", prepare=_hide_directory),
    "stored": Scenario(_put_two, (HOLD_0,), STORED, prepare=_make_storage),
    "stored and interrupted": Scenario(interrupt(HOLD_0), (HOLD_0,), STORED, ends_early=True, prepare=_make_storage),
    "resume from the storage": Scenario(settings=STORED, resumes="stored and interrupted", prepare=_lose_directory),
    "woken": Scenario(_wake, (Fault(STEP, "worker-1", "freeze", 4), HOLD_0_LATE), settings=("cluster.max_restarts=0",)),
}


# A member: in the first generation, in the one after a loss, in the one that a replacement joins.
MEMBERS = (
    of("plain", "worker-0", 1),
    of("plain", "worker-1", 1),
    of("loss", "worker-0", 2, 3),
    of("loss", "worker-1", 2),
    of("loss of the first", "worker-0", 2),
    of("loss of the first", "worker-1", 2, 3),
    of("scale out", "worker-0", 2),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
    of("leave", "worker-0", 2),
    of("resume", "worker-1", 1),
)
# A team of one has nobody to set up with.
SET_UP = (
    of("plain", "worker-0", 1),
    of("plain", "worker-1", 1),
    of("loss", "worker-0", 2),
    of("loss", "worker-1", 2),
    of("loss of the first", "worker-0", 2),
    of("loss of the first", "worker-1", 2),
    of("scale out", "worker-0", 2),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
    of("resume", "worker-1", 1),
)
NEW = (
    of("plain", "worker-0", 1),
    of("plain", "worker-1", 1),
    of("loss", "worker-1", 2),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
)
SAVING = (of("plain", "worker-0", 1, 2, 3), of("final save", "worker-0", 1), of("loss of the first", "worker-1", 1))
REMOVING = (of("plain", "worker-0", 1, 2), of("remote", "coordinator", 1, 2))
REMOTE_SAVING = (of("remote", "coordinator", 1, 2, 3), of("remote resume", "coordinator", 1))
FINAL = (of("final save", "worker-0"), of("final save", "worker-1"))
# Who has a state gives it to who has none.
HANDED = (
    of("loss", "worker-0", 1),
    of("loss", "worker-1", 1),
    of("loss of the first", "worker-0", 1),
    of("loss of the first", "worker-1", 1),
    of("scale out", "worker-2", 1),
    of("join", "worker-2", 1),
)
# Members are compared when a generation is entered, at each save (after steps 4, 8 and 12) and once at the end.
COMPARED = (
    of("plain", "worker-0", 1, 2, 3, 4),
    of("plain", "worker-1", 1, 2, 3, 4),
    of("final save", "worker-0", 1, 2),
    of("final save", "worker-1", 1, 2),
    of("loss", "worker-0", 2, 3, 4, 5),
    of("loss", "worker-1", 2, 3, 4),
    of("told of a loss", "worker-0", 2, 3),
    of("loss of the first", "worker-0", 2, 3, 4),
    of("loss of the first", "worker-1", 2, 3, 4, 5),
    of("scale out", "worker-0", 3, 5),
    of("scale out", "worker-1", 3, 5),
    of("scale out", "worker-2", 1, 2, 3),
    of("join", "worker-0", 3),
    of("join", "worker-1", 3),
    of("join", "worker-2", 1, 2),
    of("leave", "worker-0", 3, 4),
    of("leave", "worker-1", 2),
    of("scale in", "worker-0", 3),
    of("scale in", "worker-1", 2),
    of("coordinator", "worker-0", 3),
    of("coordinator", "worker-1", 3),
    of("interrupt", "worker-0", 2, 3),
    of("interrupt", "worker-1", 2, 3),
    of("resume", "worker-0", 1, 2),
    of("resume", "worker-1", 1, 2),
    of("resume over a damaged one", "worker-0", 2),
    of("woken", "worker-0", 4),
    of("woken", "worker-1", 2),
)
ENDING = (of("plain", "worker-0", 1), of("plain", "worker-1", 1), of("scale out", "worker-2", 1))
TURNS = (
    of("plain", "coordinator", 1, 2, 10),
    of("loss", "coordinator", 15, 20, 25),
    of("scale out", "coordinator", 20, 25, 30),
    of("leave", "coordinator", 15, 20),
    of("interrupt", "coordinator", 15, 20),
    of("coordinator", "coordinator", 13),  # of its replacement; a busy coordinator takes fewer, longer turns
)

WALK: dict[str, Walk] = {
    "link.join": Walk((*NEW, of("woken", "worker-1", 2))),
    "link.joined": Walk(NEW, DEATHS),
    "link.send_ready": Walk(MEMBERS),
    "link.ready": Walk(MEMBERS, DEATHS),
    "link.answered": Walk(MEMBERS, DEATHS),
    "link.pause": Walk(
        (of("loss", "worker-0"), of("scale out", "worker-0"), of("scale out", "worker-1"), of("leave", "worker-1")),
        DEATHS,
    ),
    "link.generation_ended": Walk((of("told of a loss", "worker-0"),), DEATHS),
    "link.stop": Walk((of("interrupt", "worker-0"), of("interrupt", "worker-1")), DEATHS),
    "link.given_up": Walk((of("woken", "worker-1"),), DEATHS),
    "link.send_leaving": Walk((of("leave", "worker-1"),)),
    "link.send_failure": Walk((of("failure", "worker-*"),)),  # the first of the two ends the run
    "link.send_goodbye": Walk(ENDING),
    "link.goodbye": Walk(ENDING, DEATHS),
    "step.begun": Walk(
        (
            of("plain", "worker-0", 1, 2, 5, 12),
            of("plain", "worker-1", 1, 2, 5, 12),
            of("scale out", "worker-2", 1, 2),
        )
    ),
    "step.taken": Walk((of("plain", "worker-0", 1, 2, 5, 12), of("plain", "worker-1", 1, 2, 12))),
    "evaluate.begun": Walk((of("plain", "worker-0", 1, 2, 3), of("plain", "worker-1", 1, 2))),
    "evaluate.done": Walk((of("plain", "worker-0", 1, 2, 3), of("plain", "worker-1", 1, 2))),
    "save.begun": Walk((of("plain", "worker-0", 1, 2, 3), of("plain", "worker-1", 1, 2), *FINAL)),
    "save.consolidated": Walk((of("plain", "worker-0", 1, 2, 3), of("plain", "worker-1", 1, 2), *FINAL)),
    "end.reached": Walk(ENDING),
    "enter.begun": Walk(MEMBERS),
    "enter.gathered": Walk(MEMBERS),
    "enter.loaded": Walk((of("resume", "worker-0"),)),
    "enter.shared": Walk(HANDED),
    "enter.agreed": Walk(MEMBERS),
    "enter.set_up": Walk(MEMBERS),
    "compare.begun": Walk(COMPARED),
    "compare.done": Walk(COMPARED),
    "enter.resumed": Walk(MEMBERS),
    "enter.done": Walk(MEMBERS),
    "share.begun": Walk(HANDED),
    "share.described": Walk(HANDED),
    "share.done": Walk(HANDED),
    "setup.begun": Walk(SET_UP),
    "setup.shared": Walk(SET_UP),
    "rendezvous.begin": Walk(MEMBERS),
    "segment.introduced": Walk(MEMBERS),
    "segment.made": Walk(
        (of("plain", "worker-0"), of("loss", "worker-0", 2, 3), of("loss of the first", "worker-1", 1, 2))
    ),
    "segment.found": Walk(
        (
            of("plain", "worker-1"),
            of("loss", "worker-1", 2),
            of("loss of the first", "worker-0", 1),
            of("scale out", "worker-2"),
        )
    ),
    "segment.mapped": Walk(MEMBERS),
    "segment.answered": Walk(MEMBERS),
    "rendezvous.formed": Walk(MEMBERS),
    "rendezvous.end": Walk(
        (
            of("plain", "worker-0"),
            of("plain", "worker-1"),
            of("loss", "worker-0", 1, 2),
            of("loss of the first", "worker-1", 1, 2),
            of("leave", "worker-1"),
        ),
        DEATHS,
    ),
    "checkpoint.staged": Walk((of("plain", "worker-0", 1, 2, 3), of("loss of the first", "worker-1", 1)), DEATHS),
    "checkpoint.folder": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.file": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.values": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.manifest": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.set_aside": Walk((of("resume over a damaged one", "worker-0"),)),
    "checkpoint.rename": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.renamed": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.saved": Walk((*SAVING, *REMOTE_SAVING), ends_early=("error",)),
    "checkpoint.remove": Walk(
        (of("plain", "worker-0", 1, 2), of("remote", "coordinator", 1, 2)), ends_early=("error",)
    ),
    "checkpoint.removing": Walk(
        (of("plain", "worker-0", 1, 2), of("remote", "coordinator", 1, 2)), ends_early=("error",)
    ),
    "checkpoint.written": Walk(SAVING, DEATHS),
    "remote_save.piece": Walk((of("remote", "worker-0", 1, 2, 4), of("remote resume", "worker-0", 1))),
    "remote_save.written": Walk((of("remote", "coordinator", 1, 2, 4), of("remote resume", "coordinator", 1)), DEATHS),
    "remote_save.end": Walk((of("remote", "worker-0", 1, 3), of("remote resume", "worker-0", 1))),
    "remote_save.saved": Walk((of("remote", "coordinator", 1, 3), of("remote resume", "coordinator", 1)), DEATHS),
    "remote_save.heard": Walk((of("remote", "worker-0", 1, 3), of("remote resume", "worker-0", 1)), DEATHS),
    "remote_load.ask": Walk((of("remote", "worker-0", 1), of("remote resume", "worker-0", 1, 2, 4))),
    "storage.claimed": Walk((of("stored", "launcher"), of("resume from the storage", "launcher"))),
    "storage.put_file": Walk((of("stored", "launcher", 1, 2, 4),)),
    "storage.put_manifest": Walk((of("stored", "launcher", 1, 2),)),
    "storage.put_done": Walk((of("stored", "launcher", 1, 2),)),
    "storage.remove": Walk((of("stored", "launcher", 1),)),
    "storage.removing": Walk((of("stored", "launcher", 1),)),
    "storage.fetch": Walk((of("resume from the storage", "launcher", 1, 2),)),
    "storage.fetched": Walk((of("resume from the storage", "launcher"),), DEATHS),
    "launcher_link.listen": Walk((of("plain", "coordinator"), of("coordinator", "coordinator", 2))),
    "launcher_link.again": Walk((of("coordinator", "coordinator", 1),), DEATHS),
    "coordinator.back": Walk((of("coordinator", "coordinator", 1),), DEATHS),
    "coordinator.listening": Walk((of("plain", "coordinator"), of("coordinator", "coordinator", 2)), DEATHS),
    "coordinator.control_written": Walk((of("plain", "coordinator"), of("coordinator", "coordinator", 2)), DEATHS),
    "coordinator.heard": Walk((*TURNS, of("plain", "coordinator", 40)), DEATHS),
    "coordinator.decided": Walk(TURNS, DEATHS),
    "journal.write": Walk(TURNS),
    "journal.written": Walk(TURNS, DEATHS),
    "launcher_link.command": Walk(TURNS, DEATHS),
    "coordinator.committed": Walk(TURNS, DEATHS),
    "coordinator.reply": Walk(
        (
            of("plain", "coordinator", 1, 2, 5),
            of("loss", "coordinator", 8, 10),
            of("scale out", "coordinator", 10, 15),
            of("join", "coordinator", 10),
        )
    ),
    "coordinator.directive": Walk(
        (
            of("plain", "coordinator", 1, 2),
            of("loss", "coordinator", 3, 4, 5, 6),
            of("scale out", "coordinator", 3, 4, 5, 6),
            of("leave", "coordinator", 3, 4, 5),
            of("interrupt", "coordinator", 3, 4, 5),
        )
    ),
    "coordinator.directed": Walk(
        (
            of("plain", "coordinator", 1, 2),
            of("loss", "coordinator", 3, 4, 5, 6),
            of("scale out", "coordinator", 3, 4, 5, 6),
            of("leave", "coordinator", 3, 4, 5),
            of("interrupt", "coordinator", 3, 4, 5),
        ),
        DEATHS,
    ),
    "generations.formed": Walk(
        (of("plain", "coordinator"), of("loss", "coordinator", 2, 3), of("leave", "coordinator", 2)), DEATHS
    ),
    "generations.pause": Walk((of("loss", "coordinator"), of("scale in", "coordinator")), DEATHS),
    "generations.finish": Walk((of("interrupt", "coordinator"),), DEATHS),
    "generations.leave": Walk((of("leave", "coordinator"), of("scale in", "coordinator")), DEATHS),
    "losses.found": Walk((of("loss", "coordinator"), of("loss of the first", "coordinator")), DEATHS),
    "losses.replaced": Walk((of("loss", "coordinator"), of("loss of the first", "coordinator")), DEATHS),
    "workers.scaled": Walk((of("scale out", "coordinator"), of("scale in", "coordinator")), DEATHS),
    "workers.admitted": Walk((of("join", "coordinator"),), DEATHS),
    "coordinator.over": Walk((of("plain", "coordinator"),), DEATHS),
    "launcher_link.end": Walk((of("plain", "coordinator"),), DEATHS),
    "launcher_link.ended": Walk((of("plain", "coordinator"),), DEATHS),
    "supervisor.start": Walk((of("plain", "launcher"), of("coordinator", "launcher", 2)), DEATHS),
    "supervisor.command": Walk((of("plain", "launcher", 1, 2, 10), of("loss", "launcher", 20)), DEATHS),
    "supervisor.command_done": Walk((of("plain", "launcher", 1, 2, 10), of("loss", "launcher", 20)), DEATHS),
    "supervisor.ended": Walk((of("plain", "launcher"),), DEATHS),
    "launch.summary": Walk((of("plain", "launcher"),), ends_early=("error",)),
    "launch.closed": Walk((of("plain", "launcher"),), DEATHS),
    "fork_server.asked": Walk((of("plain", "fork-server", 1, 2, 3), of("loss", "fork-server", 4)), DEATHS),
    "fork_server.forked": Walk((of("plain", "fork-server", 1, 2, 3), of("loss", "fork-server", 4)), DEATHS),
    "fork_server.answered": Walk((of("plain", "fork-server", 1, 2, 3), of("loss", "fork-server", 4)), DEATHS),
    "forked.alive": Walk((of("plain", "forked", 1, 2, 3), of("loss", "forked", 4)), DEATHS),
    "forked.reported": Walk((of("plain", "forked", 1, 2, 3), of("loss", "forked", 4)), DEATHS),
    "joining.asks": Walk((of("join", "joiner"),), DEATHS),
    "joining.taken": Walk((of("join", "joiner"),), DEATHS),
}


# Points of agents, and which visits are tried: the first, and one in the middle of the run (test_fault_walk_agents).
AGENT_WALK: dict[str, tuple[int, ...]] = {
    "agent.enrol": (1,),
    "agent.enrolled": (1,),
    "agent.command": (1,),
    "agent.status": (1, 3),
    "agent.leave": (1,),
}


def make_walker(server: WarmServer, folder: Path) -> Walker:
    return Walker(server, folder, "data_parallel", JOB, SCENARIOS)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"data_parallel": make_walker}, lambda walker: cases(WALK)))
