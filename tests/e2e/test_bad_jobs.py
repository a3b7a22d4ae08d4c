"""Mistakes in a job or its data, through the command: one clear message, exit code 2, nothing written."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from workspace import Workspace, assert_refused, settings, write_idx_set

pytestmark = pytest.mark.timeout(600)

MISTAKES = {
    "a key that is not known": (settings(training__epoch=3), ["[training]", "'epoch'", "did you mean 'epochs'?"]),
    "a section that is not known": (settings(optimiser__lr=3), ["'optimiser'", "did you mean 'optimizer'?"]),
    "a model that is not known": (settings(model__use="lennet"), ["'lennet'", "did you mean 'lenet'?", "resnet"]),
    "data that is not known": (settings(data__use="fashion"), ["'fashion'", "did you mean 'fashion-mnist'?"]),
    "an optimizer that is not known": (settings(optimizer__use="adan"), ["'adan'", "did you mean 'adam"]),
    "a schedule that is not known": (settings(schedule__use="cosin"), ["'cosin'", "did you mean 'cosine'?"]),
    "a strategy that is not known": (["--strategy", "singel"], ["'singel'", "did you mean 'single'?"]),
    "an argument that is not known": (settings(data__sizes=100), ["'sizes'", "did you mean 'size'?"]),
    "a module that is not there": (settings(model__use="no_such:Net"), ["no_such", "searched"]),
    "a name that is not in its module": (settings(model__use="parts:Nett"), ["'Nett'", "did you mean 'Net'?"]),
    "a text for a number": (settings(training__batch_size="many"), ["training.batch_size", "'many'", "int"]),
    "a number for a text": (settings(stop__time="true"), ["stop.time", "True"]),
    "a text for a rate": (settings(optimizer__lr="fast"), ["optimizer.lr = 'fast'", "expected a number"]),
    "a rate that cannot be": (settings(optimizer__lr=-1), ["optimizer 'adam'", "'lr': -1"]),
    "a number out of bounds": (settings(training__epochs=0), ["training.epochs = 0", "at least 1"]),
    "two lengths": (settings(training__steps=10), ["training.epochs = 4", "training.steps = 10", "stop.steps = 10"]),
    "a batch larger than the data": (settings(training__batch_size=481), ["481", "480"]),
    "more workers than the strategy has": (
        ["--strategy", "single", "--workers", "2"],
        ["'single'", "2", "workers = 1"],
    ),
    "a mesh of another size": (
        ["--strategy", "hybrid", "--workers", "2", "--set", "strategy.mesh={data=2,pipeline=2}"],
        ["{data = 2, pipeline = 2} has 4 workers, the job has 2", "strategy.workers = 4"],
    ),
    "more stages than layers": (
        ["--strategy", "pipeline", "--workers", "9", *settings(model__use="mlp", model__hidden="[8]")],
        ["can be cut into at most", "the job has 9", "strategy.stages"],
    ),
    "a setting of another strategy": (
        ["--strategy", "sharded", "--workers", "2", *settings(strategy__microbatches=4)],
        ["strategy.microbatches", "'pipeline'", "'sharded'"],
    ),
    "faults in the job": (
        ["--strategy", "parameter_server", "--workers", "2", *settings(strategy__lose_messages=0.1)],
        ["[strategy] has no key 'lose_messages'"],
    ),
    "compression in reproducible mode": (
        [
            *("--strategy", "parameter_server", "--workers", "2"),
            *settings(strategy__compression="fp16", training__reproducible="true"),
        ],
        ["strategy.compression = 'fp16' depends on the number of workers", "leave strategy.compression out"],
    ),
    "labels out of range": (
        ["--set", 'data={use="parts:labels_out_of_range"}'],
        ["the label at position 4 is 4", "from 0 to 3"],
    ),
    "a model whose output does not fit": (
        settings(model__use="parts:TooNarrow"),
        ["'parts:TooNarrow'", "(2, 3)", "4 classes"],
    ),
    "a model that does not take the data": (
        settings(data__augment="[]", data__shape="[3, 8]"),
        ["the model 'parts:Net' cannot compute inputs of shape (3, 8)"],
    ),
    "a setting without a value": (["--set", "training.epochs"], ["'training.epochs'", "a.b=value"]),
    "a setting without a key": (["--set", "=3"], ["'=3'", "a.b=value"]),
    "a setting with an empty part": (["--set", "training..epochs=3"], ["training..epochs=3", "a.b=value"]),
    "a setting below a value": (["--set", "name.first=3"], ["name.first=3", "'name' is a value"]),
    "no GPU": (settings(training__device="cuda"), ["training.device", "'cuda'", "GPU"]),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """What the command says to each mistake; two at a time, for most of it is importing torch."""
    workspace = Workspace(tmp_path_factory.mktemp("mistakes"))
    before = set(workspace.path.iterdir())
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = dict(zip(MISTAKES, pool.map(lambda mistake: workspace.train(*mistake[0]), MISTAKES.values())))
    left = {path.name for path in set(workspace.path.iterdir()) - before}
    assert left <= {"__pycache__"}, "nothing may be left of runs that never began"
    return answers


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_job_is_told(mistake: str, answers: dict[str, subprocess.CompletedProcess[str]]) -> None:
    if mistake == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert_refused(answers[mistake], 2, *MISTAKES[mistake][1])
    assert answers[mistake].stdout == ""


def test_job_files_that_cannot_be_read_are_told(workspace: Workspace) -> None:
    (workspace.path / "broken.toml").write_text("[model\nuse = 3")
    (workspace.path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (workspace.path / "folder.toml").mkdir()
    assert_refused(workspace.run("train", "jop.toml"), 2, "no job file 'jop.toml'", "did you mean 'job.toml'?")
    assert_refused(workspace.run("train", "broken.toml"), 2, "broken.toml is not valid TOML", "line 1")
    assert_refused(workspace.run("train", "binary.toml"), 2, "binary.toml")
    assert_refused(workspace.run("train", "folder.toml"), 2, "folder.toml", "directory")
    assert not (workspace.path / "runs").exists()


@pytest.fixture
def mnist(workspace: Workspace) -> Path:
    """The files of MNIST, small, and a job that uses them."""
    folder = workspace.path / "data" / "mnist"
    write_idx_set(folder)
    workspace.job.write_text(f'model = "mlp"\n[data]\nuse = "mnist"\nroot = "{folder}"\n[training]\nbatch_size = 8\n')
    return folder


def test_missing_files_are_listed_with_the_places_searched(workspace: Workspace, mnist: Path) -> None:
    (mnist / "t10k-labels-idx1-ubyte").unlink()
    done = workspace.train()
    assert_refused(done, 2, "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", f"searched: {mnist}", "data.download")

    workspace.job.write_text('model = "mlp"\ndata = "mnist"\n')
    done = workspace.train(CORDEE_DATA=f"{mnist}:/no/such/folder")
    places = [mnist, mnist / "MNIST/raw", "/no/such/folder/mnist", workspace.path / "cache/data/mnist"]
    if not Path("/usr/share/datasets/mnist").exists():
        assert_refused(done, 2, "t10k-labels-idx1-ubyte", *map(str, places), "/usr/share/datasets", "$CORDEE_DATA")


def test_a_truncated_file_is_told_with_both_lengths(workspace: Workspace, mnist: Path) -> None:
    images = mnist / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    assert_refused(
        workspace.train(), 2, f"{images} is truncated", f"expected {16 + 64 * 784} bytes", f"found {64 * 784 - 84}"
    )


def test_labels_out_of_range_in_a_file_are_told_with_their_place(workspace: Workspace, mnist: Path) -> None:
    labels = mnist / "t10k-labels-idx1-ubyte"
    content = bytearray(labels.read_bytes())
    content[8 + 17] = 10
    labels.write_bytes(content)
    assert_refused(workspace.train(), 2, str(labels), "position 17 is 10", "from 0 to 9")
