"""The events of a run: one struct for each type of a line of `events.jsonl`.

The table in docs/reference/monitoring.md is made of the docstrings, fields and comments below
(`python tests/unit/monitoring/event_table.py`). A field with a default may be missing from a line. A change that makes
lines of older runs unreadable, or gives a field another meaning, raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import time
from typing import TypeAlias, TypeVar

import msgspec

from cordee.monitoring.summary import Summary

SCHEMA_VERSION = 1  # of run_started; lines of runs without the field are of version 0, which lacks `member` as well


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event has, with `type`: where it comes from, which is set when the event is emitted."""

    time: float = 0.0  # unix seconds, where the event happened
    member: str = ""  # of the run, from which the event comes: "launcher", "worker 1"; empty where it is not known


class RunStarted(EventRecord, frozen=True, kw_only=True, tag="run_started"):
    """training begins, or continues after `start_step`"""

    strategy: str
    workers: int
    start_step: int
    schema_version: int = 0  # of the events
    run_dir: str = ""
    name: str = ""
    device: str = ""
    threads: int | None = None
    model: str = ""
    data: str = ""
    parameters: int | None = None
    trainable_parameters: int | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    classes: tuple[str, ...] | None = None  # their names, where they have names
    batch_size: int | None = None
    total_steps: int | None = None
    stop_steps: int | None = None  # where the rule `stop.steps` ends the run
    epochs: int | None = None
    servers: int | None = None  # parameter servers
    clients: int | None = None  # of federated learning
    cordee_version: str = ""
    torch_version: str = ""


class RunEnded(Summary, frozen=True, kw_only=True, tag_field="type", tag="run_ended"):
    """the run ended, in whatever way but `kill -9`; the fields are those of the [summary](#summary)"""

    time: float = 0.0
    member: str = ""

    @classmethod
    def of(cls, summary: Summary) -> RunEnded:
        return cls(**msgspec.structs.asdict(summary))


class Step(EventRecord, frozen=True, kw_only=True, tag="step"):
    """after steps 1, 1 + *n*, 1 + 2*n*, … with *n* = `monitoring.every_steps`"""

    step: int
    epoch: int | None = None
    loss: float | None = None  # of the whole batch
    accuracy: float | None = None  # of the whole batch
    lr: float | None = None
    gradient_norm: float | None = None  # before clipping; measured where `training.clip_norm` is set
    samples: int | None = None  # all training samples so far
    samples_lost: int | None = None  # that lost workers had trained on alone, in all
    samples_per_second: float | None = None  # since the event before, without evaluations and checkpoints


class Evaluation(EventRecord, frozen=True, kw_only=True, tag="evaluation"):
    """the model was measured on the test set"""

    step: int
    epoch: int | None = None
    train_loss: float | None = None  # mean over the epoch so far
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_top5_accuracy: float | None = None  # `null` with five classes or fewer
    metrics: dict[str, float | None] = {}  # those of `[metrics]`, by their names
    samples: int | None = None
    seconds: float | None = None


class Round(EventRecord, frozen=True, kw_only=True, tag="round"):
    """a round of clients is finished; of an asynchronous algorithm, an update of the server"""

    round: int  # from 1
    num_asked: int
    num_took_part: int
    asked: list[int] | None = None  # the clients, where they are not all
    late: list[int] = []  # after the deadline
    dropped: list[int] = []  # that failed
    refused: list[int] = []  # whose update does not count, by the warning before
    loss: float | None = None  # mean over what the clients trained on
    update_norm: float | None = None  # mean over the clients, before it is bounded
    largest_update_norm: float | None = None
    step_norm: float | None = None  # of the change of the parameters
    bytes_sent: int | None = None  # that the clients sent
    bytes_received: int | None = None  # that the clients were sent
    epsilon: float | None = None  # spent so far, at `strategy.privacy.delta`
    client_accuracy: float | None = None  # mean over the clients, of what they were sent, on samples they set aside
    worst_decile_accuracy: float | None = None  # the mean over the tenth of the clients with the lowest
    personal_gain: float | None = None  # by which training alone raised the clients' accuracy, in the mean
    clock_seconds: float | None = None  # virtual time since the start
    seconds: float | None = None


class Logged(EventRecord, frozen=True, kw_only=True, tag="logged"):
    """a callback logged numbers of its own"""

    step: int
    values: dict[str, float | None]  # by their names; `null`: not a number


class Picture(EventRecord, frozen=True, kw_only=True, tag="picture"):
    """a callback logged a picture"""

    step: int
    name: str
    path: str = ""  # of the file, in the run directory
    png: bytes = b""  # the picture itself, on its way to the launcher


class Checkpoint(EventRecord, frozen=True, kw_only=True, tag="checkpoint"):
    """a checkpoint was saved"""

    step: int
    path: str
    seconds: float  # of writing
    stall_s: float  # for which training stood still


class Stored(EventRecord, frozen=True, kw_only=True, tag="stored"):
    """a checkpoint is complete in `checkpoint.storage`"""

    step: int
    path: str
    seconds: float  # that putting it there took
    num_bytes: int


class Fetched(EventRecord, frozen=True, kw_only=True, tag="fetched"):
    """a checkpoint was brought from `checkpoint.storage` into the run directory, to continue from, or as the best"""

    step: int
    path: str
    seconds: float


class Uploading(EventRecord, frozen=True, kw_only=True, tag="uploading"):
    """training is over, and the run waits for checkpoints that are put into `checkpoint.storage`"""

    steps: list[int]  # that are not there yet
    path: str
    step: int | None = None  # that is being put there
    done_bytes: int = 0  # of it
    total_bytes: int = 0


class Commit(EventRecord, frozen=True, kw_only=True, tag="commit"):
    """at each generation and checkpoint: the state of a worker, which is that of the other members; with parameter
    servers at each snapshot"""

    step: int
    epoch: int
    batch: int
    samples: int
    samples_lost: int | None = None  # that lost workers had trained on alone, in all
    worker: int | None = None
    generation: int | None = None
    digest: dict[str, str] = {}  # 64 bits of the SHA-256 of `model` (parameters), `buffers`, `optimizer`, `progress`
    weights_sha256: str | None = None  # with parameter servers


class Warned(EventRecord, frozen=True, kw_only=True, tag="warning"):
    """something that the user should know"""

    message: str
    worker: int | None = None
    stall_s: float | None = None  # for which training stood still, where a checkpoint was not saved


class Straggler(EventRecord, frozen=True, kw_only=True, tag="straggler"):
    """a worker was five times slower than the others, three steps in a row"""

    worker: int
    step: int
    seconds: float
    median_seconds: float  # of the others


class WorkerStarted(EventRecord, frozen=True, kw_only=True, tag="worker_started"):
    """a worker, or another process of the run, has joined"""

    worker: int
    pid: int
    host: str
    role: str


class WorkerLost(EventRecord, frozen=True, kw_only=True, tag="worker_lost"):
    """a worker was killed, froze or failed"""

    worker: int
    step: int
    reason: str
    role: str = "worker"


class WorkerLeft(EventRecord, frozen=True, kw_only=True, tag="worker_left"):
    """a worker, or a server, left in order"""

    worker: int
    step: int
    role: str = "worker"


class WorkerEnded(EventRecord, frozen=True, kw_only=True, tag="worker_ended"):
    """with parameter servers: a worker has done its work"""

    worker: int
    units: int  # of work
    seconds: float
    waited_seconds: float  # for work
    peak_memory_bytes: int | None = None


class CoordinatorStarted(EventRecord, frozen=True, kw_only=True, tag="coordinator_started"):
    """the process that coordinates the workers was started"""

    pid: int


class EngineOpened(EventRecord, frozen=True, kw_only=True, tag="engine_opened"):
    """what starts the processes of the run, where that is not this host alone"""

    engine: str
    description: str


class Kernels(EventRecord, frozen=True, kw_only=True, tag="kernels"):
    """how the model is computed, where that was measured or is left to the planner"""

    memory_format: str
    precision: str
    threads: int  # of each worker; 0: its share of the cores
    reason: str = ""


class CoordinatorLost(EventRecord, frozen=True, kw_only=True, tag="coordinator_lost"):
    """the coordinator was killed; another takes its place"""

    pid: int
    reason: str


class ForkServerLost(EventRecord, frozen=True, kw_only=True, tag="fork_server_lost"):
    """the process that starts workers was killed; another takes its place, and workers continue"""

    pid: int
    reason: str


class Generation(EventRecord, frozen=True, kw_only=True, tag="generation"):
    """a team was formed, at the start or again"""

    generation: int
    members: list[int]  # worker numbers; the events of the team are those of the first
    step: int | None = None  # `null` where the team begins or loads a checkpoint


class Recovery(EventRecord, frozen=True, kw_only=True, tag="recovery"):
    """the first step after a loss was taken, or a lost process was replaced"""

    lost: list[int] | str  # the workers, or the name of the process
    seconds: float
    generation: int | None = None
    step: int | None = None
    steps_redone: int = 0
    role: str | None = None  # with parameter servers


class UpdatesLost(EventRecord, frozen=True, kw_only=True, tag="updates_lost"):
    """at `step`, a parameter server without a second was lost; its successor continues from the checkpoint of
    `from_step`"""

    server: int
    updates: int
    step: int
    from_step: int


class SamplesLost(EventRecord, frozen=True, kw_only=True, tag="samples_lost"):
    """workers were lost that had trained alone since all agreed: at `step` the others agree without what these workers
    learnt of so many samples"""

    samples: int
    step: int


class Staleness(EventRecord, frozen=True, kw_only=True, tag="staleness"):
    """with parameter servers, at each snapshot: how old the gradients were so far"""

    ages: dict[str, int]  # gradients by how many updates had overtaken them


class Scale(EventRecord, frozen=True, kw_only=True, tag="scale"):
    """another number of workers or threads was asked for"""

    workers: int
    before: int
    step: int
    threads: int | None = None
    reason: str | None = None  # of autoscaling


class Balance(EventRecord, frozen=True, kw_only=True, tag="balance"):
    """workers get other shares of the batch, by their measured speed"""

    step: int
    shares: list[int]  # samples of a batch, by worker in the order of the team
    samples_per_second: list[float]  # of each worker, without waiting for others


class Plan(EventRecord, frozen=True, kw_only=True, tag="plan"):
    """with `auto`: a team of another size was formed, and the [plan](planner.md#auto) was made again"""

    workers: int
    strategy: str
    predicted_step_seconds: float | None = None  # `null` where too little is known
    best: str | None = None
    best_step_seconds: float | None = None
    reason: str = ""


class Predicted(EventRecord, frozen=True, kw_only=True, tag="predicted"):
    """what the planner predicts of a step at the start, where it knows the model"""

    step_seconds: float
    compute_seconds: float  # of the step, on the busiest worker
    exchange_seconds: float  # of the step, that computing does not hide
    idle_share: float  # of all workers' time, in which they wait for each other
    memory_bytes: float  # of the worker that takes most
    traffic_bytes: float  # that one worker sends in a step, through shared memory too
    is_sure: bool  # the machine was quiet when it was measured
    step_interval: tuple[float, float] | None = None  # nine of ten runs are expected to be within
    num_runs: int = 0  # earlier runs that it is made from as well


class Fault(EventRecord, frozen=True, kw_only=True, tag="fault"):
    """`cordee chaos` does harm to a process of the run"""

    fault: str  # one of its faults, or the action at a fault point
    target: str = ""  # "worker 1", or the fault point


AnyEvent: TypeAlias = (
    RunStarted
    | RunEnded
    | Step
    | Evaluation
    | Round
    | Logged
    | Picture
    | Checkpoint
    | Stored
    | Fetched
    | Uploading
    | Commit
    | Warned
    | Straggler
    | WorkerStarted
    | WorkerLost
    | WorkerLeft
    | WorkerEnded
    | CoordinatorStarted
    | CoordinatorLost
    | EngineOpened
    | Kernels
    | ForkServerLost
    | Generation
    | Recovery
    | UpdatesLost
    | SamplesLost
    | Staleness
    | Scale
    | Balance
    | Plan
    | Predicted
    | Fault
)
EVENT_TYPES: dict[str, type[AnyEvent]] = {str(kind.__struct_config__.tag): kind for kind in AnyEvent.__args__}
E = TypeVar("E", bound=AnyEvent)
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def stamp(event: E, member: str) -> E:
    """Return the event with its origin: `member` and the time now, unless it was emitted in another process before."""
    return event if event.time else msgspec.structs.replace(event, time=time.time(), member=event.member or member)


class UnreadableLine(msgspec.Struct, frozen=True):
    """A line of a file of events that is none of the above: of a type that is not known here, or damaged."""

    offset: int  # where the line begins in the file
    line: bytes
    problem: str


def decode_event(line: bytes, offset: int = 0) -> AnyEvent | UnreadableLine:
    """Return what a line of `events.jsonl` says. Fields that are not known here are passed over."""
    try:
        event = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return UnreadableLine(offset, line, str(error))
    return event if event.time else UnreadableLine(offset, line, "an event without the time when it happened")
