"""`cordee run --elastic`: a loop of one's own is started in every way, saved, resumed, scaled, and used wrongly.

What happens at each fault point is in `tests/faults/fault_walk_script.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, run, run_python, run_script, started, wait_until

from cordee.tools.audit import audit_run

pytestmark = pytest.mark.timeout(200)

# Gradients are whole numbers and rates powers of two: sums are exact, so that weights are the same bits on any team.
LOOP = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import cordee

torch.manual_seed(0)
inputs = torch.randint(-4, 5, (64, 6)).double()
targets = torch.randint(-2, 3, (64, 2)).double()
train_set = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True{loader})
model = nn.Linear(6, 2, bias=False).double()
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)
{setup}
with cordee.join() as team:
    model, optimizer, batches = team.prepare(model, optimizer, train_set)
    state = team.state(model=model, optimizer=optimizer, epoch=0, steps=0{things})
    {before}
    def train():
        while state.epoch < 3:
            for x, y in batches:
                team.backward((model(x) * y).sum(), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
                state.steps += 1
                {step}
                team.commit()
            state.epoch += 1
            {epoch}
    train = team.elastic(train)
    {call}
    team.print("weights", sum((2.0**place * value) for place, value in enumerate(model.weight.flatten().tolist())))
"""
PLACES = ("loader", "setup", "things", "before", "step", "epoch", "call")


def write(folder: Path, **parts: str) -> str:
    """Write the script with statements at some places; return its path."""
    filled = dict.fromkeys(PLACES, "pass") | {"loader": "", "setup": "", "things": "", "call": "train()"} | parts
    (folder / "script.py").write_text(LOOP.format(**filled))
    return str(folder / "script.py")


def elastic(folder: Path, *options: str, script: str, num_workers: int = 2) -> Ended:
    run_dir = str(folder / "run")
    return run("run", "--elastic", "-n", str(num_workers), "--run-dir", run_dir, *options, script, folder=folder)


def weights(ended: Ended) -> str:
    assert ended.code == 0, ended.stderr
    (found,) = set(re.findall(r"weights (\S+)", ended.stdout))
    return str(found)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def assert_sound(folder: Path) -> None:
    assert not [finding for finding in audit_run(folder / "run") if finding.state == "problem"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    return weights(run_script(write(folder), folder=folder))


def test_a_killed_worker_costs_nothing_but_its_step(tmp_path: Path, expected: str) -> None:
    """Once before its commit, once in the evaluation of another; with several kinds of loaders."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    die = f"if state.steps == 6 and team.worker_index == 1 and not os.path.exists('died'): open('died', 'w'); {kill}"
    ended = elastic(tmp_path, script=write(tmp_path, step=die))
    assert weights(ended) == expected
    summary = read(tmp_path)
    assert (summary["status"], summary["steps"], summary["samples"]) == ("completed", 12, 192)
    assert (summary["recoveries"], summary["steps_redone"]) == (1, 1)
    assert_sound(tmp_path)
    assert "weights" in (tmp_path / "run" / "logs" / "worker-0.log").read_text()


@pytest.mark.parametrize(
    "loader",
    [", generator=torch.Generator().manual_seed(3)", ", num_workers=1"],
)
def test_the_order_of_any_loader_is_kept(tmp_path: Path, loader: str) -> None:
    die = "os.path.exists('died') or (open('died', 'w'), os.kill(os.getpid(), signal.SIGKILL))"
    step = f"if state.steps == 7 and team.worker_index == 0 and team.num_workers == 2: {die}"
    (tmp_path / "alone").mkdir()
    alone = weights(run_script(write(tmp_path / "alone", loader=loader), folder=tmp_path / "alone"))
    assert weights(elastic(tmp_path, script=write(tmp_path, loader=loader, step=step))) == alone
    assert read(tmp_path)["recoveries"] == 1


def test_the_script_runs_in_every_way(tmp_path: Path, expected: str) -> None:
    script = write(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for ended in (run_python(*torchrun, script, folder=tmp_path), run("run", "-n", "3", script, folder=tmp_path)):
        assert weights(ended) == expected
        assert ended.stdout.count("this loop is not elastic") == 1


def test_ctrl_c_saves_and_resume_continues(tmp_path: Path, expected: str) -> None:
    slow = write(tmp_path, step="time.sleep(0.1)", epoch="state.save()")
    command = ("run", "--elastic", "-n", "2", "--run-dir", str(tmp_path / "run"), slow)
    with started(*command, folder=tmp_path) as first:
        wait_until(lambda: events(tmp_path, "step"))
        first.note_family()
        first.process.send_signal(signal.SIGINT)
        ended = first.finish()
        assert not first.survivors()
    assert ended.code == 130 and read(tmp_path)["status"] == "interrupted"
    assert "cordee resume" in ended.stderr
    again = run("resume", str(tmp_path / "run"), folder=tmp_path)
    assert weights(again) == expected
    summary = read(tmp_path)
    assert (summary["status"], summary["samples"]) == ("completed", 192)
    assert_sound(tmp_path)


def test_scaled_while_it_runs(tmp_path: Path, expected: str) -> None:
    # Slow until the others are there, however long a busy machine takes to start them.
    slow = write(tmp_path, step="time.sleep(0.05 if team.num_workers == 3 else 2.0)")
    command = ("run", "--elastic", "-n", "1", "--run-dir", str(tmp_path / "run"), slow)
    with started(*command, folder=tmp_path) as first:
        wait_until(lambda: events(tmp_path, "generation"))
        scaled = run("scale", str(tmp_path / "run"), "3", folder=tmp_path)
        assert scaled.code == 0, scaled.stderr
        ended = first.finish()
    assert weights(ended) == expected
    assert len(events(tmp_path, "generation")[-1]["members"]) == 3
    assert_sound(tmp_path)


def test_saved_alone_and_continued_by_two_in_the_middle_of_an_epoch(tmp_path: Path, expected: str) -> None:
    saving = write(tmp_path, step="if state.steps == 6: state.save('kept'); raise SystemExit")
    assert run_script(saving, folder=tmp_path).code == 0
    before = "assert state.restore('kept') and (state.epoch, state.steps) == (1, 6)"
    assert weights(elastic(tmp_path, script=write(tmp_path, before=before))) == expected
    assert weights(run("run", "-n", "2", write(tmp_path, before=before), folder=tmp_path)) == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"before": "team.commit()"}, "team.commit: outside of the loop"),
        ({"before": "team.sum(1.0)"}, "team.sum before the loop"),
        ({"things": ", seen={1}"}, "'seen' cannot be saved.*set"),
        ({"step": "state.seen = 3"}, "the state has no 'seen'"),
        ({"step": "state.steps = {1}"}, "'steps' cannot be saved"),
        ({"step": "if team.is_first: team.commit()"}, r"committed different steps \(worker 0 \d+, worker 1 \d+\)"),
        (
            {"step": "if team.is_first: team.sum(1.0)"},
            r"made different calls at step \d: rank [01] is in all_.* while this rank is in all_",
        ),
        ({"epoch": "state.epoch -= 1; team.commit()"}, "state.epoch is still 0"),
        ({"call": "pass"}, "without a loop that could be continued"),
        ({"call": "train(); train()"}, "a script has one elastic loop"),
        ({"step": "state.steps += team.worker_index"}, "'steps' of worker 1 is not that of worker 0"),
        ({"step": "state.epoch = 3; state.steps += team.worker_index"}, "'steps' of worker 1 is not that of worker 0"),
        ({"step": "team.backward((model(x) * y).sum(), exchange=False)"}, "have not been exchanged"),
        ({"step": "team.prepare(nn.Linear(1, 1))"}, "team.prepare inside of the loop"),
        ({"setup": "raise SystemExit(3)"}, r"ended with sys.exit\(3\)"),
        ({"before": "state.restore('nothing')"}, "nothing has no checkpoint"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_named(tmp_path: Path, parts: dict[str, str], message: str) -> None:
    ended = elastic(tmp_path, script=write(tmp_path, **parts))
    assert ended.code == 1, ended
    assert re.search(message, ended.stderr, re.DOTALL), ended.stderr
    assert read(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--elastic", "-n", "0", "script.py"), "-n 0 must be at least 1"),
        (("run", "--elastic", "missing.py"), "no script"),
        (("run", "--run-dir", "d", "script.py"), "only a run with --elastic"),
        (("run", "--elastic", "--set", "autoscale=true", "script.py"), "--set autoscale"),
        (("run", "--elastic", "--resume", "script.py"), "say which run"),
    ],
)
def test_bad_options_end_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write(tmp_path)
    ended = run(*arguments, folder=tmp_path)
    assert ended.code == 2 and message in ended.stderr, ended
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    assert run_script(write(tmp_path, step="state.save('kept'); raise SystemExit"), folder=tmp_path).code == 0
    other = "state = None; other = nn.Linear(6, 3, bias=False).double()"
    script = write(tmp_path, setup="model = nn.Linear(6, 3, bias=False).double()\noptimizer = None", before="pass")
    text = Path(script).read_text().replace("optimizer = None", "optimizer = torch.optim.SGD(model.parameters(), lr=1)")
    Path(script).write_text(text.replace("    def train():", "    state.restore('kept')\n    def train():"))
    ended = run_script(script, folder=tmp_path)
    assert ended.code == 1 and "'weight' has shape (2, 6), the model needs (3, 6)" in ended.stderr, other


def test_the_example_prints_the_same_when_a_worker_is_killed(tmp_path: Path) -> None:
    """A team that waits for the replacement (min_workers = 2) takes every step with two: sums have the same bits."""
    example = str(Path(__file__).parents[2] / "examples" / "elastic_loop.py")
    command = ("run", "--elastic", "-n", "2", "--set", "min_workers=2", "--run-dir")
    undisturbed = run(*command, str(tmp_path / "calm"), example, "--epochs", "30", folder=tmp_path)
    assert undisturbed.code == 0 and undisturbed.stdout.count("test accuracy") == 31
    with started(*command, str(tmp_path / "run"), example, "--epochs", "30", folder=tmp_path) as first:
        wait_until(lambda: events(tmp_path, "step"))
        os.kill(events(tmp_path, "worker_started")[1]["pid"], signal.SIGKILL)
        ended = first.finish()
    assert ended.code == 0, ended.stderr
    assert read(tmp_path)["recoveries"] == 1
    assert (
        read(tmp_path)["weights_sha256"]
        == json.loads((tmp_path / "calm" / "summary.json").read_text())["weights_sha256"]
    )
    # An evaluation that was cut off is made again, and may print its line again.
    assert list(dict.fromkeys(ended.stdout.splitlines())) == undisturbed.stdout.splitlines()


def test_the_job_of_a_script_is_for_no_other_command(tmp_path: Path) -> None:
    assert elastic(tmp_path, script=write(tmp_path)).code == 0
    for command in ("train", "chaos"):
        ended = run(command, str(tmp_path / "run" / "job.toml"), folder=tmp_path)
        assert ended.code in (1, 2) and "cordee run --elastic" in ended.stderr, ended
