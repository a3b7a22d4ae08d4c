"""From a job to the parts one worker trains with: data, model, computation, strategy.

Everything a person can get wrong in a job is found here, before the first step.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from cordee.cluster import Team
from cordee.cluster.engines import is_of_this_host
from cordee.compute import (
    LR_SCALES,
    Computation,
    OptimizerRecipe,
    choose_device,
    make_loss,
    make_optimizer_recipe,
    make_schedule,
    share_threads,
)
from cordee.compute.compiling import Compiler
from cordee.compute.devices import LARGEST_KEPT, LARGEST_KEPT_BESIDE_SLICES, keep_freed
from cordee.compute.gpus import seed_generators, use_device
from cordee.compute.job_metrics import NamedMetric
from cordee.compute.loss_scale import LossScale
from cordee.compute.parameter_groups import freeze_parameters
from cordee.core import Batch, Job
from cordee.core.errors import CordeeError, JobError, ModelError
from cordee.core.file_memory import give_back
from cordee.core.references import bind, resolve
from cordee.core.seeds import derive_seed
from cordee.core.shards import Shards, shard_part, share_shards
from cordee.core.tree import shape_leaves
from cordee.data import ArraySource, GrowingSource, Loader, Place, Source, Splits, load_data
from cordee.data.augment import Augmentation
from cordee.data.online import OnlineStream
from cordee.models import BUILTIN_MODELS
from cordee.models.recomputation import recompute_blocks
from cordee.monitoring.events import SCHEMA_VERSION, RunStarted
from cordee.strategies.choice import entry_of, make_strategy
from cordee.strategies.strategy import Requirements, Strategy, TrainsAlone
from cordee.strategies.table import elastic_teams, quote_names, strategies_where
from cordee.training.building import Built, build_in_files, compute_in_files
from cordee.training.callbacks import NamedCallback, find_callbacks
from cordee.training.evaluation_checks import check_metrics, check_stop_settings
from cordee.training.fitting import example_of, fit, model_name, require_targets
from cordee.training.model_checks import check_model
from cordee.training.progress import Progress
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
    metrics: tuple[NamedMetric, ...] = ()  # of [metrics]
    callbacks: tuple[NamedCallback, ...] = ()  # of [callbacks]
    lower_is_better: frozenset[str] = frozenset({"loss"})  # of the metrics that settings name
    warnings: tuple[str, ...] = ()  # what the user should know before the first step

    def setup(self) -> None:
        """Hand the model over to the strategy. Collective: the team's group must be there."""
        use_device(self.computation.device)
        if self.team.num_workers > 1:
            require_one_kind(self.team.gather(self.computation.device.type == "cuda"), self.team.numbers)
        self.strategy.setup(self.model, self.recipe, self.team, self.example)

    @property
    def is_elastic(self) -> bool:
        """Whether every worker has all that is needed to continue."""
        return entry_of(self.job).is_elastic

    @property
    def is_whole(self) -> bool:
        """Whether every worker has the whole model at any time."""
        return not entry_of(self.job).splits_model

    def is_done(self, progress: Progress) -> bool:
        """Whether all steps and epochs of the job are taken."""
        total, epochs = self.total_steps, self.job.training.num_epochs
        if total is not None and progress.step >= total:
            return self.job.training.steps is not None or progress.epoch >= (epochs or 0)
        return epochs is not None and progress.epoch >= epochs

    def seed_step(self, step: int) -> None:
        """Seed torch's generators for a step of this worker. Local."""
        # In reproducible mode shards derive their own streams from this one (strategies/shards.py).
        place = () if self.job.training.reproducible else (self.shards.first,)
        seed = derive_seed(self.job.seed, "step", step, *place)
        seed_generators(seed, self.computation.device)

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
        return _test_loader(self.job, ArraySource(*samples), self.test_shards)

    @property
    def is_online(self) -> bool:
        """Whether the training set grows."""
        return isinstance(self.splits.train, GrowingSource)

    @property
    def example(self) -> Batch:
        """A batch of the training set, of two samples at most."""
        return example_of(self.splits)

    def in_team(self, team: Team) -> Components:
        """Return these parts for a member of another team: other shares and threads, maybe another rate. Local."""
        strategy = msgspec.structs.replace(self.job.strategy, workers=team.num_workers)
        job = msgspec.structs.replace(self.job, strategy=strategy)
        needs = self.strategy.requirements(job)
        shards, test_shards = _shards(job, needs, team)
        _expect_sizes(job, self.computation, shards)
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


def require_one_kind(has_gpu: Sequence[int], numbers: Sequence[int]) -> None:
    """Raise JobError where some workers compute on GPUs and some do not: what they exchange would not meet."""
    if len(set(has_gpu)) > 1:
        on_cpu = [f"worker {number}" for number, gpu in zip(numbers, has_gpu, strict=True) if not gpu]
        raise JobError(
            f"{', '.join(on_cpu)} found no GPU, and the other workers compute on theirs: set training.device = 'cpu', "
            "or start workers only where GPUs are"
        )


def bare_strategy(job: Job) -> Strategy:
    """Return the job's strategy without its parts: enough to ask what it requires. Raises JobError."""
    computation = Computation(
        loss=make_loss(job.loss, job.python_path),
        device=choose_device(job.training.device, 0),
        precision=job.training.plain().precision,
        counts_classes=False,
    )
    return make_strategy(job, computation)


def assemble(job: Job, team: Team) -> Components:
    """Build all parts of `job` for one member of `team`. Raises a CordeeError that says what to change. Local.

    Kernels that are "auto" are the plain ones: who starts a run chooses them for all members (planner/kernels.py).
    """
    job = msgspec.structs.replace(job, training=job.training.plain())
    device = choose_device(job.training.device, team.local_rank)
    num_threads = share_threads(*_threads(job, team))
    if job.training.reproducible and device.type != "cpu":
        raise JobError("training.reproducible = true works on CPUs in this version: set training.device = 'cpu'")
    if job.training.precision == "fp16" and device.type != "cuda":
        raise JobError(
            "training.precision = 'fp16' is for GPUs, and this job computes on the CPU: set "
            "training.precision = 'bf16' or 'fp32'"
        )
    loss = make_loss(job.loss, job.python_path)
    splits = load_data(
        job.data,
        seed=job.seed,
        python_path=job.python_path,
        ignored=loss.ignored,
        counts_classes=not loss.takes_outputs,
    )
    check_stop_settings(job, splits)
    computation = Computation(
        loss=loss,
        device=device,
        precision=job.training.precision,
        counts_classes=splits.num_classes is not None,
        scale=LossScale() if job.training.precision == "fp16" else None,
        memory_format=job.training.memory_format,
        compiler=Compiler() if job.training.compile else None,
    )
    strategy = make_strategy(job, computation)
    needs = strategy.requirements(job)
    has_slices = entry_of(job).mesh(job.strategy.workers, job.strategy.settings).sharded > 1
    keep_freed(LARGEST_KEPT_BESIDE_SLICES if has_slices else LARGEST_KEPT)  # what loading took need not be kept
    _check_autoscale(job)
    check_balance(job, splits)
    _check_address(job)
    _check_lr_scale(job, needs)
    if isinstance(strategy, TrainsAlone) and isinstance(splits.train, GrowingSource):
        raise JobError(
            f"strategy '{job.strategy.name}' takes steps without a word to the other workers, and data that grows is "
            f"taken together, batch by batch: use {elastic_teams(exchanging=True)}"
        )
    shards, test_shards = _shards(job, needs, team)
    _expect_sizes(job, computation, shards)
    train, test = _loaders(job, splits, shards, test_shards)
    total_steps = _total_steps(job, train) if needs.num_steps is None else needs.num_steps
    require_targets(job, splits, loss)
    # Of a model that is split nobody needs the whole in memory, also not to try it; on a GPU it is there once.
    is_split = entry_of(job).splits_model and device.type == "cpu"
    build = partial(build_model, job, splits)
    built = build_in_files(build) if is_split else Built(build())
    model = built.model
    freeze_parameters(model, job.training.freeze)
    if job.training.recompute and entry_of(job).mesh(job.strategy.workers, job.strategy.settings).pipeline == 1:
        recompute_blocks(model)  # stages of a pipeline are computed again as a whole
    computation, tried, warning = compute_in_files(is_split, partial(fit, job, splits, model, computation, needs))
    strategy = make_strategy(job, computation)  # with what is known of the model now
    strategy.requirements(job)
    measured = check_metrics(job, splits, computation.loss, *tried)
    recipe = make_optimizer_recipe(
        job.optimizer,
        make_schedule(
            job.schedule,
            total_steps,
            job.python_path,
            num_batches=train.num_batches if needs.num_steps is None else 1,  # a round is a step, and an epoch
            better=lambda metric: "lower" if metric in measured.lower_is_better else "higher",
        ),
        lr_scale=job.training.lr_scale,
        num_shares=needs.num_data_shards,
        python_path=job.python_path,
        average_decay=job.training.ema,
    ).fit(model)  # what it refuses is said now; it holds no memory before the first step
    strategy.check(model, recipe, example_of(splits))  # which may trace the model: not under a mode
    give_back(model.parameters())
    of_model = compute_in_files(is_split, partial(check_model, job, model, computation, example_of(splits), needs))
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
        metrics=measured.metrics,
        callbacks=find_callbacks(job.callbacks, job.python_path),
        lower_is_better=measured.lower_is_better,
        warnings=(*splits.warnings, *filter(None, [built.warning, warning]), *of_model, *measured.warnings),
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
    if not is_of_this_host(job.cluster.engine):
        return  # it is where the engine's own agents reach the run
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
    asked = job.training.num_threads
    if job.training.reproducible:  # kernels add in another order with another number of threads
        return asked or 1, 1
    return team.threads or asked, team.num_local_workers


def _shards(job: Job, needs: Requirements, team: Team) -> tuple[Shards, Shards]:
    """Return this worker's shards of a training batch and of a test batch."""
    own, num_shards = needs.data_shard(team.worker_index), job.training.num_shards
    # The test set is shared by those who measure it: all members, or the evaluator of a dispatched run alone.
    test = share_shards(num_shards or team.num_workers, team.worker_index, team.num_workers)
    if num_shards is None:
        return Shards(own, own + 1, needs.num_data_shards), test
    return share_shards(num_shards, own, needs.num_data_shards), test


def _expect_sizes(job: Job, computation: Computation, shards: Shards) -> None:
    """Tell what compiles which sizes of batches this worker computes."""
    if computation.compiler is None:
        return
    held = [shard_part(job.training.batch_size, shard, shards.total) for shard in range(shards.first, shards.stop)]
    computation.compiler.expect(sum(stop - start for start, stop in held), job.training.accumulate)


def build_model(job: Job, splits: Splits) -> nn.Module:
    """Return the job's model, initialised from its seed. Input shape and classes follow from the data."""
    if isinstance(job.model.use, nn.Module):
        if job.model.args:
            raise JobError("model: a module that is already built takes no settings; give its class instead")
        return job.model.use
    target = resolve("model", job.model.use, BUILTIN_MODELS, python_path=job.python_path)
    shape = splits.input_shape
    if target in BUILTIN_MODELS.values() and shape_leaves(shape) != [shape]:
        raise ModelError(
            f"model {model_name(job)} takes one tensor, and the inputs of data {splits.name!r} have shapes {shape}: "
            "choose one of them (data.inputs with a collate that returns it), or a model of your own"
        )
    provided: dict[str, Any] = {"input_shape": splits.input_shape, "num_classes": splits.num_classes}
    if splits.num_classes is None:
        provided["num_classes"] = 1  # one number to predict
    build = bind("model", target, job.model.args, provided)
    try:
        with _seeded(derive_seed(job.seed, "model")), _first_names_of_keras():
            model = build()
    except CordeeError:
        raise
    except Exception as error:
        raise ModelError(f"building the model {model_name(job)} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model {model_name(job)} is a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators for good, and inside those of Python and NumPy: initial weights of Keras are Python's."""
    torch.manual_seed(seed)  # a layer that finds its size from the data draws later
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def _first_names_of_keras() -> Iterator[None]:
    """Inside, Keras counts its names from the beginning: parameters have the same names however often it is built."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is None:
        yield
        return
    kept = state.get_global_attribute(_KERAS_NAMES)
    state.set_global_attribute(_KERAS_NAMES, defaultdict(int))
    try:
        yield
    finally:
        state.set_global_attribute(_KERAS_NAMES, kept)


_KERAS_NAMES = "object_name_uids"  # how often a name was given


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
        in_pieces=job.training.reproducible,
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
        in_pieces=job.training.reproducible,
    )


def _total_steps(job: Job, train: Loader) -> int | None:
    if job.training.steps is not None:
        return job.training.steps
    assert job.training.num_epochs is not None
    return None if train.num_batches is None else job.training.num_epochs * train.num_batches
