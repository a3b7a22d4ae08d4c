"""Compares what a strategy left behind with what one worker leaves behind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cordee.strategies.local_sgd.settings import LocalSgdSettings
from differences.generator import GPT_HEAD_WIDTH, METRIC_STOPS, Choices, num_microbatches
from differences.parts import straight
from differences.running import HANG, Outcome

# Largest differences relative to the largest number of the tensor, after a dozen steps at most (docs/decisions/0026).
DOUBLE_TOLERANCE = 1e-7
SINGLE_TOLERANCE = 1e-3
BF16_TOLERANCE = 0.15
RATE_TOLERANCE = 1e-12
# Numbers that are only reported travel in single precision with some strategies; no weight depends on them.
REPORTED_TOLERANCE = 1e-6
MEASURED_TOLERANCE = 1e-12  # of test losses where the weights are the same: sums of the workers' sums
# What compression may not have sent of a straight job at its end, in gradients of one batch and for each worker. What
# is sent of int4 is wrong by at most a 14th of the largest value; values that are left out add up until they are sent.
UNSENT = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.01, "int4": 0.15, "topk": 4.0, "topk_2bit": 6.0, "powersgd": 6.0}


@dataclass(frozen=True)
class Expectation:
    """What must agree. Steps, samples, rates and counts of test samples must wherever both ended well."""

    tolerance: float | None  # of weights, losses and optimizer state; None: they need not agree; 0: bit for bit
    compares_buffers: bool
    follows_metrics: bool  # the number of steps depends on what was measured
    is_exact: bool = False


def expect(choices: Choices) -> Expectation:
    """Return what this trial and its reference have in common, from what the documentation promises."""
    chain = [strategy for strategy in (choices["before"], choices["strategy"]) if strategy is not None]
    follows_metrics = any(key in choices["stop"] for key in METRIC_STOPS)
    is_alone = all(strategy["name"] == "single" for strategy in chain)
    is_exact = is_alone or bool(choices["training"].get("reproducible"))
    if is_exact:
        return Expectation(0.0, True, follows_metrics, is_exact=True)
    if choices["model"] == "straight":  # losses are of other weights; those at the end are compared by themselves
        return Expectation(None, True, follows_metrics)
    tolerance = DOUBLE_TOLERANCE if choices["double"] else SINGLE_TOLERANCE
    if choices["training"].get("precision") == "bf16":
        tolerance = BF16_TOLERANCE
    can_compare = all(_agrees({**choices, "strategy": strategy}) for strategy in chain)
    compares_buffers = can_compare and not {"counter", "average"} & set(choices["blocks"])
    return Expectation(tolerance if can_compare else None, compares_buffers, follows_metrics)


def _has_windows(strategy: Mapping[str, Any]) -> bool:
    """Whether workers take several steps before they agree, and report what they agree on."""
    return strategy["name"] == "local_sgd" and strategy.get("sync_every", LocalSgdSettings().sync_every) > 1


def _agrees(choices: Choices) -> bool:
    """Whether one strategy promises the weights of one worker."""
    strategy, blocks, training = choices["strategy"], choices["blocks"], choices["training"]
    name, mesh = strategy["name"], strategy.get("mesh", {})
    if name == "single":
        return True
    if "dropout" in blocks:  # draws differ between workers
        return False
    if strategy.get("staleness", 0) != 0 or strategy.get("compression", "none") != "none":
        return False
    if name == "local_sgd":
        optimizer = choices["optimizer"]
        is_linear = optimizer["use"] == "sgd" and not {"momentum", "weight_decay"} & optimizer.keys()
        if not is_linear or _has_windows(strategy) or "clip_norm" in training or "batch_norm" in blocks:
            return False
    if strategy.get("aggregate", "weighted") != "weighted":
        return False
    if choices["loss"] == "l1" and choices["optimizer"]["use"] == "rprop":
        return False  # gradients that cancel to zero, or nearly, of which only the sign is used
    if "batch_norm" not in blocks:
        return True
    has_copies = mesh.get("data", 1) * mesh.get("sharded", 1) > 1
    if name in ("data_parallel", "sharded"):
        return strategy.get("batch_norm") == "sync" and training.get("accumulate", 1) == 1
    if name == "parameter_server":
        return strategy["workers"] == 1
    if has_copies or choices["before"] is not None:
        return False
    # Micro-batches of a part of a batch are not the parts of a batch.
    return num_microbatches(choices) == 1 or training.get("accumulate", 1) == 1


def differences(choices: Choices, alone: Outcome, together: Outcome) -> list[str]:
    """Return how two runs that ended differ where they must not; nothing where all is well."""
    return list(_differences(choices, alone, together))


def _differences(choices: Choices, alone: Outcome, together: Outcome) -> Iterator[str]:
    expected = expect(choices)
    yield from (f"doctor: {problem}" for problem in together.unsound)
    missing = _needed_events(choices, alone) - {event["type"] for event in together.events}
    if missing:
        yield f"no event {sorted(missing)}"
    if expected.follows_metrics and expected.tolerance is None:
        return
    for key in ("status", "steps", "epochs", "samples", "stopped_by", "parameters"):
        if alone.summary[key] != together.summary[key]:
            yield f"{key} {alone.summary[key]} alone, {together.summary[key]} together"
    yield from _compare_saved(choices, alone, together, expected)
    yield from _compare_evaluations(choices, alone, together, expected)
    yield from _compare_steps(choices, alone, together, expected)
    if choices["model"] == "straight":
        yield from _compare_straight(choices, alone, together)
    if expected.tolerance is None:
        return
    if expected.is_exact and alone.summary["weights_sha256"] != together.summary["weights_sha256"]:
        yield f"weights differ: {_largest(alone.weights, together.weights)}"
    skipped = set() if expected.compares_buffers else {"passes", "seen", "running_mean", "running_var"}
    yield from _compare_tensors("weight", alone.weights, together.weights, expected.tolerance, skipped)
    yield from _compare_optimizers(choices, alone, together, expected)


def _compare_straight(choices: Choices, alone: Outcome, together: Outcome) -> Iterator[str]:
    """Compare weights that do not depend on who computed what when: all that is missing is what was not sent yet."""
    strategy, slack = choices["strategy"], DOUBLE_TOLERANCE
    compression = strategy.get("compression", "none")
    if strategy["name"] == "parameter_server" and compression != "none":  # and resumed workers begin without a residual
        times = strategy["workers"] * strategy.get("push_every", 1) * (2 if choices["before"] is not None else 1)
        slack = UNSENT[compression] * choices["optimizer"]["lr"] * times
    unsent = dict(together.residuals)  # of local_sgd: differences, by name
    if (left := unsent.pop("sum.0", None)) is not None:  # of data_parallel: gradients
        named = dict(straight(input_shape=(6,), num_classes=4).named_parameters())
        pieces = torch.split(-choices["optimizer"]["lr"] * left, [p.numel() for p in named.values()])
        unsent = {name: piece.view_as(named[name]) for name, piece in zip(named, pieces, strict=True)}
    for name, value in alone.weights.items():
        ours = together.weights[name] + unsent.get(name, torch.zeros_like(value)).view_as(value)
        if not (distance := float((ours - value).abs().max())) <= slack:
            yield f"weight {name}: {distance:.2g} away, which is more than {slack:.2g}"


def _needed_events(choices: Choices, alone: Outcome) -> set[str]:
    needed = {"run_started", "worker_started", "commit", "checkpoint", "run_ended"}
    if choices["strategy"].get("staleness", 0) == 0:
        needed |= {event["type"] for event in alone.events} & {"step", "evaluation"}
    return needed


def _compare_saved(choices: Choices, alone: Outcome, together: Outcome, expected: Expectation) -> Iterator[str]:
    ours, theirs = set(together.saved_steps), set(alone.saved_steps)
    extra = {choices["resume_at"]} if choices["before"] is not None else set()
    keeps_best = choices["checkpoint"].get("keep_best")
    if not keeps_best and not extra and ours != theirs and not _skips_steps(choices):
        yield f"checkpoints of steps {sorted(theirs)} alone, {sorted(ours)} together"
    if max(ours) != max(theirs):
        yield f"the last checkpoint is of step {max(theirs)} alone, {max(ours)} together"
        return
    before, after = alone.values["progress"], together.values["progress"]
    # At the end servers are evaluated and saved at once; a worker alone may have saved before, and evaluates again when
    # it is resumed.
    has_servers = "parameter_server" in (choices["strategy"]["name"], (choices["before"] or {}).get("name"))
    is_newer = has_servers and after["evaluated_at"] == after["step"]
    is_newer |= choices["before"] is not None and after["evaluated_at"] == choices["resume_at"]  # at its end, then
    compared = ["step", "samples", *(() if is_newer else ("evaluated_at",))]
    if not any(_has_windows(each) for each in (choices["strategy"], choices["before"]) if each):
        compared.append("loss_count")  # windows cross the ends of epochs
    for key in compared:
        if before.get(key) != after.get(key):
            yield f"progress.{key} {before.get(key)} alone, {after.get(key)} together"
    # The end of an epoch is the beginning of the next.
    places = {(progress["epoch"], progress["batch"]) for progress in (before, after)}
    if len(places) == 2 and not _is_boundary(*places):
        yield f"the place in the data is {sorted(places)}"
    is_close = expected.tolerance is not None and (expected.is_exact or choices["double"])  # else there are near ties
    if is_close and not extra and alone.summary["best_step"] != together.summary["best_step"]:
        yield f"best_step {alone.summary['best_step']} alone, {together.summary['best_step']} together"


def _skips_steps(choices: Choices) -> bool:
    """Whether several steps are taken before anybody saves, so that what is due inside of them is done after them."""
    strategies = [strategy for strategy in (choices["before"], choices["strategy"]) if strategy]
    return any(strategy.get("push_every", 1) > 1 or _has_windows(strategy) for strategy in strategies)


def _is_boundary(one: tuple[int, int], other: tuple[int, int]) -> bool:
    (epoch, _), (next_epoch, next_batch) = sorted((one, other))
    return next_epoch == epoch + 1 and next_batch == 0


def _compare_evaluations(choices: Choices, alone: Outcome, together: Outcome, expected: Expectation) -> Iterator[str]:
    theirs = {event["step"]: event for event in alone.of("evaluation")}
    ours = {event["step"]: event for event in together.of("evaluation")}
    extra = {choices["resume_at"]} if choices["before"] is not None else set()
    if set(theirs) - extra != set(ours) - extra and not _skips_steps(choices):
        yield f"evaluated after steps {sorted(theirs)} alone, {sorted(ours)} together"
    if len(ours) != len(together.of("evaluation")) and not extra:
        yield f"evaluated twice: {[event['step'] for event in together.of('evaluation')]}"
    for step in sorted(theirs.keys() & ours.keys()):
        for key in ("samples", "epoch"):
            if theirs[step][key] != ours[step][key] and step not in extra:
                yield f"evaluation after step {step}: {key} {theirs[step][key]} alone, {ours[step][key]} together"
        if expected.tolerance is None:
            continue
        for key in ("test_loss", "test_accuracy", "train_loss"):
            slack = 1.0 / theirs[step]["samples"] if key == "test_accuracy" and not choices["double"] else 0.0
            least = REPORTED_TOLERANCE if key == "train_loss" else MEASURED_TOLERANCE
            if not _is_close(theirs[step][key], ours[step][key], max(expected.tolerance, least), slack):
                yield f"evaluation after step {step}: {key} {theirs[step][key]} alone, {ours[step][key]} together"
        own = ours[step]["metrics"]
        for key, value in theirs[step]["metrics"].items():
            # One sample more or less that is right changes a metric of classes by more than its share.
            slack = 0.0 if choices["double"] else 8.0 / theirs[step]["samples"]
            if not _is_close(value, own.get(key), max(expected.tolerance, 100 * MEASURED_TOLERANCE), slack):
                yield f"evaluation after step {step}: metric {key} {value} alone, {own.get(key)} together"


def _compare_steps(choices: Choices, alone: Outcome, together: Outcome, expected: Expectation) -> Iterator[str]:
    theirs, ours = ({event["step"]: event for event in outcome.of("step")} for outcome in (alone, together))
    if choices["strategy"].get("staleness", 0) != 0:
        return  # there a step is no one moment
    if any(_has_windows(each) for each in (choices["strategy"], choices["before"]) if each):
        return
    before = choices["before"] or {}
    if before.get("staleness", 0) != 0 or before.get("push_every", 1) != 1:  # and servers report each push
        theirs, ours = ({step: e for step, e in all_.items() if step > choices["resume_at"]} for all_ in (theirs, ours))
    if theirs.keys() != ours.keys():
        yield f"steps {sorted(theirs)} reported alone, {sorted(ours)} together"
    for step in sorted(theirs.keys() & ours.keys()):
        for key in ("epoch", "samples"):
            if theirs[step][key] != ours[step][key]:
                yield f"step {step}: {key} {theirs[step][key]} alone, {ours[step][key]} together"
        if not _is_close(theirs[step]["lr"], ours[step]["lr"], RATE_TOLERANCE):
            yield f"step {step}: lr {theirs[step]['lr']} alone, {ours[step]['lr']} together"
        if expected.tolerance is None:
            continue
        for key in ("loss", "accuracy", "gradient_norm"):
            slack = 1.0 / choices["batch_size"] if key == "accuracy" and not choices["double"] else 0.0
            tolerance = max(expected.tolerance, REPORTED_TOLERANCE)
            if not _is_close(theirs[step][key], ours[step][key], tolerance, slack):
                yield f"step {step}: {key} {theirs[step][key]} alone, {ours[step][key]} together"


def _compare_optimizers(choices: Choices, alone: Outcome, together: Outcome, expected: Expectation) -> Iterator[str]:
    theirs, ours = alone.optimizer_tensors, together.optimizer_tensors
    one, other = alone.values.get("optimizer", {}), together.values.get("optimizer", {})
    if one.get("optimizer") != other.get("optimizer"):
        yield f"optimizer {one.get('optimizer')} alone, {other.get('optimizer')} together"
    unused = {name for name in theirs.keys() ^ ours.keys() if "spare" in name}  # zeros are a gradient to servers
    if theirs.keys() - unused != ours.keys() - unused:
        yield f"optimizer state {sorted(theirs.keys() ^ ours.keys())} only in one of them"
    both = {name: (theirs[name], ours[name]) for name in theirs.keys() & ours.keys()}
    counters = [name for name in both if name.endswith(".step")]
    for name in counters:
        if not torch.equal(both[name][0].double(), both[name][1].double()):
            yield f"optimizer counter {name}: {both[name][0].tolist()} alone, {both[name][1].tolist()} together"
    rest = [name for name in both if name not in counters]
    # Squares have twice the relative difference.
    tolerance = 3 * (expected.tolerance or 0.0)
    yield from _compare_tensors(
        "optimizer state", {name: both[name][0] for name in rest}, {name: both[name][1] for name in rest}, tolerance
    )


def _compare_tensors(
    what: str,
    theirs: Mapping[str, torch.Tensor],
    ours: Mapping[str, torch.Tensor],
    tolerance: float,
    skipped: set[str] = frozenset(),  # type: ignore[assignment]
) -> Iterator[str]:
    if theirs.keys() != ours.keys():
        yield f"{what}s {sorted(theirs.keys() ^ ours.keys())} only in one of them"
    for name in sorted(theirs.keys() & ours.keys()):
        if name.rpartition(".")[2] in skipped:
            continue
        if theirs[name].dtype != ours[name].dtype:
            yield f"{what} {name}: {theirs[name].dtype} alone, {ours[name].dtype} together"
        found = _difference(_determined(name, theirs[name]), _determined(name, ours[name]))
        if not found <= tolerance:
            yield f"{what} {name}: relative difference {found:.2g}"


def _determined(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without what only rounding decides: the bias of attention's keys, which changes no output."""
    if not name.partition("query_key_value.bias")[1] or tensor.ndim != 1:
        return tensor
    return tensor.unflatten(0, (-1, 3, GPT_HEAD_WIDTH))[:, [0, 2]]


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest number; infinities must be in the same places."""
    if one.shape != other.shape:
        return math.inf
    one, other = one.double(), other.double()
    is_number = torch.isfinite(one)
    if not torch.equal(is_number, torch.isfinite(other)):
        return math.inf
    one, other = one[is_number], other[is_number]
    if not one.numel() or torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / max(float(one.abs().max()), 1e-3))


def _largest(theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> str:
    names = sorted(theirs.keys() & ours.keys(), key=lambda name: -_difference(theirs[name], ours[name]))
    return ", ".join(f"{name} by {_difference(theirs[name], ours[name]):.2g}" for name in names[:3])


def _is_close(one: Any, other: Any, tolerance: float, slack: float = 0.0) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3) + slack * (1 + 1e-9)


# Refusals

# What strategies may refuse, by the words of the message, and where the documentation says so.
REFUSALS: dict[str, tuple[str, ...]] = {
    "data_parallel": (
        r"has no sample for each of",
        r"has no shard for each of",
        r"under re-entrant checkpointing",
        r"more than 1 value per channel",
    ),
    "local_sgd": (
        r"has no sample for each of",
        r"takes steps without a word",
        r"training\.ema = .* does not go with strategy 'local_sgd'",
        r"more than 1 value per channel",
    ),
    "parameter_server": (
        r"has no sample for each of",
        r"has no shard for each of",
        r"hands out samples by their number",
        r"too many for",
        r"parameters of one type",
        r"more than 1 value per channel",
    ),
    "sharded": (
        r"has a hook on its gradient",
        r"has no sample for each of",
        r"without a dimension",
        r"may look at whole parameters",
        r"under re-entrant",
        r"more than 1 value per channel",
    ),
    "pipeline": (
        r"lr_scale = .* follows the number of shares",
        r"cannot be cut into stages",
        r"can be cut into at most",
        r"into empty parts",
        r"micro-batches",
        r"recompute, does not go with",
        r"used in several stages",
        r"several samples|more than 1 value per channel|two of them",
        r"cannot train stage \d+, before which nothing is trained",
        r"incompatible with .grad\(\)",
    ),
    "tensor": (
        r"lr_scale = .* follows the number of shares",
        r"cannot be sliced",
        r"has a hook on its gradient",
        r"cannot slice",
        r"may look at whole parameters",
        r"names no layer|no layer",
        r"divide",
        r"has no sample for each of",
    ),
}
REFUSALS["hybrid"] = tuple({word for name in ("sharded", "pipeline", "tensor") for word in REFUSALS[name]})


def refusal(choices: Choices, outcome: Outcome) -> str | None:
    """Return why a run was not made, in the words of the documentation; None where the documentation has none."""
    for strategy in (choices["before"], choices["strategy"]):
        for words in REFUSALS.get(strategy["name"], ()) if strategy is not None else ():
            if re.search(words, outcome.message):
                return f"{strategy['name']}: {words}"
    return None


def is_clear(outcome: Outcome) -> bool:
    """Whether a run that did not end well said so in one message without a traceback; torch may have warned before."""
    said = [line for line in outcome.message.splitlines() if line.startswith("cordee: ")]
    return outcome.code in (1, 2) and len(said) == 1 and "Traceback" not in outcome.message


def judge(choices: Choices, alone: Outcome, together: Outcome) -> tuple[str, list[str]]:
    """Return a verdict ("same", "refused", "no reference" or "different") and what it is about."""
    if together.code == HANG or alone.code == HANG:
        return "different", [f"{together.message} {alone.message}".strip()]
    if alone.code != 0:
        # A part of the job that cannot even be built is a mistake of the generator, with which nothing is compared.
        if not is_clear(alone) or re.search(r"\bbuilding .* raised |raised (Type|Attribute|Name)Error", alone.message):
            return "different", [f"alone: exit code {alone.code}: {alone.message.strip()}"]
        if together.code == 0 and expect(choices).tolerance is None:
            return "no reference", [alone.message.strip()]  # micro-batches of other samples, say
        if together.code == 0:
            return "different", [f"one worker refuses it, this strategy does not: {alone.message.strip()}"]
        if not is_clear(together):
            return "different", [f"exit code {together.code}: {together.message.strip()}"]
        return "no reference", [alone.message.strip()]
    if together.code != 0:
        why = refusal(choices, together)
        if is_clear(together) and why is not None:
            return "refused", [why]
        return "different", [f"exit code {together.code}: {together.message.strip()}"]
    found = differences(choices, alone, together)
    return ("different", found) if found else ("same", [])
