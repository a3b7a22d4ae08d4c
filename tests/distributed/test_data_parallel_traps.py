"""Where data parallelism usually goes wrong: gradients that some lack, batch norms, compression, ends, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving import Outcome, StopAt, job, largest_difference, train_alone, train_together
from process_pool import CaseError, ProcessPool

from cordee.core.errors import TrainingError

pytestmark = pytest.mark.timeout(150)

IMAGES = {"use": "synthetic", "shape": [3, 8, 8], "num_classes": 10, "size": 50, "test_size": 21}


def falls(outcome: Outcome) -> bool:
    losses = outcome.losses()
    return bool(losses[-5:].mean() < 0.7 * losses[:5].mean())


# Gradients that not all workers have ------------------------------------------------------------------------


@pytest.mark.parametrize("reducer", ["flat", "overlapped", "ddp"])
def test_a_parameter_that_one_worker_uses(two: ProcessPool, reducer: str, tmp_path: Path) -> None:
    """It learns from that worker's samples; what nobody uses stays, without decay, and is named."""
    table = job(
        model={"use": "networks:Branching"},
        optimizer={"use": "sgd", "lr": 0.1, "weight_decay": 0.1, "momentum": 0.9},
        strategy={"reducer": reducer, "segment_bytes": 100},
        training={"steps": 20},
    )
    before = train_alone({**table, "training": {**table["training"], "steps": 1}}, tmp_path / "a").weights
    outcomes = train_together(two, table, tmp_path / "b")
    after = outcomes[0].weights
    assert np.abs(after["only_first.weight"] - before["only_first.weight"]).max() > 0.01
    for name in ("unused.weight", "unused.bias", "frozen.weight"):
        np.testing.assert_array_equal(after[name], before[name])
    (warning,) = outcomes[0].of("warning")
    assert "unused.weight, unused.bias" in warning["message"]
    assert "only_first" not in warning["message"] and "frozen" not in warning["message"]
    assert not outcomes[1].of("warning"), "said once for all"


def test_all_reducers_agree_on_it(two: ProcessPool, tmp_path: Path) -> None:
    table = job(model={"use": "networks:Branching"}, training={"steps": 20})
    flat, overlapped, ddp = (
        train_together(two, {**table, "strategy": {"reducer": reducer, "segment_bytes": 100}}, tmp_path / reducer)[0]
        for reducer in ("flat", "overlapped", "ddp")
    )
    assert largest_difference(flat, overlapped) == 0
    assert largest_difference(flat, ddp) <= 1e-6


# Batch norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data_parallel", "sharded"])
def test_a_batch_norm_over_all_workers_refuses_a_single_sample(two: ProcessPool, name: str, tmp_path: Path) -> None:
    """The last batch of the epoch has one sample, which one worker alone refuses to train on."""
    table = job(model={"use": "networks:flat_with_norm"}, data={"size": 17}, training={"batch_size": 16, "steps": 2})
    expected = r"step 2 raised ValueError: Expected more than 1 value per channel"
    with pytest.raises(TrainingError, match=expected):
        train_alone(table, tmp_path / "alone")
    with pytest.raises(CaseError, match=expected):
        train_together(two, {**table, "strategy": {"name": name, "batch_norm": "sync"}}, tmp_path / "together")


@pytest.mark.parametrize("reducer", ["flat", "ddp"])
@pytest.mark.parametrize("policy", ["local", "average", "sync"])
def test_batch_norm_policies(four: ProcessPool, policy: str, reducer: str, tmp_path: Path) -> None:
    """All train, with tails of 2 samples for 4 workers, and all workers end with the same buffers."""
    table = job(
        model={"use": "networks:Normed"},
        data=IMAGES,
        optimizer={"use": "sgd", "lr": 0.02},
        training={"batch_size": 16, "accumulate": 2},
        strategy={"batch_norm": policy, "reducer": reducer},
        evaluation={"every_steps": 20},
    )
    outcome = train_together(four, table, tmp_path)[0]
    assert falls(outcome)
    assert np.isfinite(outcome.weights["norm.running_mean"]).all()
    assert outcome.weights["norm.running_var"].min() > 0
    # The first worker had samples in each step: 2 parts, or 1 in each fourth step, of one sample.
    assert outcome.weights["num_calls"] == outcome.weights["norm.num_batches_tracked"] == 50 * 2 - 50 // 4
    np.testing.assert_array_equal(outcome.weights["mask"], np.float32([0.1, -np.inf]))


def test_local_keeps_the_first_workers_statistics_and_average_those_of_all(two: ProcessPool, tmp_path: Path) -> None:
    kept = {}
    for policy in ("local", "average", "sync"):
        table = job(
            model={"use": "networks:Normed"},
            data={**IMAGES, "test_size": 0},
            training={"batch_size": 16, "steps": 1},
            strategy={"batch_norm": policy},
        )
        kept[policy] = train_together(two, table, tmp_path / policy)[0].weights["norm.running_mean"]
    # After one step from the same weights the mean of the halves' means is the mean of the whole.
    np.testing.assert_allclose(kept["average"], kept["sync"], rtol=0, atol=1e-7)
    assert np.abs(kept["local"] - kept["sync"]).max() > 1e-4


def test_synced_batch_norm_is_torchs_own_on_the_whole_batch(three: ProcessPool) -> None:
    for mean in (10.0, 1000.0):  # torch's own is off by 1e-5 with the latter
        for differences in three.run(normalise_a_share, torch.float32, mean):
            assert max(differences) < 1e-6
    for differences in three.run(normalise_a_share, torch.float64, 10.0):
        assert max(differences) < 1e-14


def normalise_a_share(rank: int, size: int, dtype: torch.dtype, mean: float) -> tuple[float, ...]:
    """Compare shares of 5, 3 and 0 rows, of numbers far from zero, with the whole batch of 8 in double precision."""
    import torch.distributed as dist

    from cordee.strategies.buffers import SyncedBatchNorm, no_samples

    torch.manual_seed(0)
    batch = (torch.randn(8, 4, 3, 2, dtype=torch.float64) * torch.tensor([1.0, 2, 3, 4]).view(1, 4, 1, 1) + mean).to(
        dtype
    )
    factors = torch.randn(8, 4, 3, 2, dtype=torch.float64).to(dtype)
    whole = torch.nn.BatchNorm2d(4, dtype=torch.float64)
    synced = SyncedBatchNorm(torch.nn.BatchNorm2d(4, dtype=dtype))
    inputs = batch.double().clone().requires_grad_()
    expected = whole(inputs)
    (expected * factors.double()).sum().backward()
    rows = (slice(0, 5), slice(5, 8), slice(8, 8))[rank]
    own = batch[rows].clone().requires_grad_()
    if rank == 2:
        with no_samples(synced):
            stand_in = torch.full((1, 4, 3, 2), 7.0, dtype=dtype).requires_grad_()
            outputs = synced(stand_in)
        (outputs.sum() * 0.0).backward()
        assert not stand_in.grad.any()
        outputs, own_gradient = expected[8:], inputs.grad[8:]
    else:
        outputs = synced(own)
        (outputs * factors[rows]).sum().backward()
        own_gradient = own.grad
    gradient = torch.stack([synced.weight.grad, synced.bias.grad])
    dist.all_reduce(gradient)

    def difference(one: Any, other: Any) -> float:
        return float(((one - other).abs().max() / (1 + other.abs().max())).item()) if other.numel() else 0.0

    return (
        difference(outputs, expected[rows]),
        difference(own_gradient, inputs.grad[rows]),
        difference(gradient, torch.stack([whole.weight.grad, whole.bias.grad])),
        max(difference(synced.running_mean, whole.running_mean), difference(synced.running_var, whole.running_var)),
    )


# Compression ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_train(two: ProcessPool, compression: str, tmp_path: Path) -> None:
    table = job(training={"steps": 60}, optimizer={"use": "sgd", "lr": 0.3})
    alone = train_alone(table, tmp_path / "alone")
    outcome = train_together(two, {**table, "strategy": {"compression": compression}}, tmp_path / "team")[0]
    assert falls(outcome)
    assert largest_difference(alone, outcome) > 1e-7, "nothing was compressed"


def test_bf16_computation_trains(two: ProcessPool, tmp_path: Path) -> None:
    table = job(
        model={"use": "networks:Normed"},
        data=IMAGES,
        training={"precision": "bf16", "batch_size": 16},
        strategy={"batch_norm": "sync"},
    )
    assert falls(train_together(two, table, tmp_path)[0])


# Ends -------------------------------------------------------------------------------------------------------


def test_all_stop_together_when_time_is_up(two: ProcessPool, tmp_path: Path) -> None:
    outcomes = train_together(two, job(training={"steps": 1_000_000}, stop={"time": 0.3}), tmp_path)
    assert {outcome.summary.stopped_by for outcome in outcomes} == {"time"}
    assert len({outcome.summary.steps for outcome in outcomes}) == 1


def test_all_stop_together_at_an_accuracy(three: ProcessPool, tmp_path: Path) -> None:
    table = job(training={"steps": 100_000}, stop={"accuracy": 0.8}, evaluation={"every_steps": 10})
    outcomes = train_together(three, table, tmp_path)
    assert {(outcome.summary.stopped_by, outcome.summary.steps % 10) for outcome in outcomes} == {("accuracy", 0)}
    assert outcomes[0].summary.test_accuracy >= 0.8


def test_one_worker_that_is_told_to_stop_stops_all(two: ProcessPool, tmp_path: Path) -> None:
    outcomes = train_together(two, job(), tmp_path, stop_at=StopAt(worker_index=1, call=7))
    assert [(outcome.summary.status, outcome.summary.steps) for outcome in outcomes] == [("interrupted", 7)] * 2


def test_an_interrupt_during_evaluation(two: ProcessPool, tmp_path: Path) -> None:
    """Told in the third of the five test batches after step 5; resumed, it ends as if nothing had been."""
    table = job(evaluation={"every_steps": 5}, training={"steps": 12})
    straight = train_together(two, table, tmp_path / "straight")[0]
    run_dir = tmp_path / "interrupted"
    outcomes = train_together(two, table, run_dir, stop_at=StopAt(worker_index=1, call=5 + 3))
    assert [(outcome.summary.status, outcome.summary.steps) for outcome in outcomes] == [("interrupted", 5)] * 2
    assert not outcomes[0].of("evaluation")
    resumed = train_together(two, table, run_dir, resume=True)[0]
    assert resumed.summary.weights_sha256 == straight.summary.weights_sha256
    assert [event["step"] for event in resumed.of("evaluation")][-1] == 12


# Resuming with other numbers of workers ---------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{"use": "adam", "lr": 0.003}, {"use": "sgd", "lr": 0.02, "momentum": 0.9}])
def test_a_checkpoint_goes_on_with_any_number_of_workers(
    two: ProcessPool, three: ProcessPool, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """2 → 3 → 1 → 2 workers, each cut off in the middle of an epoch, against one straight run of one worker.

    1e-4: Adam divides by the root of squares that may be tiny, which amplifies rounding.
    """
    table = job(
        model={"use": "networks:Normed"},
        data=IMAGES,
        optimizer=optimizer,
        training={"batch_size": 16, "steps": 27},
        strategy={"batch_norm": "sync"},
    )
    straight = train_alone(table, tmp_path / "straight")

    def until(step: int) -> dict[str, Any]:
        return {**table, "stop": {"steps": step}}

    run_dir = tmp_path / "run"
    train_together(two, until(7), run_dir)
    train_together(three, until(14), run_dir, resume=True)
    train_alone(until(21), run_dir, resume=True)
    end = train_together(two, table, run_dir, resume=True)
    assert end[0].summary.steps == straight.summary.steps == 27
    assert end[0].summary.samples == straight.summary.samples
    assert largest_difference(straight, end[0]) <= 1e-4


@pytest.mark.parametrize("reducer", ["flat", "overlapped", "ddp"])
def test_resuming_at_a_batch_too_small_for_all(four: ProcessPool, reducer: str, tmp_path: Path) -> None:
    """The first batch after resuming has 2 samples for 4 workers."""
    table = job(data={"size": 34}, training={"steps": 4}, strategy={"reducer": reducer, "segment_bytes": 100})
    straight = train_alone(table, tmp_path / "straight")
    train_together(four, {**table, "stop": {"steps": 1}}, tmp_path / "run")
    end = train_together(four, table, tmp_path / "run", resume=True)[0]
    assert largest_difference(straight, end) <= 1e-5
