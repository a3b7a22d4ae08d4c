"""A process that trains a small model alone and prints by how many bytes that made it grow: `python -m` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cordee.cluster import Team
from cordee.compute.devices import MemoryWatch
from cordee.core.temporary import temporary_folder
from cordee.monitoring import Monitor
from cordee.planner.overheads import trial_job
from cordee.strategies.table import usual_strategy
from cordee.training.components import assemble
from cordee.training.session import Session

TIMEOUT_S = 120.0


def measure_alone() -> int:
    """Return the growth, of a process that is new; 0 where it is not known."""
    # -P: a file in the working folder that is called like a module of Python's is not that module.
    command = [sys.executable, "-P", "-m", "cordee.planner.trial_alone"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return int(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def main() -> None:
    memory = MemoryWatch()
    parts = assemble(trial_job(usual_strategy(1), 1, {}), Team())
    parts.setup()
    with temporary_folder() as folder, Monitor([]) as monitor:
        session = Session(parts, monitor, Path(folder), should_stop=lambda: False, memory=memory)
        session.run(resume=False, log_file=Path(folder) / "log")
    sys.stdout.write(f"{max(0, memory.peak_bytes() - memory.start_bytes)}\n")


if __name__ == "__main__":
    main()
