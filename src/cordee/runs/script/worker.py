"""The main function of a worker of a script's run: join, execute the script, say how it went."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from cordee.cluster.member_link import MemberSpec
from cordee.compute import share_threads
from cordee.compute.devices import MemoryWatch
from cordee.core import fault_points
from cordee.core.errors import JobError
from cordee.monitoring import setup_logging
from cordee.runs.script import member as members
from cordee.runs.script.member import LoopLeft, ScriptMember
from cordee.runs.script.program import execute, format_error, set_up, source_of
from cordee.runs.team.link import TeamLink
from cordee.runs.team.worker import take_part

log = logging.getLogger("cordee.worker")


def main(argument: dict[str, Any]) -> int:
    """Execute the script until the run ends; return the exit code. Called in a fresh fork of the fork server."""
    return 0 if work(msgspec.convert(argument, MemberSpec)) is None else 1


def work(spec: MemberSpec) -> Exception | None:
    """Execute the script; return why this worker could not come to its end, if it could not."""
    memory = MemoryWatch()
    fault_points.identify(spec.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher asks, when it is time
    with setup_logging(spec.log_file) as recorded, _recording(recorded.stream), TeamLink(spec) as link:
        member = ScriptMember(spec, link, memory)

        def work_in_script() -> None:
            with member:
                _execute(spec, member)

        def record(error: Exception) -> None:
            log.error("worker %d cannot continue:\n%s", spec.index, format_error(error, _path(spec)))

        return take_part(spec, link, work_in_script, lambda: member.step, record)


def _execute(spec: MemberSpec, member: ScriptMember) -> None:
    job = spec.load_job()
    script, args = Path(_path(spec)), [str(value) for value in job.model.args["args"]]
    share_threads(0, spec.num_local)
    with members.present_as(member):
        try:
            set_up(job)
            execute(script, args, source_of(job, Path(spec.run_dir)))
        except LoopLeft:
            return
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise JobError(f"{script.name} ended with sys.exit({leaving.code!r})") from None
    if not member.has_loop:
        raise JobError(
            f"{script.name} came to its end without a loop that could be continued: under --elastic the loop is a "
            "function with the decorator @team.elastic, and calls team.commit() after each step (in a Horovod script "
            "@hvd.elastic.run and state.commit()). Without --elastic any script runs"
        )


def _path(spec: MemberSpec) -> str:
    return str(spec.load_job().model.args["path"])


@contextlib.contextmanager
def _recording(file: TextIO | None) -> Iterator[None]:
    """Inside, what the script prints is recorded in the log as well."""
    if file is None:
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Recorder(stream, file) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Recorder(io.TextIOBase):
    """Writes to a stream, and to a file; what a full disk or a closed terminal refuses is lost."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream, self._file = stream, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
            if text.endswith("\n"):
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        for stream in (self._file, self._stream):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
