"""Clusters of two nodes on this host, for measuring and testing engines: real daemons, one CPU each, on loopback.

A node can be killed as a power failure would do it: all its processes at once, without a word to the others.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from cordee.bench.harness import free_port
from cordee.core import env
from cordee.core.errors import CordeeError

START_S = 300.0  # a busy machine takes minutes
HOST = "127.0.0.1"
MOST_TRIES = 3  # to start a node: Ray gives up a node that was not registered within 30 s, as on a busy machine
MARK = "CORDEE_BENCH_CLUSTER"  # in the environment of all processes of a cluster


class Cluster(Protocol):
    """Nodes of one CPU each. Node 0 has the head or master, and is not killed."""

    connect: str  # for cluster.connect

    def add_node(self) -> int:
        """Start a node, wait until the cluster has it, and return its number."""

    def kill_node(self, number: int) -> float:
        """Kill all processes of a node; return when that was (time.time)."""

    def forget_dead(self) -> None:
        """Wait until the cluster takes nodes that were killed for dead, and gives them nothing to do."""

    def busy_node(self, pids: Collection[int] = ()) -> int:
        """Return a node that has one of these processes, or else an agent or a rank, and is not the head."""

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run on the nodes, those included whose node was killed."""

    def close(self) -> None: ...


class _Nodes:
    """The daemons of a cluster: child processes of this one, and what they have started."""

    def __init__(self, prefix: str) -> None:
        # Short: Ray has sockets in it, the names of which may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        self.daemons: list[subprocess.Popen[bytes]] = []

    def spawn(self, command: Sequence[str], variables: dict[str, str]) -> int:
        number = len(self.daemons)
        with (self.folder / f"daemon-{number}.log").open("wb") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env.child_environment({**variables, MARK: str(self.folder)}),
            )
        self.daemons.append(daemon)
        return number

    def wait(self, number: int, is_up: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while not is_up():
            if self.daemons[number].poll() is not None or time.monotonic() > deadline_s:
                log = (self.folder / f"daemon-{number}.log").read_text(errors="replace")
                raise CordeeError(f"{self.daemons[number].args!r} did not come up:\n{log[-2000:]}")
            time.sleep(0.1)

    def find(self, pids: Collection[int], *words: str) -> int:
        """Return the newest node but the first that has one of the processes.

        Without `pids` it is one with one of the words in its command line.
        """
        for number in reversed(range(1, len(self.daemons))):
            for process in _family(self.daemons[number].pid):
                command = "" if pids else " ".join(_command(process))
                if process.pid in pids or any(word in command for word in words):
                    return number
        raise CordeeError(f"no node but the first runs {pids or ' or '.join(words)}")

    def discard_last(self) -> None:
        """Forget the newest node, which did not come up, and end what is left of it."""
        daemon = self.daemons.pop()
        mine = str(self.folder / str(len(self.daemons)))
        family = [*_family(daemon.pid), *(one for one in self.processes() if mine in " ".join(_command(one)))]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        daemon.wait()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(mine, ignore_errors=True)

    def num_running(self) -> int:
        return sum(daemon.poll() is None for daemon in self.daemons)

    def kill(self, number: int) -> float:
        daemon = self.daemons[number]
        family = _family(daemon.pid)
        killed_s = time.time()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        daemon.wait()
        psutil.wait_procs(family, timeout=10)
        return killed_s

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.as_dict(["environ"])["environ"] or {}  # None: a process of somebody else
                if variables.get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        for number in reversed(range(len(self.daemons))):
            if self.daemons[number].poll() is None:
                self.kill(number)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class RayCluster:
    """A head node and others, each with a raylet of its own."""

    def __init__(self, num_nodes: int = 2, *, has_dashboard: bool = False) -> None:
        """With a dashboard jobs can be submitted, at `jobs_address`."""
        self._port = free_port()
        self.connect = f"{HOST}:{self._port}"
        self._dashboard_port = free_port() if has_dashboard else 0
        self.jobs_address = f"http://{HOST}:{self._dashboard_port}"
        self._nodes = _Nodes("ray-")
        # Without, `ray start --head` asks for the token of ~/.ray if there is one, and other nodes and drivers, which
        # have an address, do not send it. A Ray that a program has started for itself leaves one.
        self._variables = contextlib.ExitStack()
        self._variables.enter_context(env.with_default("RAY_AUTH_MODE", "disabled"))
        try:
            for _ in range(num_nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    def add_node(self) -> int:
        for _ in range(MOST_TRIES - 1):
            with contextlib.suppress(CordeeError):
                return self._add_node()
            self._nodes.discard_last()
        return self._add_node()

    def _add_node(self) -> int:
        is_head = not self._nodes.daemons
        # A folder for each node: nodes with one folder between them unpack the working folder of a submitted job over
        # each other, and remove it while its driver runs in it.
        folder = self._nodes.folder / str(len(self._nodes.daemons))
        place = (
            [
                "--head",
                f"--port={self._port}",
                f"--include-dashboard={'true' if self._dashboard_port else 'false'}",
                *([f"--dashboard-port={self._dashboard_port}"] if self._dashboard_port else []),
            ]
            if is_head
            else [f"--address={self.connect}"]
        )
        options = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", f"--node-ip-address={HOST}"]
        options.append(f"--temp-dir={folder}")
        # Each node serves submitted jobs at a port of its own. Ray's default is one port for all of them: the first
        # node of the host has it, of whatever cluster, and jobs for the others find "no available agent".
        options.append(f"--dashboard-agent-listen-port={free_port()}")
        ray = str(Path(sys.executable).parent / "ray")
        # Ray's default niceness is 15: beside anything else its workers would hardly get a processor.
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        before = self.living_nodes()  # a node that was killed counts as alive for a while
        number = self._nodes.spawn([ray, "start", *place, *options, "--disable-usage-stats", "--block"], variables)
        self._nodes.wait(number, lambda: bool(self.living_nodes() - before))
        return number

    def living_nodes(self) -> set[str]:
        """Return the ids of the nodes that Ray takes for alive."""
        import ray
        from ray._raylet import GcsClient

        try:
            with socket.create_connection((HOST, self._port), timeout=1):
                nodes = GcsClient(address=self.connect).get_all_node_info()
        except (OSError, RuntimeError, ray.exceptions.RayError):
            return set()
        return {node.hex() for node, info in nodes.items() if info.state == 0}  # 0 is ALIVE

    def forget_dead(self) -> None:
        deadline_s = time.monotonic() + START_S
        while len(self.living_nodes()) > self._nodes.num_running():
            if time.monotonic() > deadline_s:
                raise CordeeError(f"the Ray at {self.connect} takes dead nodes for alive after {START_S:g} s")
            time.sleep(0.2)

    def busy_node(self, pids: Collection[int] = ()) -> int:
        return self._nodes.find(pids, "ray::RayAgent", "ray::RayTrainWorker")

    def kill_node(self, number: int) -> float:
        return self._nodes.kill(number)

    def processes(self) -> list[psutil.Process]:
        return self._nodes.processes()

    def close(self) -> None:
        self._nodes.close()
        self._variables.close()


class SparkCluster:
    """A standalone master, and workers with one core each."""

    def __init__(self, num_nodes: int = 2) -> None:
        self._port = free_port()
        self.connect = f"spark://{HOST}:{self._port}"
        self._nodes = _Nodes("spark-")
        try:
            master = self._spawn("master.Master", ["--host", HOST, "--port", str(self._port), "--webui-port", "0"])
            self._nodes.wait(master, lambda: "I have been elected leader" in self._log(master))
            for _ in range(num_nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    def _spawn(self, name: str, arguments: Sequence[str]) -> int:
        import pyspark

        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        variables = {"SPARK_LOCAL_IP": HOST, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home)}
        return self._nodes.spawn(command, variables)

    def _log(self, number: int) -> str:
        return (self._nodes.folder / f"daemon-{number}.log").read_text(errors="replace")

    def add_node(self) -> int:
        work = self._nodes.folder / f"work-{len(self._nodes.daemons)}"
        options = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--host", HOST, "--work-dir", str(work)]
        number = self._spawn("worker.Worker", [*options, self.connect])
        self._nodes.wait(number, lambda: "Successfully registered with master" in self._log(number))
        return number

    def forget_dead(self) -> None:
        """The master hears at once that the connection to a worker was closed."""

    def busy_node(self, pids: Collection[int] = ()) -> int:
        return self._nodes.find(pids, "pyspark.daemon")

    def executors(self, number: int) -> list[psutil.Process]:
        """Return the processes of a node that run tasks."""
        family = _family(self._nodes.daemons[number].pid)
        return [process for process in family if "CoarseGrainedExecutorBackend" in " ".join(_command(process))]

    def kill_executor(self, number: int) -> float:
        """Kill the executor of a node, and nothing else: the worker starts another."""
        killed_s = time.time()
        for process in self.executors(number):
            process.kill()
        return killed_s

    def kill_node(self, number: int) -> float:
        return self._nodes.kill(number)

    def processes(self) -> list[psutil.Process]:
        return self._nodes.processes()

    def close(self) -> None:
        self._nodes.close()


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []
