"""What is compiled, and what happens where that fails. torch.compile is replaced here: the real one takes a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cordee
from cordee.cluster import Team
from cordee.compute.compiling import Compiler
from cordee.core import Job
from cordee.core.errors import JobError
from cordee.core.settings import Training
from cordee.planner.kernels import Kernels, Measured, Trial, choose_kernels, decide, measure
from cordee.training.components import assemble

PLAIN, COMPILED = Kernels(), Kernels(compile=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiled_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have models compiled into themselves; return how many samples compiled calls had."""
    sizes: list[int] = []

    def compile_model(model: nn.Module, **options: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            sizes.append(len(x))
            return model(x)

        return call

    monkeypatch.setattr(torch, "compile", compile_model)
    return sizes


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_model(model: nn.Module, **options: Any) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            raise torch._dynamo.exc.Unsupported("this model cannot be traced")

        return call

    monkeypatch.setattr(torch, "compile", compile_model)


def job(workers: int = 1, name: str = "auto", **training: Any) -> dict[str, Any]:
    return {
        "model": {"use": "mlp", "hidden": [8]},
        "data": {"use": "synthetic", "shape": [6], "num_classes": 3, "size": 20, "test_size": 5},
        "training": {"batch_size": 8, "epochs": 1, "threads": 1, **training},
        "strategy": {"name": name, "workers": workers},
    }


def test_only_batches_of_the_usual_size_are_compiled(compiled_sizes: list[int], tmp_path: Path) -> None:
    plain = cordee.train(job(), run_dir=tmp_path / "a", quiet=True)
    run = cordee.train(job(compile=True), run_dir=tmp_path / "b", quiet=True)
    assert run.summary.weights_sha256 == plain.summary.weights_sha256
    # Besides those that were measured: two batches of 8, not the last one of 4, and not the test set.
    assert set(compiled_sizes) == {8}


def test_the_parts_of_a_share_have_two_sizes() -> None:
    compiler = Compiler()
    compiler.expect(16, 3)
    assert compiler._sizes == {5, 6}


def test_a_model_that_cannot_be_compiled_on_a_worker_is_computed_without_it(
    failing: None, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, model = Compiler(), nn.Linear(2, 1)
    compiler.expect(4, 1)
    x = torch.ones(4, 2)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiler.of(model, 4)(x), model(x))
    assert "this model cannot be traced" in caplog.text
    assert compiler.of(model, 4) is model


def test_a_compiler_that_fails_is_left_out_and_named(failing: None, tmp_path: Path) -> None:
    table = job(compile=True)
    asked = Job.from_dict(table)
    found = choose_kernels(asked.training, assemble(asked, Team()))
    assert found.training.compile is False
    assert "training.compile = true is left out" in found.warning and "cannot be traced" in found.warning
    plain = cordee.train(job(), run_dir=tmp_path / "a", quiet=True)
    run = cordee.train(table, run_dir=tmp_path / "b", quiet=True)
    assert run.summary.weights_sha256 == plain.summary.weights_sha256


def test_compiled_code_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda x: model(x) * 1.5)
    parts = assemble(Job.from_dict(job()), Team())
    _, compiled = measure(parts, [PLAIN, COMPILED], budget_s=0.01)
    assert "it changes the loss of the first batch" in compiled.problem


def test_the_seconds_of_compiling_count_against_the_run() -> None:
    trials = (Trial(kernels=PLAIN, gain=1.0), Trial(kernels=COMPILED, gain=1.4, compile_s=44.0))
    asked, measured = Training(compile="auto"), Measured(trials=trials)
    short = decide(asked, asked.plain(), [PLAIN, COMPILED], measured, run_s=120.0)
    long = decide(asked, asked.plain(), [PLAIN, COMPILED], measured, run_s=3600.0)
    assert (short.training.compile, long.training.compile) == (False, True)
    assert long.text == "compiled, 1.40× of plain (measured), compiled in 44 s"


def test_auto_compiles_nothing_for_a_short_run(compiled_sizes: list[int], tmp_path: Path) -> None:
    run = cordee.train(job(compile="auto"), run_dir=tmp_path / "run", quiet=True)
    assert run.status == "completed" and not compiled_sizes


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (job(compile=True, reproducible=True), "compile = true makes code that depends on the compiler"),
        (job(compile="yes"), "training.compile = 'yes'"),
        (job(2, "sharded", compile=True), "compile = true is for 'single', 'data_parallel' and 'local_sgd'"),
        (job(2, "parameter_server", compile=True), "the job's strategy is 'parameter_server'"),
        (
            {**job(compile=True), "strategy": {"name": "data_parallel", "workers": 2, "reducer": "ddp"}},
            "set strategy.reducer = 'flat'",
        ),
        ({**job(2, "data_parallel", compile=True), "cluster": {"balance": True}}, "cluster.balance = true changes"),
    ],
)
def test_what_cannot_be_compiled_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        asked = Job.from_dict(table)
        assemble(asked, Team(num_workers=asked.strategy.workers, num_local_workers=asked.strategy.workers))
