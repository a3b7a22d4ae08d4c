"""How the processes that a scheduler started find rank 0, and what they say to it.

Each process is a slot: it asks rank 0 what to do, and runs one agent at a time. Nothing is exchanged before: from the
secret that the scheduler shares, and the id of the launch, every process derives the keys and the ports. On one host
no secret is needed: rank 0 leaves one in a file that only its user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta

from cordee.cluster.engines.agent_messages import AgentOrder, Versions
from cordee.cluster.processes import describe_status
from cordee.communication.channel import ClientChannel, RefusedError, ServerChannel
from cordee.communication.endpoint import Speaker
from cordee.communication.keys import ClientKeys, ServerKeys, derive_keys, read_private
from cordee.communication.messages import Count, Message, Name, Refused, Text
from cordee.communication.wire import Codec
from cordee.core import env
from cordee.core.errors import CommunicationError, JobError
from cordee.core.launchers import LaunchedTask

NUM_PORTS = 16  # that rank 0 tries, and the others after it
PORTS = range(20_000, 30_000)  # below the range from which systems give ports to whoever asks
FIND_TIMEOUT_S = 300.0  # for rank 0 to be there: pods and nodes of one launch start minutes apart
LOST_S = 15.0  # without an answer of rank 0, that was there before
REPLY_TIMEOUT_S = 5.0
LEAST_SECRET = 16  # characters

_Number = Annotated[int, Meta(ge=-1, le=2**62)]


class SlotState(Message, frozen=True):
    """A process of the launch reports, and asks what to do. Answered by `SlotTask` within a second, or by `Refused`."""

    is_generational = False

    rank: Count
    host: Name
    versions: Versions
    agent: _Number = -1  # the number of the agent that runs here
    ended: _Number = -1  # the agent that ended here last, and how
    how: Text = ""
    is_leaving: bool = False  # the scheduler has asked this process to end
    seen: Text = ""  # what the file holds that `look` named, or why it cannot be read
    start: Count = 0  # tells processes of one rank apart; the connections of one process have incarnations of their own


class SlotTask(Message, frozen=True):
    """What a process is to do.

    `wait`: ask again. `start`: run this agent. `stop`: end the agent. `look`: read the file named. `over`: exit.
    """

    is_generational = False

    action: Literal["wait", "start", "stop", "look", "over"]
    text: Text = ""  # start: the order; look: the file
    code: Count = 0  # over: what to exit with


CODEC_MESSAGES = (SlotState, SlotTask, Refused)


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the processes of a launch meet."""

    task: LaunchedTask
    launch_id: str
    secret: str  # "" on one host where the user gives none
    port: int  # that the user wants; 0 if any

    @property
    def file(self) -> Path:
        """What rank 0 leaves for the others where there is no secret."""
        return env.cache_folder() / "launches" / f"{hashlib.sha256(self.launch_id.encode()).hexdigest()[:24]}.json"

    def ports(self) -> list[int]:
        """Return the ports that rank 0 tries, the same in every process."""
        return [self.port] if self.port else candidate_ports(self.launch_id)


class _ServerPlace(msgspec.Struct, frozen=True):
    """What the file of a launch on one host says."""

    address: str
    secret: str
    pid: int  # of rank 0, and when it was started: a file of an earlier launch is not read
    started: float


def find_rendezvous(task: LaunchedTask) -> Rendezvous:
    """Return where this launch meets. Raises JobError if it has no secret and several hosts, or no id."""
    given = env.shared_secret()
    secret = _read_secret(given) if isinstance(given, Path) else given
    if secret and len(secret) < LEAST_SECRET:
        raise JobError(
            f"CORDEE_SECRET has {len(secret)} characters, and must have at least {LEAST_SECRET}: "
            "make one with `openssl rand -hex 32`"
        )
    if not secret and not task.is_one_host:
        raise JobError(
            f"{task.launcher} started processes on {task.num_hosts or 'several'} hosts, and there is no secret that "
            "they share: without one anybody on the network could run code in them. Make one (openssl rand -hex 32), "
            "and have the scheduler give it to all of them as CORDEE_SECRET, or as a file that CORDEE_SECRET_FILE names"
        )
    launch_id = task.launch_id
    if not launch_id and task.is_one_host:
        launch_id = _parent_id()
    if not launch_id:
        raise JobError(
            f"{task.launcher} gives its processes no id that all of them have: set CORDEE_JOB_ID to the same text in "
            "all of them, another one for each job"
        )
    if not task.is_one_host and not task.first_host:
        raise JobError(
            f"{task.launcher} does not say on which host rank 0 is: set MASTER_ADDR to its name or address in all "
            "processes (mpirun -x MASTER_ADDR=…)"
        )
    return Rendezvous(task=task, launch_id=launch_id, secret=secret, port=env.listening_port())


def _read_secret(path: Path) -> str:
    try:
        secret = read_private(path, "secrets").strip()
    except CommunicationError as error:
        raise JobError(f"CORDEE_SECRET_FILE: {error}") from None
    if not secret:
        raise JobError(f"CORDEE_SECRET_FILE: {path} is empty")
    return secret


def _parent_id() -> str:
    """Return an id of the process that started this one, which is one for all processes of a launch on one host."""
    parent = psutil.Process().parent()
    return f"parent/{parent.pid}/{parent.create_time()}" if parent is not None else ""


def candidate_ports(launch_id: str) -> list[int]:
    """Return the ports at which rank 0 of a launch may listen, in the order in which they are tried."""
    seed = int.from_bytes(hashlib.sha256(f"ports of {launch_id}".encode()).digest())
    return random.Random(seed).sample(PORTS, NUM_PORTS)


def own_ip(task: LaunchedTask) -> str:
    """Return the address of this host, that of rank 0, at which the others reach it. Raises JobError."""
    if task.is_one_host:
        return "127.0.0.1"
    name = task.first_host
    ip = look_up(name)
    if ipaddress.ip_address(ip).is_loopback and not _is_loopback(name):
        raise JobError(
            f"{name} is {ip} on that host itself, where no other host reaches it: set MASTER_ADDR to its address in "
            "the network of the cluster, in all processes"
        )
    try:
        with socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET):
            return ip
    except OSError as error:
        raise JobError(
            f"rank 0 is on {task.host}, and cannot listen at {name} ({ip}): {error.strerror}; set MASTER_ADDR to an "
            "address of that host, in all processes"
        ) from None


def look_up(name: str) -> str:
    """Return the address of a host. Raises JobError."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError) as error:
        raise JobError(
            f"the host of rank 0, {name}, cannot be looked up: {error}; set MASTER_ADDR to its address in all processes"
        ) from None


def _is_loopback(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def open_server(rendezvous: Rendezvous) -> ServerChannel:
    """Listen for the other processes of the launch, as its rank 0. `close_server` takes back what this leaves.

    Raises JobError if none of the ports is free.
    """
    task, ip = rendezvous.task, own_ip(rendezvous.task)
    secret = rendezvous.secret or os.urandom(32).hex()
    keys = derive_keys(secret, rendezvous.launch_id, task.world_size)[0]
    host = f"[{ip}]" if ":" in ip else ip
    ports: list[int | str] = [*rendezvous.ports()] if rendezvous.secret or rendezvous.port else ["*"]
    problem: CommunicationError | None = None
    for port in ports:
        try:
            channel = _listen(f"tcp://{host}:{port}", keys)
            break
        except CommunicationError as error:
            problem = error
    else:
        tried = ", ".join(map(str, ports))
        raise JobError(f"rank 0 on {task.host} cannot listen at {ip}, ports {tried}: {problem}; set CORDEE_PORT")
    if not rendezvous.secret:
        own = psutil.Process()
        _write_private(rendezvous.file, _ServerPlace(channel.address, secret, own.pid, own.create_time()))
    return channel


def close_server(rendezvous: Rendezvous, channel: ServerChannel) -> None:
    if not rendezvous.secret:
        with contextlib.suppress(OSError):
            rendezvous.file.unlink(missing_ok=True)
    channel.close()


def _listen(address: str, keys: ServerKeys) -> ServerChannel:
    speaker = Speaker(run="launch", name="rank-0", incarnation=time.time_ns())
    return ServerChannel(address, speaker, Codec(CODEC_MESSAGES), keys)


def _write_private(path: Path, content: _ServerPlace) -> None:
    """Write a file that only its owner can read; it appears complete or not at all."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(content))
        Path(temporary).replace(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}; set CORDEE_CACHE to another folder") from None


class Connection:
    """The line of another rank to rank 0: found at first, and found again when it breaks."""

    def __init__(self, rendezvous: Rendezvous, *, find_timeout_s: float = FIND_TIMEOUT_S) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = find_timeout_s
        self._channel: ClientChannel | None = None
        self._start = time.time_ns()
        self._problem = "it was not looked for"

    def ask(self, state: SlotState) -> SlotTask:
        """Return the answer of rank 0.

        Raises JobError if rank 0 refuses this process, and CommunicationError if it is not there, or is lost.
        """
        state = msgspec.structs.replace(state, start=self._start)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                reply = self._request(state) if self._channel is not None else self._find(state)
                self._timeout_s = LOST_S
                return reply
            except RefusedError as error:
                raise JobError(error.detail or str(error)) from None
            except CommunicationError as error:
                self._problem = str(error)
                self.close()
            if time.monotonic() > deadline_s:
                raise CommunicationError(self._describe_loss())
            time.sleep(0.2)

    def _describe_loss(self) -> str:
        task = self._rendezvous.task
        if self._timeout_s == LOST_S:
            return f"rank 0 of the launch was lost: no answer within {LOST_S:g} s ({self._problem})"
        found = f"rank {task.rank} on {task.host} has not found rank 0 within {self._timeout_s:g} s: {self._problem}"
        if task.is_one_host:
            return f"{found}. The messages of rank 0 may say why"
        ports = ", ".join(map(str, self._rendezvous.ports()))
        return (
            f"{found}. The messages of rank 0 may say why; between {task.host} and {task.first_host} one of the ports "
            f"{ports} must be open, or the one that CORDEE_PORT names"
        )

    def _find(self, state: SlotState) -> SlotTask:
        """Connect to what listens and knows the secret; return its answer. Raises CommunicationError."""
        addresses, secret = self._addresses()
        launch_id, task = self._rendezvous.launch_id, self._rendezvous.task
        keys = derive_keys(secret, launch_id, task.world_size)[1][task.rank]
        problem = ""
        for ip, port in addresses:
            try:
                # Refused at once where nothing listens, which libzmq would not say.
                socket.create_connection((ip, port), timeout=2.0).close()
                self._channel = self._connect(ip, port, keys)
                return self._request(state)  # another program at this port does not complete the handshake
            except OSError as error:
                problem = problem or f"{ip}:{port}: {error.strerror or error}"
            except CommunicationError as error:
                if isinstance(error, RefusedError):
                    raise
                problem = str(error)
                self.close()
        raise CommunicationError(problem)

    def _addresses(self) -> tuple[list[tuple[str, int]], str]:
        """Return where rank 0 may listen, and the secret. Raises CommunicationError if that is not known yet."""
        rendezvous = self._rendezvous
        if not rendezvous.secret:
            found = self._read_place()
            host, _, port = found.address.removeprefix("tcp://").rpartition(":")
            return [(host, int(port))], found.secret
        try:
            ip = "127.0.0.1" if rendezvous.task.is_one_host else look_up(rendezvous.task.first_host)
        except JobError as error:  # the pod of rank 0 may not have its name yet
            raise CommunicationError(str(error)) from None
        return [(ip, port) for port in rendezvous.ports()], rendezvous.secret

    def _connect(self, ip: str, port: int, keys: ClientKeys) -> ClientChannel:
        host = f"[{ip}]" if ":" in ip else ip
        # Each connection numbers its messages from 1: on the second they would be taken for repeated ones of the first.
        speaker = Speaker(run="launch", name=f"rank-{self._rendezvous.task.rank}", incarnation=time.time_ns())
        return ClientChannel(f"tcp://{host}:{port}", speaker, Codec(CODEC_MESSAGES), keys, silence_s=LOST_S)

    def _request(self, state: SlotState) -> SlotTask:
        assert self._channel is not None
        reply = self._channel.request(state, timeout_s=REPLY_TIMEOUT_S).message
        assert isinstance(reply, SlotTask), reply
        return reply

    def _read_place(self) -> _ServerPlace:
        path = self._rendezvous.file
        found = None
        with contextlib.suppress(msgspec.DecodeError):
            found = msgspec.json.decode(read_private(path, "keys"), type=_ServerPlace)
        with contextlib.suppress(psutil.Error):
            if found is not None and abs(psutil.Process(found.pid).create_time() - found.started) < 0.1:
                return found
        raise CommunicationError(f"rank 0 has not written {path}")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Slot:
    """A process of the launch that runs agents when it is told to, one at a time."""

    def __init__(self, task: LaunchedTask, exchange: Callable[[SlotState], SlotTask]) -> None:
        """`exchange` gives rank 0 the state of this slot, and returns what to do; it may take up to a second."""
        self._exchange = exchange
        self._state = SlotState(rank=task.rank, host=task.host, versions=Versions.here())
        self._agent: threading.Thread | None = None
        self._stop = threading.Event()
        self._status = 0

    def serve(self, should_leave: Callable[[], bool]) -> int:
        """Do what rank 0 says until it says that it is over; return the exit code that it gives."""
        try:
            while True:
                if self._agent is not None and not self._agent.is_alive():
                    self._agent.join()
                    self._agent = None
                    how = (
                        "" if self._status == 0 else f"the agent on {self._state.host} {describe_status(self._status)}"
                    )
                    self._state = msgspec.structs.replace(self._state, agent=-1, ended=self._state.agent, how=how)
                state = msgspec.structs.replace(self._state, is_leaving=should_leave())
                told = self._exchange(state)
                match told.action:
                    case "start" if self._agent is None:
                        self._start(told.text)
                    case "stop":
                        self._stop.set()
                    case "look":
                        self._state = msgspec.structs.replace(self._state, seen=_read_marker(Path(told.text)))
                    case "over":
                        return told.code
        finally:
            self._stop.set()
            if self._agent is not None:
                self._agent.join()

    def _start(self, text: str) -> None:
        from cordee.cluster.engines.agent import run_agent_process

        order = AgentOrder.from_text(text)
        self._stop = stop = threading.Event()

        def run() -> None:
            self._status = run_agent_process(order, should_stop=stop.is_set)

        # The agent dies with the thread that started it, as the kernel sees it: this one waits for its end.
        self._agent = threading.Thread(target=run, name=f"cordee-agent-{order.number}")
        self._state = msgspec.structs.replace(self._state, agent=order.number)
        self._agent.start()


def _read_marker(path: Path) -> str:
    try:
        return path.read_text()[:1000]
    except OSError as error:
        return f"{path}: {error.strerror}"
