"""The benchmarks by name, and how one is run from the command."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cordee.bench.harness import Report
from cordee.core.errors import JobError, StorageError, nearest

BENCHMARKS = {
    "overhead": "what the training loop costs beside a hand-written one, Accelerate and Lightning",
    "accuracy": "what the shipped job files reach",
    "data": "Parquet files beside the same data in memory, and the time to resume in the middle of 10 million rows",
    "data_parallel": "two workers beside DDP on gloo, Accelerate, Lightning; FSDP2 on our backend and on gloo",
    "planner": "predicted beside measured step time and memory: every model, strategy and number of workers",
    "pipeline": "two stages beside hand-written torch.distributed.pipelining on gloo, and how much they idle",
    "staleness": "parameter servers with unlike workers, and what free-running workers learn",
    "allreduce": "the backend beside gloo and OpenMPI, and what the memory allows",
    "hosts": "two hosts, plain and encrypted, full speed and 100 Mbit/s: all-reduce beside gloo, training beside DDP",
    "slow_link": "10 Mbit/s between two hosts: local_sgd beside DDP on gloo, plain and with PowerSGD; DiLoCo of a GPT",
    "federated": "a round of 100 clients beside their pure work, Flower and pfl, and the memory of 10,000 clients",
    "federation": "a round between sites: ten client processes on loopback, plain and with secure aggregation",
    "recovery": "a worker is killed: time to the next step, beside torchrun's restart",
    "reproducible": "what reproducible mode costs beside the ordinary one: four models, one and two workers",
    "kernels": "memory format and bf16: what auto chooses beside plain PyTorch, Accelerate, Lightning, and each way",
    "commit_check": "what comparing the members costs: LeNet and ResNet-20 on two workers, with it and without",
    "memory": "a GPT sharded over four workers: each one's peak at the start, in steps, saving and loading",
    "frameworks": "elastic loops; Horovod's API and TensorFlow beside gloo; a transformer beside its usual trainers",
    "engines": "two workers on torchrun, Ray and Spark beside DDP, Ray Train and TorchDistributor; a node is lost",
    "server": "push_pull of the key-value store beside an echo of the same bytes through ZeroMQ",
}


ROUNDS = 7  # where a benchmark does not say otherwise


def run_benchmark(name: str, *, rounds: int | None, output: Path | None, cases: Sequence[str] = ()) -> Report:
    """Measure, print the table, and write the raw figures where asked.

    The planner's benchmark keeps the cases that are done beside `output`, and continues from there when called again.
    Others of several cases keep the figures in `output` of the cases that are not measured again.
    """
    if name not in BENCHMARKS:
        raise JobError(f"no benchmark '{name}'{nearest(name, BENCHMARKS)} (there are: {', '.join(BENCHMARKS)})")
    module = import_module(f"cordee.bench.{name}")
    measure: Callable[..., Report] = module.measure
    options: dict[str, Any] = {}
    journal = output.with_name(f"{output.name}.part") if output is not None else None
    parameters = inspect.signature(measure).parameters
    if "journal" in parameters:
        options = {"cases": cases, "journal": journal}
    elif "earlier" in parameters:
        options = {"cases": cases, "earlier": _read_report(output) if cases else None}
    elif cases:
        raise JobError(f"--cases is for benchmarks that have several, and '{name}' has not: leave it out")
    rounds = rounds or getattr(module, "ROUNDS", ROUNDS)
    with _clearing_up():
        report = measure(rounds=rounds, say=lambda line: print(line, file=sys.stderr, flush=True), **options)
    _print_table(_table(report))
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        except OSError as error:
            raise StorageError(f"cannot write {output}: {error.strerror}") from error
        print(f"raw figures: {output}")
        assert journal is not None
        journal.unlink(missing_ok=True)
    return report


@contextlib.contextmanager
def _clearing_up() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does: contestants and network namespaces are removed."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_report(path: Path | None) -> Report | None:
    if path is None or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise JobError(f"cannot add to {path}: {error}; name another file, or remove it to begin again") from None


def _table(report: Report) -> Table:
    machine = report.machine
    table = Table(title=f"{report.name}: {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}")
    columns = list(report.rows[0])
    for column in columns:
        is_number = isinstance(report.rows[0][column], (int, float))
        table.add_column(column.replace("_", " "), justify="right" if is_number else "left")
    for row in report.rows:
        table.add_row(*(_shown(row[column]) for column in columns))
    return table


def _print_table(table: Table) -> None:
    """Print it as wide as its words are: a file has room, and a narrow terminal breaks lines instead of words."""
    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=1000), table).minimum
    if needed > console.width:
        console = Console(highlight=False, width=needed)
    console.print(table)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return "–" if value is None else str(value)
