"""A client of a federation: trains on its own data, and sends updates. It connects out, and needs no open port.

What a client keeps is in its folder: its keys, its invitation, and the state of its algorithm after each round. The
server says which of its updates was counted last, and the client continues from the state of that round. So an update
that came too late leaves nothing behind, and one that was counted is not forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordee import checkpoint
from cordee.checkpoint import State
from cordee.cluster.engines.agent_messages import Versions
from cordee.communication.channel import ClientChannel, Received, RefusedError
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys
from cordee.communication.messages import Message
from cordee.communication.wire import Codec, Limits
from cordee.core.durations import format_duration
from cordee.core.errors import CommunicationError, CordeeError, JobError
from cordee.core.fault_points import reach
from cordee.runs.federation.messages import (
    ENDS_CLIENT,
    FEDERATION,
    LATE,
    NOT_READY,
    WRONG_UPDATE,
    Agreement,
    Alive,
    Enrol,
    Enrolled,
    Failed,
    Finished,
    Invitation,
    Poll,
    Ready,
    Result,
    Wait,
    Work,
    limits_for,
)
from cordee.runs.federation.rounds import plan_secure
from cordee.strategies.federated.algorithms import make_algorithm
from cordee.strategies.federated.client import ClientTrainer, Sent, Update
from cordee.strategies.federated.client_team import ClientTeam
from cordee.strategies.federated.flat import FlatModel
from cordee.strategies.federated.masking import PublicKeys
from cordee.strategies.federated.secure import SecureClient, SecureRound
from cordee.strategies.federated.strategy import settings_of
from cordee.training.components import Components

KEYS_FILE, INVITATION_FILE, STATES = "client.keys", "invitation", "states"
NOISE_FILE, SPENT_FILE = "noise.seed", "noise.spent"
REPLY_S = 20.0  # that the server has to answer; it answers a poll within its failure timeout
CONNECT_S = 60.0  # that a client tries to reach the server at the start
PATIENCE_S = 3600.0  # that a client looks for a server that is gone, unless it is told otherwise
_AGAIN_S = 0.5


class ClientFolder:
    """What a client keeps: keys and invitation with mode 0600, and states by round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(
                f"cannot make the client's folder {path}: {error.strerror}; choose another --folder"
            ) from None

    def enter(self, invitation: Invitation | None) -> tuple[Invitation, ClientKeys]:
        """Return the invitation and the keys of this client; new keys with a new invitation."""
        file = self.path / INVITATION_FILE
        known = Invitation.from_text(file.read_text()) if file.is_file() else None
        if invitation is None and known is None:
            raise JobError(f"{self.path} holds no client: give --token, as `cordee federation invite` printed it")
        if (
            known is not None
            and invitation is not None
            and (known.run, known.name) != (invitation.run, invitation.name)
        ):
            raise JobError(
                f"{self.path} is the folder of client {known.name} of another federation: choose another --folder"
            )
        chosen = invitation or known
        assert chosen is not None
        keys_file = self.path / KEYS_FILE
        if keys_file.is_file():
            keys = ClientKeys.load(keys_file)
        else:
            keys = ClientKeys.new(bytes.fromhex(chosen.server_key))
            keys.save(keys_file)
        _write_private(file, chosen.to_text())
        return chosen, keys

    def noise_seed(self) -> int:
        """Return the secret that noise of this client is drawn from. Kept: the same round has the same noise."""
        file = self.path / NOISE_FILE
        if not file.is_file():
            _write_private(file, str(secrets.randbits(128)))
        return int(file.read_text())

    def spend_round(self, sent: Sent, num_rounds: int) -> None:
        """Write down that noise was drawn for this round. Raises CommunicationError where ε counts it no more.

        A server gets one update with the client's noise for each round of the job: of a later round than before, or
        the same one again.
        """
        digest = hashlib.sha256(sent.parameters.numpy().tobytes()).hexdigest()
        file = self.path / SPENT_FILE
        newest, last = file.read_text().split() if file.is_file() else ("-1", "")
        if sent.round >= num_rounds or sent.round < int(newest) or (sent.round == int(newest) and digest != last):
            raise CommunicationError(
                f"the server asks for round {sent.round + 1} of {num_rounds} after round {int(newest) + 1}, or for the "
                "same round with other parameters: epsilon does not count that. Nothing was sent"
            )
        _write_private(file, f"{sent.round} {digest}")

    @property
    def newest_state(self) -> int:
        """The round of the newest state; -1: there is none."""
        kept = checkpoint.list_checkpoints(self.path / STATES)
        return max((int(path.name.split("-")[1]) - 1 for path in kept if checkpoint.looks_whole(path)), default=-1)

    def read_state(self, counted: int) -> dict[str, Tensor]:
        """Return the state after the round that was counted last. Later ones were not counted, and are removed."""
        for path in checkpoint.list_checkpoints(self.path / STATES):
            if int(path.name.split("-")[1]) > counted + 1:
                shutil.rmtree(path)
        if counted < 0:
            return {}
        return checkpoint.load(self.path / STATES / f"step-{counted + 1}").part("state").tensors

    def write_state(self, round_number: int, state: Mapping[str, Tensor]) -> None:
        """Keep the state after a round, before its update is sent."""
        tensors = {f"state.{name}": tensor for name, tensor in state.items()}
        checkpoint.save(self.path / STATES, round_number + 1, State(tensors, {}), keep=3)


class FederationClient:
    """One client. `enrol`, then `prepare` with the parts of its job, then `run`."""

    def __init__(
        self,
        folder: ClientFolder,
        invitation: Invitation,
        keys: ClientKeys,
        say: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._folder, self._invitation, self._keys, self._say = folder, invitation, keys, say
        self.name = invitation.name
        self._channel: ClientChannel | None = None
        self._heartbeat_s = 1.0
        self._lead: Callable[[Sent, dict[str, Tensor]], None] | None = None
        self._secure: tuple[str, SecureClient] | None = None
        self._trained: tuple[tuple[int, int], Any] | None = None  # what was computed for a round and attempt
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def enrol(self) -> Enrolled:
        """Show the token; return the job and what belongs to it.

        Raises JobError if the server refuses this client, CommunicationError if it is not there.
        """
        self._open(Limits())
        reply = self._request(Enrol(self.name, self._invitation.ticket, Versions.here()), CONNECT_S).message
        assert isinstance(reply, Enrolled), reply
        self._heartbeat_s = reply.heartbeat_s
        return reply

    def prepare(self, parts: Components) -> None:
        """Take the parts that train: the model of the server's job, and this client's data. Local."""
        job = parts.job
        self._settings = settings_of(job)
        self._tables = self._settings.parts
        self._algorithm = make_algorithm(self._settings.use, job.python_path)
        self._flat = FlatModel(parts.model, self._settings.is_personal)
        self._adds_noise = self._tables.privacy is not None and self._tables.privacy.where == "local"
        self._trainer = ClientTrainer(
            job,
            self._settings,
            self._algorithm,
            self._flat,
            parts.computation,
            parts.recipe,
            # The server knows the seed of the job, and could take noise of that seed off again.
            noise_key=self._folder.noise_seed() if self._adds_noise else None,
        )
        self._source = parts.splits.train
        if self._source.num_samples is None:
            raise JobError("data without a length cannot be trained on by rounds: give data that has a length")
        self._indices = torch.arange(self._source.num_samples)

    def try_out(self) -> Update:
        """Train one round from the model as it was built, and send nothing; return what would be sent."""
        return self._train(self._first_sent(), {})

    def train_in(self, team: ClientTeam, lead: Callable[[Sent, dict[str, Tensor]], None] | None) -> None:
        """Train as one of a team from now on; `lead` gives the others what a round begins with. Local."""
        self._trainer.team, self._lead = team, lead

    def follow(self, sent: Sent, state: dict[str, Tensor]) -> None:
        """Train a round that another worker of the team leads, and sends the update of."""
        with contextlib.suppress(CordeeError):  # the leader has the same, and tells the server
            self._train(sent, state)

    def _first_sent(self) -> Sent:
        own = self._algorithm.begin_server(self._flat.shared) if self._algorithm.sends_own else {}
        return Sent(0, self._flat.shared.clone(), self._flat.read_buffers(), own)

    def know(self, enrolled: Enrolled) -> None:
        """Take the answer to `enrol`, for which another process has asked."""
        self._heartbeat_s = enrolled.heartbeat_s

    def run(self, should_stop: Callable[[], bool], after_answer: Callable[[], None] = lambda: None) -> str:
        """Take part until the server says that it is over; return why. Raises JobError where the server refuses.

        `after_answer` is called when what an answer of the server asks for is done. Afterwards `run` may be called
        again.
        """
        try:
            return self._take_part(should_stop, after_answer)
        finally:
            self.close()

    def _take_part(self, should_stop: Callable[[], bool], after_answer: Callable[[], None]) -> str:
        vectors = 4 + len(self._flat.names) * 3  # of a compressed update
        limits = limits_for(self._flat.num_shared, self._flat.read_buffers().numel(), vectors)
        self._open(limits)
        self._make_ready()
        self._is_closing.clear()
        self._thread = threading.Thread(target=self._send_signs_of_life, name="cordee-client", daemon=True)
        self._thread.start()
        while not should_stop():
            try:
                received = self._request(Poll(), self._patience_s, should_stop)
            except _NotReady:
                self._make_ready()
                continue
            match received.message:
                case Finished(reason=reason):
                    return reason
                case Work() as work:
                    self._do(work, received)
                case Wait(reason=reason):
                    if reason:
                        self._say(reason)
            after_answer()
        return "it was asked to stop"

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()  # it sends through the channel
        if self._channel is not None:
            self._channel.close()
        self._thread = self._channel = None

    # One task.

    def _do(self, work: Work, received: Received) -> None:
        task = work.task
        try:
            if task.stage == "train":
                message, buffers = self._plain_result(work, received)
            else:
                message, buffers = self._secure_result(work, received)
        except CordeeError as error:
            self._say(f"round {task.round + 1}: {error}")
            with contextlib.suppress(_NotReady):
                self._request(Failed(task, str(error)[:4000]), self._patience_s)
            return
        reach("federation.client_result")
        while True:
            try:
                self._request(message, self._patience_s, buffers=buffers)
                if task.stage in ("train", "masked"):
                    self._say(f"round {task.round + 1}: the update is with the server")
                return
            except _NotReady:
                self._make_ready()
            except RefusedError as error:
                if error.reason not in (LATE, WRONG_UPDATE):
                    raise
                self._say(f"round {task.round + 1}: the update does not count: {error.detail}")
                return

    def _plain_result(self, work: Work, received: Received) -> tuple[Result, list[Any]]:
        update = self._trained_update(work, received)
        names, test = tuple(sorted(update.summed)), update.test
        message = Result(
            work.task,
            num_samples=update.num_samples,
            num_steps=update.num_steps,
            num_trained=update.num_trained,
            num_payload=len(update.payload),
            summed=names,
            scale=update.scale,
            loss_sum=update.loss_sum,
            loss_count=update.loss_count,
            test=(test.num_samples, test.num_correct_before, test.num_correct_after) if test is not None else None,
        )
        return message, [*update.payload, update.buffers, *(update.summed[name] for name in names)]

    def _trained_update(self, work: Work, received: Received) -> Update:
        """Train for a round, once: asked again, the client sends what it has."""
        key = (work.task.round, work.task.attempt)
        if self._trained is None or self._trained[0] != key:
            state = self._folder.read_state(work.counted) if self._trainer.is_stateful else {}
            sent = self._read_sent(work, received)
            if self._adds_noise:
                self._folder.spend_round(sent, self._settings.rounds)
            update = self._train(sent, state)
            if self._trainer.is_stateful:
                self._folder.write_state(work.task.round, update.state)
            self._trained = (key, update)
        trained: Update = self._trained[1]
        return trained

    def _train(self, sent: Sent, state: dict[str, Tensor]) -> Update:
        if self._lead is not None:
            self._lead(sent, state)
        return self._trainer.train(sent, state, self._source, self._indices, client=self.name)

    def _read_sent(self, work: Work, received: Received) -> Sent:
        """Check what the server sent against the own model. Raises CommunicationError."""
        tensors = [buffer.torch().clone() for buffer in received.buffers]
        like = [self._flat.shared, self._flat.read_buffers(), *[self._flat.shared] * len(work.own)]
        if len(tensors) != len(like) or any(
            a.shape != b.shape or a.dtype != b.dtype for a, b in zip(tensors, like, strict=True)
        ):
            raise CommunicationError("the server sent parameters of another model")
        return Sent(work.task.round, tensors[0], tensors[1], dict(zip(work.own, tensors[2:], strict=True)))

    def _secure_result(self, work: Work, received: Received) -> tuple[Result, list[Any]]:
        if self._tables.secure is None or work.agreement is None:
            raise CommunicationError("the server asks for a secure round, which is not in the job")
        client, agreement = self._secure_client(work.agreement), work.agreement
        match work.task.stage:
            case "keys":
                keys = client.advertise()
                return Result(work.task, keys=(keys.encryption, keys.masking)), []
            case "shares":
                directory = {name: PublicKeys(*keys) for name, keys in work.directory.items()}
                shares = client.share(directory)
                return Result(work.task, sealed=shares.sealed, commitment=shares.commitment), []
            case "masked":
                update = self._trained_update(work, received)
                plan = plan_secure(self._settings, self._tables.secure, self._flat.num_shared, agreement.num_clients)
                weight = self._settings.weight_of(update.num_samples)
                words = plan.encode(update.payload[0], weight, self.name)
                return Result(work.task), [np.ascontiguousarray(client.mask(work.sealed, words))]
            case _:
                revealed = client.reveal(work.survivors)
                return Result(
                    work.task,
                    share_number=revealed.number,
                    self_seeds=revealed.self_seeds,
                    mask_secrets=revealed.mask_secrets,
                ), []

    def _secure_client(self, agreement: Agreement) -> SecureClient:
        assert self._tables.secure is not None
        if self._secure is None or self._secure[0] != agreement.context:
            plan = plan_secure(self._settings, self._tables.secure, self._flat.num_shared, agreement.num_clients)
            agreed = SecureRound(
                context=agreement.context,
                threshold=agreement.threshold,
                num_words=plan.num_words,
                word_bits=plan.fixed.word_bits,
            )
            self._secure = (agreement.context, SecureClient(self.name, agreed))
        return self._secure[1]

    # The channel.

    def _open(self, limits: Limits) -> None:
        if self._channel is not None:
            self._channel.close()
        speaker = Speaker(run=self._invitation.run, name=self.name, incarnation=time.time_ns())
        self._channel = ClientChannel(
            f"tcp://{self._invitation.address}",
            speaker,
            Codec(FEDERATION, limits),
            self._keys,
            silence_s=max(5.0, 5 * self._heartbeat_s),
        )

    def _make_ready(self) -> None:
        state_round = self._folder.newest_state if self._trainer.is_stateful else -1
        self._request(Ready(self._flat.layout, len(self._indices), state_round), self._patience_s)

    def _request(
        self,
        message: Message,
        patience_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        buffers: list[Any] | None = None,
    ) -> Received:
        """Ask until there is an answer. Raises JobError where this client is refused for good, RefusedError for a
        message that is refused, CommunicationError after `patience_s` without the server.
        """
        assert self._channel is not None
        deadline_s, has_said = time.monotonic() + patience_s, False
        while True:
            try:
                received = self._channel.request(message, buffers or [], timeout_s=REPLY_S)
                if has_said:
                    self._say("the server answers again")
                return received
            except RefusedError as error:
                if error.reason in ENDS_CLIENT:
                    raise JobError(f"the federation refuses client {self.name}: {error.detail}") from error
                if error.reason == NOT_READY:
                    raise _NotReady from error
                raise
            except CommunicationError as error:
                if time.monotonic() > deadline_s or should_stop():
                    raise CommunicationError(
                        f"the server at {self._invitation.address} cannot be reached: {error}"
                    ) from error
                if not has_said and not isinstance(message, Enrol):
                    has_said = True
                    patience = format_duration(patience_s)
                    self._say(f"the server does not answer; this client looks for it for {patience} (--patience)")
                time.sleep(_AGAIN_S if isinstance(message, Poll) else 0.1)

    def _send_signs_of_life(self) -> None:
        """Tell the server that this client works, while it trains. Runs in a thread of its own."""
        while not self._is_closing.wait(self._heartbeat_s):
            with contextlib.suppress(CommunicationError):
                assert self._channel is not None
                self._channel.send(Alive(), timeout_s=0.0)


class _NotReady(Exception):  # noqa: N818
    """The server was started again, and has to be told about this client's model."""


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
