"""The step of the parameter server, exhaustively: every interleaving, every loss, in a small world (decision 0022).

Two workers, a server and its follower, two steps. The servers are the real `ParameterService` with real shards and
optimizers; who serves and who follows is decided by the real `ServerSlots`; units come from the real `Ledger`. Only the
wire is replaced, by calls in one process. Its fault points are where things happen: at each of them, in each server,
the process dies or the communication fails. From each state all next states are made; states that are equal are one.

Dispatcher and coordinator are taken for one that does not die: what they know is in a journal before it has an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cordee.checkpoint import State
from cordee.cluster.members import MemberRecord
from cordee.communication.calls import Call, UnavailableError
from cordee.communication.messages import Message
from cordee.compute import make_optimizer_recipe, make_schedule
from cordee.core.errors import CommunicationError
from cordee.core.references import Use
from cordee.data import Ledger
from cordee.data.ledger import Exchanges
from cordee.parameters import replication
from cordee.parameters.messages import Adopt
from cordee.parameters.placement import make_layout
from cordee.parameters.replication import decode_state, encode_state
from cordee.parameters.server_slots import ServerSlot, ServerSlots
from cordee.runs.dispatched.server_registry import ServerRegistry
from cordee.strategies.parameter_server import service as service_module
from cordee.strategies.parameter_server.messages import Pull, PullExtras, Push, Pushed, PushExtras
from cordee.strategies.parameter_server.service import ParameterService
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import FixedSum, ParameterShard

NUM_WORKERS, BATCH = 2, 2
SETTINGS = ParameterServerSettings(replicas=2)
FIXED = FixedSum(NUM_WORKERS, BATCH)
MODEL = nn.Linear(1, 1, bias=False)
LAYOUT = make_layout(MODEL, 1, can_split=True)
RECIPE = make_optimizer_recipe(
    Use("sgd", lr=0.5, momentum=0.5), make_schedule(Use("constant"), 2), lr_scale="none", num_shares=1
)
PHASES = ("pull", "pull buffers", "push", "push buffers", "report")


class DiedError(BaseException):
    """The process that runs this is dead."""


class Fault(NamedTuple):
    server: str
    point: str
    action: str  # "die" or "error"


class BothLostError(Exception):
    """All that had the parameters are dead: nothing that two replicas could do about it."""


@dataclass
class Worker:
    """One worker between two calls: `unit` is in hand, `phase` comes next."""

    name: str
    unit: int = -1
    phase: int = 0
    apply_step: int = -1
    values: tuple[float, ...] = ()
    buffer: float = 0.0


@dataclass
class Server:
    """One server process; `follower` is whom it passes on to, as it knows."""

    name: str
    service: ParameterService
    is_alive: bool = True
    follower: str = ""


class Wire:
    """What `Connection` is to a server: calls to another that may be dead."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self.address = world, address

    def call(self, message: Message, buffers: Sequence[Any] = (), reply_bytes: int = 0) -> Message:
        return self._world.call(self.address, "server", message, buffers)[0]

    def close(self) -> None:
        pass


@dataclass
class World:
    """Everything there is. Actions are named by tuples; `act` carries one out, with at most one fault in it."""

    num_steps: int
    workers: list[Worker]
    servers: dict[str, Server]
    slots: ServerSlots
    ledger: Ledger
    faults_left: int
    to_apply: int = -1  # the step that the servers may apply
    unnoticed: list[str] = field(default_factory=list)  # servers that died, or were given up and are to be killed
    num_workers_lost: int = 0
    newest: int = 1  # server
    fault: Fault | None = None
    passed: list[tuple[str, str]] = field(default_factory=list)  # points of the action under way
    running: list[str] = field(default_factory=list)  # servers whose code runs, the innermost last

    @classmethod
    def begin(cls, num_steps: int, num_faults: int) -> World:
        world = cls(
            num_steps=num_steps,
            workers=[Worker(f"worker-{index}") for index in range(NUM_WORKERS)],
            servers={},
            slots=ServerSlots([ServerSlot()]),
            ledger=_make_ledger(num_steps),
            faults_left=num_faults,
        )
        for name in ("server-0", "server-0.1"):
            world.servers[name] = Server(name, world._make_service(name))
            world.slots.join(0, name)
        world.act(("hand over",), None)
        return world

    def _make_service(self, name: str) -> ParameterService:
        shard = ParameterShard(LAYOUT.pieces, lambda piece: torch.ones(piece.length), RECIPE, SETTINGS, FIXED)
        shard.agreed = {"buffer": torch.zeros(1)}
        service = ParameterService(shard, LAYOUT, SETTINGS, is_fixed=True)
        service.name = name
        service.connect = lambda address: Wire(self, address)  # type: ignore[assignment,return-value]
        service.report_lost = lambda address, message: self._lose_follower(name, address)
        return service

    # What happens next.

    def actions(self) -> Iterator[tuple[Any, ...]]:
        """Everything that may happen now, but for faults inside calls."""
        if self.unnoticed:
            yield from (("notice", name) for name in self.unnoticed)
        if self.slots.unfollowed():
            yield ("hand over",)
        for index, worker in enumerate(self.workers):
            if worker.unit < 0:
                if self.slots.slots[0].serving and self._can_take():
                    yield ("take", index)
            elif PHASES[worker.phase] == "report":
                yield ("report", index)
            elif self.slots.slots[0].serving:
                yield ("call", index)
            if worker.unit >= 0 and self.faults_left:
                yield ("worker dies", index)

    def _can_take(self) -> bool:
        state = self.ledger.state
        limit = self.ledger.committed_steps + 1
        upcoming = [*state.returned, *([] if state.next_unit is None else [state.next_unit])]
        return any(number // NUM_WORKERS < limit for number in upcoming)

    def act(self, action: tuple[Any, ...], fault: Fault | None) -> None:
        self.fault, self.passed, self.running = fault, [], []
        self.faults_left -= fault is not None
        kind = action[0]
        if kind == "notice":
            self._notice(action[1])
        elif kind == "hand over":
            ((_, serving, follower),) = self.slots.unfollowed()
            try:
                self.call(serving, "launcher", Adopt(follower))
                self.slots.record_following(0, serving, follower)
            except CommunicationError:
                pass  # tried again
        elif kind == "take":
            self._take(self.workers[action[1]])
        elif kind == "call":
            with contextlib.suppress(CommunicationError):  # tried again
                self._call(self.workers[action[1]])
        elif kind == "report":
            self._report(self.workers[action[1]])
        elif kind == "worker dies":
            self.faults_left -= 1
            self.num_workers_lost += 1
            self.ledger.requeue(self.workers[action[1]].name)
            self.workers[action[1]] = Worker(f"worker-{NUM_WORKERS - 1 + self.num_workers_lost}")

    def _notice(self, name: str) -> None:
        """The coordinator hears that a server has ended: the dispatcher decides, another server is started."""
        self.unnoticed.remove(name)
        del self.servers[name]
        self.slots.lose(name)
        if not self.slots.slots[0].serving:
            raise BothLostError
        self.newest += 1
        new = f"server-0.{self.newest}"
        self.servers[new] = Server(new, self._make_service(new))
        self.slots.join(0, new, has_state=False)

    def _lose_follower(self, serving: str, address: str) -> None:
        """The real dispatcher's answer to `FollowerLost`; one that was given up itself is not heard."""
        records = {name: MemberRecord(role="server", index=0, address=name) for name in self.servers}
        if serving not in (self.slots.slots[0].serving, self.slots.slots[0].follower):
            raise UnavailableError("was given up")
        whereabouts = ServerRegistry(self.slots, records, lambda received, message: None, wants_followers=True)
        dropped = whereabouts.drop_follower(serving, address)
        if dropped and dropped not in self.unnoticed:  # it is killed: `Losses` does so with servers that have no part
            self.servers[dropped].is_alive = False
            self.unnoticed.append(dropped)
        self.servers[serving].follower = ""

    def _take(self, worker: Worker) -> None:
        unit = self.ledger.take(worker.name, limit_step=self.ledger.committed_steps + 1)
        assert unit is not None
        worker.unit, worker.phase, worker.apply_step = unit.number, 0, self.to_apply

    def _report(self, worker: Worker) -> None:
        """`TakeWork(done)`; a repetition of it is the same call again."""
        before = self.ledger.committed_steps
        self.ledger.commit(worker.unit)
        if self.ledger.committed_steps > before:
            self.to_apply = self.ledger.committed_steps - 1
        worker.unit = -1

    def _call(self, worker: Worker) -> None:
        step, share = divmod(worker.unit, NUM_WORKERS)
        serving = self.slots.slots[0].serving
        match PHASES[worker.phase]:
            case "pull":
                _, (values,) = self.call(serving, worker.name, Pull(0, 0, worker.apply_step))
                worker.values = tuple(values.tolist())
            case "pull buffers":
                _, (buffer,) = self.call(serving, worker.name, PullExtras(worker.apply_step))
                worker.buffer = float(buffer)
            case "push":
                gradient = gradient_of(worker.unit, torch.tensor(worker.values))
                floor = self.ledger.committed_steps * NUM_WORKERS
                push = Push(0, worker.unit, step, share, NUM_WORKERS, 1, 0, floor)
                answer, _ = self.call(serving, worker.name, push, [gradient])
                assert isinstance(answer, Pushed) and answer.outcome != "refused"
            case "push buffers":
                buffer = torch.tensor([buffer_of(worker.unit, worker.buffer)])
                pushed = PushExtras(worker.unit, ("buffer",), "", step, share, NUM_WORKERS)
                self.call(serving, worker.name, pushed, [buffer])
        worker.phase += 1

    def call(
        self, address: str, caller: str, message: Message, buffers: Sequence[Any] = ()
    ) -> tuple[Message, list[Tensor]]:
        """Have a server carry out a call. Raises CommunicationError if it is dead, dies meanwhile, or refuses."""
        server = self.servers.get(address)
        if server is None or not server.is_alive:
            raise CommunicationError(f"{address} died")
        answers: list[tuple[Message, list[Tensor]]] = []

        def send(reply: Message, out: Sequence[Any]) -> None:
            answers.append((reply, [tensor.clone() for tensor in out]))

        sent = tuple(SimpleNamespace(torch=lambda tensor=tensor: tensor) for tensor in buffers)
        self.running.append(address)
        try:
            server.service.handle(Call(caller, 0, message, sent, send))  # type: ignore[arg-type]
        except DiedError:
            if self.fault is not None and self.fault.server != address:
                raise
            server.is_alive = False
            if address not in self.unnoticed:
                self.unnoticed.append(address)
            raise CommunicationError(f"{address} died") from None
        finally:
            self.running.pop()
        if isinstance(message, Adopt):
            server.follower = message.address
        (answer,) = answers
        return answer

    def reach(self, point: str, error: type[Exception] = CommunicationError, of: Message | None = None) -> None:
        """Stands in for `fault_points.reach`."""
        point = point if of is None else f"{point}.{of.__struct_config__.tag}"
        place = (self.running[-1], point)
        self.passed.append(place)
        if self.fault is not None and place == (self.fault.server, self.fault.point):
            if self.fault.action == "die":
                raise DiedError
            raise error(point)

    # What is compared.

    def key(self) -> Any:
        """All that decides what may follow. Workers are told apart by what they have in hand only."""
        servers = {name: (*_key_of(one), one.is_alive, one.follower) for name, one in self.servers.items()}
        names = {name: index for index, name in enumerate(sorted(servers, key=lambda name: repr(servers[name])))}
        post = self.slots.slots[0]
        workers = sorted((w.unit, w.phase, w.apply_step, w.values, w.buffer) for w in self.workers)
        state = self.ledger.state
        return (
            tuple(
                repr((*key[:-1], names.get(key[-1]))) for _, key in sorted(servers.items(), key=lambda i: names[i[0]])
            ),
            (names.get(post.serving), names.get(post.follower), post.is_following),
            tuple(sorted(names[name] for name in self.unnoticed)),
            tuple(workers),
            (state.committed_steps, state.next_unit, tuple(state.committed), tuple(state.returned)),
            self.faults_left,
            self.to_apply,
        )

    def copy(self) -> World:
        ledger = _make_ledger(self.num_steps)
        ledger.restore(self.ledger.state)
        post = self.slots.slots[0]
        slots = ServerSlots([replace(post)], self.slots.has_been_ready)
        workers = [replace(worker) for worker in self.workers]
        other = World(self.num_steps, workers, {}, slots, ledger, self.faults_left, self.to_apply, list(self.unnoticed))
        other.num_workers_lost, other.newest = self.num_workers_lost, self.newest
        for name, server in self.servers.items():
            service = other._make_service(name)
            old, new = server.service._shard, service._shard
            new.piece(0).restore(_sent(old.piece(0).dump()))
            new.restore_extras(_sent(old.dump_extras()))
            if server.follower:
                service._follower = Wire(other, server.follower)  # type: ignore[assignment]
            other.servers[name] = Server(name, service, server.is_alive, server.follower)
        return other

    def check(self) -> None:
        """What holds between any two actions."""
        post = self.slots.slots[0]
        if not post.serving or not self.servers[post.serving].is_alive:
            return
        first = self.servers[post.serving]
        if post.is_following and first.follower == post.follower and self.servers[post.follower].is_alive:
            assert _key_of(first) == _key_of(self.servers[post.follower]), "a server and its follower differ"
        if post.is_following:
            assert first.follower == post.follower, "one is to take over that is not told what happens"

    @property
    def is_done(self) -> bool:
        return self.ledger.is_complete and not self.unnoticed and not self.slots.unfollowed()

    def check_end(self, expected: tuple[float, float]) -> None:
        """A snapshot of all steps: each unit has counted once, in the weights that are read and in their follower."""
        post = self.slots.slots[0]
        for name in (post.serving, post.follower):
            shard = self.servers[name].service._shard
            found = float(shard.piece(0).pull("evaluator", self.to_apply)[0])
            shard.apply_pending_extras(self.to_apply)
            assert (found, float(shard.extras()["buffer"])) == expected, f"{name} ends with other weights"
            assert shard.piece(0).version == self.num_steps


def gradient_of(unit: int, values: Tensor) -> Tensor:
    """Depends on the unit and on the weights that it was computed with; exact in floating point."""
    return (0.25 * values + unit + 1) / BATCH


def buffer_of(unit: int, before: float) -> float:
    return 0.5 * before + unit + 1


def sequential(num_steps: int) -> tuple[float, float]:
    """The weight and the buffer of one process."""
    weight, buffer = torch.ones(1), 0.0
    parameter = nn.Parameter(weight)
    optimizer = RECIPE.make([("weight", parameter)])
    for step in range(num_steps):
        units = [step * NUM_WORKERS + share for share in range(NUM_WORKERS)]
        parameter.grad = sum((gradient_of(unit, parameter.detach()) for unit in units), torch.zeros(1))
        buffer = sum(buffer_of(unit, buffer) for unit in units) / NUM_WORKERS
        RECIPE.set_rate(optimizer, step)
        optimizer.step()
    return float(parameter.detach()), buffer


def _key_of(server: Server) -> tuple[Any, ...]:
    """The whole state of a server."""
    shard = server.service._shard
    names, buffers = encode_state(shard.piece(0).dump())
    extras, plain = shard.dump_extras()
    plain = {name: value for name, value in plain.items() if name != "ages"}
    numbers = [tuple(tensor.reshape(-1).tolist()) for tensor in (*buffers, *extras.values())]
    return names, tuple(numbers), repr(plain)


def _sent(state: State) -> State:
    """What another process is given of a state."""
    names, buffers = encode_state(state)
    return decode_state(names, [tensor.clone() for tensor in buffers])


class Explored(NamedTuple):
    num_states: int
    num_transitions: int
    num_ends: int
    num_both_lost: int


def explore(num_steps: int, num_faults: int, monkeypatch: pytest.MonkeyPatch) -> Explored:
    """Make all states that can be reached, and check each; from each the end can be reached."""
    current: list[World] = []
    for module in (service_module, replication):
        monkeypatch.setattr(module, "reach", lambda *place, **of: current[-1].reach(*place, **of))
    expected = sequential(num_steps)
    first = _begin(num_steps, num_faults, current)
    todo, known = [first], {first.key(): 0}
    leads_to: list[set[int]] = [set()]
    ends: set[int] = set()
    num_transitions = num_both_lost = 0
    while todo:
        world = todo.pop()
        number = known[world.key()]
        if world.is_done:
            ends.add(number)
            world.check_end(expected)
            continue
        for action in list(world.actions()):
            faults: list[Fault | None] = [None]
            while faults:
                fault = faults.pop()
                after = world.copy()
                current[:] = [after]
                num_transitions += 1
                try:
                    after.act(action, fault)
                except BothLostError:
                    num_both_lost += 1
                    ends.add(number)  # the coordinator says so, and continues from a checkpoint
                    continue
                if fault is None and world.faults_left:
                    faults += [Fault(*place, action=how) for place in set(after.passed) for how in ("die", "error")]
                try:
                    after.check()
                except AssertionError as error:
                    raise AssertionError(f"{error} after {action} with {fault}") from error
                key = after.key()
                if key not in known:
                    known[key] = len(leads_to)
                    leads_to.append(set())
                    todo.append(after)
                leads_to[number].add(known[key])
    _check_ends(leads_to, ends)
    return Explored(len(known), num_transitions, len(ends), num_both_lost)


def _make_ledger(num_steps: int) -> Ledger:
    return Ledger(Exchanges(num_steps * BATCH, BATCH, last=num_steps), NUM_WORKERS)


def _begin(num_steps: int, num_faults: int, current: list[World]) -> World:
    silent = SimpleNamespace(reach=lambda *place, **of: None)
    current.append(silent)  # type: ignore[arg-type]
    world = World.begin(num_steps, num_faults)
    current.clear()
    return world


def _check_ends(leads_to: list[set[int]], ends: set[int]) -> None:
    """Nobody waits for ever: from every state an end can be reached."""
    before: list[list[int]] = [[] for _ in leads_to]
    for number, following in enumerate(leads_to):
        for one in following:
            before[one].append(number)
    reached, todo = set(ends), list(ends)
    while todo:
        for number in before[todo.pop()]:
            if number not in reached:
                reached.add(number)
                todo.append(number)
    assert len(reached) == len(leads_to), f"{len(leads_to) - len(reached)} states have no way to an end"


def test_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explore(2, 0, monkeypatch)
    assert found.num_ends >= 1 and not found.num_both_lost


def test_one_loss_anywhere_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explore(1, 1, monkeypatch)
    assert found.num_states > 500 and not found.num_both_lost, found


def test_a_second_that_is_dropped_in_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model sees what it is for: a server that continues alone without telling anybody."""

    def lose_follower(service: ParameterService, why: str) -> None:
        service._follower = None

    monkeypatch.setattr(ParameterService, "_lose_follower", lose_follower)
    with pytest.raises(AssertionError, match=r"differ|that is not told what happens"):
        explore(1, 1, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_losses", [1, 2])
def test_losses_anywhere_in_two_steps(monkeypatch: pytest.MonkeyPatch, num_losses: int) -> None:
    found = explore(2, num_losses, monkeypatch)
    print(found)
    assert found.num_states > 3000, found
    assert bool(found.num_both_lost) == (num_losses == 2), "only two losses can take all that have the parameters"
