"""Progress in words: what the bar says, and that it fits."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.monitoring import events, wording
from cordee.monitoring.events import Evaluation, RunStarted
from cordee.monitoring.progress import Tracker, View

VIEW = View(
    step=812,
    total_steps=2345,
    epoch=2,
    epochs=5,
    loss=0.41234,
    test_accuracy=0.861,
    samples_per_second=12_345.0,
    left_s=34.2,
    elapsed_s=20.0,
)
EMPTY = View(
    step=0,
    total_steps=None,
    epoch=None,
    epochs=None,
    loss=None,
    test_accuracy=None,
    samples_per_second=None,
    left_s=None,
    elapsed_s=0.0,
)


def test_the_bar_at_77_columns_says_everything():
    text = wording.bar(VIEW, 77).plain
    assert len(text) == 77
    for part in ("epoch 2/5", "812/2345", "loss 0.4123", "34%", "test 86.1%", "12.3k/s", "0:34 left"):
        assert part in text


def test_a_wide_bar_spells_things_out_and_a_narrow_one_keeps_what_matters():
    wide = wording.bar(VIEW, 117).plain
    assert "test accuracy 86.10 % · 12.3k samples/s · 0:34 left" in wide
    narrow = wording.bar(VIEW, 37).plain
    assert "812/2345 loss 0.4123 0:34 left" in narrow
    assert "━" in narrow


def test_ascii_screens_get_ascii_only():
    assert wording.bar(VIEW, 117, is_ascii=True).plain.isascii()


def test_without_a_total_there_is_no_bar_but_the_time_so_far():
    assert wording.bar(EMPTY, 77).plain == "step 0 · 0:00"


numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(
    width=st.integers(5, 200),
    step=st.integers(0, 10**9),
    total=st.none() | st.integers(1, 10**9),
    loss=numbers,
    accuracy=st.none() | st.floats(0, 1),
    rate=st.none() | st.floats(0, 1e12),
    left=st.none() | st.floats(0, 1e9),
)
def test_the_bar_never_exceeds_its_width(width, step, total, loss, accuracy, rate, left):
    view = View(
        step=step,
        total_steps=total,
        epoch=step // 7,
        epochs=total,
        loss=loss,
        test_accuracy=accuracy,
        samples_per_second=rate,
        left_s=left,
        elapsed_s=1.0,
    )
    assert wording.bar(view, width).cell_len <= width


@pytest.mark.parametrize("width", [40, 60, 79, 120])
def test_the_line_of_an_evaluation_fits(width):
    found = Evaluation(epoch=12, step=46_900, test_loss=0.421, test_accuracy=0.8431, test_top5_accuracy=0.99)
    line = wording.evaluation_line(found, 0.512, 8.2, width)
    assert len(line) <= width
    assert "84.31 %" in line


def test_the_line_of_an_evaluation_in_full():
    found = Evaluation(epoch=1, step=469, test_loss=0.421, test_accuracy=0.8431)
    line = wording.evaluation_line(found, 0.512, 8.2, 79)
    assert line == "epoch 1  step 469  loss 0.5120  test loss 0.4210  test accuracy 84.31 %  8.2 s"
    regression = Evaluation(epoch=1, step=469, test_loss=0.421, test_accuracy=None)
    assert wording.evaluation_line(regression, None, 8.2, 30) == "epoch 1  test loss 0.4210"


ROUNDS = RunStarted(
    strategy="federated", workers=2, clients=20, total_steps=10, batch_size=32, start_step=2, parameters=1
)


def test_federated_progress_counts_rounds_and_no_samples():
    tracker = Tracker(ROUNDS, 0.0)
    tracker.advance(3, 0.5, 10.0)
    tracker.record_epoch(3)
    view = tracker.view(10.0)
    for said in (wording.bar(view, 117).plain, wording.step_line(view)):
        assert "round 3/10" in said and "30%" in said
        assert "epoch" not in said and "step" not in said
        assert "samples" not in said, "a round has no batch"
    assert wording.bar(msgspec.structs.replace(view, total_steps=None), 77).plain.startswith("round 3 ")
    assert wording.header_lines(ROUNDS)[-1] == "continues after round 2"


def test_the_evaluation_of_a_round():
    found = Evaluation(epoch=3, step=3, test_loss=0.421, test_accuracy=0.8431)
    line = wording.evaluation_line(found, 0.512, 8.2, 79, has_rounds=True)
    assert line == "round 3  loss 0.5120  test loss 0.4210  test accuracy 84.31 %  8.2 s"
    assert wording.evaluation_line(found, None, 8.2, 20, has_rounds=True) == "round 3  accuracy 84.31 %"


def test_numbers_read_well():
    assert [wording.quantity(n) for n in (0.5, 950, 999.9, 12_345, 999_999, 1_050_000, 2e9)] == [
        "0.50", "950", "1.00k", "12.3k", "1.00M", "1.05M", "2.00G",
    ]  # fmt: skip
    assert [wording.clock(s) for s in (0, 34.4, 3599.6, 3723, 200_000)] == [
        "0:00",
        "0:34",
        "1:00:00",
        "1:02:03",
        "2 days",
    ]
    assert [wording.number(x) for x in (0.41234, 0.0, 1e-5, 123456.0, math.nan, math.inf, None)] == [
        "0.4123", "0.0000", "1e-05", "1.23e+05", "nan", "inf", "",
    ]  # fmt: skip


def test_the_header_says_what_on_what_and_where():
    run = RunStarted(
        name="lenet-fashion",
        strategy="data_parallel",
        workers=2,
        device="cpu",
        threads=1,
        parameters=44_426,
        train_samples=60_000,
        test_samples=10_000,
        batch_size=128,
        epochs=5,
        total_steps=2345,
        start_step=400,
        run_dir="runs/x",
    )
    assert wording.header_lines(run) == [
        "lenet-fashion: 44,426 parameters, data_parallel, 2 workers on cpu with 1 thread each",
        "60,000 training and 10,000 test samples, batches of 128, 5 epochs, 2,345 steps",
        "continues after step 400",
        "run directory: runs/x",
    ]
    below, elsewhere = str(Path("runs/x").absolute()), "/elsewhere/runs/x"
    for path, shown in ((below, "runs/x"), (elsewhere, elsewhere)):
        moved = RunStarted(name="x", strategy="single", workers=1, start_step=0, run_dir=path)
        assert wording.header_lines(moved)[-1] == f"run directory: {shown}"
    assert wording.header_lines(RunStarted(name="x", strategy="single", workers=1, start_step=0)) == [
        "x: single, 1 worker on cpu"
    ]
    served = RunStarted(name="x", strategy="parameter_server", workers=2, servers=1, start_step=0)
    assert wording.header_lines(served) == ["x: parameter_server, 2 workers on cpu, 1 server"]
    simulated = RunStarted(
        name="x", strategy="federated", workers=2, threads=1, clients=100, total_steps=5, batch_size=8, start_step=0
    )
    assert wording.header_lines(simulated) == [
        "x: federated, 100 clients, 2 workers on cpu with 1 thread each",
        "batches of 8, 5 rounds",
    ]
    sites = RunStarted(name="x", strategy="federated", workers=2, clients=2, start_step=0)
    assert wording.header_lines(sites) == ["x: federated, 2 clients on cpu"]


RUN = RunStarted(strategy="single", workers=1, total_steps=1000, epochs=4, batch_size=10, start_step=0)


def test_the_speed_leaves_evaluations_out_and_the_time_left_counts_them():
    tracker = Tracker(RUN, 0.0)
    tracker.advance(100, 0.5, 10.0)  # 10 steps a second
    assert tracker.view(10.0).samples_per_second == pytest.approx(100.0)
    assert tracker.view(10.0).left_s == pytest.approx(90.0)
    tracker.pause(5.0, 15.0)
    tracker.advance(200, 0.4, 25.0)
    assert tracker.view(25.0).samples_per_second == pytest.approx(100.0)
    assert tracker.view(25.0).left_s == pytest.approx(800 * (0.1 + 5.0 / 200))


def test_the_time_left_ends_where_a_rule_ends_the_run():
    tracker = Tracker(msgspec.structs.replace(RUN, stop_steps=300), 0.0)
    tracker.advance(100, 0.5, 10.0)
    assert tracker.view(10.0).left_s == pytest.approx(20.0)
    assert tracker.view(10.0).epoch == 1


def test_epochs_follow_from_the_step():
    tracker = Tracker(RUN, 0.0)
    epochs = []
    for step in (0, 1, 250, 251, 1000, 1001):
        tracker.advance(step, None, float(step + 1))
        epochs.append(tracker.view(0.0).epoch)
    assert epochs == [1, 1, 1, 2, 4, 4]


def test_a_resumed_run_does_not_count_the_steps_before_as_speed():
    tracker = Tracker(msgspec.structs.replace(RUN, start_step=900), 0.0)
    assert tracker.view(0.0).left_s is None
    tracker.advance(910, 0.1, 1.0)
    assert tracker.view(1.0).left_s == pytest.approx(9.0)


def test_how_many_parameters_are_trained():
    run = msgspec.structs.replace(RUN, name="n", parameters=1200, trainable_parameters=1000)
    assert wording.header_lines(run)[0].startswith("n: 1,200 parameters (1,000 of them trained), ")
    assert "trained" not in wording.header_lines(msgspec.structs.replace(run, trainable_parameters=1200))[0]


def test_the_team_is_counted_by_its_events():
    team = wording.TeamCount(4)
    started = [events.WorkerStarted(worker=w, pid=1, host="h", role="worker") for w in range(4)]
    for event in (*started, events.Generation(generation=1, members=[0, 1, 2, 3])):
        team.take(event)
    assert team.describe() == "4/4"
    team.take(events.WorkerLost(worker=2, step=5, reason="was killed"))
    team.take(events.Generation(generation=2, members=[0, 1, 3], step=5))
    assert team.describe() == "3/4, 1 rejoining"
    team.take(events.WorkerStarted(worker=2, pid=2, host="h", role="worker"))
    assert team.describe() == "4/4"
    team.take(events.Scale(workers=2, before=4, step=9))
    team.take(events.Generation(generation=3, members=[0, 1], step=9))
    assert team.describe() == "2/2"
    assert wording.TeamCount(1).describe() == ""


def test_the_bar_shows_the_team_where_there_is_room():
    view = msgspec.structs.replace(VIEW, team="3/4, 1 rejoining")
    assert "workers 3/4, 1 rejoining" in wording.bar(view, 140).plain
    assert "workers 3/4" in wording.bar(view, 90).plain
    assert len(wording.bar(view, 40).plain) <= 40
    assert "step 812/2345 (34%)" in wording.step_line(view)
    assert "workers 3/4, 1 rejoining" in wording.step_line(view)
