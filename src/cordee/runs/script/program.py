"""The script of a run: what the job says of it, and how a process executes it."""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from cordee.core import Job, Use
from cordee.core.errors import JobError
from cordee.core.settings import Cluster, Data, Strategy

SCRIPT = "script"  # what a job names as its model and data where a script has both
SOURCE_FILE = "script.py"  # in the run directory: a worker that is started later executes what the others do


def script_job(script: Path, args: list[str], num_workers: int, cluster: dict[str, Any], setup: str = "") -> Job:
    """Return the job of a run of a script. Raises JobError.

    `setup` is a function, as "module:function", that each worker calls before it executes the script.
    """
    source = read_source(script)
    return Job(
        name=script.stem,
        model=Use(SCRIPT, path=str(script.absolute()), args=list(args), sha256=_digest(source), setup=setup),
        data=Data(use=SCRIPT),
        strategy=Strategy(workers=num_workers),
        cluster=Cluster(**cluster),
    )


def is_script(job: Job) -> bool:
    """Whether the job is that of a script."""
    return bool(job.model.use == SCRIPT)


def is_script_run(run_dir: Path) -> bool:
    """Whether a run directory is that of a script. Raises JobError if its job cannot be read."""
    return is_script(Job.load(run_dir / "job.toml"))


def read_source(script: Path) -> bytes:
    """Return the text of a script. Raises JobError if there is none, or if Python cannot read it."""
    try:
        source = script.read_bytes()
    except OSError as error:
        raise JobError(f"no script {str(script)!r}: {error.strerror}") from None
    try:
        compile(source, str(script), "exec")
    except (SyntaxError, ValueError) as error:
        raise JobError(f"{script}: {error}") from None
    return source


def source_of(job: Job, run_dir: Path) -> bytes:
    """Return the script as it was when the run began. Raises JobError where this host has another, or none."""
    kept, script = run_dir / SOURCE_FILE, Path(job.model.args["path"])
    source = kept.read_bytes() if kept.is_file() else read_source(script)
    if _digest(source) != job.model.args["sha256"]:
        raise JobError(f"{script} is not what it was when the run began: copy the run's script to this host")
    return source


def set_up(job: Job) -> None:
    """Call what the job says that a worker does before it executes the script."""
    module, _, function = str(job.model.args.get("setup", "")).partition(":")
    if module:
        getattr(importlib.import_module(module), function)()


def execute(script: Path, args: list[str], source: bytes) -> None:
    """Execute a script in this process as `python script args` does. Raises what it raises."""
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.absolute().parent))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(compile(source, str(script), "exec", dont_inherit=True), module.__dict__)


def format_error(error: BaseException, script: str) -> str:
    """Return the traceback as Python would have printed it: from the script on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames or error.__traceback__)))


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()
