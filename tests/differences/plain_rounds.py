"""Rounds of clients in plain torch: what a run of strategy 'federated' has to come to.

Written from the formulas, with one copy of the model for each client and loops over them, and none of the code that
trains, sums or takes steps. Shared with the product is only what is drawn: first weights, who has which sample, who is
asked, the seeds of orders and dropout, noise; and the codecs of `compress`, which have no memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cordee.cluster import Team
from cordee.communication.compression import CompressionSettings
from cordee.core import Batch, Job
from cordee.core.seeds import derive_seed
from cordee.data.augment import Augmentation
from cordee.data.datasets import DatasetSource
from cordee.runs.federated.facts import partition_of
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import split_samples
from cordee.strategies.federated.keyed import normals
from cordee.strategies.federated.schedule import Schedule, Task
from cordee.strategies.federated.settings import FederatedSettings
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import assemble
from differences import parts as own_parts
from differences.generator import Choices
from differences.robust_rules import NobodyCountsError, robust_mean

Vector = Tensor


@dataclass
class PlainRound:
    """What a round came to."""

    loss: float | None
    num_took_part: int
    num_trained: int
    shared: Vector
    buffers: dict[str, Tensor]
    test_loss: float | None
    measured: dict[str, float]  # by clients on what they had set aside


@dataclass
class Client:
    """What a client keeps from one round to the next, where the strategy has it keep something."""

    personal: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers
    residual: Vector | None = None
    control: Vector | None = None


@dataclass
class Returned:
    difference: Vector
    buffers: dict[str, Tensor]
    num_samples: int
    num_steps: int
    unit_steps: float
    num_trained: int
    loss_sum: float
    loss_count: float
    control_change: Vector | None = None
    tested: tuple[float, float] | None = None  # shares that were right, before and after training


class PlainRounds:
    """A server and its clients."""

    def __init__(self, choices: Choices, job: Job) -> None:
        self.choices, self.job = choices, job
        self.components = assemble(job, Team())
        self.model = self.components.model
        self.settings: FederatedSettings = settings_of(job)
        self.source = self.components.splits.train
        self.partition = partition_of(self.components)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.personal = [name for name in trained if self.settings.is_personal(name)]
        self.shared = [name for name in trained if name not in self.personal]
        saved = self.model.state_dict()
        self.buffers = [name for name, _ in self.model.named_buffers() if name in saved]
        self.shared_buffers = [name for name in self.buffers if not self.settings.is_personal(name)]
        self.personal_buffers = [name for name in self.buffers if self.settings.is_personal(name)]
        self.algorithm = make_algorithm(self.settings.use, job.python_path)
        self.clients = {number: Client() for number in range(self.partition.num_clients)}
        self.control = torch.zeros_like(self.flat(self.model))
        self.outer_state: dict[str, Vector] = {}

    def run(self) -> list[PlainRound]:
        """Train; return the rounds."""
        settings, partition = self.settings, self.partition
        schedule = Schedule(
            settings, self.algorithm, self.job.seed, partition.sizes.tolist(), self.job.training.batch_size
        )
        sent = [(self.state(), self.control)]
        rounds = []
        for one in schedule.rounds():
            returned, staleness = [], []
            for task in one.tasks:
                update = self.train(task, *sent[task.base])
                if update.num_steps and math.isfinite(float(update.difference.sum())):
                    returned.append(update)
                    staleness.append(one.number - task.base)
            if one.tasks and not returned:
                raise NobodyCountsError
            self.load(sent[one.number][0])
            self.finish(one.number, returned, staleness)
            sent.append((self.state(), self.control))
            count = sum(update.loss_count for update in returned)
            rounds.append(
                PlainRound(
                    loss=sum(update.loss_sum for update in returned) / count if count else None,
                    num_took_part=len(returned),
                    num_trained=sum(update.num_trained for update in returned),
                    shared=self.flat(self.model).clone(),
                    buffers={name: dict(self.model.named_buffers())[name].clone() for name in self.shared_buffers},
                    test_loss=self.test_loss(),
                    measured=measure_clients([update.tested for update in returned if update.tested is not None]),
                )
            )
        return rounds

    # A client

    def train(self, task: Task, start: dict[str, Tensor], control: Vector) -> Returned:
        settings, training = self.settings, self.job.training
        name, kept = self.partition.name(task.client), self.clients[task.client]
        model = self.model
        self.load({**start, **kept.personal})
        model.train()
        indices, aside = split_samples(self.partition.of(task.client), settings.client_test, self.job.seed, name)
        place = (self.job.seed, "client", name, "round", task.base)
        optimizer = self.make_optimizer(model, task.base)
        begin, use, before = self.flat(model), settings.use, self.share_right(aside)
        own = kept.control if kept.control is not None else torch.zeros_like(begin)
        returned = Returned(begin, {}, len(indices), 0, 0.0, 0, 0.0, 0.0)
        for number, batch in enumerate(self.batches(indices, place)):
            torch.manual_seed(derive_seed(*place, "step", number))
            optimizer.zero_grad(set_to_none=True)
            loss, count = self.backward(model, batch, training.accumulate)
            returned.num_trained += batch.num_samples
            if not count:
                continue
            if not math.isfinite(loss):
                returned.num_steps = 0
                return returned
            if training.clip_norm:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], training.clip_norm)
            if use.use == "fedprox":
                self.correct(model, (self.flat(model) - begin) * use.args.get("mu", 0.01))
            if use.use == "scaffold":
                self.correct(model, control - own)
            optimizer.step()
            returned.num_steps += 1
            returned.loss_sum += loss * count
            returned.loss_count += count
        if not returned.num_steps:
            return returned
        if before is not None and (later := self.share_right(aside)) is not None:
            returned.tested = (before, later)
        returned.unit_steps = self.unit_steps(optimizer, returned.num_steps)
        difference = self.flat(model) - begin
        if use.use == "scaffold":
            rate = optimizer.param_groups[0]["lr"]
            change = -control - (difference / (returned.unit_steps * rate) if rate else 0.0)
            kept.control, returned.control_change = own + change, change
        if use.use == "fednova":
            difference = difference / returned.unit_steps
        returned.difference = self.send(difference, kept, task, name)
        after = self.state()
        returned.buffers = {key: after[key] for key in self.shared_buffers}
        kept.personal = {key: after[key] for key in (*self.personal, *self.personal_buffers)}
        return returned

    def batches(self, indices: Tensor, place: tuple[int | str, ...]) -> Iterator[Batch]:
        settings, size, augment = self.settings, self.job.training.batch_size, self.job.data.augment
        most = settings.local_steps if settings.local_steps is not None else math.inf
        epochs = settings.local_epochs if settings.local_epochs is not None else 1
        num_batches = 0
        for epoch in itertools.count() if settings.local_steps is not None else range(epochs):
            generator = torch.Generator().manual_seed(derive_seed(*place, "epoch", epoch))
            order = indices[torch.randperm(len(indices), generator=generator)]
            for first in range(0, len(order), size):
                if num_batches >= most:
                    return
                num_batches += 1
                chosen = order[first : first + size]
                positions = torch.arange(first, first + len(chosen))
                if isinstance(self.source, DatasetSource):
                    batch = self.source.read(chosen, positions, derive_seed(*place, "transform", epoch))
                else:
                    batch = self.source.gather(chosen)
                if augment:
                    change = Augmentation(augment, self.source.input_shape)
                    inputs = change.apply(batch.inputs, positions, derive_seed(*place, "augment", epoch))
                    batch = Batch(inputs, batch.targets)
                yield batch

    @torch.no_grad()
    def share_right(self, indices: Tensor) -> float | None:
        """Return for which share of these samples the model has the right class; None without any."""
        if not len(indices):
            return None
        batch = self.source.gather(indices)
        self.model.eval()
        right = (self.outputs(self.model, batch).argmax(-1) == batch.targets).double().mean()
        self.model.train()
        return float(right)

    def backward(self, model: nn.Module, batch: Batch, num_parts: int) -> tuple[float, float]:
        """Add the gradient of the mean loss of the batch; return the mean, and over what."""
        parts = [part for part in batch.cut(num_parts) if part.num_samples]
        total = sum(self.count(part.targets) for part in parts)
        mean = 0.0
        for part in parts:
            count, loss = self.count(part.targets), self.loss(model, part)
            if count:
                (loss * (count / total)).backward()
                mean += float(loss.detach()) * count / total
        return mean, total

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.job.training.precision == "bf16"):
            if self.choices["nested"] == "own_loss":
                return model(**batch.inputs, labels=batch.targets)["loss"]
            return self.loss_of(self.outputs(model, batch), batch.targets)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        match self.choices["nested"]:
            case "names" | "own_loss":
                return model(**batch.inputs)["logits"]
            case "tuple":
                return model(*batch.inputs)[1]
        return model(batch.inputs)

    def loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        kind = self.choices["loss"]
        if kind == "cross_entropy":
            smoothing = self.choices["loss_settings"].get("label_smoothing", 0.0)
            flat = outputs.reshape(-1, outputs.shape[-1])
            ignored = self.choices["ignored_label"]
            return F.cross_entropy(flat, targets.reshape(-1), ignore_index=ignored, label_smoothing=smoothing)
        if kind == "differences.parts:class_weighted":
            return own_parts.class_weighted(outputs, targets)
        flat, numbers = outputs.squeeze(-1), targets.to(outputs.dtype)
        losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "mse": F.mse_loss,
            "l1": F.l1_loss,
            "torch.nn:SmoothL1Loss": F.smooth_l1_loss,
            "differences.parts:log_cosh": own_parts.log_cosh,
            "binary_cross_entropy": F.binary_cross_entropy_with_logits,
        }
        return losses[kind](flat, numbers)

    def count(self, targets: Tensor) -> float:
        if self.choices["loss"] == "differences.parts:class_weighted":
            return float((targets + 1).sum())
        if targets.is_floating_point():
            return float(len(targets))
        return float((targets != self.choices["ignored_label"]).sum())

    def correct(self, model: nn.Module, correction: Vector) -> None:
        """Add to the gradients. A parameter that has none gets one only where there is something to correct."""
        start = 0
        parameters = dict(model.named_parameters())
        for name in self.shared:
            parameter = parameters[name]
            piece = correction[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is not None:
                parameter.grad += piece
            elif bool(piece.any()):
                parameter.grad = piece.clone()

    def make_optimizer(self, model: nn.Module, number: int) -> torch.optim.Optimizer:
        """Return what this round begins with: nothing is left over from another round."""
        table = dict(self.choices["optimizer"])
        use, groups = table.pop("use"), table.pop("groups", [])
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if ":" in use:
            optimizer = getattr(own_parts, use.partition(":")[2])([p for _, p in trained], **table)
        else:
            kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
            matched = [p for name, p in trained if groups and groups[0]["match"] in name]
            rest = [p for name, p in trained if not (groups and groups[0]["match"] in name)]
            given: list[Any] = [{"params": rest}] if rest else []
            if matched:
                given.append({"params": matched, "lr": groups[0]["lr"]})
            optimizer = kinds[use](given, **table)
        self.set_rate(optimizer, number)
        return optimizer

    def set_rate(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Set the rate of a round: rounds are the steps of schedules, and their epochs."""
        table = {key: value for key, value in self.choices["schedule"].items() if key != "per"}
        use = table.pop("use")
        if hasattr(torch.optim.lr_scheduler, use):
            scheduler = self.make_scheduler(optimizer, use, table)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            for _ in range(number):
                scheduler.step()
            return
        total, warmup = self.settings.rounds, table.get("warmup_steps", 0)
        length = max(1, total - warmup)

        def factor(at: int) -> float:
            if at < warmup:
                return factor(warmup) * (at + 1) / warmup
            done = min(1.0, (at - warmup) / length)
            match use:
                case "constant":
                    return 1.0
                case "cosine":
                    final = table.get("final", 0.0)
                    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
                case "linear":
                    return 1 - done * (1 - table.get("final", 0.0))
                case "step":
                    return float(table["factor"] ** (at // table["every_steps"]))
            return own_parts.sawtooth(**table)(at)

        for group in optimizer.param_groups:
            group["lr"] *= factor(number)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, use: str, table: dict[str, Any]) -> Any:
        kinds = torch.optim.lr_scheduler
        if use == "SequentialLR":
            inner = [
                getattr(kinds, one["use"])(optimizer, **{key: value for key, value in one.items() if key != "use"})
                for one in table["schedulers"]
            ]
            return kinds.SequentialLR(optimizer, inner, table["milestones"])
        if use == "OneCycleLR":
            table = {**table, "total_steps": self.settings.rounds}
        return getattr(kinds, use)(optimizer, **table)

    @staticmethod
    def unit_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
        """Return how far torch's SGD moves at a rate of 1 with gradients of 1."""
        group = optimizer.param_groups[0]
        number = torch.zeros((), dtype=torch.float64, requires_grad=True)
        kept = {key: group[key] for key in ("momentum", "dampening", "nesterov") if group.get(key)}
        walking = torch.optim.SGD([number], lr=1.0, **kept)
        for _ in range(num_steps):
            number.grad = torch.ones_like(number)
            walking.step()
        return -float(number.detach())

    def send(self, difference: Vector, kept: Client, task: Task, name: str) -> Vector:
        privacy, compress = self.settings.parts.privacy, self.settings.parts.compress
        if privacy is not None:
            difference = bounded(difference, privacy.clip_norm)
        if compress.use == "none":
            return difference
        meant = difference if kept.residual is None else difference + kept.residual
        codec = compression(compress, self.model, self.shared, difference.dtype)
        sent = codec.decode(codec.encode(meant.clone())).clone()
        kept.residual = meant - sent
        return sent

    # The server

    @torch.no_grad()
    def finish(self, number: int, returned: list[Returned], staleness: list[int]) -> None:
        settings, parts = self.settings, self.settings.parts
        if not returned and parts.privacy is None:
            return
        samples = [min(update.num_samples, settings.most_samples or update.num_samples) * 1.0 for update in returned]
        bound = parts.privacy.clip_norm if parts.privacy is not None else settings.max_norm
        differences = [bounded(update.difference, bound or math.inf).double() for update in returned]
        weights = [1.0 if settings.weights == "equal" or parts.privacy else count for count in samples]
        if self.algorithm.discount is not None:
            exponent = settings.use.args.get("exponent", 0.5)
            weights = [weight / (1 + late) ** exponent for weight, late in zip(weights, staleness, strict=True)]
        if parts.robust is not None:
            mean = robust_mean(parts.robust, torch.stack(differences))
        else:
            divisor = sum(weights)
            zero = torch.zeros_like(self.control, dtype=torch.float64)
            total = sum((w * d for w, d in zip(weights, differences, strict=True)), zero)
            if parts.privacy is not None:
                asked = settings.num_asked(self.partition.num_clients)
                divisor = asked if settings.sampling == "fixed" else settings.fraction * self.partition.num_clients
                noise = normals(len(total), self.job.seed, "privacy", number)
                total = total + torch.from_numpy(noise) * parts.privacy.noise * parts.privacy.clip_norm
            mean = total / divisor
        if settings.use.use == "fednova":
            mean = mean * sum(w * u.unit_steps for w, u in zip(weights, returned, strict=True)) / sum(weights)
        if settings.use.use == "scaffold":
            for update in returned:
                assert update.control_change is not None
                self.control = self.control + update.control_change / self.partition.num_clients
        self.outer_step(mean.to(self.control.dtype))
        if parts.privacy is None:
            self.average_buffers(returned, samples)

    def outer_step(self, mean: Vector) -> None:
        use = self.settings.use
        here, args = self.flat(self.model).clone(), use.args
        state = self.outer_state
        if use.use in ("fedadam", "fedyogi", "fedadagrad"):
            beta1 = args.get("beta1", 0.0 if use.use == "fedadagrad" else 0.9)
            beta2, tau = args.get("beta2", 0.99), args.get("tau", 1e-3)
            first = beta1 * state.get("first", torch.zeros_like(here)) + (1 - beta1) * mean
            second = state.get("second", torch.full_like(here, tau**2))
            second = {
                "fedadam": beta2 * second + (1 - beta2) * mean**2,
                "fedyogi": second - (1 - beta2) * mean**2 * torch.sign(second - mean**2),
                "fedadagrad": second + mean**2,
            }[use.use]
            state["first"], state["second"] = first, second
            here = here + args.get("server_lr", 0.1) * first / (second.sqrt() + tau)
        elif use.use == "fedavgm":
            momentum, rate = args.get("momentum", 0.9), args.get("server_lr", 1.0)
            state["velocity"] = momentum * state["velocity"] + mean if "velocity" in state else mean
            here = here + rate * (mean + momentum * state["velocity"] if args.get("nesterov") else state["velocity"])
        else:
            here = here + args.get("server_lr", 1.0) * mean
        start, parameters = 0, dict(self.model.named_parameters())
        for name in self.shared:
            parameter = parameters[name]
            parameter.copy_(here[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def average_buffers(self, returned: list[Returned], samples: list[float]) -> None:
        buffers = dict(self.model.named_buffers())
        for name in self.shared_buffers:
            values = [update.buffers[name].double() * count for update, count in zip(returned, samples, strict=True)]
            mean = sum(values[1:], values[0]) / sum(samples)
            buffers[name].copy_(mean if buffers[name].is_floating_point() else mean.round())

    @torch.no_grad()
    def test_loss(self) -> float | None:
        test = self.components.splits.test
        if test is None or test.num_samples is None:
            return None
        batch = test.gather(torch.arange(test.num_samples))
        if not (count := self.count(batch.targets)):
            return None
        self.model.eval()
        loss = float(self.loss(self.model, batch))
        self.model.train()
        return loss if count else None

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """One model in place: a copy would have no hooks."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(state[name])

    def flat(self, model: nn.Module) -> Vector:
        parameters = dict(model.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.shared])


def measure_clients(shares: list[tuple[float, float]]) -> dict[str, float]:
    """Return the mean share of right classes, that of the worst tenth of the clients, and what training gained."""
    if not shares:
        return {}
    before, after = sorted(one for one, _ in shares), [other for _, other in shares]
    worst = before[: math.ceil(len(before) / 10)]
    mean = sum(before) / len(before)
    gain = sum(after) / len(after) - mean
    return {"client_accuracy": mean, "worst_decile_accuracy": sum(worst) / len(worst), "personal_gain": gain}


def compression(settings: CompressionSettings, model: nn.Module, names: list[str], dtype: torch.dtype) -> Any:
    parameters = dict(model.named_parameters())
    return settings.feedback([tuple(parameters[name].shape) for name in names], dtype).codec


def bounded(vector: Vector, most: float) -> Vector:
    norm = float(vector.double().norm())
    return vector * (most / norm) if norm > most else vector
