"""Random federated jobs, run in this process by the workers' own code, and compared with plain rounds.

`python -m differences.federated --seeds 0..500`, in the folder `tests`: many of them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from cordee.checkpoint import Folder
from cordee.checkpoint.layout import decode_values, encode_values
from cordee.cluster import Team
from cordee.core import Job
from cordee.core.errors import CordeeError
from cordee.runs.federated.board import Board, BoardState
from cordee.runs.federated.facts import check_federated
from cordee.runs.federated.messages import Task
from cordee.runs.federated.round_files import FolderFiles
from cordee.runs.federated.worker import FederatedWorker
from cordee.strategies.federated.schedule import Schedule
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import Components, assemble
from cordee.training.progress import Progress
from differences.generator import DATA, OPTIMIZERS, PLAIN, Choices, Table, draw_job, job_table, nest, simpler
from differences.plain_rounds import PlainRound, PlainRounds
from differences.robust_rules import NobodyCountsError
from differences.shrinking import shrink

# The reference does the same operations in nearly the same order.
DOUBLE_TOLERANCE, SINGLE_TOLERANCE, BF16_TOLERANCE = 1e-9, 1e-3, 0.05
ALGORITHMS: tuple[Any, ...] = (
    *("fedavg", "fedavg", {"use": "fedavg", "server_lr": 0.7}),
    *("fedprox", {"use": "fedprox", "mu": 0.3}, "fedavgm", {"use": "fedavgm", "momentum": 0.5, "nesterov": True}),
    *("fedadam", "fedyogi", "fedadagrad", {"use": "fedadam", "beta1": 0.5, "server_lr": 0.01}),
    *("scaffold", {"use": "scaffold", "server_lr": 0.5}, "fednova", "fedbuff", {"use": "fedbuff", "concurrency": 3}),
)
COMPRESSIONS: tuple[Any, ...] = (
    *("fp16", "bf16", "int8", "int4"),
    *({"use": "topk", "share": 0.1}, {"use": "topk_2bit", "share": 0.2}, {"use": "powersgd", "rank": 1}),
)
RULES = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
NEEDS_SGD = ("scaffold", "fednova")


def draw_federated(seed: int) -> Table:
    """Return the choices of a job, with `workers`, and the round after which it is resumed (0: it is not)."""
    rng = random.Random(f"federated {seed}")
    job = draw_job(rng)
    while job["data"] in ("stream", "digits") or (job["training"].get("precision") and rng.random() < 0.7):
        job = draw_job(rng)
    nest(rng, job)
    job["size"], job["test_size"] = rng.randint(24, 60), rng.choice([0, 7])
    job["data_settings"] = {key: value for key, value in job["data_settings"].items() if key == "augment"}
    training = job["training"]
    job["training"] = {
        key: training[key] for key in ("accumulate", "clip_norm", "precision", "recompute") if key in training
    }
    job |= {"steps": 0, "epochs": 0, "stop": {}, "metrics": {}, "checkpoint": {"every_steps": 1, "keep": 9}}
    job["evaluation"] = {"every_epochs": 1}
    job["strategy"] = draw_strategy(rng, job)
    job["resume_at"] = rng.randint(1, job["strategy"]["rounds"] - 1) if rng.random() < 0.4 else 0
    return job


def draw_strategy(rng: random.Random, job: Table) -> Table:
    num_clients = rng.choice([3, 4, 5, 7])
    rounds = rng.randint(2, 5)
    settings: Table = {"name": "federated", "workers": rng.choice([1, 2, 3]), "rounds": rounds}
    algorithm = rng.choice(ALGORITHMS)
    use = algorithm if isinstance(algorithm, str) else algorithm["use"]
    settings["algorithm"] = algorithm
    if job["model"] == "gpt":  # others make whole steps of the rounding that is the gradient of the keys' bias
        job["optimizer"] = dict(rng.choice(OPTIMIZERS[:3]))
    if use in NEEDS_SGD:
        job["optimizer"] = dict(
            rng.choice([{"use": "sgd", "lr": 0.1}, {"use": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}])
        )
    settings["partition"] = {"clients": num_clients, "min_samples": 2}
    if DATA[job["data"]] == "classes" and rng.random() < 0.5:
        settings["partition"] |= rng.choice([{"kind": "dirichlet", "alpha": 3.0}, {"kind": "labels", "per_client": 3}])
        if not job["nested"] and rng.random() < 0.3:
            settings["partition"] = {"kind": "key", "key": "target"}
    length = rng.choice([{}, {"local_epochs": 2}, {"local_steps": 3}, {"local_steps": rng.randint(1, 12)}])
    settings |= length
    if use == "fedbuff":
        settings["clients_per_round"] = 2
        settings["clock"] = {"stragglers": 0.4, "slowdown": 8.0, "failures": rng.choice([0.0, 0.2])}
    elif rng.random() < 0.4:
        settings |= rng.choice([{"fraction": 0.6}, {"clients_per_round": 2}])
    if rng.random() < 0.2:
        settings["clock"] = {**settings.get("clock", {}), "failures": 0.3}
    if rng.random() < 0.15 and use != "fedbuff":
        settings["deadline"], settings["clock"] = "0.2s", {"stragglers": 0.4}
    if rng.random() < 0.25:
        settings["personal"] = [rng.choice(["*bias", "*head*", "*0.*", "*2*"])]
    if rng.random() < 0.2 and DATA[job["data"]] == "classes":
        settings["client_test"] = 0.3
    _draw_robust_or_private(rng, job, settings, use)
    return settings


def _draw_robust_or_private(rng: random.Random, job: Table, settings: Table, use: str) -> None:
    compressed, kind = rng.random() < 0.3, rng.random()
    if compressed:
        settings["compress"] = rng.choice(COMPRESSIONS)
    if kind < 0.15 and use not in NEEDS_SGD and "batch_norm" not in job["blocks"]:
        settings["robust"] = {"use": rng.choice(RULES), "wrong": 0.25}
    elif kind < 0.25 and use not in (*NEEDS_SGD, "fedbuff") and "batch_norm" not in job["blocks"]:
        settings["privacy"] = {"clip_norm": 0.5, "noise": 0.1, "accountant": "rdp"}
        if "fraction" in settings:
            settings["sampling"] = "poisson"
        return
    elif kind < 0.4:
        settings["max_norm"] = 0.05
    if rng.random() < 0.2:
        settings["weights"] = "equal"
    if rng.random() < 0.2:
        settings["most_samples"] = 8


def federated_table(choices: Choices) -> Table:
    table = job_table({**choices, "epochs": 1})
    del table["training"]["epochs"], table["monitoring"]
    return table


# Running


@dataclass(frozen=True)
class Ran:
    """What the rounds of a job came to."""

    rounds: list[Table]  # what the worker that finished each says
    shared: list[Tensor]  # the parameters after each
    buffers: Tensor  # at the end
    digest: str
    samples: int


class Workers:
    """The workers of a run in this process, and who hands out their tasks: in an order that the generator draws."""

    def __init__(self, job: Job, folder: Path, num_workers: int, seed: int, first: int = 0) -> None:
        self._job, self._rng = job, random.Random(seed)
        files, store = FolderFiles(folder), Folder(folder / "checkpoints")
        self._workers = [FederatedWorker(assemble(job, Team()), files, store) for _ in range(num_workers)]
        parts = self._workers[0]._parts
        self.settings = settings_of(job)
        sizes = self._workers[0]._partition.sizes.tolist()
        schedule = Schedule(self.settings, self._workers[0]._algorithm, job.seed, sizes, job.training.batch_size)
        self._board = Board(schedule, BoardState(round=first), merges=self.settings.parts.robust is None)
        self._progress, self._has_test = Progress(step=first), parts.test is not None

    def run(self, num_rounds: int) -> Ran:
        """Do the tasks until so many rounds are finished."""
        rounds, shared, board = [], [], self._board
        while board.round is not None and board.round.number < num_rounds:
            keys = [(index, key) for index in range(len(self._workers)) if (key := board.take(str(index))) is not None]
            self._rng.shuffle(keys)  # who comes first
            for index, key in keys:
                task = self._task(key)
                done = self._workers[index].do(task)
                board.finish(str(index), key, is_refused=bool(done.refused))
                if key.kind == "finish":
                    result = decode_values(done.result.encode())
                    if board.round.tasks and not result["num_clients"]:
                        raise NobodyCountsError
                    self._progress.step, self._progress.samples = (
                        key.round + 1,
                        self._progress.samples + result["num_trained"],
                    )
                    rounds.append(result)
                    shared.append(self._workers[index]._flat.shared.clone())
                    self._last = self._workers[index]
                    board.advance()
        buffers = self._last._flat.read_buffers()
        return Ran(rounds, shared, buffers, rounds[-1]["sha"], self._progress.samples)

    def _task(self, key: Any) -> Task:
        board = self._board
        task = Task(what=key.kind, round=key.round, index=key.place)
        if key.kind == "prepare":
            return task
        assert board.round is not None
        task = msgspec.structs.replace(task, num_places=board.round.num_places)
        if key.kind == "client":
            client, base = board.task_of(key.place)
            return msgspec.structs.replace(task, client=client, base=base)
        if key.kind == "merge":
            return msgspec.structs.replace(task, places=board.places_of(key.place))
        progress = encode_values(msgspec.to_builtins(self._progress)).decode()
        places, oldest = board.took_part, board.round.needs_from
        return msgspec.structs.replace(task, places=places, oldest=oldest, evaluate=True, save=True, progress=progress)


def run_job(choices: Choices, job: Job, folder: Path, num_workers: int) -> Ran:
    """Run the rounds, the last of them by other workers where the run is resumed."""
    torch.set_num_threads(1)  # as in the job
    total, at = job.strategy.settings["rounds"], choices["resume_at"]
    folder.mkdir(parents=True, exist_ok=True)
    if not at or num_workers == 1:
        return Workers(job, folder, num_workers, choices["seed"]).run(total)
    before = Workers(job, folder, num_workers, choices["seed"]).run(at)
    after = Workers(job, folder, num_workers % 3 + 1, choices["seed"], first=at).run(total)
    return Ran(
        before.rounds + after.rounds,
        before.shared + after.shared,
        after.buffers,
        after.digest,
        before.samples + after.samples,
    )


# Comparing


def judge_federated(choices: Choices, folder: Path) -> tuple[str, list[str]]:
    """Return a verdict ("same", "refused" or "different") and what it is about."""
    torch.set_num_threads(1)  # of the reference, too
    try:
        job = Job.from_dict(federated_table(choices))
        components = assemble(job, Team())
        check_federated(components)
    except CordeeError as error:
        return "refused", [str(error)]
    try:
        plain = PlainRounds(choices, job)
        theirs: list[PlainRound] | None = plain.run()
    except NobodyCountsError:
        theirs = None
    ours = []
    for num_workers in (1, choices["strategy"]["workers"]):
        try:
            ours.append(run_job(choices, job, folder / f"on-{len(ours)}", num_workers))
        except NobodyCountsError:
            ours.append(None)
        except CordeeError as error:
            if theirs is not None:
                return "different", [f"it ended with: {error}"]
            ours.append(None)
    if theirs is None or None in ours:
        fine = theirs is None and ours == [None, None]
        return ("nobody counts", [""]) if fine else ("different", ["nobody counts in one of them"])
    found = list(_differences(choices, components, plain, theirs, *ours))
    return ("different", found) if found else ("same", [])


def _differences(
    choices: Choices, components: Components, plain: PlainRounds, theirs: list[PlainRound], one: Ran, other: Ran
) -> Iterator[str]:
    tolerance = DOUBLE_TOLERANCE if choices["double"] else SINGLE_TOLERANCE
    if choices["training"].get("precision") == "bf16":
        tolerance = BF16_TOLERANCE
    members = plain.partition.order.sort().values
    if not torch.equal(members, torch.arange(components.splits.train.num_samples or 0)):
        yield f"{len(members)} samples of {components.splits.train.num_samples} belong to clients"
    if one.digest != other.digest:
        yield "one worker has other weights than several"
    for number, (a, b) in enumerate(zip(one.rounds, other.rounds, strict=True), 1):
        kept = {"path", "seconds", "save_seconds"}
        a, b = ({**each, "metrics": {**each.get("metrics", {}), "seconds": 0}} for each in (a, b))
        if unlike := [key for key in a.keys() | b.keys() if key not in kept and a.get(key) != b.get(key)]:
            yield f"round {number}: {sorted(unlike)} differ between one worker and several"
    if len(theirs) != len(one.rounds):
        yield f"{len(theirs)} rounds, {len(one.rounds)} were made"
    for number, (reference, result, shared) in enumerate(zip(theirs, one.rounds, one.shared, strict=True), 1):
        largest = max(float(reference.shared.abs().max()), 1e-3)
        distance = float((reference.shared - shared).abs().max()) / largest
        if not distance <= tolerance:
            yield f"round {number}: parameters differ by {distance:.2g}"
        for key, expected in (("num_clients", reference.num_took_part), ("num_trained", reference.num_trained)):
            if result[key] != expected:
                yield f"round {number}: {key} is {result[key]} and not {expected}"
        for key, share in reference.measured.items():
            if abs(result.get(key, math.inf) - share) > 1e-9 and choices["data"] != "dataset":
                yield f"round {number}: {key} is {result.get(key)} and not {share}"
        loss = result["loss_sum"] / result["loss_count"] if result["loss_count"] else None
        if not _is_close(loss, reference.loss, tolerance):
            yield f"round {number}: loss is {loss} and not {reference.loss}"
        measured = result["metrics"]["loss"] if "metrics" in result else None
        # The other data draws noise when it is read for a test.
        if choices["data"] != "dataset" and not _is_close(measured, reference.test_loss, max(tolerance, 1e-6)):
            yield f"round {number}: test loss is {measured} and not {reference.test_loss}"
    expected = [theirs[-1].buffers[name].reshape(-1).double() for name in plain.shared_buffers]
    buffers = torch.cat(expected) if expected else torch.zeros(0, dtype=torch.float64)
    if not torch.allclose(buffers, one.buffers, rtol=max(tolerance, 1e-6), atol=tolerance):
        yield "buffers differ"
    if one.samples != sum(reference.num_trained for reference in theirs):
        yield f"{one.samples} samples"


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other or (one or other or math.nan) != (one or other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3) or (one != one and other != other)


def simpler_federated(choices: Choices) -> Iterator[Table]:
    """Yield jobs with one choice nearer to the plain one."""
    for one in simpler({**choices, "steps": 4}):
        if one["strategy"].get("name") == "federated" and one["strategy"].get("rounds"):
            yield {**one, "steps": 0}
    if choices["resume_at"]:
        yield {**choices, "resume_at": 0}
    if choices["strategy"]["rounds"] > choices["resume_at"] + 1:
        yield {**choices, "strategy": {**choices["strategy"], "rounds": choices["strategy"]["rounds"] - 1}}


def report(seed: int, choices: Choices, problems: list[str]) -> str:
    changed = {key: value for key, value in choices.items() if value != PLAIN[key]}
    again = f"again, in the folder tests: python -m differences.federated --trial '{json.dumps(changed)}'"
    return "\n".join([f"seed {seed} differs:", *(f"  {problem}" for problem in problems[:6]), again])


def smallest(choices: Table, folder: Path) -> Table:
    number = 0

    def fails(candidate: Table) -> bool:
        nonlocal number
        number += 1
        return judge_federated(candidate, folder / f"smaller-{number}")[0] == "different"

    return shrink(choices, fails, simpler=simpler_federated)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m differences.federated", description=__doc__)
    parser.add_argument("--seeds", default="0..100", help="FIRST..LAST, or one seed")
    parser.add_argument("--trial", default="", help="the choices of one trial as JSON, as a report prints them")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("..")
    verdicts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="federated-") as folder:
        if options.trial:
            verdict, problems = judge_federated({**PLAIN, **json.loads(options.trial)}, Path(folder))
            print("\n".join([verdict, *problems]))
            return int(verdict == "different")
        for seed in range(int(first), int(last or first) + 1):
            choices = draw_federated(seed)
            try:
                verdict, problems = judge_federated(choices, Path(folder) / str(seed))
            except Exception:  # noqa: BLE001 - of the test or of the product: to be looked at
                verdict, problems = "different", [traceback.format_exc(limit=-3)]
                print(report(seed, choices, problems), flush=True)
                verdicts[verdict] += 1
                continue
            verdicts[verdict] += 1
            if verdict == "refused":
                refusals[problems[0][:140]] += 1
            if verdict == "different":
                if not options.no_shrink:
                    choices = smallest(choices, Path(folder) / f"{seed}-smaller")
                    problems = judge_federated(choices, Path(folder) / f"{seed}-smallest")[1]
                print(report(seed, choices, problems), flush=True)
        print(dict(verdicts), *(f"\n  {count} × {why}" for why, count in refusals.most_common()), flush=True)
    return 1 if verdicts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
