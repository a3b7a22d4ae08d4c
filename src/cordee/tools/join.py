"""Working for a run that somebody else started: with its directory, or on another host with its ticket."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from cordee.cluster.control import Control, NotYetError, request_join
from cordee.cluster.member_link import MemberSpec
from cordee.core import fault_points
from cordee.core.env import cache_folder
from cordee.core.errors import CordeeError, JobError, TrainingError
from cordee.runs.kind import KINDS

LONGEST_START_S = 120.0  # of a run that is asked to take a worker before it trains
ASK_EVERY_S = 0.5


def join_run(place: Path, control: Control, data_root: Path | None, say: Callable[[str], None]) -> None:
    """Be a worker of the run until it ends, or Ctrl-C or SIGTERM. `place` is the run directory, or the ticket.

    Raises CordeeError if the run does not take this process, or if it cannot continue; the run continues without it.
    """
    if data_root is not None and not control.is_remote:
        raise JobError("--data-root is for joining from another host: on its own host a run has its data")
    fault_points.identify("joiner")
    fault_points.reach("joining.asks")
    spec = _request_spec(place, control, say)
    fault_points.reach("joining.taken")
    kind = KINDS[spec.kind]
    if control.is_remote:
        spec = _adapt_to_host(spec, control, data_root)
        plain = "" if kind.encrypts(spec.load_job()) else "; gradients and weights cross the network without encryption"
        say(f"joining the run on {control.host} as worker {spec.index}{plain}; Ctrl-C leaves after the step")
    else:
        say(f"joining {place} as worker {spec.index}; Ctrl-C leaves after the step")
    if (error := kind.work(spec)) is not None:
        what = str(error) if isinstance(error, CordeeError) else f"{type(error).__name__}: {error}"
        raise TrainingError(f"worker {spec.index} could not continue: {what}; its log is {spec.log_file}")
    say(f"worker {spec.index} is done")


def _request_spec(place: Path, control: Control, say: Callable[[str], None]) -> MemberSpec:
    """Ask until the run trains, if it has only begun."""
    deadline_s, has_said = time.monotonic() + LONGEST_START_S, False
    while True:
        try:
            return msgspec.json.decode(request_join(control, place, str(torch.__version__)), type=MemberSpec)
        except NotYetError:
            if time.monotonic() > deadline_s:
                raise
            if not has_said:
                say("the run is still starting; waiting until it trains")
                has_said = True
            time.sleep(ASK_EVERY_S)


def _adapt_to_host(spec: MemberSpec, control: Control, data_root: Path | None) -> MemberSpec:
    """Return the spec with what is different on this host: the folders of the log and the data."""
    folder = cache_folder() / "joined" / f"{control.run}-{spec.index}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror}; set CORDEE_CACHE to another folder") from None
    job = spec.job
    if data_root is not None:
        job = spec.load_job().replace([f"data.root={str(data_root.expanduser().absolute())!r}"]).to_toml()
    return msgspec.structs.replace(spec, log_dir=str(folder), num_local=1, job=job)
