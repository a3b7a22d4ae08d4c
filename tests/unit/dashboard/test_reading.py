"""What a page shows of a run directory, which may be damaged, growing, or made by somebody else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from cordee.core.errors import RunDirectoryError
from cordee.dashboard.reading import RunReader, Runs, diagnose, seconds_left
from cordee.monitoring import RunDirectory, events
from cordee.monitoring.jsonl import append_event
from cordee.monitoring.timeline import Line, Phase, TimelineFolder


def write(run: Path, *emitted: events.AnyEvent) -> None:
    with (run / "events.jsonl").open("ab") as file:
        for event in emitted:
            file.write(msgspec.json.encode(event) + b"\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "runs" / "one", 'name = "iris"\n') as made:
        write(
            made.path,
            events.WorkerStarted(time=100.0, worker=0, pid=1, host="h", role="worker"),
            events.WorkerStarted(time=100.0, worker=1, pid=2, host="h", role="worker"),
            events.RunStarted(time=101.0, strategy="x", workers=2, start_step=0, total_steps=50),
            events.Step(time=102.0, step=1, loss=2.0, samples_per_second=10.0),
            events.WorkerLost(time=103.0, worker=1, step=1, reason="was killed by SIGKILL"),
            events.WorkerStarted(time=104.0, worker=1, pid=3, host="h", role="worker"),
            events.Recovery(time=105.0, lost=[1], seconds=0.5, step=2, steps_redone=1),
            events.Step(time=106.0, step=2, loss=1.0, samples_per_second=20.0),
            events.Evaluation(time=107.0, step=2, test_loss=0.5, test_accuracy=0.75),
        )
    return tmp_path / "runs" / "one"


def test_the_curves_marks_and_members_of_a_run(run: Path) -> None:
    reader = RunReader(run)
    reader.update()
    assert reader.curves["loss"].part(0, 10, 10).x == [2.0, 6.0]
    assert reader.curves["accuracy"].part(0, 10, 10).high == [0.75]
    assert [(mark.at, mark.kind) for mark in reader.marks] == [(3.0, "lost"), (4.0, "rejoined"), (5.0, "recovery")]
    spans = [(span.state, span.begin, span.end) for span in reader.members["worker 1"].spans]
    assert spans == [("up", 0.0, 3.0), ("lost", 3.0, 4.0), ("up", 4.0, None)]


def test_a_frozen_member_was_frozen_since_it_was_heard_last(run: Path) -> None:
    write(run, events.WorkerLost(time=112.0, worker=0, step=2, reason="is frozen: no sign of life for 3.5 s"))
    states = RunReader(run)
    states.update()
    spans = [(span.state, span.begin, span.end) for span in states.members["worker 0"].spans]
    assert spans == [("up", 0.0, 8.5), ("frozen", 8.5, 12.0), ("lost", 12.0, None)]


def test_members_say_what_they_prepare(run: Path) -> None:
    said = [(0, "loading"), (2_000_000, "joining"), (3_000_000, "training"), (9_000_000, "ended")]
    line = Line(member="worker-0", pid=1, host="h", origin_us=100 * 10**6, states=said)  # type: ignore[arg-type]
    TimelineFolder(run).write("worker-0", line)
    (shown,) = [Runs(run.parent).overview("one")["members"]["worker 0"]]
    found = [(span["state"], span["begin"], span["end"]) for span in shown]
    assert found == [("up", 0.0, None), ("loading", 0.0, 2.0), ("joining", 2.0, 3.0)]


def test_faults_that_were_injected_are_marked(run: Path) -> None:
    append_event(run, events.stamp(events.Fault(fault="kill", target="worker 1"), "chaos"))
    (mark,) = [mark for mark in Runs(run.parent).overview("one")["marks"] if mark["kind"] == "fault"]
    assert mark["text"] == "cordee chaos: kill worker 1"


def test_log_lines_have_their_place_on_the_axis(run: Path) -> None:
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(104))
    (run / "logs" / "worker-1.log").write_text(f"{text},250 INFO    a: hello\n  of two lines\n")
    assert Runs(run.parent).logs("one") == [
        ("worker 1", f"{text},250 INFO    a: hello", 4.25),
        ("worker 1", "  of two lines", 4.25),
    ]


def test_the_prediction_is_beside_what_is_measured_while_the_run_goes(run: Path) -> None:
    facts = {"compute_seconds": 1.0, "exchange_seconds": 0.5, "idle_share": 0.1, "memory_bytes": 1.0}
    write(run, events.Predicted(time=101.0, step_seconds=2.0, traffic_bytes=1.0, is_sure=True, **facts))
    shown = Runs(run.parent).overview("one")
    assert shown["predicted"]["compute_seconds"] == 1.0
    assert (shown["facts"]["predicted_step_seconds"], shown["facts"]["step_seconds"]) == (2.0, 4.0)


def test_only_what_is_new_is_read(run: Path) -> None:
    reader = RunReader(run)
    reader.update()
    before = reader.offset
    write(run, events.Step(time=108.0, step=3, loss=0.5))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"type": "step", "time": 109.0, "st')  # the run is still writing it
    reader.update()
    assert reader.step == 3
    assert before < reader.offset < (run / "events.jsonl").stat().st_size
    assert len(reader.curves["loss"]) == 3


def test_hours_between_two_parts_of_a_run_are_not_drawn(run: Path) -> None:
    write(
        run,
        events.RunEnded(time=108.0, status="interrupted"),
        events.WorkerStarted(time=9000.0, worker=0, pid=5, host="h", role="worker"),
        events.RunStarted(time=9001.0, strategy="x", workers=1, start_step=2),
        events.Step(time=9002.0, step=3, loss=0.5),
    )
    reader = RunReader(run)
    reader.update()
    assert reader.end < 15
    assert [mark.kind for mark in reader.marks][-2:] == ["end", "resumed"]


def test_another_run_in_the_same_place_is_read_from_its_beginning(run: Path) -> None:
    runs = Runs(run.parent)
    assert runs.overview("one")["step"] == 2
    (run / "events.jsonl").write_bytes(b"")
    write(run, events.Step(time=500.0, step=1, loss=3.0))
    assert runs.overview("one")["step"] == 1


def test_an_overview_says_what_matters_first(run: Path) -> None:
    overview = Runs(run.parent).overview("one")
    assert overview["state"] == "died"
    assert "cordee resume" in overview["diagnosis"]
    assert overview["total_steps"] == 50
    assert set(overview["curves"]) == {"loss", "rate", "test_loss", "accuracy"}


@pytest.mark.parametrize("name", ["", ".", "..", "../runs/one", "one/../one", "\0", "two", "one/"])
def test_names_that_are_no_runs(run: Path, name: str) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run"):
        Runs(run.parent).find(name)


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    (run.parent / "link").symlink_to(run)
    with pytest.raises(RunDirectoryError):
        Runs(run.parent).find("link")


def test_text_of_a_run_has_no_control_characters_and_is_cut(run: Path) -> None:
    write(run, events.Warned(time=108.0, message="\x1b[31m<b>red</b>" + "x" * 10_000))
    (mark,) = [mark for mark in Runs(run.parent).overview("one")["marks"] if mark["kind"] == "warning"]
    assert "\x1b" not in mark["text"]
    assert len(mark["text"]) <= 2000


def test_a_job_that_is_a_pipe_is_not_waited_for(run: Path) -> None:
    (run / "job.toml").unlink()
    os.mkfifo(run / "job.toml")
    with pytest.raises(RunDirectoryError):
        Runs(run.parent).job("one")


def test_damaged_lines_are_passed_over(run: Path) -> None:
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe garbage\n" + b"[" * 5000 + b"\n" + b'{"type": "of the future", "time": 1}\n')
    write(run, events.Step(time=110.0, step=9, loss=0.1))
    overview = Runs(run.parent).overview("one")
    assert overview["step"] == 9
    assert ["unreadable", "3 lines"] in overview["rows"]


def test_rounds_staleness_and_the_time_left(run: Path) -> None:
    write(run, events.Round(time=108.0, round=3, num_asked=5, num_took_part=4, late=[1], loss=0.25, epsilon=1.5))
    write(run, events.Staleness(time=109.0, ages={"0": 2}), events.Staleness(time=110.0, ages={"0": 3, "1": 1}))
    shown = Runs(run.parent).overview("one")
    assert (shown["rounds"][0]["num_took_part"], shown["rounds"][0]["epsilon"]) == (4, 1.5)
    assert shown["staleness"] == {"0": 3, "1": 1}  # each event counts from the start
    assert shown["begin"] == 2.0
    assert shown["seconds_left"] is None  # it does not run
    reader = RunReader(run)
    reader.update()
    assert seconds_left(reader) == pytest.approx((50 - 3) * (8.0 - 2.0) / (3 - 1))


def test_the_list_of_runs_shows_the_loss_at_a_glance(run: Path) -> None:
    for step in range(3, 3000):
        write(run, events.Step(time=110.0 + step, step=step, loss=1.0 / step))
    write(run, events.Step(time=4000.0, step=3000, loss=float("nan")), events.Step(time=4001.0, step=3001, loss=7.0))
    (listed,) = Runs(run.parent).list()
    losses = listed["losses"]
    assert (losses[0], losses[-1]) == (2.0, 7.0)
    assert losses[:-1] == sorted(losses[:-1], reverse=True)
    assert 20 < len(losses) <= 41
    assert listed["faults"] == 1
    (run / "events.jsonl").unlink()
    assert Runs(run.parent).list()[0]["losses"] == []
    write(run, *(events.Round(time=1.0, round=n, num_asked=1, num_took_part=1, loss=1.0 / n) for n in range(1, 99)))
    assert Runs(run.parent).list()[0]["losses"][0] == 1.0, "rounds of clients have a loss too"


def test_phases_are_on_the_axis_of_the_events(run: Path) -> None:
    columns = {name: [0] for name in ("data", "exchange", "evaluate", "save")}
    row = {"step": [1], "steps": [1], "at": [0], "compute": [1_000_000], "wait": [1_000_000], **columns}
    folder = TimelineFolder(run)
    # The clock of the member is 7 s behind; the run began at 100 and rests from 107 to 1000.
    folder.write("worker-0", Line(member="worker-0", pid=1, host="h", origin_us=95 * 10**6, offset_us=7 * 10**6, **row))
    write(run, events.RunStarted(time=1000.0, strategy="x", workers=2, start_step=2))
    folder.write("worker-0", Line(member="worker-0", pid=1, host="h", origin_us=1002 * 10**6, **row))
    part = Runs(run.parent).lanes("one", 0.0, 14.0, 7)
    assert part["members"]["worker 0"]["compute"] == [0, 50, 0, 0, 0, 50, 0]


def test_the_diagnosis_names_the_member_that_waits_for_its_data(run: Path) -> None:
    reader = RunReader(run)
    folder = TimelineFolder(run)
    columns = {name: [0] for name in ("exchange", "evaluate", "save")}
    facts = {"pid": 1, "host": "h", "origin_us": 0, "step": [1], "steps": [1], "at": [0], **columns}
    folder.write("worker-0", Line(member="worker-0", data=[0], compute=[6_000_000], wait=[4_000_000], **facts))
    folder.write("worker-1", Line(member="worker-1", data=[1_000_000], compute=[1_500_000], wait=[0], **facts))
    reader.update()
    folder.write("worker-1", Line(member="worker-1", data=[3_000_000], compute=[4_500_000], wait=[0], **facts))
    for _ in range(2):  # what was read is not counted again
        reader.update()
    assert reader.phases["worker 1"][Phase.DATA] == 4_000_000
    assert diagnose(reader, "completed") == (
        "Worker 1 waits for its data 40 % of the time: raise data.processes. "
        "1 loss; the last: worker 1 was killed by SIGKILL."
    )


def test_a_worker_that_is_slow_now_is_named_and_one_that_was_is_not(run: Path) -> None:
    slow = {"worker": 1, "seconds": 0.5, "median_seconds": 0.05}
    write(run, events.WorkerStarted(time=112.0, worker=1, pid=2, host="h", role="worker"))
    write(run, events.Straggler(time=113.0, step=100, **slow), events.Step(time=113.0, step=101, loss=0.1))
    write(run, events.Warned(time=113.0, message="worker 1 is slow: step 100 took it 0.5 s"))
    reader = RunReader(run)
    reader.update()
    assert [mark.kind for mark in reader.marks[-1:]] == ["warning"], "one mark for one warning"
    said = "A slow worker holds the others up: worker 1 took 0.5 s for step 100, the others 0.05 s."
    assert diagnose(reader, "running") == said
    write(run, events.Step(time=120.0, step=1000, loss=0.1))
    reader.update()
    assert diagnose(reader, "running") != said


def test_a_host_with_fewer_cores_than_workers_is_named(run: Path) -> None:
    columns = {name: [0] for name in ("data", "exchange", "evaluate", "save")}
    facts = {"pid": 1, "host": "h", "origin_us": 0, "cores": 2, "step": [1], "steps": [1], "at": [0], **columns}
    for n in range(3):
        line = Line(member=f"worker-{n}", compute=[6_000_000], wait=[4_000_000], **facts)
        TimelineFolder(run).write(line.member, line)
    reader = RunReader(run)
    reader.update()
    assert diagnose(reader, "running").startswith(
        "The workers wait up to 40 % of the time for each other: 3 workers share 2 cores of h"
    )


def test_a_worker_without_a_core_is_named(run: Path) -> None:
    columns = {name: [0] for name in ("data", "compute", "exchange", "evaluate", "save")}
    facts = {"member": "worker-0", "pid": 1, "host": "h", "origin_us": 0, "cores": 2, "step": [1], "steps": [1]}
    for second in range(1, 5):  # waits are those for peers that have no core
        at = {"at": [10**6 * second], "until": 10**6 * second, "queued_us": 5_000_000 + 600_000 * second}
        TimelineFolder(run).write("worker-0", Line(**facts, **at, **{**columns, "wait": [10**6]}))
    reader = RunReader(run)
    reader.update()
    assert reader.queued == {"worker 0": (1_800_000, 3_000_000)}
    assert diagnose(reader, "running").startswith("Worker 0 waits for a core 60 % of the time: its cores are taken")


def test_a_run_that_cannot_be_read_is_not_called_usual(run: Path) -> None:
    (run / "job.toml").write_text('name = "x\n')
    overview = Runs(run.parent).overview("one")
    assert overview["state"] == "unreadable"
    assert overview["diagnosis"] == "A file of this run cannot be read: what is shown is incomplete."


def test_an_enormous_line_is_passed_over_a_part_at_a_time(run: Path) -> None:
    with (run / "events.jsonl").open("ab") as file:
        file.truncate(file.tell() + (60 << 20))  # zeros without an end of a line
        file.seek(0, 2)
        file.write(b"\n")
    write(run, events.Step(time=111.0, step=10, loss=0.1))
    reader = RunReader(run)
    reader.update()
    assert reader.step == 10
    assert Runs(run.parent).list()[0]["state"] == "died"


@pytest.mark.parametrize("name", ["job.toml", "summary.json"])
def test_an_enormous_file_is_said_to_be_damaged(run: Path, name: str) -> None:
    with (run / name).open("wb") as file:
        file.truncate(1 << 34)
    (listed,) = Runs(run.parent).list()
    assert listed["state"] == "unreadable"
    assert f"{name} has more than" in listed["problem"]
    assert Runs(run.parent).overview("one")["state"] == "unreadable"


def test_of_an_enormous_log_the_end_is_shown(run: Path) -> None:
    (run / "logs").mkdir(exist_ok=True)
    with (run / "logs" / "worker-0.log").open("wb") as file:
        file.truncate(1 << 34)
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    assert Runs(run.parent).logs("one")[-1][1] == "the end"


def test_an_empty_folder_is_no_run_and_an_empty_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert Runs(tmp_path).list() == []
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "job.toml").write_text("")
    shown = Runs(tmp_path).overview("new")
    assert (shown["curves"], shown["marks"], shown["phases"]) == ({}, [], {})


def test_a_run_of_a_newer_version_is_shown_as_far_as_it_is_known(run: Path) -> None:
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"type": "step", "time": 120.0, "step": 33, "loss": 0.5, "energy_joules": 5}\n')
        file.write(b'{"type": "teleported", "time": 121.0, "worker": 3}\n')
    (run / "job.toml").write_text('name = "one"\n[of_the_future]\nkey = 1\n')
    shown = Runs(run.parent).overview("one")
    assert (shown["step"], shown["state"]) == (33, "died")
    assert ["unreadable", "1 line"] in shown["rows"]


def test_links_are_added_up_over_the_processes_of_a_member(run: Path) -> None:
    folder = TimelineFolder(run)
    for pid, links in ((1, {"coordinator": 10, "server-1": 500}), (1, {"server-1": 300}), (2, {"server-1": 1})):
        folder.write("worker-0", Line(member="worker-0", pid=pid, host="h", origin_us=10**8, links=links))
    folder.write("server-1", Line(member="server-1", pid=3, host="h", origin_us=10**8, links={"worker-0": 40}))
    assert Runs(run.parent).overview("one")["links"] == [
        ["worker 0", "server 1", 801],
        ["server 1", "worker 0", 40],
        ["worker 0", "coordinator", 10],
    ]
