"""Runs beside each other: times to the same accuracy, and no verdict that the spread of the seeds does not allow."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from cordee.core.errors import JobError, RunDirectoryError
from cordee.dashboard.comparison import compare_runs, to_csv, to_html, to_png
from cordee.monitoring import RunDirectory, Summary, events
from cordee.monitoring.timeline import Line, TimelineFolder


def make_run(path: Path, *, seconds: float, rate: float, best: float = 0.9, status: str = "completed") -> Path:
    """A run whose accuracy is `best` after so many seconds of training."""
    with RunDirectory.create(path, 'name = "x"\n') as run:
        emitted: list[events.AnyEvent] = [
            events.RunStarted(time=100.0, strategy="single", workers=1, start_step=0),
            events.Step(time=105.0, step=1, loss=2.0, samples_per_second=rate),
            events.Evaluation(time=105.0 + seconds / 2, step=5, test_accuracy=best / 2),
            events.Evaluation(time=105.0 + seconds, step=10, test_accuracy=best),
        ]
        run.events_file.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in emitted))
        run.write_summary(
            Summary(
                status=status,  # type: ignore[arg-type]
                strategy=path.name,
                steps=10,
                samples_per_second=rate,
                test_accuracy=best,
                weights_sha256=path.name,
            )
        )
    return path


def test_the_time_is_that_to_an_accuracy_that_all_reached(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "slow", seconds=20, rate=10, best=0.92),
        make_run(tmp_path / "fast", seconds=10, rate=30),
    ]
    found = compare_runs(runs)
    assert found.target == pytest.approx(0.99 * 0.9)
    assert [run.seconds_to_target for run in found.runs] == [20.0, 10.0]
    assert found.verdict[0].startswith("Fastest to 89.10 % test accuracy: fast, 2.00 times as fast as slow")
    assert "one run each, so chance is not ruled out" in found.verdict[0]
    assert found.verdict[1].startswith("Fastest in samples per second: fast, 3.00 times as fast")


def test_times_count_from_the_begin_of_training_and_not_from_the_first_loss(tmp_path: Path) -> None:
    """Workers that train alone report a first loss when they agree: they would seem to have begun then."""
    runs = [make_run(tmp_path / name, seconds=10, rate=10) for name in ("often", "seldom")]
    columns = {name: [0] for name in ("data", "compute", "exchange", "wait", "evaluate", "save")}
    for run, begin_s in zip(runs, (104, 101), strict=True):
        facts = {"pid": 1, "host": "h", "origin_us": begin_s * 10**6, "step": [1], "steps": [1], "at": [0]}
        TimelineFolder(run).write("worker-0", Line(member="worker-0", **facts, **columns))
    found = compare_runs(runs)
    assert [run.seconds_to_target for run in found.runs] == [11.0, 14.0]
    assert [found.curves[name]["loss"]["x"] for name in ("often", "seldom")] == [[1.0], [4.0]]
    assert compare_runs([runs[0], make_run(tmp_path / "older", seconds=10, rate=10)]).runs[0].seconds_to_target == 10.0
    assert len(to_png(found)) > 1000


def test_a_hundredth_is_no_difference(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seconds=seconds, rate=10) for name, seconds in (("a", 10.1), ("b", 10.0))]
    said = compare_runs(runs).verdict
    assert said[0] == "Fastest to 89.10 % test accuracy: b and a, less than 2 % apart (b 10 s, a 10.1 s)."


def test_a_difference_within_the_spread_of_the_seeds_is_none(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{name}{k}", seconds=s, rate=1)
        for name, k, s in (("a", 0, 10), ("a", 1, 14), ("b", 0, 12), ("b", 1, 16))
    ]
    found = compare_runs(runs, groups=["a", "a", "b", "b"])
    assert "no difference beyond the spread of the seeds between a and b" in found.verdict[0]


def test_a_run_that_missed_the_target_and_a_run_that_failed_are_said(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "good", seconds=10, rate=5), make_run(tmp_path / "poor", seconds=10, rate=5, best=0.5)]
    found = compare_runs(runs, 0.8)
    assert found.runs[1].seconds_to_target is None
    assert any("poor did not" in line for line in found.verdict)
    failed = compare_runs([runs[0], make_run(tmp_path / "bad", seconds=1, rate=99, status="failed")])
    assert failed.verdict[0].startswith("bad failed")
    assert not any("Fastest" in line for line in failed.verdict)


def test_a_time_that_the_first_evaluation_ended_is_said_to_be_one(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "seldom", seconds=20, rate=5, best=0.9), make_run(tmp_path / "b", seconds=9, rate=5)]
    found = compare_runs(runs, 0.45)
    assert [run.is_first_evaluation for run in found.runs] == [True, True]
    assert any(line.startswith("All runs reached it by the first evaluation") for line in found.verdict)
    slow = make_run(tmp_path / "slow", seconds=9, rate=5, best=0.8)
    some = compare_runs([*runs, slow], 0.45).verdict
    assert any(line.startswith("seldom, b reached it by the first evaluation") for line in some)
    assert not any("first evaluation" in line for line in compare_runs(runs, 0.8).verdict)


def test_what_workers_wait_exchange_and_send_is_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seconds=10, rate=5) for name in "ab"]
    for number, (member, wait) in enumerate((("worker-0", 100), ("worker-1", 300), ("server-0", 0))):
        columns = {
            "data": [0],
            "compute": [700 - wait],
            "exchange": [100],
            "wait": [wait],
            "evaluate": [9],
            "save": [9],
        }
        lines = [
            Line(
                member=member,
                pid=number,
                host="h",
                origin_us=10**8 + at,
                until=10,
                sent_bytes=sent,
                step=[1],
                steps=[1],
                at=[0],
                **columns,
            )  # type: ignore[arg-type]
            for at, sent in ((0, 1000), (0, 1500))
        ]
        lines[1] = msgspec.structs.replace(
            lines[1], until=2_000_000, step=[], steps=[], at=[], **{key: [] for key in columns}
        )
        (runs[0] / "timeline").mkdir(exist_ok=True)
        (runs[0] / "timeline" / f"{member}.jsonl").write_bytes(
            b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        )
    first, second = compare_runs(runs).runs
    assert (first.idle_share, first.exchange_share, first.bytes_sent) == (0.25, 0.125, 1500)
    assert (second.idle_share, second.exchange_share, second.bytes_sent) == (None, None, None)


def test_a_page_holds_its_data_and_no_markup_of_names(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", seconds=10, rate=5), make_run(tmp_path / "<script>b", seconds=10, rate=5)]
    comparison = compare_runs(runs)
    page = to_html(comparison, "<script>b")
    assert page.count("</script>") == 2
    assert "<script>b" not in page
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    data = re.search(r'id="data">(.*)</script>', page)
    assert data is not None
    assert json.loads(data[1])["runs"][1]["run"] == "<script>b"
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [row["run"] for row in rows] == ["a", "<script>b"]


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", seconds=10, rate=5)
    with pytest.raises(JobError, match="two runs or more"):
        compare_runs([run])
    with pytest.raises(JobError, match="must be above 0"):
        compare_runs([run, run], 90)
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        compare_runs([run, tmp_path])
    RunDirectory.create(tmp_path / "new", 'name = "x"\n').release()
    with pytest.raises(RunDirectoryError, match="has no summary: it is died"):
        compare_runs([run, tmp_path / "new"])
    damaged = make_run(tmp_path / "damaged", seconds=10, rate=5)
    (damaged / "job.toml").write_text('name = "x')
    with pytest.raises(RunDirectoryError, match=r"the run damaged cannot be compared: job.toml"):
        compare_runs([run, damaged])


def test_a_summary_of_before_the_run_was_continued_is_not_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seconds=10, rate=5) for name in "ab"]
    summary = json.loads((runs[1] / "summary.json").read_text())
    (runs[1] / "summary.json").write_text(json.dumps({**summary, "ended": 200.0}))
    later = 300.0
    with (runs[1] / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": later, "member": "worker 0", "type": "step", "step": 900, "loss": 0.1}) + "\n")
    with pytest.raises(RunDirectoryError, match="the run b was continued after its summary was written"):
        compare_runs(runs)
