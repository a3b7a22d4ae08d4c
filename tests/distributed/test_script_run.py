"""`cordee run`: the user's script on several workers; what it prints, how it fails, what it leaves."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import psutil
import pytest
from launching import run, run_python, started, wait_until

from cordee.cluster.engine import Exited
from cordee.runs.script.processes import CONSEQUENCE, find_cause

pytestmark = pytest.mark.timeout(200)
EXAMPLES = Path(__file__).parents[2] / "examples"

LOOP = """
import os, pathlib, signal, sys
import torch
import cordee

def main():
    with cordee.join() as team:
        for step in range(100000):
            team.sum(1.0)
            act(team, step)

{act}

if __name__ == "__main__":
    main()
"""


def write_script(folder: Path, act: str) -> Path:
    """Write a script whose workers meet in each step, after which they do what `act` defines."""
    script = folder / "script.py"
    script.write_text(LOOP.format(act=act))
    return script


# Started in every way ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_example_prints_the_same_however_it_is_started() -> None:
    script = [str(EXAMPLES / "own_loop.py"), "--epochs", "3"]
    alone = run_python(*script)
    assert alone.code == 0 and alone.stdout.count("loss") == 3
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for ended in (run("run", "-n", "2", *script), run("run", "-n", "3", *script), run_python(*torchrun, *script)):
        assert ended.code == 0, ended.stderr
        assert ended.stdout == alone.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="Keras is not installed: pip install 'cordee[keras]'"
)
def test_a_keras_model_trains_the_same_on_two_workers() -> None:
    script = [str(EXAMPLES / "own_loop_keras.py"), "--epochs", "2"]
    alone, together = run_python(*script), run("run", "-n", "2", *script)
    assert alone.code == 0 and alone.stdout.count("loss") == 2, alone.stderr
    assert (together.code, together.stdout) == (0, alone.stdout), together.stderr


def test_a_script_is_started_as_python_would(tmp_path: Path) -> None:
    """Its arguments, its folder on the path, its name, the places of the workers; two runs at once do not collide."""
    (tmp_path / "beside.py").write_text("VALUE = 17\n")
    (tmp_path / "script.py").write_text(
        "import os, sys, beside, cordee\n"
        "with cordee.join() as team:\n"
        "    places = team.gather(__import__('torch').tensor([int(os.environ['LOCAL_RANK'])])).tolist()\n"
        "    team.print(__name__, sys.argv[1:], beside.VALUE, places, team.num_workers)\n"
    )
    args = ("run", "-n", "2", "script.py", "--flag", "-n", "7", "a b")
    with started(*args, folder=tmp_path) as one, started(*args, folder=tmp_path) as other:
        for ended in (one.finish(), other.finish()):
            assert ended == (0, "__main__ ['--flag', '-n', '7', 'a b'] 17 [0, 1] 2\n", "")


# Mistakes and failures --------------------------------------------------------------------------------------


def test_a_missing_script_and_a_wrong_number(tmp_path: Path) -> None:
    ended = run("run", "-n", "2", "nowhere.py", folder=tmp_path)
    assert ended == (2, "", "cordee: no script 'nowhere.py'\n")
    ended = run("run", "-n", "0", str(write_script(tmp_path, "")))
    assert ended == (2, "", "cordee: -n 0 must be at least 1\n")


def test_the_worker_that_raises_is_named_with_its_traceback_only(tmp_path: Path) -> None:
    act = (
        "def act(team, step):\n"
        "    if step == 5 and team.worker_index == 1:\n"
        "        raise ValueError('this worker has had enough')\n"
    )
    ended = run("run", "-n", "3", str(write_script(tmp_path, act)))
    assert ended.code == 1
    lines = ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith(f'File "{tmp_path}/script.py", line '), "from the script on"
    assert lines[-2:] == [
        "ValueError: this worker has had enough",
        "cordee: worker 1 exited with code 1; the others were ended",
    ]
    assert ended.stderr.count("Traceback") == 1


def test_all_workers_that_raise_give_one_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("x = 1\nraise KeyError('all the same')\n")
    ended = run("run", "-n", "3", "script.py", folder=tmp_path)
    assert ended.code == 1
    assert ended.stderr.count("Traceback") == ended.stderr.count("KeyError: 'all the same'") == 1


def test_a_syntax_error_is_shown(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def broken(:\n")
    ended = run("run", "-n", "2", "script.py", folder=tmp_path)
    assert ended.code == 1
    assert ended.stderr.count("SyntaxError") == 1 and 'script.py", line 1' in ended.stderr


def test_a_worker_that_leaves_early_is_named(tmp_path: Path) -> None:
    act = "def act(team, step):\n    if step == 5 and team.worker_index == 1: sys.exit(0)\n"
    ended = run("run", "-n", "2", str(write_script(tmp_path, act)))
    assert ended.code == 1
    assert ended.stderr == "cordee: worker 1 came to its end while the others still needed it; they were ended\n"


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    act = "def act(team, step):\n    if step == 5 and team.worker_index == 0: os.kill(os.getpid(), 9)\n"
    ended = run("run", "-n", "2", str(write_script(tmp_path, act)))
    assert ended == (1, "", "cordee: worker 0 was killed by SIGKILL; the others were ended\n")


def exits(*statuses: tuple[int, int]) -> list[Exited]:
    return [Exited(index, 1, 1000 + index, status) for index, status in statuses]


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (exits((0, 0), (1, 0)), None),
        (exits((0, CONSEQUENCE), (1, 1)), 1),
        (exits((2, CONSEQUENCE), (0, -9), (1, CONSEQUENCE)), 0),
        (exits((1, 0), (0, CONSEQUENCE)), 1),
        (exits((0, CONSEQUENCE), (1, 0)), 1),
        (exits((0, CONSEQUENCE), (1, CONSEQUENCE)), 0),
        (exits((1, 0), (0, CONSEQUENCE), (2, 3)), 2),
        ([], None),
    ],
)
def test_the_cause_is_told_from_its_consequences(ended: list[Exited], cause: int | None) -> None:
    found = find_cause(ended)
    assert (found.index if found else None) == cause


# Ends from outside ------------------------------------------------------------------------------------------

BEGUN = "def act(team, step):\n    if step == 3: pathlib.Path(sys.argv[1], str(team.worker_index)).touch()\n"


def has_begun(folder: Path) -> bool:
    return all((folder / str(index)).exists() for index in range(2))


@pytest.mark.parametrize("is_deaf", [False, True])
def test_ctrl_c_ends_all(tmp_path: Path, is_deaf: bool) -> None:
    """Workers that do not listen are ended too, after a while."""
    deaf = "    if step == 0: signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if is_deaf else ""
    script = write_script(tmp_path, BEGUN + deaf)
    with started("run", "-n", "2", str(script), str(tmp_path)) as command:
        wait_until(lambda: has_begun(tmp_path))
        command.note_family()
        command.process.send_signal(signal.SIGINT)
        ended = command.finish(timeout_s=15)
        assert ended.code == 130, ended.stderr
        assert "Traceback" not in ended.stderr
        assert len(command.family) >= 3 and not command.survivors()


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    script = write_script(tmp_path, BEGUN)
    with started("run", "-n", "2", str(script), str(tmp_path)) as command:
        wait_until(lambda: has_begun(tmp_path))
        command.note_family()
        command.process.kill()
        assert len(command.family) >= 3 and not command.survivors()


def test_a_killed_fork_server_is_said_and_the_script_continues(tmp_path: Path) -> None:
    act = (
        "def act(team, step):\n"
        "    pathlib.Path(sys.argv[1], f'begun-{team.worker_index}').touch()\n"
        "    if team.sum(float(pathlib.Path(sys.argv[1], 'enough').exists())) == [2.0]: sys.exit(0)\n"
    )
    with started("run", "-n", "2", str(write_script(tmp_path, act)), str(tmp_path)) as command:
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        children = psutil.Process(command.process.pid).children()
        (server,) = [child.pid for child in children if os.getsid(child.pid) == child.pid]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(server))
        (tmp_path / "enough").touch()
        ended = command.finish()
    assert ended.code == 0
    assert ended.stderr.startswith("warning: the fork server was killed by SIGKILL: processes that run continue")
