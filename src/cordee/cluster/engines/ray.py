"""The engine `ray`: every agent is a Ray actor with one CPU.

Ray places actors and reports their end. Ray restarts nothing (`max_restarts=0`): the engine of agents asks for another
actor, with another ticket. Actors are independent of each other, not bundles of a placement group, so that a lost node
takes its own agents only (docs/decisions/0038). Actors that wait for a CPU are the demand that Ray's autoscaler sees.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cordee.cluster.engine import GRACE_S, Capacity
from cordee.cluster.engines.agent import findings_of, look_from_here, run_agent_process
from cordee.cluster.engines.agent_messages import AgentOrder
from cordee.cluster.engines.agents import AgentEnded, AgentSource, EngineRequest
from cordee.cluster.processes import describe_status
from cordee.communication.this_host import split_address
from cordee.core import env
from cordee.core.errors import CordeeError, JobError, MissingExtraError
from cordee.core.findings import Finding
from cordee.core.interrupts import keep_handlers

CONNECT_S = 3.0  # for a connection to the head node, before Ray itself tries, which takes a minute to give up
CHECK_S = 30.0  # that nodes have to answer, when the cluster is checked
ANSWER_S = 0.3  # that a node has to take a connection, where it is to be known whether it lives
LOOK_S, LOOK_EVERY_S = 2.0, 0.1  # for how long, and how often, nodes are looked at when a connection has ended
CLIENT_PREFIX = "ray://"
_NOT_THERE = (ConnectionError, RuntimeError, ValueError, TimeoutError)  # what `ray.init` raises without a Ray


def make_source(request: EngineRequest) -> RaySource:
    """Connect to the Ray of `cluster.connect`, else to a Ray of this host, else start one here.

    Raises JobError for a Ray that is not there or cannot be used, MissingExtraError without the package.
    """
    address = request.job.cluster.connect or env.ray_address()
    _refuse_client(address)
    ray = import_ray()
    is_ours, is_new = connect(ray, address)
    # Ray hides the GPUs of a node from actors that have asked for none.
    num_gpus = 1 if request.job.training.device == "cuda" else 0
    return RaySource(ray, num_gpus=num_gpus, is_ours=is_ours, is_new=is_new)


def check() -> Iterable[Finding]:
    """Say what is wrong with the Ray of `RAY_ADDRESS`, or of this host, before a run. Starts no Ray."""
    address = env.ray_address()
    try:
        _refuse_client(address)
        ray = import_ray()
        is_ours, _ = connect(ray, address, may_start=False)
    except CordeeError as error:
        yield Finding("Ray", "problem", str(error))
        return
    source = RaySource(ray, num_gpus=0, is_ours=is_ours, is_new=False)
    try:
        free = source.capacity()
        growing = ", and an autoscaler that may add nodes" if free.may_grow else ""
        yield Finding("Ray", "ok", f"{source.describe()}; {_count(free.num_slots, 'CPU')} free{growing}")
        yield from _check_nodes(ray)
    finally:
        source.close()


def _check_nodes(ray: Any) -> Iterable[Finding]:
    """Look at this host from every node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.util.get_node_ip_address()
    with socket.create_server((here, 0)) as listener:
        port = listener.getsockname()[1]
        looks = {}
        for node in _living_nodes(ray):
            only_there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=only_there)(look_from_here)
            looks[look.remote(here, port)] = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
        done, waiting = ray.wait(list(looks), num_returns=len(looks), timeout=CHECK_S)
        found = []
        for reference in done:
            try:
                found.append(ray.get(reference))
            except ray.exceptions.RayError as error:
                yield Finding(looks[reference], "problem", _reason(error))
    for reference in waiting:
        yield Finding(
            looks[reference], "problem", f"no answer within {CHECK_S:g} s", "look at `ray status` and its logs"
        )
    yield from findings_of(found)


class RayAgent:
    """The actor: an agent as a child process, which ends with the actor."""

    def __init__(self, order: str) -> None:
        self._order = AgentOrder.from_text(order)
        self._is_leaving = threading.Event()

    def node(self) -> str:
        """Return the id of the node that this actor was placed on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self) -> int:
        return run_agent_process(self._order, should_stop=self._is_leaving.is_set)

    def leave(self) -> None:
        self._is_leaving.set()


class _Actor(msgspec.Struct):
    """What the launcher knows of an actor."""

    handle: Any
    placed: Any  # becomes the id of its node
    end: Any  # becomes the exit code of its agent
    node_id: str = ""  # empty while it waits for a CPU
    kill_s: float | None = None  # when it is killed, once it was asked to leave


class RaySource(AgentSource):
    """Agents as actors of a Ray that this process is connected to."""

    name = "ray"

    def __init__(self, ray: Any, *, num_gpus: int, is_ours: bool, is_new: bool) -> None:
        """`is_ours`: this run has connected to Ray, and disconnects. `is_new`: it has started that Ray as well."""
        self._ray = ray
        self._num_gpus = num_gpus
        self._is_ours, self._is_new = is_ours, is_new
        self._actors: dict[int, _Actor] = {}
        self._look_by_s = self._looked_s = 0.0
        self._slow: set[str] = set()  # nodes that took long to answer
        self._suspects: set[str] = set()  # nodes that lost an agent: Ray may take a dead one for alive for some 15 s

    def describe(self) -> str:
        nodes = _living_nodes(self._ray)
        num_cpus = sum(_cpus_of(node["Resources"]) for node in nodes)
        address = self._ray.get_runtime_context().gcs_address
        origin = ", started on this host for this run" if self._is_new else ""
        num_gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
        gpus = f", {_count(num_gpus, 'GPU')}" if self._num_gpus else ""
        return (
            f"Ray {self._ray.__version__} at {address}, {_count(len(nodes), 'node')}, "
            f"{_count(num_cpus, 'CPU')}{gpus}{origin}"
        )

    def capacity(self) -> Capacity:
        """Return the free CPUs. Inside a placement group, of a Ray Tune trial say, they are those of its bundles."""
        nodes = _living_nodes(self._ray)
        may_grow = _may_grow(self._ray, sum(_cpus_of(node["Resources"]) for node in nodes))
        here = self._ray.util.get_node_ip_address()
        others = {node["NodeManagerAddress"] for node in nodes} - {here}
        address = here if others or may_grow else ""
        group = self._ray.util.get_current_placement_group()
        if group is not None:
            own = self._ray.get_runtime_context().get_assigned_resources()
            total = {
                kind: sum(bundle.get(kind, 0) for bundle in group.bundle_specs) - own.get(kind, 0)
                for kind in ("CPU", "GPU")
            }
            return Capacity({"placement group": self._slots_in(total)}, is_limit=True, address=address)
        free = _free_by_node(self._ray)
        slots: dict[str, int] = {}
        for node in nodes:
            host = node["NodeManagerHostname"]
            slots[host] = slots.get(host, 0) + self._slots_in(free.get(node["NodeID"], {}))
        return Capacity(slots, may_grow=may_grow, is_limit=True, address=address)

    def _slots_in(self, resources: dict[str, float]) -> int:
        """Return how many agents they are enough for."""
        num_cpus = _cpus_of(resources)
        return min(num_cpus, int(resources.get("GPU", 0)) // self._num_gpus) if self._num_gpus else num_cpus

    def start(self, order: AgentOrder) -> None:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": self._num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 3,  # `leave` and `node` are called while `run` runs
        }
        living = {node["NodeID"]: node for node in _living_nodes(self._ray) if _cpus_of(node["Resources"]) > 0}
        avoided = [node_id for node_id in sorted(self._suspects & living.keys()) if not _answers(living[node_id])]
        if 0 < len(avoided) < len(living):  # if none is left: they may be back, or be marked dead any moment
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoided)})"}
        actor = self._ray.remote(**options)(RayAgent).remote(order.to_text())
        self._actors[order.number] = _Actor(actor, actor.node.remote(), actor.run.remote())

    def ended(self) -> Sequence[AgentEnded]:
        actors = self._actors
        self._find_nodes()
        now_s = time.monotonic()
        for actor in actors.values():
            if actor.kill_s is not None and now_s > actor.kill_s:
                self._kill(actor)
        found = self._find_dead_nodes(now_s)
        by_end = {actor.end: number for number, actor in actors.items()}
        for end in self._ready(list(by_end)):
            number = by_end[end]
            actor = actors.pop(number)
            how = self._fate(actor)
            found.append(AgentEnded(number, "" if actor.kill_s is not None else how))
            self._kill(actor)  # an actor that cannot be heard may still run
        return found

    def look(self) -> None:
        self._look_by_s = time.monotonic() + LOOK_S
        self._slow.clear()

    def _find_dead_nodes(self, now_s: float) -> list[AgentEnded]:
        """Give up the agents of nodes whose daemon is gone. Ray needs some 2 s to say so (2.60).

        A node that refuses connections has no daemon, and its actors end with it. One that takes long is only slow.
        """
        if now_s > self._look_by_s or now_s - self._looked_s < LOOK_EVERY_S:
            return []
        self._looked_s = now_s
        used = {actor.node_id for actor in self._actors.values()}
        dead = set()
        for node in _living_nodes(self._ray):
            if (node_id := node["NodeID"]) in used and node_id not in self._slow:
                try:
                    socket.create_connection(_daemon_of(node), timeout=ANSWER_S).close()
                except ConnectionError:
                    dead.add(node_id)
                except OSError:
                    self._slow.add(node_id)  # not again: whoever waits here hears no agent
        found = []
        for number, actor in list(self._actors.items()):
            if actor.node_id in dead:
                del self._actors[number]
                self._suspects.add(actor.node_id)
                how = f"its Ray node {self._name_of(actor.node_id)} does not answer"
                found.append(AgentEnded(number, "" if actor.kill_s is not None else how))
                self._kill(actor)
        return found

    def stop(self, number: int) -> None:
        actor = self._actors.get(number)
        if actor is None or actor.kill_s is not None:
            return
        if actor.node_id:
            self._suspects.add(actor.node_id)  # nothing may have been heard of the agent because its node is gone
            actor.handle.leave.remote()
            actor.kill_s = time.monotonic() + GRACE_S
        else:  # it waits for a CPU: it need not come
            actor.kill_s = 0.0
            self._kill(actor)

    def close(self) -> None:
        try:
            self._find_nodes()
            for number in list(self._actors):
                self.stop(number)
            deadline_s = time.monotonic() + GRACE_S
            while self._actors and time.monotonic() < deadline_s:
                self.ended()
                time.sleep(0.02)
            for actor in self._actors.values():
                self._kill(actor)
        finally:
            self._actors.clear()
            if self._is_ours:
                self._ray.shutdown()

    def _find_nodes(self) -> None:
        waiting = {actor.placed: actor for actor in self._actors.values() if not actor.node_id}
        for placed in self._ready(list(waiting)):
            with contextlib.suppress(self._ray.exceptions.RayError):  # `end` says the same
                waiting[placed].node_id = self._ray.get(placed)

    def _ready(self, references: list[Any]) -> list[Any]:
        if not references:
            return []
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        return list(ready)

    def _fate(self, actor: _Actor) -> str:
        """Return how an agent ended, in words; empty if it left as it was asked to."""
        errors = self._ray.exceptions
        try:
            status = self._ray.get(actor.end)
        except errors.RayError as error:
            node = self._name_of(actor.node_id)
            if not actor.node_id:
                return f"Ray could not start an agent: {_reason(error)}"
            self._suspects.add(actor.node_id)
            living = {node["NodeID"]: node for node in _living_nodes(self._ray)}
            if actor.node_id not in living:
                return f"its Ray node {node} died"
            if not _answers(living[actor.node_id]):
                return f"its Ray node {node} does not answer"
            return f"its Ray actor on node {node} died: {_reason(error)}"
        return "" if status == 0 else f"the agent {describe_status(status)} on Ray node {self._name_of(actor.node_id)}"

    def _name_of(self, node_id: str) -> str:
        for node in self._ray.nodes():
            if node["NodeID"] == node_id:
                return f"{node['NodeManagerHostname']} ({node_id[:8]})"
        return node_id[:8]

    def _kill(self, actor: _Actor) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor.handle, no_restart=True)


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("engine 'ray'", "ray") from None
    return ray


def _refuse_client(address: str) -> None:
    if address.startswith(CLIENT_PREFIX):
        raise JobError(
            f"{address} is an address of Ray Client, which runs the driver's calls in a proxy: agents on the cluster "
            "could not reach this process. Start the run on a node of the cluster: `ray job submit -- cordee train "
            "JOB.toml --engine ray`, or cluster.connect = 'HOST:6379' on a host where `ray start --address` was run"
        )


def connect(ray: Any, address: str, *, may_start: bool = True) -> tuple[bool, bool]:
    """Connect this process to Ray; return whether it was not connected before, and whether that Ray was started here.

    Raises JobError.
    """
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            _refuse_client(CLIENT_PREFIX + "…")
        connected = ray.get_runtime_context().gcs_address
        if address not in ("", "auto", "local") and not _is_same(ray, address, connected):
            raise JobError(
                f"this process is connected to the Ray at {connected}, and the run asks for {address}: "
                "call ray.shutdown() before, or remove cluster.connect"
            )
        return False, False
    options = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    if address not in ("", "auto", "local"):
        _reach(address)
    with keep_handlers():  # `ray.init` replaces that of SIGTERM by its own
        if address != "local":
            try:
                ray.init(address or "auto", **options)
            except (*_NOT_THERE, ray.exceptions.AuthenticationError) as error:
                ray.shutdown()
                if _asks_for_token(ray, address, error):
                    raise JobError(
                        f"the Ray {f'at {address}' if address else 'of this host'} takes no driver without its token: "
                        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token if that is not "
                        "~/.ray/auth_token (where that file exists, `ray start --head` asks for its token)"
                    ) from None
                if address:
                    raise JobError(
                        f"cannot use the Ray at {address}: {_first_line(error)}. A driver has to run on a node of the "
                        f"cluster: run `ray start --address={address}` on this host, or use `ray job submit`"
                    ) from None
            else:
                return True, False
        if not may_start:
            raise JobError("no Ray runs on this host: start one with `ray start --head`, or set RAY_ADDRESS")
        # Ray's default niceness of 15 would leave the workers next to nothing beside anything else on this host: on a
        # busy machine of 2 cores the first worker took 7 minutes to start.
        with env.with_default("RAY_worker_niceness", "0"):
            ray.init("local", include_dashboard=False, **options)
    return True, True


def _asks_for_token(ray: Any, address: str, error: Exception) -> bool:
    """Whether a Ray refused this process because of its token. `ray.init` says that only in a log (2.60)."""
    if isinstance(error, ray.exceptions.AuthenticationError):
        return True
    if address in ("", "auto"):
        return False
    try:
        ray._raylet.GcsClient(address=address).get_all_node_info()
    except ray.exceptions.AuthenticationError:
        return True
    except Exception:  # noqa: BLE001 - it is not there, or something else is: `error` says what
        return False
    return False


def _reach(address: str) -> None:
    host, port = split_address(address)
    if not port:
        raise JobError(
            f"cluster.connect = {address!r} is not an address of Ray: write HOST:PORT, as `ray start` prints it"
        )
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            pass
    except OSError as error:
        raise JobError(
            f"no Ray answers at {address} ({error}): start one with `ray start --head --port={port}` on {host}, or "
            "remove cluster.connect to use the Ray of this host"
        ) from None


def _is_same(ray: Any, address: str, connected: str) -> bool:
    def resolved(text: str) -> tuple[str, int | None]:
        host, port = split_address(text)
        with contextlib.suppress(OSError):
            host = socket.gethostbyname(host)
        # Ray replaces loopback addresses by the host's own.
        return ray.util.get_node_ip_address() if host.startswith("127.") else host, port

    return resolved(address) == resolved(connected)


# What Ray knows of its nodes. `available_resources_per_node` is what `ray.available_resources()` adds up, and the
# configuration of the autoscaler what Ray Data asks for; neither has a public name (Ray 2.60).


def _living_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _daemon_of(node: dict[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _answers(node: dict[str, Any]) -> bool:
    """Whether the daemon of a node takes connections."""
    with contextlib.suppress(OSError):
        socket.create_connection(_daemon_of(node), timeout=ANSWER_S).close()
        return True
    return False


def _free_by_node(ray: Any) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def _may_grow(ray: Any, num_cpus: int) -> bool:
    """Whether an autoscaler may add CPUs to those that are there."""
    most = ray._private.state.state.get_max_resources_from_cluster_config()
    return most is not None and most.get("CPU", 0) > num_cpus


def _cpus_of(resources: dict[str, float]) -> int:
    return int(resources.get("CPU", 0))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _reason(error: BaseException) -> str:
    """Return what a Ray error says, in one line."""
    text = str(error)
    if "No module named 'cordee" in text:
        return "cordee is not installed there: install it on every node, or in the runtime environment of the Ray job"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
