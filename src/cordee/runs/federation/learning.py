"""What a federation's server learns: parameters, rounds, privacy, checkpoints and events. Knows nothing of channels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from cordee import checkpoint
from cordee.checkpoint import State, model_state
from cordee.compute import Metrics
from cordee.core.errors import CheckpointError, JobError, TrainingError
from cordee.monitoring import Monitor, events
from cordee.runs.federated.worker import describe_tests
from cordee.runs.federation.rounds import (
    BufferedRound,
    MaskedRound,
    ModelShape,
    PlainRound,
    Round,
    plan_secure,
    secure_threshold,
)
from cordee.runs.federation.store import ClientRecord, RoundRecord
from cordee.strategies.federated.aggregation import Contribution
from cordee.strategies.federated.algorithms import make_algorithm, summed_names
from cordee.strategies.federated.client import Sent
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.privacy import Accountant
from cordee.strategies.federated.sampling import draw_clients
from cordee.strategies.federated.secure import least_threshold
from cordee.strategies.federated.server import FederatedServer
from cordee.strategies.federated.settings import FederatedSettings
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import Components
from cordee.training.measuring import make_policy, measure
from cordee.training.progress import Progress

PART = "federation"  # of a checkpoint; another one than that of a simulation, which cannot continue it


class FederationLearning:
    """The state of a federation between two rounds, and what a round does to it. Local."""

    def __init__(
        self, parts: Components, checkpoints: Path, monitor: Monitor, *, run: str, noise_seed: int, num_clients: int
    ) -> None:
        """`noise_seed` is secret. `num_clients` is the population that privacy and control variates count with."""
        self.parts, self._monitor, self._checkpoints, self._run = parts, monitor, checkpoints, run
        job = parts.job
        self.settings = settings_of(job)
        self._tables = self.settings.parts
        self._algorithm = make_algorithm(self.settings.use, job.python_path)
        check_deployable(self.settings, parts.model)
        self._flat = FlatModel(parts.model, self.settings.is_personal)
        self.layout = self._flat.layout
        self.population = num_clients
        self._noise_seed = noise_seed
        self._server = self._new_server()
        self._summed = summed_names(self._algorithm, self._flat.shared)
        self.progress = Progress()
        self.metrics: Metrics | None = None
        self.epsilon: float | None = None
        self._accountant: Accountant | None = None
        self._counted: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # of clients, by name
        self._stopped_by: str | None = None
        self._started_s = time.perf_counter()
        self._round_s = time.perf_counter()
        self.weights_sha256 = ""
        if self._tables.privacy is not None:
            self._accountant = Accountant(self.settings, self._tables.privacy, num_clients)
            self.epsilon = 0.0
            if not self._accountant.allows(1):
                raise JobError(
                    f"strategy.privacy.max_epsilon = {self._tables.privacy.max_epsilon} is passed by the first round, "
                    f"which costs ε = {self._accountant.epsilon(1):.3g}: raise it, or add more noise"
                )

    def _new_server(self) -> FederatedServer:
        return FederatedServer(
            self.settings,
            self._algorithm,
            self._flat.shared,
            self._flat.read_buffers(),
            num_clients=self.population,
            noise_key=self._noise_seed,
            python_path=self.parts.job.python_path,
        )

    @property
    def num_rounds(self) -> int:
        return self._server.num_rounds

    @property
    def num_values(self) -> int:
        return self._flat.num_shared

    @property
    def num_buffer_values(self) -> int:
        return self._server.buffers.numel()

    def sent(self) -> Sent:
        return self._server.sent()

    def counted(self, client: str) -> int:
        """Return the last round in which an update of the client was counted; -1: none was."""
        return self._counted.get(client, -1)

    def warn(self, message: str) -> None:
        self._monitor.emit(events.Warned(message=message))

    def client_came(self, record: ClientRecord, num_samples: int, say: Callable[[str], None]) -> None:
        say(f"client {record.name} is here, with {num_samples:,} samples")

    # Who takes part.

    @property
    def is_population_fixed(self) -> bool:
        """Whether all clients must be there from the beginning: ε, or control variates, are counted with them."""
        return self._tables.privacy is not None or self._algorithm.is_stateful

    def refuses_new(self, num_enrolled: int) -> str:
        """Return why a client that was invited cannot be taken any more; empty: it can."""
        if self.is_population_fixed and num_enrolled >= self.population:
            what = "strategy.privacy counts" if self._tables.privacy is not None else "the algorithm's state belongs to"
            return f"{what} {self.population} clients, and all have joined: start a federation with --clients higher"
        return ""

    def check_state(self, client: str, state_round: int) -> str:
        """Return why a client cannot continue with the state that it has; empty: it can."""
        counted = self.counted(client)
        if self._keeps_state and counted >= 0 and state_round < counted:
            return (
                f"client {client} has no state of round {counted + 1}, in which its update was counted: start it with "
                "the folder that it had (--folder)"
            )
        return ""

    @property
    def _keeps_state(self) -> bool:
        return self._algorithm.is_stateful or bool(self.settings.personal) or self._tables.compress.use != "none"

    def draw(self, present: Sequence[str], everybody: Sequence[str], least: int) -> tuple[list[str], str]:
        """Return who is asked in the next round, or whom it waits for, in words.

        Drawn are all clients where amplification by sampling is counted, else those who are there.
        """
        self._numbers = {name: number for number, name in enumerate(everybody)}
        per_round = self.settings.clients_per_round or 1
        needed = max(least, per_round, self._least_secure(max(per_round, least)), 1)
        if self.is_population_fixed and len(everybody) < self.population:
            return [], f"waiting for clients: {len(everybody)} of {self.population} have joined"
        if len(present) < needed:
            why = f", strategy.clients_per_round = {per_round}" if per_round > least else ""
            return [], f"waiting for clients: {len(present)} of {needed} are here{why}"
        pool = list(everybody) if self.is_population_fixed else list(present)
        # Clients know the seed of the job. Where sampling is counted as privacy, nobody may know who is asked.
        key = self.parts.job.seed if self._tables.privacy is None else self._noise_seed
        if self._algorithm.discount is not None:
            return [], ""  # whoever has nothing to do is asked
        drawn = draw_clients(self.settings, len(pool), key, self.num_rounds)
        asked = [pool[number] for number in drawn]
        if self._tables.secure is not None and len(asked) < 2:
            return [], f"waiting for clients: a secure round needs at least 2, and {len(asked)} would be asked"
        return asked, ""

    def num_wanted(self, num_present: int) -> int:
        """Return how many updates of clients an asynchronous round takes; 0 where rounds are synchronous."""
        return 0 if self._algorithm.discount is None else self.settings.num_asked(num_present)

    def _least_secure(self, num_clients: int) -> int:
        return least_threshold(num_clients) if self._tables.secure is not None else 1

    def open_round(self, record: RoundRecord) -> Round:
        self._round_s = time.perf_counter()
        if self._tables.secure is None:
            model = ModelShape(self._server.parameters, self._server.buffers, self._flat.shapes, self._summed)
            algorithm = self._algorithm
            if algorithm.discount is not None:
                return BufferedRound(record, self.settings, model, algorithm.discount, algorithm.concurrency)
            return PlainRound(record, self.settings, model)
        num = len(record.asked)
        plan = plan_secure(self.settings, self._tables.secure, self.num_values, num)
        context = f"{self._run} {record.round} {record.attempt}"
        return MaskedRound(record, plan, secure_threshold(self._tables.secure, num), context, self._server.buffers)

    # The end of a round.

    def finish(self, current: Round, total: Contribution | None, robust: Tensor | None, late: Sequence[str]) -> None:
        """Take the sum of a round: step, measure, save, report. Raises TrainingError where parameters diverge."""
        sent = self.sent()
        sent_bytes = sum(v.numel() * v.itemsize for v in [sent.parameters, sent.buffers, *sent.own.values()])
        outcome = self._server.finish_round(total, robust)
        if not bool(torch.isfinite(self._server.parameters).all()):
            raise TrainingError(
                f"the parameters are not finite after round {self.num_rounds}: lower optimizer.lr, or bound updates "
                "(strategy.max_norm)"
            )
        for name in current.took_part:
            self._counted[name] = current.base_of(name)
        if self._accountant is not None:
            self.epsilon = self._accountant.epsilon(self.num_rounds)
        self._show()
        progress = self.progress
        progress.step = self.num_rounds
        progress.samples += sum(told.num_trained for told in current.told.values())
        progress.elapsed_s += time.perf_counter() - self._started_s
        self._started_s = time.perf_counter()
        event = self._describe(current, late, outcome.step_norm, sent_bytes)
        self._measure()
        self.save(event)
        number = self.num_rounds
        self._monitor.emit(
            events.Commit(
                step=number, epoch=number, batch=0, samples=progress.samples, weights_sha256=self.weights_sha256
            )
        )
        self._monitor.emit(event)

    def _describe(self, current: Round, late: Sequence[str], step_norm: float, sent_bytes: int) -> events.Round:
        told = [current.told[name] for name in sorted(current.told)]
        norms = [one.norm for one in told if one.norm is not None]
        tests = [one.test for one in told if one.test is not None and one.test.num_samples]
        tested = describe_tests([(t.num_samples, t.num_correct_before, t.num_correct_after) for t in tests])
        count = sum(one.loss_count for one in told)
        number = self._numbers.get
        return events.Round(
            round=self.num_rounds,
            num_asked=len(current.record.asked),
            num_took_part=len(current.took_part),
            asked=[number(name, -1) for name in current.record.asked],
            late=[number(name, -1) for name in late],
            dropped=[number(name, -1) for name in sorted(current.failed.keys() - current.refused)],
            refused=[number(name, -1) for name in sorted(current.refused)],
            loss=sum(one.loss_sum for one in told) / count if count else None,
            update_norm=sum(norms) / len(norms) if norms else None,
            largest_update_norm=max(norms, default=None),
            step_norm=step_norm,
            bytes_sent=sum(one.num_bytes for one in told),
            bytes_received=sent_bytes * len(current.told),
            epsilon=self.epsilon,
            seconds=time.perf_counter() - self._round_s,
            client_accuracy=tested.get("client_accuracy"),
            worst_decile_accuracy=tested.get("worst_decile_accuracy"),
            personal_gain=tested.get("personal_gain"),
        )

    def _measure(self) -> None:
        """Measure the model, when it is due."""
        evaluation, number = self.parts.job.evaluation, self.num_rounds
        is_due = any(every and number % every == 0 for every in (evaluation.every_epochs, evaluation.every_steps))
        # What is known before the model is measured to be the last round always is.
        if self.parts.test is None or not (is_due or self.end_reason() is not None):
            return
        metrics = measure(self.parts, self.parts.model, self.parts.test)
        assert metrics is not None
        self.metrics = metrics
        policy = make_policy(self.parts)
        policy.patience = self.progress.patience
        self._stopped_by = self.progress.take_evaluation(metrics, self.num_rounds, policy, self.parts.recipe.schedule)
        self._monitor.emit(self.progress.describe_evaluation(metrics, self.num_rounds, self.num_rounds))

    def end_reason(self) -> str | None:
        """Return why no further round begins: "" when all are done, else the rule; None: another round begins."""
        if self.num_rounds >= self.settings.rounds:
            return ""
        if self._stopped_by is not None:
            return self._stopped_by
        if self._accountant is not None and not self._accountant.allows(self.num_rounds + 1):
            return "epsilon"
        limit_s = self.parts.job.stop.time_s
        if limit_s is not None and self.progress.elapsed_s + time.perf_counter() - self._started_s >= limit_s:
            return "time"
        return "steps" if self.num_rounds >= (self.parts.job.stop.steps or math.inf) else None

    # The disk.

    @torch.no_grad()
    def _show(self) -> None:
        """Make the model that of the server. Personal layers stay as they were built."""
        self._flat.shared.copy_(self._server.parameters)
        self._flat.write_buffers(self._server.buffers)

    def save(self, event: events.Round) -> None:
        """Write the checkpoint of the finished round, whole or not at all. Raises StorageError."""
        own = self._server.state_dict()
        own_part = State(
            {**{f"server.{name}": tensor for name, tensor in own.tensors.items()}, "buffers": self._server.buffers},
            {
                "server": own.values,
                "epsilon": self.epsilon,
                "counted": dict(self._counted),
                "event": msgspec.json.encode(event).decode(),
            },
        )
        joined = State.join(model=State(model_state(self.parts.model), {}), **{PART: own_part})
        values = {**joined.values, "progress": msgspec.to_builtins(self.progress)}
        began_s = time.perf_counter()
        kept = self.parts.job.checkpoint
        protected = (self.progress.best_step,) if kept.keep_best and self.progress.best_step >= 0 else ()
        path = checkpoint.save(
            self._checkpoints, self.num_rounds, State(joined.tensors, values), keep=kept.keep, protected=protected
        )
        self.weights_sha256 = checkpoint.weights_sha256(self.parts.model.state_dict())
        took_s = time.perf_counter() - began_s
        self._monitor.emit(events.Checkpoint(step=self.num_rounds, path=str(path), seconds=took_s, stall_s=took_s))

    def load(self) -> events.Round | None:
        """Continue from the newest checkpoint; return the event of its round. Raises CheckpointError."""
        loaded = checkpoint.load_newest(self._checkpoints)
        if loaded is None:
            return None
        for path, reason in loaded.damaged:
            self.warn(f"checkpoint {path.name} is damaged ({reason}); using {loaded.path.name}")
        part = loaded.state.part(PART)
        if "counted" not in part.values:
            raise CheckpointError(f"{loaded.path} is not that of a federation's server")
        checkpoint.load_model_state(self.parts.model, loaded.state.part("model").tensors)
        self._server.load_state_dict(part.part("server"), self._flat.shared, part.tensors["buffers"])
        self._counted = {str(name): int(number) for name, number in part.values["counted"].items()}
        self.progress = msgspec.convert(loaded.state.values["progress"], Progress)
        self.epsilon = part.values["epsilon"]
        self.metrics = self.progress.metrics
        if self.metrics is not None and self.progress.evaluated_at == self.num_rounds:
            policy = make_policy(self.parts)
            policy.patience = self.progress.patience
            self._stopped_by = policy.stop_reason(self.metrics.get)  # it was stopped before it could say so
        self.weights_sha256 = checkpoint.weights_sha256(self.parts.model.state_dict())
        return msgspec.json.decode(part.values["event"], type=events.Round)


def check_deployable(settings: FederatedSettings, model: nn.Module) -> None:
    """Raise JobError for what works in a simulation, and not between sites in this version."""
    algorithm, parts = make_algorithm(settings.use), settings.parts
    if algorithm.discount is not None and settings.deadline != "":
        raise JobError(
            f"strategy.deadline = {settings.deadline!r}: the rounds of '{settings.use.use}' wait for nobody in "
            "particular, and what comes late counts less. Between sites leave strategy.deadline out"
        )
    if parts.secure is None:
        return
    if settings.weights == "samples" and parts.privacy is None and settings.most_samples is None:
        raise JobError(
            "strategy.secure adds updates that are multiplied by at most 1: set strategy.most_samples, the number of "
            "samples beyond which a client does not weigh more, or strategy.weights = 'equal'"
        )
    if algorithm.needs_sgd:
        raise JobError(
            f"strategy.algorithm = '{settings.use.use}' needs more than the sum of the updates, which is all that "
            "strategy.secure tells: use another algorithm"
        )
    if any(not settings.is_personal(name) for name, _ in model.named_buffers() if name in model.state_dict()):
        raise JobError(
            "strategy.secure adds parameters, and the running statistics of this model would be sent in the clear: "
            "use GroupNorm, or name them in strategy.personal"
        )
