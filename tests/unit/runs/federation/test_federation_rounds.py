"""A round decides without I/O: what is refused, what counts, and that the order of arrival changes no bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cordee.core.errors import CordeeError, DataError, JobError, TrainingError
from cordee.runs.federation.learning import check_deployable
from cordee.runs.federation.messages import Result, Task
from cordee.runs.federation.rounds import (
    BufferedRound,
    MaskedRound,
    ModelShape,
    PlainRound,
    plan_secure,
    secure_threshold,
)
from cordee.runs.federation.store import RoundRecord
from cordee.strategies.federated.secure import SecureClient, SecureRound
from cordee.strategies.federated.settings import FederatedSettings, SecureSettings

LENGTH = 11
TASK = Task(2, 5, "train")
NAMES = ("a", "b", "c")


def plain(settings: FederatedSettings | None = None) -> PlainRound:
    record = RoundRecord(round=2, attempt=5, asked=NAMES, started=0.0)
    model = ModelShape(torch.ones(LENGTH), torch.zeros(0, dtype=torch.float64), [(LENGTH,)])
    return PlainRound(record, settings or FederatedSettings(), model)


def result(**changed: object) -> Result:
    told: dict[str, object] = {"task": TASK, "num_samples": 10, "num_steps": 2, "num_payload": 1, **changed}
    return Result(**told)  # type: ignore[arg-type]


def vectors(value: float = 0.5, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((length,), value, dtype=dtype), torch.zeros(0, dtype=torch.float64)]


def test_the_order_of_arrival_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    updates = {name: torch.randn(LENGTH, generator=generator) for name in NAMES}
    sums = []
    for order in itertools.permutations(NAMES):
        one = plain()
        for name in order:
            assert one.take(name, result(num_samples=7), [updates[name].clone(), torch.zeros(0, dtype=torch.float64)])
        assert one.end_stage()
        total, _ = one.result()
        assert total is not None
        sums.append(total.difference)
    assert all(torch.equal(sums[0], other) for other in sums)


def test_an_update_counts_once_and_only_in_its_round() -> None:
    one = plain()
    assert one.take("a", result(), vectors())
    assert not one.take("a", result(), vectors())
    assert not one.take("b", result(task=Task(2, 4, "train")), vectors())
    assert not one.take("stranger", result(), vectors())
    one.fail("c", "it was lost")
    assert not one.take("c", result(), vectors())
    assert one.missing == {"b"} and one.took_part == {"a"}


@pytest.mark.parametrize(
    "sent, arrays, message",
    [
        (result(), vectors(length=LENGTH + 1), "another model"),
        (result(), vectors(dtype=torch.float64), "another model"),
        (result(), vectors(math.nan), "not finite"),
        (result(), vectors(math.inf), "not finite"),
        (result(), vectors(1e30), "norm 3.32e\\+30"),
        (result(num_samples=0), vectors(), "0 samples"),
        (result(num_steps=0), vectors(), "0 steps"),
        (result(num_payload=0), vectors(), "2 vectors"),
        (result(summed=("control",)), vectors(), "2 vectors"),
        (result(loss_sum=math.nan), vectors(), "not a number"),
        (result(scale=math.inf), vectors(), "not a number"),
        (result(scale=1e30), vectors(), "an update of norm"),
        (result(summed=("control",)), [*vectors(), torch.zeros(LENGTH)], "not \\[\\]: it has another job"),
    ],
)
def test_wrong_updates_are_refused(sent: Result, arrays: list[Tensor], message: str) -> None:
    one = plain()
    with pytest.raises(DataError, match=message):
        one.take("a", sent, arrays)
    assert not one.took_part


def test_a_claimed_number_of_samples_is_capped() -> None:
    one = plain(FederatedSettings(most_samples=100))
    one.take("a", result(num_samples=2**62), vectors(1.0))
    one.take("b", result(num_samples=100), vectors(0.0))
    one.take("c", result(num_samples=100), vectors(0.0))
    total, _ = one.result()
    assert total is not None and total.weight == 300
    assert torch.equal(total.difference, torch.full((LENGTH,), 100.0, dtype=torch.float64))


def test_a_round_without_updates_is_none() -> None:
    one = plain()
    one.fail("a", "its loss is nan")
    with pytest.raises(DataError, match="a: its loss is nan"):
        one.end_stage()


def test_a_robust_rule_sees_all_updates() -> None:
    one = plain(FederatedSettings(robust="median"))
    for name, value in zip(NAMES, (1.0, 2.0, 900.0), strict=True):
        one.take(name, result(), vectors(value))
    _, robust = one.result()
    assert robust is not None and torch.equal(robust, torch.full((LENGTH,), 2.0, dtype=torch.float64))


def test_a_secure_round_gives_the_plain_sum_of_the_encoded_updates() -> None:
    settings, secure = FederatedSettings(most_samples=50, secure=True), SecureSettings(threshold=0.6)
    plan = plan_secure(settings, secure, LENGTH, 3)
    threshold = secure_threshold(secure, 3)
    record = RoundRecord(round=0, attempt=0, asked=NAMES, started=0.0)
    one = MaskedRound(record, plan, threshold, "run 0 0", torch.zeros(0, dtype=torch.float64))
    agreed = SecureRound(context="run 0 0", threshold=threshold, num_words=plan.num_words)
    clients = {name: SecureClient(name, agreed) for name in NAMES}
    updates = {name: torch.randn(LENGTH, generator=torch.Generator().manual_seed(n)) for n, name in enumerate(NAMES)}
    weights = dict(zip(NAMES, (50.0, 20.0, 7.0), strict=True))
    for name in NAMES:
        one.take(name, Result(one.task(), keys=tuple(clients[name].advertise())), [])
    assert not one.end_stage()
    from cordee.strategies.federated.masking import PublicKeys

    directory = {name: PublicKeys(*keys) for name, keys in one.directory.items()}
    for name in NAMES:
        shares = clients[name].share(directory)
        one.take(name, Result(one.task(), sealed=shares.sealed, commitment=shares.commitment), [])
    assert not one.end_stage()
    for name in NAMES[:2]:  # c is lost while it trains
        words = plan.encode(updates[name], weights[name], name)
        one.take(name, Result(one.task()), [torch.from_numpy(clients[name].mask(one.sealed_for(name), words))])
    with pytest.raises(DataError, match="2 vectors"):
        one.take("c", Result(one.task()), vectors())
    assert not one.end_stage()
    for name in NAMES[:2]:
        told = clients[name].reveal(one.took_part)
        one.take(
            name,
            Result(one.task(), share_number=told.number, self_seeds=told.self_seeds, mask_secrets=told.mask_secrets),
            [],
        )
    assert one.end_stage()
    total, _ = one.result()
    assert total is not None
    encoded = [plan.encode(updates[name], weights[name], name) for name in NAMES[:2]]
    exact = plan.decode(encoded[0] + encoded[1], 2, torch.zeros(0, dtype=torch.float64))
    assert torch.equal(total.difference, exact.difference) and total.weight == 70.0
    mean = sum(weights[name] * updates[name].double() for name in NAMES[:2]) / 70
    # Each number is rounded to a step; the weighted sum of two is off by at most two halves of a step times 50 / 70.
    assert torch.allclose(total.difference / total.weight, mean, rtol=0, atol=plan.fixed.step * 50 / 70)


def test_a_value_beyond_the_range_is_refused_before_it_is_sent() -> None:
    plan = plan_secure(FederatedSettings(weights="equal", secure=True), SecureSettings(range=1.0), LENGTH, 2)
    with pytest.raises(TrainingError, match=r"client a has a value of 1.5.*range = 1"):
        plan.encode(torch.full((LENGTH,), 1.5), 1.0, "a")


def test_a_bounded_norm_keeps_updates_in_the_range() -> None:
    settings = FederatedSettings(weights="equal", secure=True, max_norm=0.5)
    plan = plan_secure(settings, SecureSettings(range=1.0), LENGTH, 2)
    values = plan.fixed.decode(plan.encode(torch.full((LENGTH,), 1.5), 1.0, "a")[:-1])
    assert math.isclose(float((values**2).sum()) ** 0.5, 0.5, rel_tol=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        (FederatedSettings(algorithm="fedbuff", clients_per_round=2, deadline=5.0), "what comes late counts less"),
        (FederatedSettings(secure=True), "strategy.most_samples"),
        (FederatedSettings(secure=True, weights="equal", algorithm="fednova"), "sum of the updates"),
    ],
)
def test_what_a_federation_cannot_do(settings: FederatedSettings, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_deployable(settings, torch.nn.Linear(2, 2))


def test_running_statistics_cannot_be_secure() -> None:
    settings = FederatedSettings(secure=True, weights="equal")
    with pytest.raises(JobError, match="running statistics"):
        check_deployable(settings, torch.nn.BatchNorm1d(3))
    check_deployable(settings, torch.nn.GroupNorm(1, 3))


def test_robust_and_secure_together_are_refused_with_the_reason() -> None:
    with pytest.raises(JobError, match="the server has their sum only"):
        FederatedSettings(secure=True, robust="median")


def test_the_share_of_the_job_and_half_of_the_clients_are_both_minimums() -> None:
    assert secure_threshold(SecureSettings(threshold=0.67), 10) == 7
    assert secure_threshold(SecureSettings(threshold=0.51), 10) == 6
    assert secure_threshold(SecureSettings(threshold=1.0), 3) == 3
    with pytest.raises(CordeeError, match="fewer than the threshold"):
        secure_threshold(SecureSettings(), 1)


def buffered(
    requests: dict[str, tuple[int, int]] | None = None, *, num_wanted: int = 2, concurrency: int = 0
) -> BufferedRound:
    record = RoundRecord(
        round=2, attempt=5, asked=(), started=0.0, num_wanted=num_wanted, requests={} if requests is None else requests
    )
    model = ModelShape(torch.ones(LENGTH), torch.zeros(0, dtype=torch.float64), [(LENGTH,)])
    return BufferedRound(record, FederatedSettings(), model, lambda staleness: (1 + staleness) ** -0.5, concurrency)


def test_an_asynchronous_round_takes_the_next_updates_and_late_ones_count_less() -> None:
    one = buffered({"slow": (0, 1)})
    task = one.ask("quick", 7)
    assert task == Task(2, 7, "train") and one.record.asked == ("quick",)
    assert not one.is_stage_over(is_late=True, present=["slow", "quick"])
    assert one.take("slow", result(task=Task(0, 1, "train")), vectors(1.0))
    assert one.base_of("slow") == 0
    assert not one.take("slow", result(task=Task(0, 1, "train")), vectors(1.0)), "an update counts once"
    assert not one.may_ask("slow"), "it was counted in this round"
    assert one.take("quick", result(task=task), vectors(3.0))
    assert one.is_stage_over(is_late=False, present=["slow", "quick"]) and one.end_stage()
    total, _ = one.result()
    discount = 3**-0.5
    assert total is not None and total.weight == 10 * discount + 10
    expected = torch.full((LENGTH,), 10 * discount * 1.0 + 10 * 3.0, dtype=torch.float64)
    torch.testing.assert_close(total.difference, expected, rtol=0, atol=1e-12)


def test_a_client_cannot_say_by_itself_from_which_parameters_it_began() -> None:
    one = buffered({"slow": (0, 1)})
    for task in (Task(2, 1, "train"), Task(0, 5, "train"), Task(2, 5, "train")):
        assert not one.is_of("slow", task) and not one.take("slow", result(task=task), vectors())
    assert not one.is_of("stranger", Task(2, 5, "train"))


def test_who_is_under_way_goes_on_into_the_next_asynchronous_round() -> None:
    one = buffered({"a": (1, 1), "b": (1, 2), "c": (2, 3)}, num_wanted=1)
    one.fail("c", "it was lost")
    assert one.take("a", result(task=Task(1, 1, "train")), vectors())
    assert one.is_stage_over(is_late=False, present=["a", "b"])
    assert one.outstanding == {"b": (1, 2)} and one.late == []
    after = buffered(one.outstanding)
    assert after.may_ask("b"), "one that asks has forgotten its task"
    after.ask("b", 9)
    assert not after.take("b", result(task=Task(1, 2, "train")), vectors())
    assert after.take("b", result(task=Task(2, 9, "train")), vectors())


def test_an_asynchronous_round_does_not_wait_for_more_clients_than_there_are() -> None:
    one = buffered(num_wanted=3)
    assert not one.is_stage_over(is_late=False, present=["a"])
    task = one.ask("a", 1)
    assert not one.is_stage_over(is_late=False, present=["a"])
    assert one.take("a", result(task=task), vectors())
    assert not one.is_stage_over(is_late=False, present=["a", "b"]), "another can still be asked"
    assert one.is_stage_over(is_late=False, present=["a"])
    total, _ = one.result()
    assert total is not None and total.num_clients == 1
    nobody = buffered()
    nobody.ask("a", 1)
    nobody.fail("a", "its loss is nan")
    assert nobody.is_stage_over(is_late=False, present=["a"])
    with pytest.raises(DataError, match="a: its loss is nan"):
        nobody.end_stage()


def test_only_so_many_clients_train_at_once() -> None:
    one = buffered(num_wanted=3, concurrency=2)
    one.ask("a", 1)
    assert one.may_ask("b") and one.may_ask("a")
    one.ask("b", 2)
    assert not one.may_ask("c") and one.may_ask("b")


def test_the_results_on_the_disk_give_an_asynchronous_round_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    updates = {name: torch.randn(LENGTH, generator=generator) for name in NAMES}
    requests = {"a": (0, 1), "b": (2, 2), "c": (1, 3)}
    sums = []
    for _ in range(2):
        one = buffered(requests, num_wanted=3)
        for name in ("c", "a", "b"):
            task = Task(*requests[name], "train")
            assert one.take(name, result(task=task), [updates[name].clone(), torch.zeros(0, dtype=torch.float64)])
        total, _ = one.result()
        assert total is not None
        sums.append(total.difference)
    assert torch.equal(*sums)
