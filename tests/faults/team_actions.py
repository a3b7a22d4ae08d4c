"""What is done to the run of a team while one of its workers is held: actions of the scenarios of several walks."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGINT, SIGKILL

from fault_trials import Trial

from cordee.core.fault_points import Fault

Action = Callable[[Trial], None]


def until_size(num_workers: int, hold: Fault, before: Action = lambda trial: None) -> Action:
    """Hold a worker, do what is to be done before, and release it when the team has this size."""

    def act(trial: Trial) -> None:
        trial.until_held(hold)
        before(trial)
        trial.until_members(num_workers, hold.process)
        trial.release(hold)

    return act


def scale(num_workers: int, hold: Fault) -> Action:
    return until_size(num_workers, hold, lambda trial: trial.scale(num_workers))


def join(num_workers: int, hold: Fault) -> Action:
    return until_size(num_workers, hold, lambda trial: trial.join())


def kill_coordinator(hold: Fault) -> Action:
    def act(trial: Trial) -> None:
        trial.until_held(hold)
        trial.signal(trial.pid_of("coordinator_started"), SIGKILL)
        trial.until(lambda: trial.num_visits("coordinator.control_written", "coordinator") >= 2)
        trial.release(hold)

    return act


def interrupt(hold: Fault) -> Action:
    def act(trial: Trial) -> None:
        trial.until_held(hold)
        trial.process.send_signal(SIGINT)
        trial.until(lambda: trial.num_visits("link.stop", hold.process))
        trial.release(hold)

    return act
