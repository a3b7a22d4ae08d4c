"""From a job to the parts one worker trains with: data, model, computation, strategy.

Everything a person can get wrong in a job is found here, before the first step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from cordee.cluster import Team
from cordee.compute import (
    LR_SCALES,
    Computation,
    LossFunction,
    OptimizerRecipe,
    choose_device,
    make_loss,
    make_optimizer_recipe,
    make_schedule,
    share_threads,
)
from cordee.compute.devices import keep_freed
from cordee.compute.losses import ADVICE, find_state, find_trained, find_uneven_parts
from cordee.core import Batch, Job
from cordee.core.errors import CordeeError, JobError, ModelError
from cordee.core.references import bind, name_of, resolve
from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards, share_shards
from cordee.data import ArraySource, GrowingSource, Loader, Place, Source, Splits, load_data
from cordee.data.augment import Augmentation
from cordee.data.datasets import IterableSource
from cordee.data.online import OnlineStream
from cordee.models import BUILTIN_MODELS
from cordee.models.effects import find_kept
from cordee.monitoring.events import SCHEMA_VERSION, RunStarted
from cordee.strategies.choice import entry_of, make_strategy
from cordee.strategies.strategy import Requirements, Strategy
from cordee.strategies.table import elastic_teams, quote_names, strategies_where
from cordee.training.shares import check_balance
from cordee.version import __version__


@dataclass(frozen=True)
class Components:
    """The parts of one worker, built and fitted together."""

    job: Job
    team: Team
    splits: Splits
    train: Loader
    test: Loader | None
    computation: Computation
    model: nn.Module
    recipe: OptimizerRecipe
    strategy: Strategy
    total_steps: int | None  # None where the data has no length and the job counts epochs
    num_parameters: int  # frozen ones included
    num_trainable: int
    num_threads: int
    shards: Shards  # of each batch, that this worker computes
    test_shards: Shards
    warnings: tuple[str, ...] = ()  # what the user should know before the first step

    def setup(self) -> None:
        """Hand the model over to the strategy. Collective: the team's group must be there."""
        self.strategy.setup(self.model, self.recipe, self.team, self.example)

    @property
    def is_elastic(self) -> bool:
        """Whether every worker has all that is needed to continue."""
        return entry_of(self.job).is_elastic

    def open_stream(self, place: Place) -> OnlineStream:
        """Return this worker's batches of a growing training set, from `place` on."""
        job, source = self.job, self.splits.train
        assert isinstance(source, GrowingSource)
        return OnlineStream(
            source,
            place,
            batch_size=job.training.batch_size,
            holdout=job.data.holdout,
            shards=self.shards,
            augmentation=Augmentation(job.data.augment, source.input_shape) if job.data.augment else None,
            augment_seed=derive_seed(job.seed, "augment", 0),
        )

    def test_on(self, samples: Batch) -> Loader:
        """Return this worker's batches of samples to be tested on."""
        return _test_loader(self.job, ArraySource(samples.inputs, samples.targets), self.test_shards)

    @property
    def is_online(self) -> bool:
        """Whether the training set grows."""
        return isinstance(self.splits.train, GrowingSource)

    @property
    def example(self) -> Batch:
        """A batch of the training set, of two samples at most."""
        return _example(self.splits)

    def in_team(self, team: Team) -> Components:
        """Return these parts for a member of another team: other shares and threads, maybe another rate. Local."""
        strategy = msgspec.structs.replace(self.job.strategy, workers=team.num_workers)
        job = msgspec.structs.replace(self.job, strategy=strategy)
        needs = self.strategy.requirements(job)
        shards, test_shards = _shards(job, needs, team)
        train, test = _loaders(job, self.splits, shards, test_shards)
        return replace(
            self,
            team=team,
            train=train,
            test=test,
            recipe=replace(self.recipe, lr_factor=LR_SCALES[job.training.lr_scale](needs.num_data_shards)),
            num_threads=share_threads(*_threads(job, team)),
            shards=shards,
            test_shards=test_shards,
        )

    def describe(self, run_dir: Path | str = "", start_step: int = 0) -> RunStarted:
        """Return the event that tells of the start of a run of these parts, in `run_dir` after `start_step`."""
        job, splits = self.job, self.splits
        return RunStarted(
            run_dir=str(run_dir),
            start_step=start_step,
            name=job.name,
            strategy=job.strategy.name,
            workers=self.team.num_workers,
            device=str(self.computation.device),
            threads=self.num_threads,
            model=job.to_dict()["model"]["use"],
            data=splits.name,
            parameters=self.num_parameters,
            trainable_parameters=self.num_trainable,
            train_samples=splits.train.num_samples,
            test_samples=splits.test.num_samples if splits.test else None,
            classes=splits.class_names,
            batch_size=job.training.batch_size,
            total_steps=self.total_steps,
            stop_steps=job.stop.steps,
            epochs=None if self.is_online else job.training.num_epochs,
            schema_version=SCHEMA_VERSION,
            cordee_version=__version__,
            torch_version=str(torch.__version__),
        )


def bare_strategy(job: Job) -> Strategy:
    """Return the job's strategy without its parts: enough to ask what it requires. Raises JobError."""
    computation = Computation(
        loss=make_loss(job.loss, job.python_path),
        device=choose_device(job.training.device, 0),
        precision=job.training.precision,
        counts_classes=False,
    )
    return make_strategy(job, computation)


def assemble(job: Job, team: Team) -> Components:
    """Build all parts of `job` for one member of `team`. Raises a CordeeError that says what to change. Local."""
    device = choose_device(job.training.device, team.local_rank)
    num_threads = share_threads(*_threads(job, team))
    if job.training.reproducible and device.type != "cpu":
        raise JobError("training.reproducible = true works on CPUs in this version: set training.device = 'cpu'")
    loss = make_loss(job.loss, job.python_path)
    splits = load_data(job.data, seed=job.seed, python_path=job.python_path, ignored=loss.ignored)
    keep_freed()  # from here on: what loading took need not be kept
    _check_stop_settings(job, splits)
    computation = Computation(
        loss=loss,
        device=device,
        precision=job.training.precision,
        counts_classes=splits.num_classes is not None,
    )
    strategy = make_strategy(job, computation)
    needs = strategy.requirements(job)
    _check_autoscale(job)
    check_balance(job, splits)
    _check_address(job)
    _check_lr_scale(job, needs)
    shards, test_shards = _shards(job, needs, team)
    train, test = _loaders(job, splits, shards, test_shards)
    total_steps = _total_steps(job, train)
    recipe = make_optimizer_recipe(
        job.optimizer,
        make_schedule(job.schedule, total_steps, job.python_path),
        lr_scale=job.training.lr_scale,
        num_shares=needs.num_data_shards,
        python_path=job.python_path,
    )
    model = build_model(job, splits)
    outputs = _check_fit(job, splits, model, computation)
    warning = _check_parts(job, splits, computation.loss, outputs, needs)
    recipe.make(model.named_parameters())  # what it refuses is said now; it holds no memory before the first step
    strategy.check(model, recipe, _example(splits))
    kept = _check_kept(job, model, _example(splits))
    return Components(
        job=job,
        team=team,
        splits=splits,
        train=train,
        test=test,
        computation=computation,
        model=model,
        recipe=recipe,
        strategy=strategy,
        total_steps=total_steps,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        num_threads=num_threads,
        shards=shards,
        test_shards=test_shards,
        warnings=splits.warnings + tuple(filter(None, (warning, kept))),
    )


def _check_autoscale(job: Job) -> None:
    cluster, workers = job.cluster, job.strategy.workers
    if not cluster.autoscale:
        return
    if not entry_of(job).is_elastic or workers < 2:
        raise JobError(
            f"cluster.autoscale = true changes the number of workers, which strategy '{job.strategy.name}' with "
            f"{workers} cannot: use {elastic_teams()} and begin with at least 2"
        )
    if cluster.max_workers is not None and workers > cluster.max_workers:
        raise JobError(f"strategy.workers = {workers} is more than cluster.max_workers = {cluster.max_workers}")


def _check_address(job: Job) -> None:
    entry = entry_of(job)
    if not job.cluster.address or entry.run_kind == "dispatched":
        return
    if not entry.is_elastic or job.strategy.workers < 2:
        dispatched = quote_names(strategies_where(lambda other: other.run_kind == "dispatched"))
        raise JobError(
            f"cluster.address = {job.cluster.address!r} lets workers of other hosts join, which strategy "
            f"'{job.strategy.name}' with {job.strategy.workers} worker{'s' * (job.strategy.workers > 1)} cannot have: "
            f"use {elastic_teams()} and begin with at least 2, or {dispatched}"
        )


def _check_lr_scale(job: Job, needs: Requirements) -> None:
    scale = job.training.lr_scale
    if scale != "none" and needs.num_workers > 1 and needs.num_data_shards == 1:
        raise JobError(
            f"training.lr_scale = '{scale}' follows the number of shares a batch is cut into, and the workers of "
            f"strategy '{job.strategy.name}' compute every batch as a whole: remove it, and set optimizer.lr itself"
        )


def _threads(job: Job, team: Team) -> tuple[int, int]:
    """Return the threads that are set, and among how many workers the cores are shared where none are."""
    if job.training.reproducible:  # kernels add in another order with another number of threads
        return job.training.threads or 1, 1
    return team.threads or job.training.threads, team.num_local_workers


def _shards(job: Job, needs: Requirements, team: Team) -> tuple[Shards, Shards]:
    """Return this worker's shards of a training batch and of a test batch."""
    own, num_shards = needs.data_shard(team.worker_index), job.training.num_shards
    # The test set is shared by those who measure it: all members, or the evaluator of a dispatched run alone.
    test = share_shards(num_shards or team.num_workers, team.worker_index, team.num_workers)
    if num_shards is None:
        return Shards(own, own + 1, needs.num_data_shards), test
    return share_shards(num_shards, own, needs.num_data_shards), test


def build_model(job: Job, splits: Splits) -> nn.Module:
    """Return the job's model, initialised from its seed. Input shape and classes follow from the data."""
    if isinstance(job.model.use, nn.Module):
        if job.model.args:
            raise JobError("model: a module that is already built takes no settings; give its class instead")
        return job.model.use
    target = resolve("model", job.model.use, BUILTIN_MODELS, python_path=job.python_path)
    provided: dict[str, Any] = {"input_shape": splits.input_shape, "num_classes": splits.num_classes}
    if splits.num_classes is None:
        provided["num_classes"] = 1  # one number to predict
    build = bind("model", target, job.model.args, provided)
    torch.manual_seed(derive_seed(job.seed, "model"))
    try:
        model = build()
    except CordeeError:
        raise
    except Exception as error:
        raise ModelError(f"building the model {_name(job)} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model {_name(job)} is a {type(model).__name__}, not a torch.nn.Module")
    return model


def _loaders(job: Job, splits: Splits, shards: Shards, test_shards: Shards) -> tuple[Loader, Loader | None]:
    train = Loader(
        splits.train,
        batch_size=job.training.batch_size,
        seed=job.seed,
        shuffle=True,
        shard=shards.first,
        num_shards=shards.total,
        num_held=shards.num_held,
        augment=job.data.augment,
        prefetch=job.data.prefetch,
        processes=job.data.processes,
    )
    return train, None if splits.test is None else _test_loader(job, splits.test, test_shards)


def _test_loader(job: Job, source: Source, shards: Shards) -> Loader:
    size = job.evaluation.batch_size
    if source.num_samples is not None:
        size = min(size, source.num_samples)
    return Loader(
        source,
        batch_size=size,
        seed=job.seed,
        shuffle=False,
        shard=shards.first,
        num_shards=shards.total,
        num_held=shards.num_held,
        prefetch=job.data.prefetch,
    )


def _total_steps(job: Job, train: Loader) -> int | None:
    if job.training.steps is not None:
        return job.training.steps
    assert job.training.num_epochs is not None
    return None if train.num_batches is None else job.training.num_epochs * train.num_batches


def _check_stop_settings(job: Job, splits: Splits) -> None:
    wants_test = [key for key in ("accuracy", "loss", "patience") if getattr(job.stop, key) is not None]
    is_online = isinstance(splits.train, GrowingSource)
    if is_online:
        _check_online(job, splits, [f"stop.{key}" for key in wants_test])
        return
    if job.stop.idle is not None:
        raise JobError(f"stop.idle = {job.stop.idle!r} is for data that grows, and {splits.name!r} does not: remove it")
    if wants_test and splits.test is None:
        raise JobError(
            f"stop.{wants_test[0]} is measured on a test set, and data {splits.name!r} has none: "
            "set data.test_fraction = 0.1, say, to set a part of the training set aside"
        )
    if job.checkpoint.keep_best and splits.test is None:
        raise JobError(
            f"checkpoint.keep_best = true needs a test set, and data {splits.name!r} has none: "
            "set data.test_fraction = 0.1, say, or remove the setting"
        )
    if job.stop.accuracy is not None and splits.num_classes is None:
        raise JobError("stop.accuracy needs classes, and the targets are numbers: use stop.loss instead")


def _check_online(job: Job, splits: Splits, wants_test: list[str]) -> None:
    """Raise JobError for settings that have no meaning where the training set has no end."""
    if job.training.epochs not in (None, 1):
        raise JobError(
            f"training.epochs = {job.training.epochs}, but data that grows is gone through once: set training.steps, "
            "stop.time or stop.idle, or nothing, and it trains for as long as data comes"
        )
    wants_test += ["checkpoint.keep_best"] if job.checkpoint.keep_best else []
    if wants_test and splits.test is None and not job.data.holdout:
        raise JobError(f"{wants_test[0]} is measured on a test set: set data.holdout = 0.1, say, to set samples aside")
    if wants_test and not job.evaluation.every_steps:
        raise JobError(f"{wants_test[0]} is never measured, as growing data has no epochs: set evaluation.every_steps")
    if job.stop.accuracy is not None and splits.num_classes is None:
        raise JobError("stop.accuracy needs classes, and the targets are numbers: use stop.loss instead")


def _check_fit(job: Job, splits: Splits, model: nn.Module, computation: Computation) -> torch.Tensor:
    """Try the model and the loss on two samples, so that what does not fit is said before training.

    Returns the outputs.
    """
    batch = _example(splits)
    shape = tuple(batch.inputs.shape[1:])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(batch.inputs.to(next((p.device for p in model.parameters()), "cpu")))
    except Exception as error:
        raise ModelError(
            f"the model {_name(job)} cannot compute inputs of shape {shape} from data {splits.name!r}: {error}"
        ) from error
    finally:
        model.train(was_training)
    if not isinstance(outputs, torch.Tensor):
        raise ModelError(f"the model {_name(job)} returns a {type(outputs).__name__}; it must return a tensor")
    found = tuple(outputs.shape)
    if splits.num_classes is None and batch.targets.ndim == 1 and job.loss.use == "cross_entropy":
        raise ModelError(
            f"loss.use = 'cross_entropy' compares classes, and the targets of data {splits.name!r} are numbers: "
            "set loss.use = 'mse', say"
        )
    if splits.num_classes is not None and (outputs.ndim < 2 or found[-1] < splits.num_classes):
        raise ModelError(
            f"the model {_name(job)} gives outputs of shape {found} for {len(batch.inputs)} samples, but data "
            f"{splits.name!r} has {splits.num_classes} classes: the last dimension must have at least "
            f"{splits.num_classes} values"
        )
    try:
        with warnings.catch_warnings():
            # torch only warns when (N, 1) meets (N,), and then compares every output with every target.
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            loss = computation.loss.mean(outputs, batch.targets.to(outputs.device))
    except Exception as error:
        raise ModelError(
            f"the loss cannot compare outputs of shape {found} with targets of shape "
            f"{tuple(batch.targets.shape)}: {error}"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError(f"the loss gives {kind}; it must give one number, the mean over the batch")
    return outputs


def _check_parts(
    job: Job, splits: Splits, loss: LossFunction, outputs: torch.Tensor, needs: Requirements
) -> str | None:
    """Refuse a loss whose parts do not make the whole where batches are computed in parts; else return a warning.

    The same for one that keeps something from batch to batch. One with parameters to train is refused everywhere.
    """
    if not loss.name:  # built in
        return None
    if trained := find_trained(loss):
        raise JobError(
            f"the loss {loss.name!r} has parameters to train ({', '.join(trained)}), and the optimizer only has those "
            "of the model: put them into the model, or set requires_grad_(False)"
        )
    if (kept := find_state(loss, outputs.detach(), _example(splits).targets.to(outputs.device))) is not None:
        what = f"the loss {loss.name!r} keeps {kept!r} from batch to batch, which is not saved"
        if job.strategy.workers > 1:
            raise JobError(f"{what}, and every worker would keep its own: put it into the model, as a buffer")
        return f"{what}: a resumed run begins with it as it was at the start. Put it into the model, as a buffer"
    for targets in _target_samples(splits, outputs):
        tiled = outputs.detach()[torch.arange(len(targets)) % len(outputs)]
        found = find_uneven_parts(loss, tiled, targets.to(outputs.device))
        if found is None:
            continue
        what = f"the loss {loss.name!r} of a batch is not the mean of those of its parts: {found}"
        if needs.cuts_batches or job.training.accumulate > 1:
            how = "training.accumulate" if job.training.accumulate > 1 else f"strategy '{job.strategy.name}'"
            raise JobError(f"{what}. With {how} a batch is computed in parts. {ADVICE}")
        return f"{what}; test_loss depends on evaluation.batch_size. Give the loss an attribute count if it is a mean"
    return None


def _check_kept(job: Job, model: nn.Module, example: Batch) -> str | None:
    """Refuse a model that keeps what its next pass depends on outside of buffers, where workers have copies of it.

    Alone it is a warning, as is what has no effect that can be seen.
    """
    kept = find_kept(model, example.inputs.to(next((p.device for p in model.parameters()), "cpu")))
    if kept is None or (job.strategy.workers == 1 and not kept.has_effect):
        return None
    what = f"{kept.what}, which is not saved"
    advice = "Keep it in a buffer (register_buffer)"
    if job.strategy.workers == 1:
        return f"{what}: a resumed run begins with it as it was at the start. {advice}"
    if kept.has_effect and (job.training.reproducible or not kept.is_generator):
        raise JobError(f"{what}, and every worker would have its own: {advice[0].lower()}{advice[1:]}")
    return f"{what}, and every worker has its own. {advice} if what the model computes depends on it"


def _target_samples(splits: Splits, outputs: torch.Tensor) -> list[torch.Tensor]:
    """Return targets to try a loss with: some of the data, and of all classes as far as that is not too much."""
    example = _example(splits).targets
    most = max(2, min(256, (4 << 20) // max(1, outputs[0].numel())))  # rows of outputs that are made for it
    if isinstance(splits.train, ArraySource):
        size = len(splits.train.targets)
        tried = [splits.train.targets[torch.linspace(0, size - 1, min(most, size)).long()]]
    else:
        tried = [example[torch.arange(min(most, 8)) % len(example)]]
    if splits.num_classes is not None:
        per_sample = max(1, example[0].numel())
        num_rows = max(2, min(most, -(-splits.num_classes // per_sample)))
        labels = torch.linspace(0, splits.num_classes - 1, num_rows * per_sample, dtype=torch.float64)
        tried.append(labels.round().long().view(num_rows, *example.shape[1:]))
    return tried


def _example(splits: Splits) -> Batch:
    if isinstance(splits.train, (IterableSource, GrowingSource)):
        return splits.train.example  # reading on would lose samples
    assert splits.train.num_samples is not None
    return splits.train.gather(torch.arange(min(2, splits.train.num_samples)))


def _name(job: Job) -> str:
    return repr(job.model.use if isinstance(job.model.use, str) else name_of(job.model.use))
