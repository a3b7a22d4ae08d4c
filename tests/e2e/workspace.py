"""The real command in real processes: how it is started, the job most tests run, and what to look at after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

import warm_launch
from cordee.monitoring import UnreadableLine, follow
from warm_launch import WarmProcess

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
BIN = Path(sys.executable).parent
CORDEE = BIN / "cordee"
Running = subprocess.Popen[str] | subprocess.Popen[bytes] | WarmProcess
# What one process may take: seconds on an idle machine, and machines are not always idle.
TIMEOUT_S = 120.0

# Parts of the user's own. The environment slows training steps down, or lets one of them hang.
PARTS = '''
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(144, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, num_classes)
        )
        self.forwards = 0

    def forward(self, x):
        if self.training:
            self.forwards += 1
            time.sleep(float(os.environ.get("TEST_STEP_MS", 0)) / 1000)
            if self.forwards == int(os.environ.get("TEST_HANG_AT", 0)):
                time.sleep(600)
        return self.layers(x)


class Images(Dataset):
    """Read one by one, so that other processes can do it."""

    num_classes = 4

    def __len__(self):
        return 480

    def __getitem__(self, index):
        label = index % self.num_classes
        image = torch.full((1, 12, 12), label / 4)
        return image + 0.5 * torch.randn(1, 12, 12), label


def TooNarrow(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(144, num_classes - 1))


def labels_out_of_range():
    from cordee.data import ArraySource, Splits

    source = ArraySource(torch.zeros(40, 1, 12, 12), torch.arange(40) % 5)
    return Splits(source, source, (1, 12, 12), 4, "mislabelled")
'''

# 30 steps an epoch, 120 in all, with everything that must come out the same after a resume: dropout, running
# means, augmentation, momentum, a schedule.
JOB = """
name = "tiny"

[model]
use = "parts:Net"

[data]
use = "synthetic"
shape = [1, 12, 12]
num_classes = 4
size = 480
test_size = 60
augment = ["crop", "flip"]

[optimizer]
use = "adam"
lr = 0.01

[schedule]
use = "cosine"

[training]
batch_size = 16
epochs = 4
threads = 1

[checkpoint]
every_steps = 10

[monitoring]
every_steps = 5
"""
STEPS = 120


def environment(**extra: str) -> dict[str, str]:
    """Return an environment without this machine's settings of Cordée, coverage of the terminal, or colour."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CORDEE_", "TEST_")) and key not in ("COLUMNS", "LINES", "FORCE_COLOR", "PYTHONPATH")
    }
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept.get('PATH', '')}", **extra}


class Workspace:
    """A folder with the job above, in which commands are run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.timeout_s = TIMEOUT_S  # of a command
        self.environ = environment(CORDEE_CACHE=str(path / "cache"))
        (path / "parts.py").write_text(PARTS)
        self.job = path / "job.toml"
        self.job.write_text(JOB)

    def run(self, *arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `cordee` with these arguments to its end, from a process that has torch imported."""
        environment = {**self.environ, **env}
        return warm_launch.run(*arguments, folder=cwd or self.path, environment=environment, timeout=self.timeout_s)

    def execute(
        self, command: Sequence[object], *, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run any command to its end, as a user's shell starts it."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.path,
            env={**self.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )

    def train(self, *arguments: object, run_dir: str | Path = "run", **env: str) -> subprocess.CompletedProcess[str]:
        """Train the job to its end in `run_dir`."""
        return self.run("train", self.job, "--run-dir", self.path / run_dir, *arguments, **env)

    @contextlib.contextmanager
    def started(self, *arguments: object, **env: str) -> Iterator[WarmProcess]:
        """Run `cordee` in a process group of its own; whatever is left of it at the end is killed."""
        with warm_launch.start(*arguments, folder=self.path, environment={**self.environ, **env}) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def steps_taken(self, run_dir: str | Path = "run") -> int:
        """Return the last step recorded so far."""
        return max((event["step"] for event in events(self.path / run_dir) if event["type"] == "step"), default=0)

    def wait_for_step(self, process: Running, step: int, run_dir: str | Path = "run") -> None:
        wait_until(lambda: self.steps_taken(run_dir) >= step, process)


def hear_ctrl_c() -> None:
    """Called in a new process: what a shell starts in the background ignores SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], process: Running) -> None:
    """Wait for something a process does; fail with its output if it ends before."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended too early with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.01)


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events recorded so far, all of known types. The last line may be on its way; others must be whole."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    unknown = [event for event in follow(run_dir)[0] if isinstance(event, UnreadableLine)]
    assert not unknown, unknown
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def warnings_of(run_dir: Path) -> list[str]:
    return [event["message"] for event in events(run_dir) if event["type"] == "warning"]


def summary(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, but for the lock, which each look at a run may write again."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_ended_well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""


def assert_refused(done: subprocess.CompletedProcess[str], exit_code: int, *facts: str) -> None:
    """Check that a command failed with one clear message that has these facts, and nothing else on stderr."""
    assert done.returncode == exit_code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr.startswith("cordee: "), done.stderr
    assert done.stderr.count("cordee: ") == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for fact in facts:
        assert fact in done.stderr, f"{fact!r} is not in: {done.stderr}"


def living_descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def write_idx_set(folder: Path, num_train: int = 64, num_test: int = 32) -> None:
    """Write the four files of MNIST or Fashion-MNIST, with few images."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", num_train), ("t10k", num_test)):
        pixels = bytes((index * 7 + index // 784 * 13) % 256 for index in range(count * 784))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels)
        labels = bytes(index % 10 for index in range(count))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels)


def write_cifar_set(folder: Path) -> None:
    """Write the six files of CIFAR-10's binary version: full size as they must be, but sparse on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    record = 1 + 3 * 32 * 32
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        with (folder / name).open("wb") as file:
            file.write(b"".join(bytes([index % 10]) + bytes([index * 3 % 256]) * (record - 1) for index in range(100)))
            file.truncate(10_000 * record)


def settings(**values: object) -> list[str]:
    """Return --set options; a double underscore stands for the point in a key."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
