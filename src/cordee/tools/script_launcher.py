"""`cordee run`: the user's own script on N local workers, seen from the launcher and in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cordee.core.env import is_horovod_alias_wanted
from cordee.core.errors import JobError
from cordee.core.temporary import temporary_folder
from cordee.runs.script.processes import attempt, run_workers


def run_script(script: Path, args: list[str], num_workers: int, extra: Mapping[str, str] | None = None) -> bool:
    """Run `script` on `num_workers` processes; return whether it came to its end (False: Ctrl-C).

    `extra` are more variables of the workers' environment.

    The first worker that fails ends the others. Raises TrainingError that names it, having printed its
    traceback and nobody else's. Leaves no process.
    """
    if not script.is_file():
        raise JobError(f"no script {str(script)!r}")
    if num_workers < 1:
        raise JobError(f"-n {num_workers} must be at least 1")
    with temporary_folder() as folder:
        job = {"script": str(script), "args": args}
        main = "cordee.tools.script_launcher:main"
        return run_workers(main, job, num_workers, Path(folder), preload="cordee.loop", environment=extra)


def main(job: dict[str, Any]) -> int:
    """Run the script as a worker, in a fresh fork of the fork server, and say how it failed."""
    from cordee.communication.shared_memory import register
    from cordee.compute import share_threads
    from cordee.runs.script.program import execute

    if is_horovod_alias_wanted():
        from cordee.horovod.alias import install

        install()
    register()  # the fork server has imported torch before the environment of this script was known
    script = str(job["script"])
    share_threads(0, int(job["num_workers"]))
    source = Path(script).read_bytes()
    return attempt(lambda: execute(Path(script), job["args"], source), Path(job["failure_file"]), script)
