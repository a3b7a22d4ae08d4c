"""The sections of a job that Cordée itself reads: frozen values, checked when they are made.

Sections that name a part of the user's choice (model, loss, optimizer, schedule) are `components.Use`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from cordee.core.durations import parse_duration
from cordee.core.errors import JobError
from cordee.core.shards import DEFAULT_NUM_SHARDS


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all sections have in common."""


class _Named(msgspec.Struct, frozen=True):
    use: Any  # a built-in name, "module:callable", or a live object


class Data(_Named, frozen=True, kw_only=True):
    """Where samples come from and how they are made ready. Keys not listed are arguments of the source."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    normalize: bool = True  # scale inputs to mean 0 and deviation 1, where the source knows its statistics
    augment: tuple[Literal["crop", "flip", "color"], ...] = ()  # random changes to training images
    inputs: tuple[str, ...] | None = (
        None  # the parts of a sample that are inputs, by name; all but the target otherwise
    )
    target: str | tuple[str, ...] | None = None  # the part, or parts, of a sample that are its target, by name
    collate: Any = None  # "module:callable" or a live function that makes a batch of a list of samples
    train_limit: int | None = None  # use only the first samples of the training set
    test_limit: int | None = None  # use only the first samples of the test set
    test_fraction: float = 0.0  # set this share of the training set aside where the source has no test set
    prefetch: int = 2  # batches made ready in the background; 0 makes them when asked for
    processes: int = 0  # processes that read samples one by one, or from files; 0 reads in the training process
    online: bool = False  # an IterableDataset keeps delivering: take what is there, wait for more, never start again
    holdout: float = 0.0  # share of growing data that is set aside to be tested on
    holdout_size: int = 1000  # samples of it, the newest, that are tested on

    def __post_init__(self) -> None:
        _at_least("data", self, holdout_size=1)
        if not 0.0 <= self.holdout <= 0.5:
            raise JobError(f"data.holdout = {self.holdout} must be at least 0 and at most 0.5")
        _at_least("data", self, train_limit=1, test_limit=1, prefetch=0, processes=0)
        if not 0.0 <= self.test_fraction < 1.0:
            raise JobError(f"data.test_fraction = {self.test_fraction} must be at least 0 and below 1")


# What each setting of how kernels compute is where it is "auto" and nothing says that another is better.
PLAIN_KERNELS: dict[str, Any] = {"memory_format": "contiguous", "precision": "fp32", "compile": False, "threads": 0}


class Training(Section, frozen=True, kw_only=True):
    """How long and how to train."""

    batch_size: int = 32  # samples per optimizer step, over all workers
    epochs: int | None = None  # passes over the training set
    steps: int | None = None  # optimizer steps, instead of epochs
    reproducible: bool = False  # the same bits on any number of workers
    shards: int | None = None  # parts a batch is always cut into when reproducible; 8 where it is not set
    lr_scale: Literal["none", "linear", "sqrt"] = "none"  # how the rate follows the shares a batch is cut into
    # bf16, fp16: autocast, the weights stay in fp32; fp16 with a dynamic scale of the loss, on GPUs
    # auto: bf16 where it was measured to be faster
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    # how images lie in memory while they are computed; auto: what was measured to be faster, in runs that are long
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    # compile the passes of training with torch.compile; auto: where that was measured to pay within the run
    compile: bool | Literal["auto"] = False
    accumulate: int = 1  # parts a batch is computed in, to save memory
    clip_norm: float = 0.0  # largest norm of the whole gradient; 0 leaves it alone
    recompute: bool = False  # compute activations of blocks again in the backward pass, to save memory
    freeze: tuple[str, ...] = ()  # patterns of names of parameters that are not trained
    ema: float = 0.0  # decay of a moving average of the weights, which is then what is evaluated; 0: there is none
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs where there are any
    threads: int | Literal["auto"] = 0  # kernel threads per worker; 0 shares the cores out; auto: what is fastest

    def __post_init__(self) -> None:
        _at_least("training", self, batch_size=1, epochs=1, steps=1, accumulate=1, clip_norm=0, shards=1)
        if self.threads != "auto":
            _at_least("training", self, threads=0)
        if not 0.0 <= self.ema < 1.0:
            raise JobError(f"training.ema = {self.ema} must be at least 0 and below 1, for example 0.999")
        if self.shards is not None and not self.reproducible:
            raise JobError(f"training.shards = {self.shards} has a meaning only with training.reproducible = true")
        if self.reproducible and self.lr_scale != "none":
            raise JobError(
                f"training.lr_scale = '{self.lr_scale}' makes the rate depend on the number of workers, which "
                "training.reproducible = true rules out: set lr_scale = 'none'"
            )
        if self.reproducible and self.compile is True:
            raise JobError(
                "training.compile = true makes code that depends on the compiler of each host, which "
                "training.reproducible = true rules out: remove one of them"
            )
        if self.epochs is not None and self.steps is not None:
            raise JobError(
                f"training.epochs = {self.epochs} and training.steps = {self.steps} contradict each other: remove one "
                f"from the job; to end a job with epochs after {self.steps} steps, set stop.steps = {self.steps}"
            )
        if self.accumulate > self.batch_size:
            raise JobError(
                f"training.accumulate = {self.accumulate} cuts a batch of {self.batch_size} into empty parts: "
                "set accumulate to at most the batch size"
            )

    @property
    def automatic(self) -> tuple[str, ...]:
        """The settings of how kernels compute that are left to the planner."""
        return tuple(key for key in PLAIN_KERNELS if getattr(self, key) == "auto")

    @property
    def num_threads(self) -> int:
        """Kernel threads per worker; 0 where the cores are shared out."""
        return 0 if self.threads == "auto" else self.threads

    def plain(self) -> Training:
        """Return these settings with what is computed where nothing was measured, instead of 'auto'."""
        changed = {key: PLAIN_KERNELS[key] for key in self.automatic}
        return msgspec.structs.replace(self, **changed) if changed else self

    @property
    def num_shards(self) -> int | None:
        """How many shards a batch is cut into; None where that follows from the number of workers."""
        return (self.shards or DEFAULT_NUM_SHARDS) if self.reproducible else None

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train for; one where the job says neither epochs nor steps."""
        return 1 if self.epochs is None and self.steps is None else self.epochs


class Strategy(Section, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Who trains, and how they agree. Keys not listed are settings of the named strategy."""

    name: str = "auto"  # which strategy; auto: what the planner predicts to be the fastest
    workers: int = 1  # processes that train
    settings: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least("strategy", self, workers=1)


class Cluster(Section, frozen=True, kw_only=True):
    """Where workers come from, and how they are looked after."""

    engine: str = "local"  # what starts the processes
    failure_timeout: str | float = "5s"  # a worker not heard of for so long is lost; all other timeouts follow
    max_restarts: int = 3  # lost processes that are replaced before the run gives up, or continues with fewer
    min_workers: int = 1  # fewer than this do not continue: they wait for others, and then save and end
    wait_for_workers: str | float = "30s"  # for how long they wait
    spares: int = 0  # slots that are held ready for workers that are replaced
    address: str = ""  # HOST or HOST:PORT of this host at which workers of other hosts may join; else none can
    connect: str = ""  # where the cluster of the engine is: HOST:PORT of a Ray, spark://HOST:PORT of a Spark master
    # What goes between workers of different hosts. auto: encrypted (docs/decisions/0037).
    encrypt: bool | Literal["auto"] = "auto"
    balance: bool = False  # give each worker a share of the batch by its measured speed
    autoscale: bool = False  # change the number of workers, and of their threads, by what is measured
    max_workers: int | None = None  # to which autoscaling goes; as many as there are cores where it is not set
    autoscale_every: str | float = "10s"  # for how long a size is measured before the next is decided on

    def __post_init__(self) -> None:
        _at_least("cluster", self, max_workers=1)
        if self.max_workers is not None and not self.autoscale:
            raise JobError(f"cluster.max_workers = {self.max_workers} has a meaning only with cluster.autoscale = true")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise JobError(f"cluster.max_workers = {self.max_workers} is below min_workers = {self.min_workers}")
        if self.autoscale_every_s < 1:
            raise JobError(f"cluster.autoscale_every = {self.autoscale_every!r} must be at least 1 s")
        _at_least("cluster", self, min_workers=1, max_restarts=0, spares=0)
        if self.wait_for_workers_s < 0:
            raise JobError(f"cluster.wait_for_workers = {self.wait_for_workers!r} must not be negative")
        if self.failure_timeout_s < 0.5:
            raise JobError(f"cluster.failure_timeout = {self.failure_timeout!r} must be at least 0.5 s")

    @property
    def encrypts(self) -> bool:
        """Whether what goes between workers of different hosts is encrypted."""
        return self.encrypt is not False

    @property
    def failure_timeout_s(self) -> float:
        timeout = self.failure_timeout
        return parse_duration(timeout, "cluster.failure_timeout") if isinstance(timeout, str) else timeout

    @property
    def wait_for_workers_s(self) -> float:
        wait = self.wait_for_workers
        return parse_duration(wait, "cluster.wait_for_workers") if isinstance(wait, str) else wait

    @property
    def autoscale_every_s(self) -> float:
        every = self.autoscale_every
        return parse_duration(every, "cluster.autoscale_every") if isinstance(every, str) else every


class Stop(Section, frozen=True, kw_only=True):
    """When to end before all epochs are done; whichever comes first. All of them are ends that went well."""

    accuracy: float | None = None  # test accuracy reached, from 0 to 1
    loss: float | None = None  # test loss reached
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # values of [metrics] reached, from either side
    time: str | float | None = None  # "10m", or seconds
    steps: int | None = None  # optimizer steps taken
    patience: int | None = None  # evaluations without a better result
    patience_metric: str = ""  # what is better by: a name of [metrics]; "": accuracy, or loss where there is none
    idle: str | float | None = None  # "10m", or seconds: growing data brought nothing new for so long

    def __post_init__(self) -> None:
        _at_least("stop", self, steps=1, patience=1)
        if self.accuracy is not None and not 0.0 < self.accuracy <= 1.0:
            raise JobError(f"stop.accuracy = {self.accuracy} must be above 0 and at most 1 (0.9 is 90 %)")
        if self.time_s is not None and not self.time_s > 0:
            raise JobError(f"stop.time = {self.time!r} must be longer than nothing")
        if self.idle_s is not None and not self.idle_s > 0:
            raise JobError(f"stop.idle = {self.idle!r} must be longer than nothing")
        if self.loss is not None and self.loss != self.loss:
            raise JobError("stop.loss = nan is never reached: give a number")
        for name, goal in self.metrics.items():
            if goal != goal:
                raise JobError(f"stop.metrics.{name} = nan is never reached: give a number")
        if self.patience_metric and self.patience is None:
            raise JobError(f"stop.patience_metric = '{self.patience_metric}' has a meaning only with stop.patience")

    @property
    def time_s(self) -> float | None:
        return parse_duration(self.time, "stop.time") if isinstance(self.time, str) else self.time

    @property
    def idle_s(self) -> float | None:
        return parse_duration(self.idle, "stop.idle") if isinstance(self.idle, str) else self.idle


class Evaluation(Section, frozen=True, kw_only=True):
    """When to measure the model on the test set. The end of the run always does."""

    every_epochs: int = 1  # 0: not by epochs
    every_steps: int = 0  # 0: not by steps
    batch_size: int = 1000  # samples computed at once

    def __post_init__(self) -> None:
        _at_least("evaluation", self, every_epochs=0, every_steps=0, batch_size=1)


class Checkpoint(Section, frozen=True, kw_only=True):
    """When to save, and how many to keep. The end of the run always saves."""

    every_steps: int = 200  # 0: only at the end
    keep: int = 3  # how many, the newest
    keep_best: bool | str = False  # also save and keep the one that was best when it was evaluated, or best by a metric
    asynchronous: bool = True  # write a copy while training continues; needs memory for it
    storage: str = (
        ""  # fsspec URL or shared folder that checkpoints are put into as well; "" is the run directory alone
    )

    def __post_init__(self) -> None:
        _at_least("checkpoint", self, every_steps=0, keep=1)
        msgspec.structs.force_setattr(self, "storage", _checked_storage(self.storage))


class Monitoring(Section, frozen=True, kw_only=True):
    """What is recorded while training."""

    every_steps: int = 20  # steps between two 'step' events
    tensorboard: bool = False  # also write TensorBoard files into the run directory
    csv: bool = False  # also write the numbers of the run into metrics.csv
    mlflow: bool = False  # also log to MLflow, at $MLFLOW_TRACKING_URI or in the run directory
    wandb: bool = False  # also log to Weights & Biases, as its own environment variables say

    def __post_init__(self) -> None:
        _at_least("monitoring", self, every_steps=1)


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_WITH_USER = ("hdfs", "webhdfs", "sftp", "ssh", "smb", "ftp")  # where the name of a user is part of the address


def _checked_storage(storage: Any) -> str:
    """Return `checkpoint.storage`, a folder as an absolute path. Raises JobError, without repeating credentials."""
    if not isinstance(storage, str):
        raise JobError(f"checkpoint.storage = {storage!r} must be a text: a URL or a folder")
    if any(ord(character) < 32 for character in storage):
        raise JobError("checkpoint.storage has a control character")
    scheme, separator, rest = storage.partition("://")
    if not separator:
        if found := re.match(r"([a-z0-9]{2,}):/", storage):
            raise JobError(f"checkpoint.storage begins with '{found[0]}': a URL begins with '{found[1]}://'")
        return str(Path(storage).expanduser().absolute()) if storage else ""
    if "::" in scheme or "::" in rest:
        raise JobError(
            "checkpoint.storage is a chain of URLs ('::'): name the place itself, as in 's3://bucket/folder'"
        )
    if not _SCHEME.fullmatch(scheme):
        raise JobError(f"checkpoint.storage begins with {scheme!r}, which is no name of a protocol, such as 's3'")
    host = rest.partition("/")[0]
    user, at, name = host.rpartition("@")
    port = name.rpartition("]")[2].partition(":")[2]  # after an IPv6 address in brackets
    # Secret keys may contain '/': what follows the colon is then no port.
    if ":" in user or (at and scheme not in _WITH_USER) or (port and not port.isdecimal()):
        raise JobError(
            f"checkpoint.storage = '{scheme}://***' has credentials in the URL, which would be written into job.toml "
            "and logs: leave them out, and give them as the driver expects (for s3:// AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, ~/.aws, or a role)"
        )
    if "?" in rest or "#" in rest:
        where = re.split("[?#]", rest)[0]
        raise JobError(f"checkpoint.storage = '{scheme}://{where}…' has a query ('?' or '#'): leave it out")
    if scheme in ("file", "local") and not rest.startswith("/"):
        raise JobError(
            f"checkpoint.storage = {storage!r} is not absolute: write {scheme}:///folder, or the folder alone"
        )
    if scheme == "memory":
        raise JobError("checkpoint.storage = 'memory://…' is gone with the process: name a place that stays")
    if not rest.strip("/") and scheme not in ("file", "local"):
        raise JobError(f"checkpoint.storage = {storage!r} names no bucket, host or folder")
    return storage.rstrip("/") if rest.strip("/") else storage


def _at_least(section: str, settings: msgspec.Struct, **lowest: int) -> None:
    """Raise JobError for the first of these settings that is below its lowest value."""
    for key, least in lowest.items():
        value = getattr(settings, key)
        # Structs made in Python are not checked for types by msgspec; NaN is not at least anything.
        if value is not None and (not isinstance(value, (int, float)) or not value >= least):
            raise JobError(f"{section}.{key} = {value!r} must be at least {least}")
