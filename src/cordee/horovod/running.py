"""`horovod.run`: a function on several processes of this host, and what each of them returned.

The function is not pickled. Workers import it by its name, from its module or from the script. Arguments and results
are encoded as `broadcast_object` does: nothing that a worker reads can run other code (docs/decisions/0077).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cordee.core import env
from cordee.core.errors import JobError
from cordee.core.importing import refuse_what_workers_miss, stop_import
from cordee.core.references import LIVE_PREFIX, name_of, program_folders, resolve
from cordee.core.temporary import temporary_folder
from cordee.runs.script.processes import attempt, run_workers

_THIS_HOST = ("localhost", "127.0.0.1")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` processes of this host; return what each rank returned, in order.

    The function calls `hvd.init()` itself. It must be defined in a module or at the top of a script; arguments and
    results are values of the kinds that `broadcast_object` takes. `np` is the older name of `num_proc`. `use_gloo` and
    `disable_cache` ask for what is so in any case.

    Raises JobError for what cannot be done here, KeyboardInterrupt after Ctrl-C, TrainingError that names the rank
    where the function failed; the others are ended then.
    """
    stop_import("horovod.run")
    num_proc = np if np is not None and num_proc == 1 else num_proc
    if not isinstance(num_proc, int) or num_proc < 1:
        raise JobError(f"horovod.run: num_proc={num_proc!r} must be a whole number, at least 1")
    elastic = {"min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "min_np": min_np, "max_np": max_np}
    elastic |= {"slots": slots, "reset_limit": reset_limit, "cooldown_range": cooldown_range}
    refuse_given("horovod.run", elastic, "start an elastic script with `cordee run --elastic`")
    remote = {"hostfile": hostfile, "ssh_port": ssh_port, "ssh_identity_file": ssh_identity_file}
    remote |= {"network_interface": network_interface, "hosts": None if _is_here(hosts, num_proc) else hosts}
    refuse_given("horovod.run", remote, "it uses this host: for several start the script with torchrun, mpirun or srun")
    refuse_given("horovod.run", {"use_mpi": use_mpi or None, "mpi_args": mpi_args}, "operations do not go through MPI")
    refuse_given("horovod.run", {"start_timeout": start_timeout}, "processes of this host are not waited for")
    other = executable if executable != sys.executable else None
    refuse_given("horovod.run", {"executable": other}, "workers are processes of this Python")
    name = name_of(func)
    if name.startswith(LIVE_PREFIX):
        raise JobError(
            f"horovod.run: {name.removeprefix(LIVE_PREFIX)} has no name by which other processes can import it: define "
            "the function at the top of a script or in a module (not in a notebook, a function or as a lambda)"
        )
    refuse_what_workers_miss([name.rpartition(":")[2]])
    return _run(name, args, dict(kwargs or {}), num_proc, output_filename, bool(verbose))


def refuse_given(call: str, options: Mapping[str, Any], advice: str) -> None:
    """Raise JobError if one of the options of a call has been given."""
    if given := [name for name, value in options.items() if value is not None]:
        raise JobError(f"{call}({', '.join(f'{name}=…' for name in given)}) is not possible: {advice}")


def _is_here(hosts: str | None, num_proc: int) -> bool:
    """Whether hosts, as "name:slots", are this one with enough slots."""
    if hosts is None:
        return True
    name, _, num_slots = hosts.partition(":")
    return name in (*_THIS_HOST, socket.gethostname()) and num_slots.isdecimal() and int(num_slots) >= num_proc


def _run(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], num_proc: int, output: str | None, say: bool
) -> list[Any]:
    from cordee.horovod.alias import is_installed
    from cordee.horovod.objects import decode, encode

    if say:
        sys.stderr.write(f"horovod.run: {name} on {num_proc} processes of this host\n")
    with temporary_folder() as path:
        folder = Path(path)
        (folder / "arguments").write_bytes(encode([list(args), kwargs], "the arguments of horovod.run"))
        job = {
            "function": name,
            "python_path": program_folders(),
            "folder": path,
            "output": None if output is None else str(Path(output).absolute()),
        }
        extra = env.horovod_alias_environment() if is_installed() else None
        preload = "cordee.horovod.torch"
        if not run_workers("cordee.horovod.running:main", job, num_proc, folder, preload=preload, environment=extra):
            raise KeyboardInterrupt
        return [decode((folder / f"result-{rank}").read_bytes()) for rank in range(num_proc)]


def main(job: dict[str, Any]) -> int:
    """Call the function as a worker, in a fresh fork of the fork server, and say how it failed."""
    from cordee.communication.shared_memory import register
    from cordee.compute import share_threads

    if job["output"] is not None:
        _redirect(Path(job["output"]), job["rank"], job["num_workers"])
    if env.is_horovod_alias_wanted():
        from cordee.horovod.alias import install

        install()
    register()
    share_threads(0, int(job["num_workers"]))
    return attempt(lambda: _call(job), Path(job["failure_file"]), job["function"].rpartition(":")[0])


def _call(job: dict[str, Any]) -> None:
    from cordee.horovod.objects import decode, encode

    folder, rank, name = Path(job["folder"]), job["rank"], job["function"]
    function = resolve("horovod.run", name, {}, python_path=job["python_path"])
    args, kwargs = decode((folder / "arguments").read_bytes())
    result = encode(function(*args, **kwargs), f"what {name} returned on rank {rank}")
    (folder / f"result-{rank}").write_bytes(result)


def _redirect(output: Path, rank: int, num_proc: int) -> None:
    """Let what this process prints go to files, as Horovod names them."""
    folder = output / f"rank.{rank:0{len(str(num_proc - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
