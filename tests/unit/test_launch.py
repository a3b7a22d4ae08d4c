"""From a job to a run directory: what a job may be, where runs go, how they are found again, exports."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import msgspec
import pytest
import small_jobs
import torch
from safetensors.torch import load_file
from small_jobs import events_of, run, small_job

import cordee
from cordee import checkpoint, launch
from cordee.cluster.team import Team
from cordee.core import Job
from cordee.core.errors import CheckpointError, CordeeError, DataError, JobError, RunDirectoryError, TrainingError
from cordee.launch import train
from cordee.monitoring import Monitor, RunDirectory, read_events
from cordee.tools.audit import audit_run
from cordee.tools.export import export_run
from cordee.training.components import assemble


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORDEE_RUNS", raising=False)


def write_job(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(small_job().to_toml())
    return path


# What a job may be ------------------------------------------------------------------------------------------


def test_a_job_a_table_and_a_file_are_the_same() -> None:
    job = small_job()
    write_job(Path("job.toml"))
    runs = [train(given, quiet=True) for given in (job, job.to_dict(), "job.toml", Path("job.toml"))]
    assert len({result.summary.weights_sha256 for result in runs}) == 1
    assert len({result.directory for result in runs}) == 4


def test_overrides_apply_to_all_of_them() -> None:
    write_job(Path("job.toml"))
    for given in (small_job(), small_job().to_dict(), "job.toml"):
        assert train(given, overrides=["training.epochs=1"], quiet=True).summary.steps == 5


def test_what_is_not_a_job() -> None:
    with pytest.raises(JobError, match=r"a job is a cordee.Job, a table or the path of a job file, not int"):
        train(5)  # type: ignore[arg-type]


def test_auto_says_which_strategy_has_no_such_setting() -> None:
    with pytest.raises(JobError, match="the job's strategy is 'auto', which takes 'single' here: remove it"):
        train(small_job(strategy={"name": "auto", "microbatches": 4}))
    assert not list(Path().glob("runs/*"))


def test_the_public_names_are_enough() -> None:
    job = cordee.Job(
        model=cordee.Use("mlp", hidden=(4,)),
        data=cordee.Data(use=small_jobs.samples()),
        training=cordee.Training(batch_size=8, steps=3, threads=1),
        stop=cordee.Stop(steps=2),
    )
    result = cordee.train(job, quiet=True)
    assert isinstance(result, cordee.Run)
    assert (result.status, result.summary.stopped_by, result.summary.steps) == ("stopped", "steps", 2)
    with pytest.raises(cordee.CordeeError):
        cordee.train(job, run_dir=result.directory)


def test_the_screen_shows_the_result_unless_it_is_to_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    train(small_job(), run_dir="a", quiet=True)
    assert capsys.readouterr() == ("", "")
    train(small_job(), run_dir="b")
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "cordee export b" in shown


# Where runs go ----------------------------------------------------------------------------------------------


def test_runs_go_to_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(small_job(), quiet=True).directory.parent == Path("runs")
    monkeypatch.setenv("CORDEE_RUNS", str(tmp_path / "elsewhere"))
    result = train(small_job(), quiet=True)
    assert result.directory.parent == tmp_path / "elsewhere"
    assert result.directory.name.startswith("small-")


def test_the_run_directory_is_complete() -> None:
    result = run(small_job(), Path("run"))
    names = {path.name for path in result.directory.iterdir()} - {".lock", ".data"}
    assert names == {"job.toml", "events.jsonl", "checkpoints", "logs", "summary.json", "timeline"}
    assert [path.name for path in Path("run/timeline").iterdir()] == ["worker-0.jsonl"]
    assert [path.name for path in Path("run/logs").iterdir()] == ["worker-0.log"]


def test_tensorboard_when_asked() -> None:
    run(small_job(monitoring={"tensorboard": True}), Path("run"))
    assert any(path.name.startswith("events.out") for path in Path("run/tensorboard").iterdir())


def test_a_run_is_never_overwritten() -> None:
    run(small_job(), Path("run"))
    before = Path("run/summary.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="run holds a run already"):
        run(small_job(), Path("run"))
    assert Path("run/summary.json").read_bytes() == before


def test_a_mistake_in_the_job_leaves_no_run_directory() -> None:
    with pytest.raises(CordeeError):
        run(small_job(model="lenet"), Path("run"))
    with pytest.raises(JobError):
        train(small_job(strategy="zzz"))
    assert list(Path().iterdir()) == []


# The job as resolved ----------------------------------------------------------------------------------------


def test_the_resolved_job_says_what_auto_became_and_runs_again() -> None:
    first = run(small_job(), Path("first"))
    table = tomllib.loads(Path("first/job.toml").read_text())
    assert table["strategy"] == {"name": "single", "workers": 1}
    assert table["training"]["epochs"] == 2
    again = train("first/job.toml", run_dir="again", quiet=True)
    assert again.summary.weights_sha256 == first.summary.weights_sha256
    again_table = tomllib.loads(Path("again/job.toml").read_text())
    assert {**again_table, "python_path": []} == {**table, "python_path": []}


def test_a_resolved_job_with_parts_of_the_users_runs_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "net_of_home.py").write_text("from torch import nn\ndef Net(): return nn.Linear(6, 3)")
    monkeypatch.chdir(home)
    jobs = [small_job(model="net_of_home:Net"), small_job(model="net_of_home.py:Net")]
    firsts = [run(job, elsewhere / f"run-{number}") for number, job in enumerate(jobs)]
    monkeypatch.chdir(elsewhere)
    for number, first in enumerate(firsts):
        again = train(Path(f"run-{number}") / "job.toml", run_dir=f"again-{number}", quiet=True)
        assert again.summary.weights_sha256 == first.summary.weights_sha256


def test_a_job_of_live_objects_says_why_it_cannot_run_again() -> None:
    run(small_job(model=lambda: torch.nn.Linear(6, 3)), Path("run"))
    with pytest.raises(JobError, match="made in Python from an object that has no importable name"):
        train("run/job.toml", run_dir="again")


def test_live_objects_need_one_worker() -> None:
    job = small_job(model=lambda: torch.nn.Linear(6, 3), strategy={"workers": 2})
    with pytest.raises(JobError, match="exists only in this process, and the job has 2 workers"):
        run(job, Path("run"))
    assert not Path("run").exists()


# Going on ---------------------------------------------------------------------------------------------------


def test_the_newest_run_of_that_name_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_RUNS", "runs")
    run(small_job(), Path("runs/old"))
    newest = run(small_job(), Path("runs/newer"))
    run(small_job(name="other"), Path("runs/other"))
    resumed = train(small_job(training={"epochs": 3}), resume=True, quiet=True)
    assert resumed.directory == newest.directory
    assert resumed.summary.steps == 15


def test_there_is_nothing_to_resume() -> None:
    with pytest.raises(RunDirectoryError, match="no run of 'small' in runs to resume"):
        train(small_job(), resume=True)
    with pytest.raises(RunDirectoryError, match="there is no run directory nowhere"):
        run(small_job(), Path("nowhere"), resume=True)
    Path("empty").mkdir()
    with pytest.raises(RunDirectoryError, match="empty is not a run directory"):
        run(small_job(), Path("empty"), resume=True)


def write_rows(rows: list[str]) -> None:
    Path("rows.csv").write_text("a,b,label\n" + "".join(rows))


def test_a_run_does_not_continue_with_other_samples(tmp_path: Path) -> None:
    """Places in the order of an epoch are those of other samples where the training set has another length."""
    data = {"use": "csv", "path": "rows.csv"}
    rows = [f"{number},{number % 7},{number % 3}\n" for number in range(40)]
    write_rows(rows)
    whole = run(small_job(data=data), Path("whole"))
    (tmp_path / "store").mkdir()
    job = small_job(data=data, stop={"steps": 3}, checkpoint={"storage": str(tmp_path / "store")})
    run(job, Path("run"))
    longer = msgspec.structs.replace(job, stop=small_job().stop)
    write_rows(rows[:-1])
    before = Path("run/job.toml").read_bytes()
    for place in ("run", "elsewhere/run"):  # there it is brought from the storage
        with pytest.raises(DataError, match=r"there were train: 40 samples .*; now there are train: 39 samples .*Put"):
            run(longer, Path(place), resume=True)
    assert Path("run/job.toml").read_bytes() == before
    write_rows([*rows[:-1], "500,3,1\n"])
    changed = run(longer, Path("run"), resume=True)
    assert changed.summary.status == "completed"
    (warning,) = [event["message"] for event in events_of(changed, "warning")]
    assert warning.startswith("the data are not those that the run began with: there were train: 40 samples (")
    write_rows(rows)
    run(job, Path("again/other"))
    resumed = run(longer, Path("other/other"), resume=True)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert not events_of(resumed, "warning")


def test_a_run_that_has_saved_nothing_begins_again_with_any_data() -> None:
    data = {"use": "csv", "path": "rows.csv"}
    write_rows([f"{number},{number % 7},{number % 3}\n" for number in range(40)])
    run(small_job(data=data, stop={"steps": 3}), Path("run"))
    shutil.rmtree("run/checkpoints")
    write_rows([f"{number},{number % 7},{number % 3}\n" for number in range(30)])
    assert run(small_job(data=data), Path("run"), resume=True).summary.samples == 60


def test_the_job_of_a_run_is_damaged() -> None:
    run(small_job(), Path("run"))
    Path("run/job.toml").write_text("[model")
    with pytest.raises(RunDirectoryError, match=r"job\.toml is damaged"):
        run(small_job(), Path("run"), resume=True)


def test_resuming_from_the_resolved_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(small_job(), Path("whole"))
    run(small_job(stop={"steps": 3}), Path("run"))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    resumed = train("../run/job.toml", overrides=["stop.steps=99"], run_dir="../run", resume=True, quiet=True)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256


def test_weights_of_another_model_are_not_taken() -> None:
    run(small_job(model=lambda: torch.nn.Linear(6, 3)), Path("run"))
    with pytest.raises(CheckpointError, match="weight"):
        run(small_job(model=lambda: torch.nn.Linear(6, 4)), Path("run"), resume=True)


def test_all_checkpoints_are_damaged() -> None:
    run(small_job(), Path("run"))
    for file in Path("run/checkpoints").glob("*/model.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        run(small_job(), Path("run"), resume=True)


def test_a_failed_run_can_be_resumed() -> None:
    class SometimesFailing(small_jobs.Net):
        fails = True

        @classmethod
        def at_step(cls, step: int) -> None:  # type: ignore[override]
            if step == 4 and cls.fails:
                raise OSError("a passing trouble")

    job = small_job(model=SometimesFailing, checkpoint={"every_steps": 2})
    whole = run(small_job(model=small_jobs.Net), Path("whole"))
    with pytest.raises(TrainingError, match="step 4 raised OSError: a passing trouble"):
        run(job, Path("run"))
    SometimesFailing.fails = False
    assert run(job, Path("run"), resume=True).summary.weights_sha256 == whole.summary.weights_sha256


def test_a_failure_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """From the newest checkpoint that is whole; a run that has none is not worth resuming."""

    class Failing(small_jobs.Net):
        fails_at = 5

        @classmethod
        def at_step(cls, step: int) -> None:  # type: ignore[override]
            if step == cls.fails_at:
                newest = Path("a/checkpoints/step-4/model.safetensors")
                newest.write_bytes(b"cut")
                raise OSError("a passing trouble")

    job = small_job(model=Failing, checkpoint={"every_steps": 2, "asynchronous": False})
    with pytest.raises(TrainingError):
        train(job, run_dir="a")
    command = "cordee train a/job.toml --resume --run-dir a"
    assert f"the run failed; this continues from step-2\n  {command}\n" in capsys.readouterr().out
    Failing.fails_at = 1
    with pytest.raises(TrainingError):
        train(job, run_dir="b")
    assert "--resume" not in capsys.readouterr().out


STEP = b'{"type": "step", "step": 7, "epoch": 2, "samples": 56}\n'


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        (STEP + b'{"type": "step"}\n', 7),
        (STEP + b'{"type": "step", "step": "8", "epoch": 2, "samples": 56}\n', 7),
        (STEP + b'{"type": "step", "step": 8, "epoch": null, "samples": 56}\n', 7),
        (b"[]\n\xff\n" + STEP, 7),
        (b"", 0),
        (None, 0),
    ],
)
def test_damaged_events_do_not_hide_why_a_run_failed(events: bytes | None, steps: int) -> None:
    job = small_job()
    with RunDirectory.create("run", job.to_toml()) as directory, Monitor([]) as monitor:
        if events is None:
            directory.events_file.mkdir()
        else:
            directory.events_file.write_bytes(events)
        begun = assemble(job, Team(num_workers=1, num_local_workers=1)).describe()
        with pytest.raises(TrainingError, match="the real one"), launch.reporting_failure(begun, directory, monitor):
            raise TrainingError("the real one")
        summary = directory.read_summary()
    assert summary is not None
    assert (summary.status, summary.error, summary.steps) == ("failed", "the real one", steps)


def test_checkpoints_that_are_a_link_are_not_followed() -> None:
    """Neither read nor written; what the link leads to stays as it is."""
    run(small_job(checkpoint={"every_steps": 5}), Path("run"))
    Path("run/checkpoints").rename("elsewhere")
    Path("run/checkpoints").symlink_to(Path("elsewhere").resolve())
    before = sorted(Path("elsewhere").rglob("*"))
    longer = small_job(training={"epochs": 3})
    with pytest.raises(RunDirectoryError, match="run/checkpoints is a link, and no links are followed"):
        run(longer, Path("run"), resume=True)
    for step in (None, 5):
        with pytest.raises(CheckpointError, match="run/checkpoints is a link, and no links are followed"):
            export_run(Path("run"), [Path("w.pt")], step=step)
    (problem,) = [finding for finding in audit_run(Path("run")) if finding.state == "problem"]
    assert problem.subject == "checkpoints"
    assert "run/checkpoints is a link to" in problem.detail
    Path("new").mkdir()
    Path("new/checkpoints").symlink_to("not-there")
    with pytest.raises(RunDirectoryError, match="new/checkpoints is a link"):
        run(small_job(), Path("new"))
    assert not Path("new/not-there").exists()
    assert sorted(Path("elsewhere").rglob("*")) == before


# Exports ----------------------------------------------------------------------------------------------------


def test_weights_are_exported() -> None:
    result = run(small_job(checkpoint={"every_steps": 5}), Path("run"))
    outputs = [Path("w.safetensors"), Path("w.pt")]
    assert export_run(Path("run"), outputs) == outputs
    expected = result.model.state_dict()
    for weights in (load_file("w.safetensors"), torch.load("w.pt", weights_only=True)):
        assert checkpoint.weights_sha256(weights) == result.summary.weights_sha256
        assert weights.keys() == expected.keys()
    export_run(Path("run"), [Path("earlier.pt")], step=5)
    earlier = torch.load("earlier.pt", weights_only=True)
    assert checkpoint.weights_sha256(earlier) != result.summary.weights_sha256


def test_what_cannot_be_exported() -> None:
    with pytest.raises(RunDirectoryError, match="nowhere is not a run directory"):
        export_run(Path("nowhere"), [Path("w.pt")])
    run(small_job(), Path("run"))
    with pytest.raises(RunDirectoryError, match=r"no checkpoint of step 3 \(it has: step-10\)"):
        export_run(Path("run"), [Path("w.pt")], step=3)
    with pytest.raises(CordeeError, match=r"\.txt"):
        export_run(Path("run"), [Path("w.txt")])


def test_a_resumed_job_is_the_one_recorded() -> None:
    run(small_job(), Path("run"))
    run(small_job(training={"epochs": 3}), Path("run"), resume=True)
    assert Job.load("run/job.toml").training.epochs == 3


def test_a_damaged_newest_checkpoint_is_not_exported_as_an_older_one(tmp_path: Path) -> None:
    done = run(small_job(checkpoint={"every_steps": 2, "keep": 9}), tmp_path / "run")
    older, newest = checkpoint.list_checkpoints(done.directory / "checkpoints")[-2:]
    with (newest / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=f"{newest.name}.* is damaged .*--step {older.name[5:]} is the newest"):
        export_run(done.directory, [tmp_path / "model.safetensors"])
    assert not (tmp_path / "model.safetensors").exists()
    export_run(done.directory, [tmp_path / "model.safetensors"], step=int(older.name[5:]))


# What is said before training -------------------------------------------------------------------------------


def test_what_is_odd_about_the_data_is_said_once_and_not_again_on_resuming() -> None:
    """By the launcher, so that every kind of run says it."""
    targets = torch.tensor([0, 3] * 8)
    job = cordee.Job(
        model=lambda: torch.nn.Linear(4, 4),
        data=(torch.zeros(16, 4), targets),
        training=cordee.Training(batch_size=8, epochs=1),
        stop={"steps": 1},
    )
    for resume in (False, True):
        train(job, run_dir="run", quiet=True, resume=resume)
    events = list(read_events(Path("run/events.jsonl")))
    warnings = [event["message"] for event in events if event["type"] == "warning"]
    assert sum("no sample of class 1, 2" in warning for warning in warnings) == 1, warnings
