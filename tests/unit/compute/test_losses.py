"""Losses by name and of the user's own: what they compute, what they count, what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cordee.compute import make_loss
from cordee.compute.losses import find_state, find_trained, find_uneven_parts, require_even_parts
from cordee.core import Use
from cordee.core.errors import JobError, TrainingError

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
NUMBERS = torch.tensor([1.0, 2.0, 4.0])


def test_cross_entropy_over_classes() -> None:
    loss = make_loss(Use("cross_entropy"))
    targets = torch.tensor([0, 1])
    assert torch.equal(loss.mean(LOGITS, targets), F.cross_entropy(LOGITS, targets))
    assert loss.count(targets) == 2


def test_cross_entropy_settings() -> None:
    loss = make_loss(Use("cross_entropy", label_smoothing=0.2))
    targets = torch.tensor([0, 1])
    assert torch.equal(loss.mean(LOGITS, targets), F.cross_entropy(LOGITS, targets, label_smoothing=0.2))


def test_cross_entropy_over_tokens_counts_all_but_the_ignored() -> None:
    loss = make_loss(Use("cross_entropy"))
    outputs, targets = torch.randn(2, 3, 5), torch.tensor([[1, 4, -100], [-100, -100, 0]])
    expected = F.cross_entropy(outputs[targets >= 0], targets[targets >= 0])
    torch.testing.assert_close(loss.mean(outputs, targets), expected)
    assert loss.count(targets) == 3


@pytest.mark.parametrize("targets", [torch.tensor([0, 1, 0, 2]), torch.tensor([[0, 1], [0, 2]])])
def test_a_class_can_be_ignored(targets: Tensor) -> None:
    loss = make_loss(Use("cross_entropy", ignore_index=0))
    assert loss.count(targets) == 2
    assert loss.ignored == 0


@pytest.mark.parametrize(
    ("name", "function"),
    [("mse", F.mse_loss), ("l1", F.l1_loss), ("binary_cross_entropy", F.binary_cross_entropy_with_logits)],
)
@pytest.mark.parametrize("shapes", [((3, 1), (3,)), ((3,), (3, 1)), ((3,), (3,)), ((3, 1), (3, 1))])
def test_numbers_are_compared_one_by_one(name: str, function: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    outputs, targets = torch.tensor([0.1, 0.9, -1.0]), torch.tensor([0.0, 1.0, 1.0])
    found = make_loss(Use(name)).mean(outputs.view(shapes[0]), targets.view(shapes[1]))
    torch.testing.assert_close(found, function(outputs, targets))


def test_several_numbers_per_sample_count_as_one() -> None:
    loss = make_loss(Use("mse"))
    assert loss.count(torch.zeros(4, 3)) == 4
    assert loss.mean(torch.ones(4, 3), torch.zeros(4, 3)) == 1.0


@pytest.mark.parametrize("shape", [(3, 2), (3, 3), (2,)])
def test_shapes_that_would_broadcast_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the shapes must be the same"):
        make_loss(Use("mse")).mean(torch.zeros(shape), NUMBERS)


def test_whole_numbers_can_be_targets_of_a_loss_over_numbers() -> None:
    assert make_loss(Use("mse")).mean(torch.tensor([1.0, 3.0]), torch.tensor([1, 1])) == 2.0


def test_targets_keep_their_precision_under_bf16() -> None:
    # 1.001 is 1.0 in bfloat16: the loss would be 0.
    loss = make_loss(Use("l1")).mean(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.001]))
    assert loss.item() == pytest.approx(0.001, rel=1e-3)


def weighted(outputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
    return weight * (outputs - targets).abs().mean()


def test_a_function_of_the_users() -> None:
    loss = make_loss(Use(weighted, weight=2))
    assert loss.mean(NUMBERS, NUMBERS + 1) == 2.0
    assert loss.count(NUMBERS) == 3
    assert loss.count(torch.zeros(3, 4, dtype=torch.long)) == 12, "labels, so that accuracy is at most 1"
    with pytest.raises(JobError, match=r"loss has no setting 'wieght'; did you mean 'weight'\? \(it takes: weight\)"):
        make_loss(Use(weighted, wieght=2))


def test_functions_and_modules_of_torch() -> None:
    smooth = make_loss(Use("torch.nn:SmoothL1Loss", beta=0.5))
    assert torch.equal(smooth.mean(NUMBERS, NUMBERS + 1), F.smooth_l1_loss(NUMBERS, NUMBERS + 1, beta=0.5))
    huber = make_loss(Use("torch.nn.functional:huber_loss", delta=0.5))
    assert torch.equal(huber.mean(NUMBERS, NUMBERS + 1), F.huber_loss(NUMBERS, NUMBERS + 1, delta=0.5))
    live = make_loss(Use(nn.MSELoss()))
    assert live.mean(NUMBERS, NUMBERS + 1) == 1.0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Use("cross_entrop"), r"loss.use = 'cross_entrop' is not known; did you mean 'cross_entropy'\?"),
        (Use("mse", reduction="sum"), r"loss has no setting 'reduction' \(it takes: output\)"),
        (Use("cross_entropy", label_smoothing="much"), "loss.label_smoothing = 'much' does not fit"),
        (Use(nn.MSELoss(), reduction="sum"), "a module that is already built takes no settings"),
        (Use("torch.nn:TripletMarginLoss", margin=-1.0), "'torch.nn:TripletMarginLoss' raised ValueError: .* \\(at "),
        (Use("datetime:datetime", year=1, month=1, day=1), "makes a datetime, which cannot be called"),
    ],
)
def test_losses_that_cannot_be_made(part: Use, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_loss(part)


WEIGHTS = torch.tensor([3.0, 1.0, 0.25])
LABELS = torch.tensor([0, 2, 1, 0, 0, 2])
OUTPUTS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]).repeat(3, 1)


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def class_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS)


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=0)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


class Counting(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return class_weighted(outputs, targets)

    def count(self, targets: Tensor) -> Tensor:
        return WEIGHTS[targets].sum()


class Negative(Counting):
    def count(self, targets: Tensor) -> Tensor:
        return -super().count(targets)


class Following(nn.Module):
    """Has a state that each call changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        return plain(outputs, targets)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (Use("cross_entropy", weight=[3.0, 1.0, 0.25]), 10.5),
        (Use("cross_entropy", weight=[3.0, 1.0, 0.25], ignore_index=0), 1.5),
        (Use("torch.nn:CrossEntropyLoss", weight=[3.0, 1.0, 0.25]), 10.5),
        (Use("torch.nn:CrossEntropyLoss", ignore_index=2), 4),
        (Use(nn.NLLLoss(weight=WEIGHTS, ignore_index=1)), 9.5),
        (Use("torch.nn.functional:cross_entropy", ignore_index=0), 3),
        (Use(functools.partial(F.cross_entropy, weight=WEIGHTS)), 10.5),
        (Use(Counting), 10.5),
        (Use(plain), 6),
        (Use("torch.nn:MSELoss"), 6),
    ],
)
def test_what_is_counted(use: Use, expected: float) -> None:
    assert make_loss(use).count(LABELS) == pytest.approx(expected)


@pytest.mark.parametrize("targets", [torch.rand(4, 3), torch.rand(4, 3).softmax(1)])
def test_probabilities_count_once_per_sample(targets: Tensor) -> None:
    assert make_loss(Use("torch.nn:CrossEntropyLoss", weight=[3.0, 1.0, 0.25])).count(targets) == 4


@pytest.mark.parametrize(
    "use", [Use(class_weighted), Use(ignoring), Use(summed), Use(nn.CrossEntropyLoss(reduction="sum"))]
)
def test_parts_that_do_not_make_the_whole_are_found(use: Use) -> None:
    found = find_uneven_parts(make_loss(use), OUTPUTS, LABELS)
    assert found is not None and "6 samples give" in found


@pytest.mark.parametrize(
    "use",
    [
        Use(plain),
        Use(Counting),
        Use(functools.partial(F.cross_entropy, weight=WEIGHTS)),
        Use(nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0, label_smoothing=0.2)),
        Use("cross_entropy", weight=[3.0, 1.0, 0.25], ignore_index=2),
    ],
)
def test_parts_that_make_the_whole_are_not(use: Use) -> None:
    assert find_uneven_parts(make_loss(use), OUTPUTS, LABELS) is None


def test_trying_a_loss_has_no_effect() -> None:
    loss, before = Following(), torch.get_rng_state()
    assert find_uneven_parts(make_loss(Use(loss)), OUTPUTS, LABELS) is None
    assert loss.calls == 0 and torch.equal(torch.get_rng_state(), before)


def test_a_count_below_zero_is_refused() -> None:
    with pytest.raises(JobError, match=r"gave -10\.5"):
        make_loss(Use(Negative)).count(LABELS)


def test_an_accuracy_is_over_labels_whatever_they_weigh() -> None:
    loss = make_loss(Use("cross_entropy", weight=[3.0, 1.0, 0.25], ignore_index=0))
    assert loss.num_items(LABELS) == 3


# What is assumed is tried on every part ---------------------------------------------------------------------


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets)[targets != -9] ** 2).mean()


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_label_that_a_loss_leaves_out_is_found_when_it_first_comes(place: int) -> None:
    loss = make_loss(Use(masked))
    outputs, targets = torch.randn(8, 3), torch.randn(8, 3)
    require_even_parts(loss, outputs, targets)
    targets[place, 1] = -9
    with pytest.raises(TrainingError, match=r"is not the mean of those of its own parts.*attribute count"):
        require_even_parts(loss, outputs, targets)


def test_losses_that_say_what_they_count_and_random_ones_are_not_refused() -> None:
    outputs, targets = torch.randn(8, 3), torch.randint(3, (8,))

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs), targets)

    loss = make_loss(Use(noisy))
    assert find_uneven_parts(loss, outputs, targets) is None
    state = torch.get_rng_state()
    require_even_parts(loss, outputs, targets)
    assert torch.equal(torch.get_rng_state(), state)
    said = make_loss(Use(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))))
    require_even_parts(said, outputs, targets)


def test_a_loss_that_keeps_something_is_not_changed_by_being_tried() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(outputs, targets)

    made = Counting()
    require_even_parts(make_loss(Use(made)), torch.randn(4, 2), torch.randn(4, 2))
    assert made.calls == 0


class Centred(nn.Module):
    """Keeps a mean of the outputs; `remembers` something, which may have an effect, or none, or be a number."""

    def __init__(self, remembers: str) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.remembers, self.calls, self.last = remembers, 0, 0.0
        self.noise = torch.Generator()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.remembers == "centre":
            self.centre = 0.9 * self.centre + 0.1 * outputs.mean(0)
        if self.remembers == "own noise":
            outputs = outputs + torch.rand(3, generator=self.noise)
        if self.remembers == "noise":
            outputs = outputs + torch.rand(3)
        factor = 1 / self.calls if self.remembers == "calls" else 1.0
        loss = F.cross_entropy(outputs - self.centre, targets) * factor
        self.last = loss.item()
        return loss


@pytest.mark.parametrize(
    ("remembers", "found"),
    [("nothing", None), ("centre", "centre"), ("calls", "calls"), ("noise", None), ("own noise", "calls")],
)
def test_what_a_loss_keeps_is_found_where_it_has_an_effect(remembers: str, found: str | None) -> None:
    loss = make_loss(Use(Centred, remembers=remembers))
    state = torch.get_rng_state()
    assert find_state(loss, LOGITS, torch.tensor([0, 1])) == found
    assert torch.equal(torch.get_rng_state(), state) and loss.mean.calls == 0  # type: ignore[attr-defined]
    assert find_trained(loss) == []
    assert find_state(make_loss(Use("cross_entropy")), LOGITS, torch.tensor([0, 1])) is None


def test_parameters_of_a_loss_are_found() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.scale + self.shift, targets)

    assert find_trained(make_loss(Use(Scaled))) == ["scale"]
    assert find_trained(make_loss(Use(nn.CrossEntropyLoss))) == []
