"""What does not fit together is found before the first step, and said in one sentence."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_jobs
import torch
from small_jobs import small_job
from torch import Tensor, nn

from cordee.checkpoint import weights_sha256
from cordee.cluster import Team
from cordee.core import Job, Use, file_memory
from cordee.core.errors import CordeeError, DataError, JobError, ModelError
from cordee.training.components import assemble


class Wide(nn.Module):
    """Gives outputs of any shape, whatever comes in."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * torch.ones(len(inputs), *self.shape)


class Strange(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def as_number(outputs: Tensor, targets: Tensor) -> float:
    return 0.0


class Counting(nn.Module):
    """A loss that depends on how often it was computed, or on a parameter of its own."""

    def __init__(self, is_trained: bool = False) -> None:
        super().__init__()
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(()), requires_grad=is_trained)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * self.scale / self.calls


def not_a_model() -> int:
    return 3


def raises() -> nn.Module:
    raise ValueError("no such net")


NUMBERS = {"use": small_jobs.regression_data()}
NO_TEST = {"use": small_jobs.samples()}


@pytest.mark.parametrize(
    ("sections", "kind", "message"),
    [
        # the model
        ({"model": "mpl"}, JobError, r"model.use = 'mpl' is not known; did you mean 'mlp'\?"),
        ({"model": {"use": "mlp", "hiden": [3]}}, JobError, r"model has no setting 'hiden'; did you mean 'hidden'\?"),
        ({"model": {"use": "mlp", "hidden": 3}}, JobError, "model.hidden = 3 does not fit"),
        ({"model": "lenet"}, ModelError, r"'lenet' takes images of shape .* the data has samples of shape \(6,\)"),
        (
            {"model": Use(Wide, shape=(2,))},
            ModelError,
            r"outputs of shape \(2, 2\) for 2 samples, but data 'synthetic' has 3 c",
        ),
        ({"model": Use(Wide, shape=())}, ModelError, r"outputs of shape \(2,\) .* has 3 classes"),
        ({"model": nn.Linear(5, 3)}, ModelError, r"cannot compute inputs of shape \(6,\) from data 'synthetic': mat1"),
        ({"model": Strange}, ModelError, r"the model returns a tuple of '0' .*, without 'logits': set loss.output"),
        ({"model": not_a_model}, ModelError, "is a int, not a torch.nn.Module"),
        ({"model": raises}, ModelError, "building the model .*raises' raised ValueError: no such net"),
        ({"model": Use(nn.Linear(6, 3), bias=False)}, JobError, "a module that is already built takes no settings"),
        # the loss
        ({"loss": "mse"}, ModelError, r"cannot compare outputs of shape \(2, 3\) with targets of shape \(2,\)"),
        ({"loss": summed}, ModelError, r"the loss gives a tensor of shape \(2,\); it must give one number"),
        ({"loss": as_number}, ModelError, "the loss gives float; it must give one number"),
        ({"data": NUMBERS}, ModelError, "'cross_entropy' compares classes, .* are numbers: set loss.use = 'mse'"),
        (
            {"data": NUMBERS, "loss": "torch.nn:SmoothL1Loss"},
            ModelError,
            r"outputs of shape \(2, 1\) with targets of shape \(2,\): Using a target size",
        ),
        # stopping
        (
            {"data": NO_TEST, "stop": {"accuracy": 0.9}},
            JobError,
            "stop.accuracy is measured on a test set, .* has none: set data.test_fraction",
        ),
        ({"data": NO_TEST, "stop": {"loss": 0.9}}, JobError, "stop.loss is measured on a test set"),
        ({"data": NO_TEST, "stop": {"patience": 2}}, JobError, "stop.patience is measured on a test set"),
        (
            {"data": {**NUMBERS, "test_fraction": 0.2}, "loss": "mse", "stop": {"accuracy": 0.9}},
            JobError,
            "stop.accuracy needs classes, and the targets are numbers: use stop.loss",
        ),
        # the strategy
        ({"strategy": "singel"}, JobError, r"strategy.name = 'singel' is not known; did you mean 'single'\?"),
        ({"strategy": "zzz"}, JobError, r"strategy.name = 'zzz' is not known \(this version has: auto, "),
        ({"strategy": {"name": "single", "worker": 1}}, JobError, "has no key 'worker'"),
        (
            {"strategy": {"name": "single", "workers": 2}},
            JobError,
            "'single' has one worker, the job has 2: set strategy.workers = 1",
        ),
        # the rest
        ({"data": {"use": "irsi"}}, JobError, r"data.use = 'irsi' is not known; did you mean 'iris'\?"),
        ({"data": {"use": "synthetic", "sise": 3}}, JobError, r"data has no setting 'sise'; did you mean 'size'\?"),
        (
            {"training": {"batch_size": 39}},
            DataError,
            r"batch_size = 39 is larger than the training set \(38 samples\)",
        ),
        ({"training": {"shards": 4}}, JobError, "training.shards = 4 has a meaning only with"),
        ({"training": {"reproducible": True, "lr_scale": "sqrt"}}, JobError, "set lr_scale = 'none'"),
        ({"optimizer": "adan"}, JobError, "optimizer.use = 'adan' is not known"),
        ({"optimizer": {"use": "adam", "lr": "big"}}, JobError, "lr"),
        ({"schedule": "cosinus"}, JobError, r"schedule.use = 'cosinus' is not known; did you mean 'cosine'\?"),
        (
            {"schedule": "cosine", "data": {"use": small_jobs.StreamData()}},
            JobError,
            "this data has no length: set training.steps or schedule.total_steps",
        ),
    ],
)
def test_what_does_not_fit(sections: dict[str, Any], kind: type[CordeeError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        assembled(small_job(**sections))
    assert "Traceback" not in str(caught.value)


def assembled(job: Job) -> Any:
    parts = assemble(job, Team())
    parts.setup()
    return parts


def test_what_a_loss_keeps_is_told_alone_and_refused_with_workers() -> None:
    loss = Use(Counting)
    assert "keeps 'calls' from batch to batch, which is not saved" in assembled(small_job(loss=loss)).warnings[0]
    together = small_job(loss=loss, strategy={"name": "data_parallel", "workers": 2})
    with pytest.raises(JobError, match="every worker would keep its own: put it into the model"):
        assemble(together, Team(0, 2))
    with pytest.raises(JobError, match=r"has parameters to train \(scale\), and the optimizer only has"):
        assembled(small_job(loss=Use(Counting, is_trained=True)))


class Annealed(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, has_effect: bool) -> None:
        super().__init__()
        self.layer, self.has_effect, self.passes = nn.Linear(input_shape[0], num_classes), has_effect, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        outputs: Tensor = self.layer(inputs)
        return outputs / self.passes if self.has_effect and self.training else outputs


def test_what_a_model_keeps_is_told_alone_and_refused_with_workers() -> None:
    two = {"name": "data_parallel", "workers": 2}
    keeps, counts = Use(Annealed, has_effect=True), Use(Annealed, has_effect=False)
    assert (
        "changes its attribute 'passes', which is not saved: a resumed" in assembled(small_job(model=keeps)).warnings[0]
    )
    assert assembled(small_job(model=counts)).warnings == ()
    with pytest.raises(JobError, match=r"every worker would have its own: keep it in a buffer \(register_buffer\)"):
        assemble(small_job(model=keeps, strategy=two), Team(0, 2))
    warning = "every worker has its own. Keep it in a buffer (register_buffer) if what the model computes depends on it"
    assert warning in assemble(small_job(model=counts, strategy=two), Team(0, 2)).warnings[0]


class Centred(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs - inputs.mean(0))
        return outputs


def test_a_model_that_looks_at_the_whole_batch_is_warned_of_where_batches_are_cut() -> None:
    two, four = {"name": "data_parallel", "workers": 2}, {"reproducible": True, "shards": 4}
    assert assembled(small_job(model=Use(Centred))).warnings == ()
    assert assemble(small_job(model=Use(Centred), strategy=two, training=four), Team(0, 2)).warnings == ()
    (warning,) = assemble(small_job(model=Use(Centred), strategy=two), Team(0, 2)).warnings
    assert (
        "depends on the other samples of the batch, and strategy 'data_parallel' computes a batch in parts" in warning
    )
    (warning,) = assembled(small_job(model=Use(Centred), training={"accumulate": 2})).warnings
    assert "and training.accumulate computes a batch in parts" in warning


def test_shape_and_classes_follow_from_the_data() -> None:
    parts = assembled(small_job())
    assert parts.model[1].in_features == 6
    assert parts.model[-1].out_features == 3
    assert (parts.total_steps, parts.num_parameters) == (10, 83)
    numbers = assembled(small_job(data=NUMBERS, loss="mse"))
    assert numbers.model[-1].out_features == 1, "one number to predict"


def test_the_model_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = assembled(small_job()).model.state_dict()
    torch.manual_seed(2)
    other = assembled(small_job()).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = assembled(small_job(seed=1)).model.state_dict()
    assert not torch.equal(one["linear1.weight"], changed["linear1.weight"])


class DrawnElsewhere(nn.Linear):
    """Draws its weights from Python's generator, as models of Keras do, and its biases from NumPy's."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        nn.init.constant_(self.weight, random.random())
        nn.init.constant_(self.bias, np.random.rand())


def test_weights_that_are_drawn_by_python_and_numpy_follow_from_the_seed() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.getstate(), np.random.rand(3).tolist()
    np.random.seed(5)
    one, other = (assembled(small_job(model=Use(DrawnElsewhere))).model.state_dict() for _ in range(2))
    assert (random.getstate(), np.random.rand(3).tolist()) == expected, "a program's own numbers stay"
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = assembled(small_job(model=Use(DrawnElsewhere), seed=1)).model.state_dict()
    assert not torch.equal(one["weight"], changed["weight"])
    assert not torch.equal(one["bias"], changed["bias"])


@pytest.mark.parametrize("mode", [True, False])
def test_trying_the_model_leaves_no_trace(mode: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).train(mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts = assembled(small_job(model=model))
    assert parts.model is model and model.training is mode
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_layers_that_find_their_size_from_the_data() -> None:
    lazy = Use(lambda: nn.Sequential(nn.LazyLinear(3)))
    assert assembled(small_job(model=lazy)).num_parameters == 21
    assert assembled(small_job(model=lazy, data={"use": small_jobs.StreamData()})).num_parameters == 21


def test_a_model_that_does_not_fit_a_stream_is_found_as_well() -> None:
    with pytest.raises(ModelError, match=r"cannot compute inputs of shape \(6,\)"):
        assembled(small_job(model=nn.Linear(5, 3), data={"use": small_jobs.StreamData()}))


def test_the_test_set_is_read_in_batches_no_larger_than_it_is() -> None:
    parts = assembled(small_job(evaluation={"batch_size": 1000}))
    assert [len(batch.targets) for batch in parts.test.batches(0)] == [20]
    parts = assembled(small_job(evaluation={"batch_size": 7}))
    assert [len(batch.targets) for batch in parts.test.batches(0)] == [7, 7, 6]


def test_parts_of_the_users_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(
        "import torch\n"
        "def net(input_shape, num_classes, width=4):\n"
        "    layers = torch.nn.Linear(input_shape[0], width), torch.nn.Linear(width, num_classes)\n"
        "    return torch.nn.Sequential(*layers)\n"
        "def data(seed, size=12):\n"
        "    return torch.randn(size, 5), torch.arange(size) % 4\n"
        "def loss(outputs, targets, scale=1.0):\n"
        "    return scale * torch.nn.functional.cross_entropy(outputs, targets)\n"
        "class Plain(torch.optim.SGD):\n"
        "    def __init__(self, params, speed):\n"
        "        super().__init__(params, lr=speed)\n"
        "def fade(total_steps, power=2):\n"
        "    return lambda step: (1 - step / total_steps) ** power\n"
    )
    (tmp_path / "job.toml").write_text(
        "[model]\nuse = 'my_parts.py:net'\nwidth = 3\n[data]\nuse = 'my_parts:data'\nsize = 16\n"
        "[loss]\nuse = 'my_parts:loss'\nscale = 2\n[optimizer]\nuse = 'my_parts:Plain'\nspeed = 1\n"
        "[schedule]\nuse = 'my_parts:fade'\npower = 1\n[training]\nbatch_size = 4\ndevice = 'cpu'\n"
    )
    parts = assembled(Job.load(tmp_path / "job.toml"))
    assert parts.num_parameters == 5 * 3 + 3 + 3 * 4 + 4
    assert parts.total_steps == 4
    assert [parts.recipe.schedule(step) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_a_rate_that_would_follow_nothing_is_refused(name: str) -> None:
    job = small_job(training={"lr_scale": "linear"}, strategy={"name": name, "workers": 2}, model={"use": "mlp"})
    with pytest.raises(JobError, match=rf"lr_scale = 'linear' follows the number of shares .* strategy '{name}'"):
        assemble(job, Team(num_workers=2))


@pytest.mark.parametrize(
    ("strategy", "factor"),
    [
        ({"name": "data_parallel", "workers": 3}, 3.0),
        ({"name": "sharded", "workers": 2}, 2.0),
        ({"name": "parameter_server", "workers": 4}, 4.0),
        ({"name": "hybrid", "workers": 4, "mesh": {"data": 2, "tensor": 2}}, 2.0),
    ],
)
def test_the_rate_follows_the_shares_of_a_batch(strategy: dict[str, Any], factor: float) -> None:
    job = small_job(training={"lr_scale": "linear"}, strategy=strategy, model={"use": "mlp", "hidden": [8]})
    assert assemble(job, Team(num_workers=strategy["workers"])).recipe.lr_factor == factor


def test_tokens_that_are_ignored_may_be_in_the_data() -> None:
    tokens = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]] * 4)
    targets = torch.tensor([[1, 2, 1, -100], [1, 0, -100, -100]] * 4)
    parts = assemble(small_job(data={"use": (tokens, targets)}, model={"use": "gpt", "num_layers": 1}), Team())
    assert parts.splits.num_classes == 3
    with pytest.raises(DataError, match="is -100"):
        assemble(
            small_job(
                data={"use": (tokens, targets)},
                model={"use": "gpt", "num_layers": 1},
                loss={"use": "cross_entropy", "ignore_index": 0},
            ),
            Team(),
        )


class CountsPasses(nn.Linear):
    """Keeps a number in a parameter without a gradient, as layers of Keras do."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.passes = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.passes += 1
        return super().forward(inputs)


def test_a_parameter_that_a_forward_pass_changes_is_refused_with_workers() -> None:
    assert assembled(small_job(model=Use(CountsPasses))).model.passes == 0, "it was tried without a trace"
    with pytest.raises(JobError, match="changes its parameter 'passes', and every worker would have its own"):
        assemble(small_job(model=Use(CountsPasses), strategy={"name": "data_parallel", "workers": 2}), Team(0, 2))


class TestModelsThatAreSplit:
    """They are built in files, of which nothing can be seen but the memory that is not taken."""

    @pytest.fixture(autouse=True)
    def _everything_is_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_memory, "SMALLEST_BYTES", 1)

    def test_the_weights_are_those_of_a_model_in_memory(self) -> None:
        for name in ("sharded", "pipeline"):
            split = assemble(small_job(strategy={"name": name, "workers": 2}), Team(0, 2))
            alone = assemble(small_job(), Team())
            assert all(file_memory.lies_in_file(parameter) for parameter in split.model.parameters())
            assert not any(file_memory.lies_in_file(parameter) for parameter in alone.model.parameters())
            assert weights_sha256(split.model.state_dict()) == weights_sha256(alone.model.state_dict())
            assert split.warnings == ()

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP])
    def test_without_room_for_files_they_are_built_in_memory_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        parts = assemble(small_job(strategy={"name": "sharded", "workers": 2}), Team(0, 2))
        assert not any(file_memory.lies_in_file(parameter) for parameter in parts.model.parameters())
        assert parts.warnings == (
            "each worker has the whole model in memory until it has its part: it cannot lie in a file "
            f"([Errno {number}] {os.strerror(number)})",
        )

    def test_a_model_that_fails_in_files_is_built_in_memory(self) -> None:
        parts = assemble(small_job(model=Use(Grown), strategy={"name": "sharded", "workers": 2}), Team(0, 2))
        assert "it cannot lie in a file" in parts.warnings[0] and parts.model(torch.ones(2, 6)).shape == (2, 3)

    def test_what_is_wrong_with_a_model_is_said_as_ever(self) -> None:
        with pytest.raises(ModelError, match=r"building the model .* raised ValueError: no"):
            assemble(small_job(model=Use(Refusing), strategy={"name": "sharded", "workers": 2}), Team(0, 2))


class Grown(nn.Linear):
    """Changes the size of a tensor's memory, which a file has no room for."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        torch.ones(4).resize_(1000)


class Refusing(nn.Linear):
    def __init__(self) -> None:
        raise ValueError("no")
