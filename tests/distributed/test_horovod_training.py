"""Training with Horovod's API equals training on the whole batch in one process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run
from process_pool import ProcessPool
from torch import Tensor, nn

import cordee.horovod.torch as hvd

pytestmark = pytest.mark.timeout(150)
EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_digits.py"
BATCH = 12


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def train_alone(num_steps: int = 4) -> list[Tensor]:
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_together(rank: int, size: int, options: dict[str, Any], manner: str = "") -> list[Tensor]:
    hvd.init()
    model = make_model(seed=rank)  # of which that of rank 0 counts
    plain = make_optimizer(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0)  # made before: it wraps step()
    if "groups" in options and options["groups"] == "two":
        parameters = list(model.parameters())
        options = {**options, "groups": [parameters[:1], parameters[2:]]}
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
    assert optimizer is plain and isinstance(optimizer, torch.optim.SGD)
    passes = options.get("backward_passes_per_step", 1)
    for step in range(4):
        optimizer.zero_grad()
        for part in batch(step).chunk(size)[rank].chunk(passes):
            (model(part).pow(2).mean() / passes).backward()
        if manner == "synchronize":
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("options", "manner", "tolerance"),
    [
        ({}, "", 1e-6),
        ({"backward_passes_per_step": 2}, "", 1e-6),
        ({"gradient_predivide_factor": 2.0}, "", 1e-6),
        ({"groups": 3}, "", 1e-6),
        ({"groups": "two"}, "", 1e-6),
        ({"compression": hvd.Compression.fp16}, "", 2e-3),  # gradients of 11 bits
        ({}, "synchronize", 1e-6),
    ],
)
def test_the_optimizer_equals_the_whole_batch(
    two: ProcessPool, options: dict[str, Any], manner: str, tolerance: float
) -> None:
    expected = train_alone()
    answers = two.run(train_together, options, manner)
    for weights in answers:
        for got, wanted, first in zip(weights, expected, answers[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(got, first)


def step_with_closure(rank: int, size: int) -> str:
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    with pytest.raises(ValueError, match="takes no closure") as raised:
        optimizer.step(lambda: 0.0)
    return str(raised.value)


def test_a_closure_whose_gradients_nobody_would_reduce_is_refused(two: ProcessPool) -> None:
    assert len(set(two.run(step_with_closure))) == 1


def use_odd_layers(rank: int, size: int) -> tuple[Tensor, ...]:
    """A sparse embedding, and a layer that only one rank uses."""
    hvd.init()
    torch.manual_seed(0)
    embedding, head, extra = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1), nn.Linear(4, 1)
    modules = nn.ModuleDict({"embedding": embedding, "head": head, "extra": extra})
    alone = copy.deepcopy(modules)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(modules.parameters(), 0.1), modules.named_parameters())

    def loss_of(parts: Any, other: int) -> Tensor:
        rows = parts["embedding"](torch.tensor([other, other + 1, 3]))
        result: Tensor = parts["head"](rows).pow(2).mean()
        return result + parts["extra"](rows).pow(2).mean() if other else result

    loss_of(modules, rank).backward()
    optimizer.step()
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    (sum(loss_of(alone, other) for other in range(size)) / size).backward()  # type: ignore[union-attr]
    plain.step()
    pairs: list[Any] = [embedding, alone["embedding"], extra, alone["extra"]]
    return tuple(module.weight.detach() for module in pairs)


def test_sparse_gradients_and_unused_layers(two: ProcessPool) -> None:
    for embedding, wanted, extra, extra_wanted in two.run(use_odd_layers):
        torch.testing.assert_close(embedding, wanted)
        torch.testing.assert_close(extra, extra_wanted)


def train_other_layers(rank: int, size: int) -> list[Tensor]:
    """After a step the first layer is frozen, and the last one, as large as it was, is trained."""
    hvd.init()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 3, generator=torch.Generator().manual_seed(step * size + rank))).pow(2).mean().backward()
        optimizer.step()
        model[0].requires_grad_(False)
        model[2].requires_grad_(True)
    return [parameter.detach() for parameter in model.parameters()]


def test_layers_that_are_trained_later_in_place_of_others_are_reduced(two: ProcessPool) -> None:
    for one, other in zip(*two.run(train_other_layers), strict=True):
        assert torch.equal(one, other)


def train_with_adasum(rank: int, size: int) -> list[Tensor]:
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum)
    model(batch(0).chunk(size)[rank]).pow(2).mean().backward()
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_adasum_combines_the_changes_of_each_layer(two: ProcessPool) -> None:
    start = [parameter.detach() for parameter in make_model().parameters()]
    changes = []
    for rank in range(2):
        model = make_model()
        model(batch(0).chunk(2)[rank]).pow(2).mean().backward()
        changes.append([-0.1 * parameter.grad.double() for parameter in model.parameters()])  # type: ignore[union-attr]
    for weights in two.run(train_with_adasum):
        for got, old, a, b in zip(weights, start, *changes, strict=True):
            dot = (a * b).sum()
            combined = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
            torch.testing.assert_close(got, (old + combined).float(), rtol=1e-5, atol=1e-6)


def make_mistakes(rank: int, size: int) -> None:
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
    model(batch(0)).sum().backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        model(batch(0)).sum().backward()
    with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after loss.backward\(\)"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="reduced again"):
        optimizer.step()
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    for options, message in (
        ({"named_parameters": [("a", p) for p in model.parameters()]}, "must be unique"),
        ({"named_parameters": list(model.named_parameters())[1:]}, "were not named"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "for op=hvd.Average only"),
        ({"groups": -1}, "non-negative"),
        ({"groups": [[1]]}, "must consist of torch.Tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(make_optimizer(model), **options)
    other = nn.Linear(6, 2 + rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other.named_parameters())
    other(batch(0)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"\(tensor 0: float32 \[2, 6\] and float32 \[3, 6\]\)"):
        optimizer.step()


def test_mistakes_are_named(two: ProcessPool) -> None:
    two.run(make_mistakes)


def copy_optimizer_state(rank: int, size: int) -> tuple[Any, list[Tensor]]:
    hvd.init()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:  # the others have no state yet
        model(batch(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model(batch(1)).sum().backward()
    optimizer.step()
    return optimizer.param_groups[0]["lr"], [parameter.detach() for parameter in model.parameters()]


def test_weights_and_optimizer_state_are_those_of_rank_0(two: ProcessPool) -> None:
    (rate, weights), (other_rate, other_weights) = two.run(copy_optimizer_state)
    assert rate == other_rate == 0.1
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))


def normalize(rank: int, size: int, shape: tuple[int, ...]) -> list[Tensor]:
    hvd.init()
    torch.manual_seed(0)
    norm = hvd.SyncBatchNorm(3)
    nn.init.uniform_(norm.weight)
    data = torch.randn(*shape).split([1, shape[0] - 1])[rank].requires_grad_()
    output = norm(data)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    assert data.grad is not None and norm.weight.grad is not None
    return [output.detach(), data.grad, norm.running_mean, norm.running_var, norm.weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 2)])
def test_batch_norm_over_all_ranks(two: ProcessPool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    nn.init.uniform_(norm.weight)
    data = torch.randn(*shape).requires_grad_()
    output = norm(data)
    weights = [torch.arange(part.numel()).view_as(part) for part in output.split([1, shape[0] - 1])]
    (output * torch.cat(weights)).sum().backward()
    assert data.grad is not None and norm.weight.grad is not None
    answers = two.run(normalize, shape)
    together = [torch.cat([answer[i] for answer in answers]) for i in range(2)]
    torch.testing.assert_close(together[0], output.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[1], data.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(answers[0][4] + answers[1][4], norm.weight.grad, rtol=1e-4, atol=1e-4)
    for answer in answers:
        torch.testing.assert_close(answer[2], norm.running_mean)
        torch.testing.assert_close(answer[3], norm.running_var)


# Scripts ------------------------------------------------------------------------------------------------------------


def accuracy(output: str) -> float:
    return float(output.splitlines()[-1].rpartition("accuracy ")[2].rstrip("%"))


def test_the_example_learns_on_two_workers_and_as_horovod(tmp_path: Path) -> None:
    together = run("run", "-n", "2", str(EXAMPLE), "--epochs", "6")
    assert together.code == 0, together.stderr
    assert accuracy(together.stdout) > 85
    unchanged = tmp_path / "script.py"
    unchanged.write_text(
        EXAMPLE.read_text().replace("import cordee.horovod.torch as hvd", "import horovod.torch as hvd")
    )
    as_horovod = run("run", "--as-horovod", "-n", "2", str(unchanged), "--epochs", "6")
    assert as_horovod.code == 0, as_horovod.stderr
    assert as_horovod.stdout == together.stdout


@pytest.mark.long
def test_the_example_alone_under_torchrun_and_as_a_module(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*command: str) -> str:
        arguments = [sys.executable, *command, "--epochs", "2"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert accuracy(start(str(EXAMPLE))) > 50  # by chance 10; two epochs give 64
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = start(*torchrun, str(EXAMPLE))
    unchanged = tmp_path / "script.py"
    unchanged.write_text(
        EXAMPLE.read_text().replace("import cordee.horovod.torch as hvd", "import horovod.torch as hvd")
    )
    assert start(*torchrun, "-m", "cordee.horovod", str(unchanged)) == together


SKIPS = """
import torch
import cordee.horovod.torch as hvd

hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(2), name="metric")
hvd.allgather(torch.ones(2), name="rows")
"""


def test_a_call_that_only_one_rank_makes_ends_the_script_with_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SKIPS)
    ended = run("run", "-n", "2", str(script))
    assert ended.code == 1
    text = " ".join((ended.stdout + ended.stderr).split())
    assert "rank 0 is in allreduce 'allreduce.metric' (Average of float32 [2]); rank 1 is in allgather" in text
