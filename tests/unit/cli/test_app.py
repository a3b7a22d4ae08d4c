"""The command: what it prints, how it ends. In this process where possible: importing torch takes seconds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_jobs import run, small_job
from typer.testing import CliRunner

from cordee.cli import main
from cordee.cli.app import app
from cordee.core.errors import JobError, TrainingError
from cordee.version import __version__

NO_TORCH = """
import sys
from cordee.cli import main
sys.argv = ["cordee", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "numpy", "sklearn"} & sys.modules.keys()
    assert not heavy, f"imported {heavy}"
"""
INTERRUPTED = """
import sys, types
from cordee.cli import main

def train(*arguments, **options):
    raise KeyboardInterrupt

sys.modules["cordee.launch"] = types.SimpleNamespace(train=train)
main()
"""
INTERRUPTED_EARLY = """
import sys, types
from cordee.cli import main

class Interrupted(types.ModuleType):
    def __getattr__(self, name):
        raise KeyboardInterrupt

sys.modules["typer"] = Interrupted("typer")
main()
"""


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cordee", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False
    )


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# Help -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "-h"], ["--version"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert ("Usage" in result.stdout) or result.stdout == f"cordee {__version__}\n"


def test_every_command_is_explained() -> None:
    text = invoke("--help")
    for name in ("train", "run", "server", "worker", "export", "runs", "doctor", "bench"):
        assert f"\n  {name} " in text
        assert "Usage" in invoke(name, "--help")


def test_the_benchmarks_are_listed_and_arguments_have_no_braces() -> None:
    from cordee.bench import BENCHMARKS

    text = invoke("bench", "--help")
    assert BENCHMARKS.keys() >= {"overhead", "accuracy", "allreduce", "data_parallel"}
    assert all(f"\n  {name} " in text for name in BENCHMARKS)
    assert invoke("train", "--help").splitlines()[0].endswith("train [OPTIONS] JOB.toml")


# Exit codes -------------------------------------------------------------------------------------------------


def test_the_command_from_a_job_to_a_result(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_job().to_toml())
    result = command("train", "job.toml", "--set", "training.epochs=1", "--run-dir", "run", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "accuracy" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 5


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_job().to_toml())
    result = command("train", "job.toml", "--set", "training.epoch=1", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("cordee: [training] has no key 'epoch'; did you mean 'epochs'?")
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_a_failure_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_job().to_toml())
    result = command("train", "job.toml", "-q", "--set", "optimizer.lr=1e30", "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("cordee: ") and "at step" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.fixture
def failing_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[BaseException], None]:
    """Make `cordee train` raise, wherever in the program that is then caught."""

    def prepare(error: BaseException) -> None:
        def fail(*arguments: Any, **options: Any) -> None:
            raise error

        monkeypatch.setattr("cordee.launch.train", fail)
        (tmp_path / "job.toml").write_text(small_job().to_toml())
        monkeypatch.setattr(sys, "argv", ["cordee", "train", str(tmp_path / "job.toml")])

    return prepare


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobError("what is wrong"), 2, "cordee: what is wrong"),
        (TrainingError("what is wrong"), 1, "cordee: what is wrong"),
    ],
)
def test_how_errors_leave_the_program(
    failing_with: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    failing_with(error)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_an_interrupt_is_one_message_and_exit_code_130(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_job().to_toml())
    # In a process of its own, for it ends at once.
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "train", "job.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "cordee: interrupted\n")


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_EARLY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "cordee: interrupted\n")


def test_a_traceback_for_those_who_ask(
    failing_with: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_with(JobError("what is wrong"))
    monkeypatch.setenv("CORDEE_TRACEBACK", "1")
    with pytest.raises(JobError):
        main()


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "job.toml", "--sett", "a=b"]])
def test_a_command_line_that_makes_no_sense(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, arguments).exception, JobError)


@pytest.mark.parametrize("arguments", [["server", "--listen"], ["worker", "--servers"]])
def test_an_address_of_a_store_that_is_none(arguments: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    place = [str(script)] if arguments[0] == "worker" else []
    with pytest.raises(JobError, match=f"{arguments[1]}: 'there' is no address of a channel: use 'tcp://HOST:PORT'"):
        CliRunner().invoke(app, [*arguments, "there", *place], catch_exceptions=False)


# Commands ---------------------------------------------------------------------------------------------------


def test_options_of_train_become_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(small_job().to_toml())
    invoke("train", "job.toml", "-q", "--strategy", "single", "--workers", "1", "--run-dir", "run", "--set", "seed=3")
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["strategy"], summary["workers"], summary["steps"]) == ("single", 1, 10)
    invoke("train", "job.toml", "-q", "--resume", "--run-dir", "run", "--set", "seed=3", "--set", "training.epochs=3")
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 15


def test_runs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_RUNS", str(tmp_path / "runs"))
    assert "no runs in" in invoke("runs")
    run(small_job(), tmp_path / "runs" / "first")
    assert "completed" in invoke("runs")
    (found,) = json.loads(invoke("runs", "--json"))
    assert (
        found | {"state": "completed", "name": "small", "steps": 10, "path": str(tmp_path / "runs" / "first")} == found
    )
    assert json.loads(invoke("runs", "--json", str(tmp_path / "none"))) == []


def test_weights_are_exported(tmp_path: Path) -> None:
    run(small_job(), tmp_path / "run")
    assert invoke("export", str(tmp_path / "run")).strip() == str(tmp_path / "run" / "model.safetensors")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    invoke("export", str(tmp_path / "run"), "-o", str(tmp_path / "w.pt"), "--step", "10")
    assert (tmp_path / "w.pt").is_file()


def test_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    findings = {finding["subject"]: finding for finding in json.loads(invoke("doctor", "--json"))}
    subjects = {
        "Python",
        "torch",
        "devices",
        "cores",
        "memory",
        "shared memory",
        "runs folder",
        "cache folder",
        "ports",
    }
    assert subjects | {"mnist", "fashion-mnist", "cifar10"} <= findings.keys()
    assert all(finding["state"] in ("ok", "note", "problem") for finding in findings.values())
    assert "everything that training needs is here" in invoke("doctor")
    assert list(tmp_path.iterdir()) == [], "it only looks"


def test_the_doctor_says_what_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cordee.tools import doctor

    monkeypatch.setattr(doctor, "check_memory", lambda: [doctor.Finding("memory", "problem", "0 GiB free", "buy some")])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "BAD   memory" in result.output and "buy some" in result.output and "1 to fix" in result.output


def test_the_doctor_knows_the_limit_of_a_container(tmp_path: Path) -> None:
    from cordee.tools import doctor

    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (unlimited,) = doctor.check_memory(tmp_path)
    assert "limit" not in unlimited.detail
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29}\n")
    (limited,) = doctor.check_memory(tmp_path)
    assert (limited.state, limited.detail) == ("problem", "0.5 GiB free of 1.0 (the limit of this container)")
    assert "raise the limit" in limited.remedy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dashboard", "--port", "x"], "cordee: Invalid value for '--port'.*`cordee dashboard --help` says more"),
        (["nothing"], "cordee: No such command 'nothing': `cordee --help` says more"),
        (["--nothing"], "cordee: No such option: --nothing.*`cordee --help` says more"),
        (
            ["chaos", "job.toml", "--workers", "2"],
            "cordee: No such option: --workers: write --set strategy.workers=…",
        ),
        (["logs", "--workers", "2"], "cordee: No such option: --workers: `cordee logs --help` says more"),
        (["show", "a", "b"], "cordee: .*unexpected extra argument.*`cordee show --help` says more"),
        (["federation", "nothing"], "cordee: No such command 'nothing': `cordee federation --help` says more"),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line_like_others(arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(said.replace("`cordee", "`(python -m )?cordee"), done.stderr.strip())


def test_the_help_does_not_cut_what_a_group_of_commands_is_for() -> None:
    assert "...\n" not in command("--help").stdout.partition("Options:")[2]


def test_examples_in_the_help_are_not_wrapped_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    num_examples = 0
    for known in app.registered_commands:
        assert known.callback is not None
        name = known.name or known.callback.__name__.replace("_", "-")
        shown = CliRunner().invoke(app, [name, "--help"]).stdout
        assert not re.search("[{}]", shown.splitlines()[0]), shown.splitlines()[0]
        assert not re.search("<.*>", shown), f"{name}: the name of a Python type says nothing to who trains"
        _, _, examples = (known.callback.__doc__ or "").partition("For example:\n")
        for example in filter(None, map(str.strip, examples.splitlines())):
            assert f"      {example}" in shown.splitlines()
            num_examples += 1
    assert num_examples > 10
