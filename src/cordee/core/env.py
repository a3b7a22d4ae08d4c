"""The environment variables that Cordée reads, all of them here."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from cordee.core.errors import JobError
from cordee.core.launchers import LAUNCHERS, LaunchedTask, recognise


class Place(NamedTuple):
    """A process's place among those that a launcher started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class StoreRole(NamedTuple):
    """What ps-lite's variables make of a process: its role, how many there are, and where the scheduler is."""

    role: str  # scheduler, server or worker
    num_workers: int
    num_servers: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def data_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders named by `CORDEE_DATA`, which may list several with ':' between them."""
    return [Path(part).expanduser() for part in environ.get("CORDEE_DATA", "").split(os.pathsep) if part]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where downloads and profiles are kept: `CORDEE_CACHE`, or `cordee` in the user's cache folder."""
    if environ.get("CORDEE_CACHE"):
        return Path(environ["CORDEE_CACHE"]).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cordee"


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where new run directories are made: `CORDEE_RUNS`, or `runs` in the working folder."""
    return Path(environ.get("CORDEE_RUNS") or "runs").expanduser()


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a new process is given: this process's environment as it is now, and `extra`."""
    return {**os.environ, **(extra or {})}


def log_environment(log: Path) -> dict[str, str]:
    """Return what an agent gives a process whose run directory is on another host: where it logs instead."""
    return {"CORDEE_LOG": str(log)}


def log_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where this process logs, `CORDEE_LOG`; None is the run directory."""
    name = environ.get("CORDEE_LOG")
    return Path(name) if name else None


def mlflow_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return where MLflow keeps runs; empty if the user has not said."""
    return environ.get("MLFLOW_TRACKING_URI", "")


def ray_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Ray cluster, `RAY_ADDRESS`, which Ray sets in submitted jobs; empty if not set."""
    return environ.get("RAY_ADDRESS", "")


def spark_remote(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Spark Connect server, `SPARK_REMOTE`; empty if it is not set."""
    return environ.get("SPARK_REMOTE", "")


@contextlib.contextmanager
def with_default(name: str, value: str) -> Iterator[None]:
    """Inside, the variable is set for libraries that read it; one that is set already is left alone."""
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


def faults_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder with the faults that a test asks for, `CORDEE_FAULTS`; None outside such tests."""
    name = environ.get("CORDEE_FAULTS")
    return Path(name) if name else None


def lost_messages(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of messages that a test has lost on purpose, `CORDEE_LOSE_MESSAGES`; 0 outside such tests."""
    text = environ.get("CORDEE_LOSE_MESSAGES") or "0"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 0.5:
        raise JobError(f"the environment says CORDEE_LOSE_MESSAGES={text!r}: it must be a number from 0 to below 0.5")
    return share


def wants_gloo_replaced(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether programs that ask for gloo get the backend `cordee` (`CORDEE_REPLACE_GLOO=1`)."""
    text = environ.get("CORDEE_REPLACE_GLOO") or "0"
    if text not in ("0", "1"):
        raise JobError(f"the environment says CORDEE_REPLACE_GLOO={text!r}: it must be 1 or 0")
    return text == "1"


def wants_traceback(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether errors should come with their traceback (`CORDEE_TRACEBACK=1`), for reporting bugs."""
    return bool(environ.get("CORDEE_TRACEBACK"))


def wants_colour(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a terminal may be written to in colour; `NO_COLOR` is what many programs handle."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun, Kubernetes or `cordee run` gave this process; None if it runs alone."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    numbers = {}
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "1")):
        text = environ.get(name, environ.get(default, default) if default else None)
        if text is None or not text.isdecimal():
            raise JobError(f"the environment says {name}={text!r}: RANK and WORLD_SIZE must both be whole numbers")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise JobError(f"the environment says RANK={numbers['RANK']} of WORLD_SIZE={numbers['WORLD_SIZE']}")
    if numbers["WORLD_SIZE"] > 1 and not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        raise JobError("the environment has RANK and WORLD_SIZE but no MASTER_ADDR and MASTER_PORT: where to meet?")
    return Place(*numbers.values())


def launched_task(environ: Mapping[str, str] = os.environ) -> LaunchedTask:
    """Return what started this process together with others. Raises JobError if nothing did: see `launchers`."""
    return recognise(environ, host=socket.gethostname())


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher or scheduler started this process together with others: see `launchers`."""
    host = socket.gethostname()
    return any(find(environ, host) is not None for find in LAUNCHERS.values())


def master_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return `MASTER_ADDR` and `MASTER_PORT`; empty and 0 where they are not set."""
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT") or "0"
    if not port.isdecimal() or int(port) >= 65536:
        raise JobError(f"the environment says MASTER_PORT={port!r}: it must be a port")
    return address, int(port)


def has_kept_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether whoever started this process keeps the store of its launch, as torchrun and `cordee run` do."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launch_name(task: LaunchedTask, environ: Mapping[str, str] = os.environ) -> str:
    """Return a name that all processes of this start have, and those of other starts have not; "" if there is none."""
    return f"{task.launch_id}/{environ.get('SLURM_STEP_ID', '')}" if task.launch_id else ""


def horovod_timeline(environ: Mapping[str, str] = os.environ) -> str:
    """Return the file that `HOROVOD_TIMELINE` names for the timeline of rank 0; empty if it is not set."""
    return environ.get("HOROVOD_TIMELINE", "")


def horovod_fusion_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return up to how many bytes are reduced together, `HOROVOD_FUSION_THRESHOLD`, 64 MB if it is not set."""
    text = environ.get("HOROVOD_FUSION_THRESHOLD") or str(64 << 20)
    if not text.isdecimal():
        raise JobError(f"the environment says HOROVOD_FUSION_THRESHOLD={text!r}: it must be a number of bytes")
    return int(text)


def shared_secret(environ: Mapping[str, str] = os.environ) -> str | Path:
    """Return the secret that the processes of a launch share, `CORDEE_SECRET`, or the file that it is in.

    The file is `CORDEE_SECRET_FILE`. Empty if neither is set.
    """
    secret, file = environ.get("CORDEE_SECRET", ""), environ.get("CORDEE_SECRET_FILE", "")
    if secret and file:
        raise JobError("CORDEE_SECRET and CORDEE_SECRET_FILE are both set: which is meant? Unset one of them")
    return Path(file).expanduser() if file else secret.strip()


def listening_port(environ: Mapping[str, str] = os.environ) -> int:
    """Return the port at which rank 0 of a launch listens for the others, `CORDEE_PORT`; 0 if it is not set."""
    text = environ.get("CORDEE_PORT") or "0"
    if not text.isdecimal() or not (text == "0" or 1024 <= int(text) < 65536):
        raise JobError(f"the environment says CORDEE_PORT={text!r}: it must be a port from 1024 to 65535")
    return int(text)


def script_environment(place: Place, master_port: int, master_address: str = "127.0.0.1") -> dict[str, str]:
    """Return what `cordee run` gives each script, in the words of torchrun, so that torch finds the others.

    The launcher keeps the store, which torch takes for that of torchrun's agent.
    """
    found = {**torchrun_environment(place, master_port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**found, "MASTER_ADDR": master_address}


def is_horovod_alias_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `import horovod` is to import Cordée's modules of the same API (`CORDEE_AS_HOROVOD=1`)."""
    text = environ.get("CORDEE_AS_HOROVOD") or "0"
    if text not in ("0", "1"):
        raise JobError(f"the environment says CORDEE_AS_HOROVOD={text!r}: it must be 1 or 0")
    return text == "1"


def horovod_alias_environment() -> dict[str, str]:
    """Return what makes a script that `cordee run` starts import Cordée's modules as `horovod`."""
    return {"CORDEE_AS_HOROVOD": "1"}


def gloo_replacement_environment() -> dict[str, str]:
    """Return what makes a process, and those that it starts, replace gloo by the backend `cordee`."""
    return {"CORDEE_REPLACE_GLOO": "1"}


def torchrun_environment(place: Place, master_port: int) -> dict[str, str]:
    """Return what torchrun gives a process of a group on one host, whose first member keeps the store."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
    }


def adopt(variables: Mapping[str, str]) -> None:
    """Set variables of this process, as if it had been started with them."""
    os.environ.update(variables)


@contextlib.contextmanager
def adopted(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables of this process are set; afterwards its environment is what it was."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def keep_compiled(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have torch keep what it compiles in our cache folder, unless `TORCHINDUCTOR_CACHE_DIR` says where."""
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(environ) / "compiled"))


def cxx_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the C++ compiler that torch compiles with: `CXX`, g++ or clang++; None where there is none."""
    names = (environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def store_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return where the store is that `cordee worker` or the user names by `CORDEE_STORE`; empty if none."""
    return environ.get("CORDEE_STORE", "")


def store_key_text(environ: Mapping[str, str] = os.environ) -> str:
    """Return the key of the store, `CORDEE_STORE_KEY`; empty if it is not given."""
    return environ.get("CORDEE_STORE_KEY", "")


def store_key_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the key of the store is, `CORDEE_STORE_KEY_FILE`; None if not said."""
    name = environ.get("CORDEE_STORE_KEY_FILE")
    return Path(name).expanduser() if name else None


def store_updaters(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the modules with update functions for servers that `DMLC_ROLE` starts, `CORDEE_STORE_UPDATERS`."""
    return [name for name in environ.get("CORDEE_STORE_UPDATERS", "").split(",") if name]


def store_environment(address: str, key_text: str) -> dict[str, str]:
    """Return what a process needs to find a store."""
    return {"CORDEE_STORE": address, "CORDEE_STORE_KEY": key_text}


def enter_store(address: str | None, key_file: Path | None) -> None:
    """Set for this process, and those it starts, which store it works for. Raises JobError if nothing says which."""
    if not (address or store_address() or os.environ.get("DMLC_ROLE")):
        raise JobError("which store? Give --servers with the address that `cordee server` printed, or set CORDEE_STORE")
    if address:
        os.environ["CORDEE_STORE"] = address
    if key_file is not None:
        if not key_file.expanduser().is_file():
            raise JobError(f"--key-file {key_file}: there is no such file")
        os.environ["CORDEE_STORE_KEY_FILE"] = str(key_file.expanduser().resolve())


def store_role(environ: Mapping[str, str] = os.environ) -> StoreRole | None:
    """Return the role that ps-lite's `DMLC_*` variables give this process; None without `DMLC_ROLE`."""
    role = environ.get("DMLC_ROLE")
    if not role:
        return None
    if role not in ("scheduler", "server", "worker"):
        raise JobError(f"the environment says DMLC_ROLE={role!r}: it must be scheduler, server or worker")
    numbers = {}
    for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        text = environ.get(name, "")
        if not text.isdecimal() or int(text) < 1:
            raise JobError(f"the environment says DMLC_ROLE={role} and {name}={text!r}: it must be a number from 1")
        numbers[name] = int(text)
    host = environ.get("DMLC_PS_ROOT_URI", "")
    if not host:
        raise JobError(f"the environment says DMLC_ROLE={role} but has no DMLC_PS_ROOT_URI: where is the scheduler?")
    num_workers, num_servers, port = numbers.values()
    return StoreRole(role, num_workers, num_servers, host, port)
