"""Metrics have the values of scikit-learn and torchmetrics, however the test set is cut."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import sklearn.metrics
import torch
import torchmetrics
from torch import Tensor

from cordee.compute.evaluation import Rows, in_order
from cordee.compute.job_metrics import NamedMetric, make_metrics, require_known, try_metrics
from cordee.compute.metrics import SummedMetric, Task
from cordee.core.errors import JobError, TrainingError
from cordee.core.references import Use

CLASSES = Task(num_classes=4)
NUMBERS = Task(num_classes=None)
BINARY = Task(num_classes=None, is_binary=True)


def drawn(task: Task, size: int = 101, columns: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if task.num_classes is not None:
        # The class 3 is rare, and cuts have parts without it.
        targets = torch.randint(0, 30, (size,), generator=generator).clamp(max=3 * 9) // 9
        return torch.randn(size, task.num_classes, generator=generator), targets
    if task.is_binary:
        return torch.randn(size, generator=generator), (torch.rand(size, generator=generator) < 0.3).float()
    shape = (size, columns) if columns else (size,)
    targets = 1e4 + torch.randn(shape, generator=generator)
    return targets + 0.5 * torch.randn(shape, generator=generator), targets


def value(part: Any, task: Task, outputs: Tensor, targets: Tensor, cuts: tuple[int, ...] = (1, 2, 60)) -> float:
    """Return the metric of parts of different sizes, put together as an evaluation does."""
    (metric,) = make_metrics({"own": Use.coerce("metrics.own", part)}, task, targets)
    assert try_metrics([metric], outputs, targets) == []
    ends = [0, *cuts, len(targets)]
    parts = [(outputs[a:b], targets[a:b]) for a, b in itertools.pairwise(ends)]
    if isinstance(metric.metric, SummedMetric):
        return metric.finish(sum((metric.measure(*part) for part in parts), torch.zeros(metric.metric.num_sums)))
    return metric.compute(*in_order([Rows.join(parts)], len(parts)))


@pytest.mark.parametrize("kind", ["f1", "precision", "recall"])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_of_classes_as_scikit_learn(kind: str, average: str) -> None:
    outputs, targets = drawn(CLASSES)
    score = getattr(sklearn.metrics, f"{kind}_score")
    expected = score(targets, outputs.argmax(-1), average=average, zero_division=0)
    assert value({"use": kind, "average": average}, CLASSES, outputs, targets) == pytest.approx(expected, rel=1e-12)


def test_macro_leaves_out_classes_that_are_not_there() -> None:
    outputs, targets = torch.eye(4)[torch.tensor([0, 1, 1, 0])], torch.tensor([0, 1, 0, 0])
    expected = sklearn.metrics.f1_score(targets, outputs.argmax(-1), average="macro")
    assert value("f1", CLASSES, outputs, targets, cuts=(1,)) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_as_scikit_learn(k: int) -> None:
    outputs, targets = drawn(CLASSES)
    expected = sklearn.metrics.top_k_accuracy_score(targets, outputs, k=k, labels=range(4))
    assert value(f"top_{k}" if k > 1 else "accuracy", CLASSES, outputs, targets) == pytest.approx(expected)
    assert value({"use": "top_k", "k": k}, CLASSES, outputs, targets) == pytest.approx(expected)


def test_binary_is_of_the_positive_class() -> None:
    outputs, targets = drawn(BINARY)
    assert value("f1", BINARY, outputs, targets) == pytest.approx(sklearn.metrics.f1_score(targets, outputs > 0))
    assert value("accuracy", BINARY, outputs, targets) == pytest.approx(
        float(((outputs > 0) == targets).float().mean())
    )


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_of_numbers_as_scikit_learn(columns: int) -> None:
    outputs, targets = drawn(NUMBERS, columns=columns)
    assert value("mae", NUMBERS, outputs, targets) == pytest.approx(
        sklearn.metrics.mean_absolute_error(targets, outputs), rel=1e-6
    )
    mse = sklearn.metrics.mean_squared_error(targets, outputs)
    assert value("mse", NUMBERS, outputs, targets) == pytest.approx(mse, rel=1e-6)
    assert value("rmse", NUMBERS, outputs, targets) == pytest.approx(math.sqrt(mse), rel=1e-6)
    expected = sklearn.metrics.r2_score(targets.double(), outputs.double())
    assert value("r2", NUMBERS, outputs, targets) == pytest.approx(expected, rel=1e-9)  # of targets far from 0


def test_r2_of_targets_that_are_all_the_same() -> None:
    targets = torch.full((6,), 3.0)
    assert value("r2", NUMBERS, targets.clone(), targets, cuts=(2,)) == 1.0
    assert value("r2", NUMBERS, targets + 1, targets, cuts=(2,)) == 0.0


def test_perplexity_of_tokens_leaves_ignored_ones_out() -> None:
    outputs, targets = torch.randn(9, 5, 4), torch.randint(0, 4, (9, 5))
    targets[2:, 3:] = -100
    truth = torchmetrics.text.Perplexity(ignore_index=-100)
    truth.update(outputs, targets)
    task = Task(num_classes=4, ignored=-100)
    assert value("perplexity", task, outputs, targets, cuts=(1, 3)) == pytest.approx(float(truth.compute()), rel=1e-6)
    assert value("torchmetrics.text.Perplexity", Task(4), outputs[:2], targets[:2], cuts=(1,)) == pytest.approx(
        value("perplexity", Task(4), outputs[:2], targets[:2], cuts=(1,)), rel=1e-5
    )


@pytest.mark.parametrize(
    "name", ["MulticlassF1Score", "MulticlassAUROC", "MulticlassCalibrationError", "MulticlassMatthewsCorrCoef"]
)
def test_torchmetrics_by_name_and_as_objects(name: str) -> None:
    outputs, targets = drawn(CLASSES)
    truth = getattr(torchmetrics.classification, name)(num_classes=4)
    expected = float(truth(outputs, targets))
    assert value(f"torchmetrics.classification.{name}", CLASSES, outputs, targets) == pytest.approx(expected, rel=1e-5)
    assert value(f"torchmetrics.classification:{name}", CLASSES, outputs, targets) == pytest.approx(expected, rel=1e-5)
    assert value(type(truth)(num_classes=4), CLASSES, outputs, targets) == pytest.approx(expected, rel=1e-5)


def test_torchmetrics_gets_classes_of_tokens_as_the_second_dimension() -> None:
    outputs, targets = torch.randn(9, 4, 4), torch.randint(0, 4, (9, 4))  # as many tokens as classes
    expected = float((outputs.argmax(-1) == targets).float().mean())
    use = {"use": "torchmetrics.classification.MulticlassAccuracy", "average": "micro"}
    assert value(use, CLASSES, outputs, targets, cuts=(1, 3)) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Metric .SpearmanCorrcoef. will save:UserWarning")
@pytest.mark.parametrize("name", ["PearsonCorrCoef", "SpearmanCorrCoef", "R2Score", "MeanAbsoluteError"])
def test_torchmetrics_whose_states_are_no_sums(name: str) -> None:
    outputs, targets = drawn(NUMBERS)
    outputs, targets = outputs - 1e4, targets - 1e4
    expected = float(getattr(torchmetrics, name)()(outputs, targets))
    assert value(f"torchmetrics.{name}", NUMBERS, outputs, targets) == pytest.approx(expected, rel=1e-5)


def test_torchmetrics_whose_states_take_their_shape_from_the_samples() -> None:
    outputs, targets = drawn(NUMBERS, columns=2)
    outputs, targets = outputs - 1e4, targets - 1e4
    expected = float(torchmetrics.R2Score()(outputs, targets))
    assert value("torchmetrics.R2Score", NUMBERS, outputs, targets) == pytest.approx(expected, rel=1e-5)


def changes_outputs(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.sub_(100).sum())


def changes_targets(outputs: Tensor, targets: Tensor) -> float:
    return float(targets.zero_().sum())


@pytest.mark.parametrize("function", [changes_outputs, changes_targets])
def test_function_that_changes_what_others_are_given(function: Any) -> None:
    outputs, targets = drawn(NUMBERS)
    (metric,) = make_metrics({"mine": Use(function)}, NUMBERS, targets)
    with pytest.raises(TrainingError, match="metric 'mine': it changes the outputs or targets"):
        metric.compute(outputs, targets)


def median_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().median()


def test_function_gets_all_samples_in_order() -> None:
    outputs, targets = drawn(NUMBERS)
    assert value(median_error, NUMBERS, outputs, targets) == float(median_error(outputs, targets))


def test_rows_of_members_are_put_in_the_order_of_the_test_set() -> None:
    rows = torch.arange(11.0)
    # Two batches of 7 and 4 samples; the first member has two parts of each, the second one, the third nothing.
    first = Rows.join([(rows[a:b], rows[a:b]) for a, b in ((0, 3), (3, 5), (7, 9), (9, 10))])
    second = Rows.join([(rows[a:b], rows[a:b]) for a, b in ((5, 7), (10, 11))])
    third = Rows.join([(torch.empty(0), torch.empty(0))] * 2)
    outputs, targets = in_order([first, second, third], 2)
    assert torch.equal(outputs, rows) and torch.equal(targets, rows)


def gives_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def gives_nothing(outputs: Tensor, targets: Tensor) -> None:
    return None


def raises(outputs: Tensor, targets: Tensor) -> float:
    raise RuntimeError("only one class")


@pytest.mark.parametrize(
    ("part", "task", "message"),
    [
        ("precison", CLASSES, "did you mean 'precision'"),
        ({"use": "f1", "averge": "micro"}, CLASSES, "no setting 'averge'.*did you mean 'average'"),
        ({"use": "f1", "average": "makro"}, CLASSES, "did you mean 'macro'"),
        ({"use": "f1", "better": "up"}, CLASSES, "must be 'higher' or 'lower'"),
        ({"use": "f1", "better": "lower"}, CLASSES, "higher is better"),
        ("f1", NUMBERS, "needs classes, and the targets are numbers"),
        ("mae", CLASSES, "compares numbers, and the targets are classes"),
        ("top_9", CLASSES, "more than the 4 classes"),
        ("top_k", CLASSES, "needs 'k'"),
        ("torchmetrics.classification.MulticlassF2", CLASSES, "has no 'MulticlassF2'"),
        (gives_shape, NUMBERS, r"a tensor of shape \(101,\), and must give one number"),
        (gives_nothing, NUMBERS, "a NoneType, and must give one number"),
        ({"use": "torchmetrics.classification.MulticlassF1Score", "average": "none"}, CLASSES, "average = 'macro'"),
    ],
)
def test_bad_metrics_are_refused(part: Any, task: Task, message: str) -> None:
    outputs, targets = drawn(task)
    with pytest.raises(JobError, match=message):
        try_metrics(make_metrics({"own": Use.coerce("m", part)}, task, targets), outputs, targets)


@pytest.mark.parametrize("name", ["loss", "1st", "a b", ""])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(JobError, match="choose another name"):
        make_metrics({name: Use("f1")}, CLASSES, torch.zeros(1))


def test_metric_that_raises_is_named() -> None:
    outputs, targets = drawn(NUMBERS)
    (metric,) = make_metrics({"mine": Use(raises)}, NUMBERS, targets)
    assert "'mine' raised RuntimeError: only one class" in try_metrics([metric], outputs, targets)[0]
    with pytest.raises(TrainingError, match="metric 'mine' raised RuntimeError: only one class"):
        metric.compute(outputs, targets)


def test_what_torchmetrics_says_of_the_few_samples_that_are_tried_is_not_shown() -> None:
    (metric,) = make_metrics({"mine": Use("torchmetrics.classification.MulticlassAUROC")}, CLASSES, torch.zeros(2))
    outputs, targets = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        metric.compute(outputs, targets)
    assert any("No negative samples" in str(each.message) for each in said)
    assert try_metrics([metric], outputs, targets) == []  # warnings are errors here


def test_direction() -> None:
    def of(part: Any) -> tuple[NamedMetric, ...]:
        return make_metrics({"own": Use.coerce("m", part)}, NUMBERS, torch.zeros(1))

    assert require_known("own", "stop.metrics.own", of("mae")) == "lower"
    assert require_known("own", "k", of("r2")) == "higher"
    assert require_known("own", "k", of("torchmetrics.MeanAbsoluteError")) == "lower"
    assert require_known("own", "k", of({"use": median_error, "better": "lower"})) == "lower"
    assert require_known("loss", "k", of("mae")) == "lower"
    with pytest.raises(JobError, match="not known whether higher or lower"):
        require_known("own", "k", of(median_error))
    with pytest.raises(JobError, match="did you mean 'own'"):
        require_known("onw", "k", of("mae"))
