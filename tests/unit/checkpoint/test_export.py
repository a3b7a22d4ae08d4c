"""Exported files work in the programs they are for."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn

from cordee.checkpoint import State, export, model_state, save
from cordee.core.errors import CheckpointError, JobError, MissingExtraError, ModelError, StorageError


class Net(nn.Module):
    """A small LeNet with what changes between training and evaluation, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(0.5), nn.Flatten()
        )
        self.mix = nn.Linear(6 * 14 * 14, 6 * 14 * 14, bias=False)
        self.again = nn.Linear(6 * 14 * 14, 6 * 14 * 14, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(6 * 14 * 14, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.mix(self.features(images))))


@pytest.fixture(scope="module")
def trained() -> Net:
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(8, 1, 28, 28))  # moves the running statistics
    return model


@pytest.fixture(scope="module")
def state(trained: Net) -> State:
    return State.join(model=State(model_state(trained), {}), optimizer=State({"x": torch.ones(1)}, {}))


def assert_same(model: Net, other: Net) -> None:
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(model.eval()(images), other.eval()(images))


def test_safetensors(state: State, trained: Net, tmp_path: Path) -> None:
    target = export(state, tmp_path / "new" / "net.safetensors")
    fresh = Net()
    assert safetensors.torch.load_model(fresh, target) == (set(), [])
    assert_same(fresh, trained)
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "mix.weight": "again.weight"}


def test_state_dict(state: State, trained: Net, tmp_path: Path) -> None:
    target = export(state, tmp_path / "net.pt")
    fresh = Net()
    fresh.load_state_dict(torch.load(target, weights_only=True))
    assert_same(fresh, trained)
    assert target.stat().st_size < 1.1 * sum(p.nbytes for p in trained.parameters()) + 10_000


def test_state_dict_leaves_out_what_a_view_does_not_show(tmp_path: Path) -> None:
    target = export(State({"model.x": torch.zeros(1_000_000)[:3]}, {}), tmp_path / "net.pt")
    assert target.stat().st_size < 10_000


def test_onnx_gives_the_same_answers_for_any_batch(
    state: State, trained: Net, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = Net().train()
    before = pickle.dumps({name: tensor.numpy() for name, tensor in model_state(fresh).items()})
    target = export(state, tmp_path / "net.onnx", model=fresh, example=torch.randn(1, 1, 28, 28))
    assert fresh.training
    assert pickle.dumps({name: tensor.numpy() for name, tensor in model_state(fresh).items()}) == before
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    session = onnxruntime.InferenceSession(target)
    assert [node.name for node in (*session.get_inputs(), *session.get_outputs())] == ["input", "output"]
    for batch_size in (1, 5):
        images = torch.randn(batch_size, 1, 28, 28)
        (answers,) = session.run(None, {"input": images.numpy()})
        # Another library's kernels sum in another order: a few units in the last place of sums over 1176 terms.
        torch.testing.assert_close(torch.from_numpy(answers), trained.eval()(images), rtol=1e-4, atol=1e-5)


def test_a_model_that_onnx_cannot_express_is_said(tmp_path: Path) -> None:
    class Branching(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs if inputs.sum() > 0 else super().forward(inputs)

    model = Branching(2, 2)
    state = State.join(model=State(model_state(model), {}))
    with pytest.raises(ModelError, match="Branching cannot be exported to ONNX: ") as caught:
        export(state, tmp_path / "net.onnx", model=model, example=torch.ones(2, 2))
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_onnx_needs_model_example_and_packages(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="needs the model and an example input"):
        export(state, tmp_path / "net.onnx")
    with pytest.raises(CheckpointError, match="do not fit Linear"):
        export(state, tmp_path / "net.onnx", model=nn.Linear(1, 1), example=torch.ones(1, 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(MissingExtraError, match=r"ONNX export needs optional packages: pip install 'cordee\[onnx\]'"):
        export(state, tmp_path / "net.onnx", model=Net(), example=torch.ones(1, 1, 28, 28))


def test_a_model_beyond_two_gigabytes_is_refused_before_any_work(tmp_path: Path) -> None:
    huge = State({"model.x": torch.zeros(1).expand(1 << 29)}, {})
    with pytest.raises(ModelError, match="an ONNX file holds at most 2 GB, the weights have 2147483648 bytes"):
        export(huge, tmp_path / "net.onnx", model=nn.Linear(1, 1), example=torch.ones(1, 1))


def test_from_a_checkpoint_on_disk(state: State, trained: Net, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3, state, keep=1)
    target = export(checkpoint, tmp_path / "net.pt")
    fresh = Net()
    fresh.load_state_dict(torch.load(target, weights_only=True))
    assert_same(fresh, trained)
    (checkpoint / "values.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"values\.json"):
        export(checkpoint, tmp_path / "other.pt")
    assert not (tmp_path / "other.pt").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_checkpoint_is_never_in_memory_as_a_whole(
    suffix: str, state: State, trained: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "checkpoints", 4, state, keep=1)

    def refuse(*arguments: object) -> None:
        raise AssertionError("a file was read as a whole")

    monkeypatch.setattr(safetensors.torch, "load", refuse)
    target = export(path, tmp_path / f"net.{suffix}")
    monkeypatch.undo()
    fresh = Net()
    if suffix == "pt":
        table = torch.load(target, weights_only=True)
        assert table["mix.weight"].data_ptr() == table["again.weight"].data_ptr(), "a tied weight is there twice"
        fresh.load_state_dict(table)
        assert target.stat().st_size < 1.01 * sum(p.nbytes for p in trained.parameters()) + 20_000
    else:
        safetensors.torch.load_model(fresh, target)
    assert_same(fresh, trained)


@pytest.mark.parametrize("name", ["net.pth", "net", "net.safetensor"])
def test_another_suffix_is_refused(name: str, state: State, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"must end in \.safetensors, \.pt or \.onnx"):
        export(state, tmp_path / name)


def test_a_state_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model in this state"):
        export(State({}, {"step": 1}), tmp_path / "net.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_failed_export_leaves_the_old_file(
    suffix: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / f"net{suffix}"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=rf"cannot export to .*net\{suffix}: No space left"):
        export(state, target)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "old"
