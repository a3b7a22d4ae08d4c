"""What started this process together with others, by the variables that launchers and schedulers set.

Pure functions over a mapping. Launchers that run inside each other are the rule (`srun torchrun`, mpirun in a Slurm
allocation, torchrun in a Kubernetes pod): the innermost counts, and what the others say must fit to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath

import msgspec

from cordee.core.errors import JobError

_FIRST_RESERVED_STEP = 0xFFFFFFF0  # Slurm's own steps have the highest numbers: batch script, interactive shell, extern
_MOST_HOSTS = 100_000


class LaunchedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process among those that one launcher started together."""

    launcher: str  # as it is printed: "Slurm"
    rank: int
    world_size: int
    local_rank: int
    num_hosts: int  # 0 where the launcher does not say
    tasks_per_host: int  # of this host; others may have another number
    host: str  # name of this host
    first_host: str = ""  # name or address of the host of rank 0; "" where the launcher does not say
    tasks_by_host: dict[str, int] = {}  # where the launcher lists all hosts
    job_id: str = ""  # the same when the scheduler starts the job again, and no other job's; "" where there is none
    launch_id: str = ""  # the same for all processes of this start; another one at the next start, if there is a job_id
    restart_count: int | None = None  # how often the job was started again; None where the launcher does not count

    @property
    def is_one_host(self) -> bool:
        return self.num_hosts == 1

    @property
    def is_even(self) -> bool:
        """Whether all hosts have as many tasks as this one, as far as the launcher says."""
        return self.num_hosts > 0 and self.num_hosts * self.tasks_per_host == self.world_size

    def describe(self) -> str:
        """Return what was recognised: "Slurm, 2 hosts × 2 tasks, this is host node1"."""
        if self.is_even:
            size = f"{_counted(self.num_hosts, 'host')} × {_counted(self.tasks_per_host, 'task')}"
        else:
            hosts = f" on {self.num_hosts} hosts" if self.num_hosts else ""
            size = f"{self.world_size} tasks{hosts}, {self.tasks_per_host} of them here"
        return f"{self.launcher}, {size}, this is host {self.host}"

    def describe_place(self) -> str:
        return f"{self.launcher} says that this is process {self.rank} of {self.world_size}"


def recognise(environ: Mapping[str, str], *, host: str) -> LaunchedTask:
    """Return what started this process. `host` is the name of this host, for launchers that do not say it.

    Raises JobError if nothing did, or if what the variables say does not fit together.
    """
    if name := environ.get("CORDEE_LAUNCHER"):
        if name not in LAUNCHERS:
            raise JobError(f"the environment says CORDEE_LAUNCHER={name!r}: it is one of {', '.join(LAUNCHERS)}")
        task = LAUNCHERS[name](environ, host)
        if task is None:
            raise JobError(f"the environment says CORDEE_LAUNCHER={name}, but has none of its variables")
        return _complete(task, environ)
    found = {name: task for name in LAUNCHERS if (task := LAUNCHERS[name](environ, host)) is not None}
    if not found:
        raise JobError(_nothing_found(environ))
    inner, *outers = found
    for outer in outers:
        _check_nested(inner, found[inner], outer, found[outer])
    task = _complete(found[inner], environ)
    for name, said in (("RANK", task.rank), ("WORLD_SIZE", task.world_size)):
        if environ.get(name, str(said)) != str(said):
            raise JobError(
                f"{task.describe_place()}, and the environment has {name}={environ[name]}: which is meant? Unset "
                f"{name}, or set CORDEE_LAUNCHER={inner}"
            )
    return task


def _complete(task: LaunchedTask, environ: Mapping[str, str]) -> LaunchedTask:
    """Check what all launchers must say, and add what the user says for them."""
    if not 0 <= task.rank < task.world_size:
        raise JobError(f"{task.describe_place()}: ranks go from 0 to {task.world_size - 1}")
    if not 0 < task.tasks_per_host <= task.world_size:
        raise JobError(f"{task.launcher} says that {task.tasks_per_host} of {task.world_size} processes are here")
    if not 0 <= task.local_rank < task.tasks_per_host:
        raise JobError(
            f"{task.launcher} says that this is process {task.local_rank} of the {task.tasks_per_host} on this host"
        )
    if job_id := environ.get("CORDEE_JOB_ID", ""):
        count = task.restart_count or 0
        task = msgspec.structs.replace(task, job_id=job_id, launch_id=f"{job_id}/{count}")
    job_id = re.sub(r"[^A-Za-z0-9._-]+", "-", task.job_id)[:80]
    return msgspec.structs.replace(task, first_host=environ.get("MASTER_ADDR") or task.first_host, job_id=job_id)


def _check_nested(inner_name: str, inner: LaunchedTask, outer_name: str, outer: LaunchedTask) -> None:
    """Raise JobError if one launcher cannot have run inside the other."""
    is_same = (inner.rank, inner.world_size) == (outer.rank, outer.world_size)
    # mpirun starts its daemons by srun, one for each host: what their step says is not about the processes.
    is_daemon = inner_name in ("openmpi", "mpich") and outer_name != "variables"
    # torchrun, started once on each host by the outer launcher.
    is_per_host = inner_name == "torchrun" and inner.num_hosts == outer.world_size
    if is_same or is_daemon or is_per_host:
        return
    if inner_name == "torchrun":
        raise JobError(
            f"{inner.describe_place()} on {_counted(inner.num_hosts, 'host')}, and {outer.launcher} started torchrun "
            f"{outer.world_size} times: each would train on its own. Give torchrun --nnodes={outer.world_size}, or "
            f"start it once; set CORDEE_LAUNCHER={inner_name} if this is meant"
        )
    raise JobError(
        f"{inner.describe_place()}, and {outer.launcher} says that it is {outer.rank} of {outer.world_size}: which is "
        f"meant? Set CORDEE_LAUNCHER={inner_name} or CORDEE_LAUNCHER={outer_name}, or unset the variables of the other"
    )


def _nothing_found(environ: Mapping[str, str]) -> str:
    use = (
        "start `cordee train JOB --engine env` by torchrun (torchrun --nproc-per-node 2 --no-python cordee train …), "
        "srun, mpirun, or in a Kubernetes Indexed Job; without a launcher use --engine local"
    )
    if "SLURM_JOB_ID" in environ:
        return (
            f"this is Slurm's job {environ['SLURM_JOB_ID']}, but not a task of a step: write `srun cordee train … "
            "--engine env` in the script or the shell of the allocation, or use --engine local"
        )
    if "JOB_COMPLETION_INDEX" in environ:
        return (
            "JOB_COMPLETION_INDEX is set, but not WORLD_SIZE: a Kubernetes Indexed Job must say how many pods it has "
            "(env WORLD_SIZE) and where the first is (env MASTER_ADDR); see examples/cluster/kubernetes"
        )
    if "WORLD_SIZE" in environ or "RANK" in environ:
        return "RANK and WORLD_SIZE must both be set: " + use
    return "--engine env: no launcher is recognised in the environment: " + use


def _torchrun(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    numbers = _numbers(
        "torchrun", environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    )
    rank, world_size, local_rank, local_size, restarts = numbers
    num_hosts = _number("torchrun", environ, "GROUP_WORLD_SIZE", 1 if local_size == world_size else 0)
    run_id = environ["TORCHELASTIC_RUN_ID"]
    # A --rdzv-id may be used again for another job. torchrun's folder of this start is its own, and each host has one.
    folders = PurePath(environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-3] if num_hosts == 1 else ()
    folder = folders[-1].rpartition("_")[2] if folders else ""
    may_restart = _number("torchrun", environ, "TORCHELASTIC_MAX_RESTARTS", 0) > 0
    job_id = f"torchrun-{folder}" if folder and may_restart else ""
    where = f"{folder}/{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    return LaunchedTask(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        num_hosts=num_hosts,
        tasks_per_host=local_size,
        host=host,
        job_id=job_id,
        launch_id=f"torchrun/{run_id}/{where}/{restarts}",
        # 0 may also be a start after hosts have come or gone, which torchrun does not count.
        restart_count=restarts or None,
    )


def _openmpi(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    name = "Open MPI"
    rank, world_size, local_rank, local_size = _numbers(
        name, environ, *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    )
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return LaunchedTask(
        launcher=name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        num_hosts=_number(name, environ, "OMPI_MCA_orte_num_nodes", _hosts_of_equal_size(world_size, local_size)),
        tasks_per_host=local_size,
        host=host,
        launch_id=f"openmpi/{namespace}" if namespace else "",
    )


def _slurm(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdecimal() or int(step) >= _FIRST_RESERVED_STEP:
        return None  # an allocation or its batch script
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1:
        raise JobError(
            f"Slurm's job {environ.get('SLURM_JOB_ID')} is heterogeneous (SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}), "
            "and its components count their tasks each from 0: use one component"
        )
    rank, local_rank, node, job = _numbers(
        "Slurm", environ, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"
    )
    world_size = _number("Slurm", environ, "SLURM_STEP_NUM_TASKS", _number("Slurm", environ, "SLURM_NTASKS", 0))
    nodes = expand_node_list(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "")
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    if not world_size:
        raise JobError("Slurm says neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS: start with srun --ntasks=N")
    if not nodes or len(tasks) != len(nodes) or sum(tasks) != world_size or node >= len(nodes):
        raise JobError(
            f"what Slurm says does not fit together: SLURM_NODEID={node} of the nodes {', '.join(nodes) or '(none)'} "
            f"with {', '.join(map(str, tasks)) or 'no'} tasks, {world_size} in all"
        )
    job_id = f"slurm-{job}.{step}"
    restarts = _number("Slurm", environ, "SLURM_RESTART_COUNT", 0)
    if rank == 0 and node != 0 and not environ.get("MASTER_ADDR"):
        raise JobError(
            f"Slurm's task 0 is on {nodes[node]}, and the others would look for it on {nodes[0]}, the first of "
            f"{environ.get('SLURM_STEP_NODELIST')}: export MASTER_ADDR={nodes[node]} before srun"
        )
    return LaunchedTask(
        launcher="Slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        num_hosts=len(nodes),
        tasks_per_host=tasks[node],
        host=environ.get("SLURMD_NODENAME") or nodes[node],
        first_host=nodes[0],
        tasks_by_host=dict(zip(nodes, tasks)),
        job_id=job_id,
        launch_id=f"slurm/{environ.get('SLURM_CLUSTER_NAME', '')}/{job_id}/{restarts}",
        restart_count=restarts,
    )


def _mpich(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    local_size = _number("MPICH", environ, "MPI_LOCALNRANKS", 0)
    if "PMI_RANK" not in environ or (not local_size and "SLURM_STEP_ID" in environ):  # srun --mpi=pmi2 sets it as well
        return None
    rank, world_size = _numbers("MPICH", environ, "PMI_RANK", "PMI_SIZE")
    if not local_size:
        raise JobError(
            "MPICH says PMI_RANK but not MPI_LOCALNRANKS: how many processes are on this host? Start with mpiexec of "
            "MPICH (Hydra) or Intel MPI"
        )
    return LaunchedTask(
        launcher="MPICH",
        rank=rank,
        world_size=world_size,
        local_rank=_number("MPICH", environ, "MPI_LOCALRANKID", 0),
        num_hosts=_hosts_of_equal_size(world_size, local_size),
        tasks_per_host=local_size,
        host=host,
        launch_id=f"mpich/{environ['PMI_JOBID']}" if environ.get("PMI_JOBID") else "",
    )


def _kubeflow(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    """A pod of a TrainJob or PyTorchJob whose command is not torchrun, which reads PET_* itself."""
    if "PET_NODE_RANK" not in environ or "PET_NNODES" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return None
    per_pod = environ.get("PET_NPROC_PER_NODE") or "1"
    if per_pod != "1":
        raise JobError(
            f"Kubeflow says PET_NPROC_PER_NODE={per_pod}, and this is one process: start it by `torchrun --no-python "
            "cordee train …`, which starts one for each, or set numProcPerNode: 1"
        )
    rank, world_size = _numbers("Kubeflow", environ, "PET_NODE_RANK", "PET_NNODES")
    first = environ.get("PET_MASTER_ADDR", "")
    return _one_task_each(
        "Kubeflow",
        rank,
        world_size,
        host,
        first_host=first,
        launch_id=f"kubeflow/{first}:{environ.get('PET_MASTER_PORT', '')}" if first else "",
    )


def _kubernetes(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    if "JOB_COMPLETION_INDEX" not in environ or "WORLD_SIZE" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return None  # torchrun in a pod: WORLD_SIZE is torchrun's
    rank, world_size = _numbers("Kubernetes", environ, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
    first = environ.get("MASTER_ADDR", "")
    return _one_task_each("Kubernetes", rank, world_size, host, launch_id=f"kubernetes/{first}" if first else "")


def _skypilot(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    rank, world_size = _numbers("SkyPilot", environ, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) != world_size:
        raise JobError(f"SkyPilot says SKYPILOT_NUM_NODES={world_size} and {len(addresses)} SKYPILOT_NODE_IPS")
    job_id = environ.get("SKYPILOT_TASK_ID", "")
    return _one_task_each(
        "SkyPilot",
        rank,
        world_size,
        host,
        first_host=addresses[0],
        job_id=job_id,
        launch_id=f"skypilot/{job_id}" if job_id else "",
    )


def _variables(environ: Mapping[str, str], host: str) -> LaunchedTask | None:
    """RANK and WORLD_SIZE that somebody else has set: a script with ssh, a PyTorchJob."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return None
    name = "RANK and WORLD_SIZE"
    rank, world_size = _numbers(name, environ, "RANK", "WORLD_SIZE")
    local_size = _number(name, environ, "LOCAL_WORLD_SIZE", 1)
    where = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    return LaunchedTask(
        launcher=name,
        rank=rank,
        world_size=world_size,
        local_rank=_number(name, environ, "LOCAL_RANK", 0),
        num_hosts=_hosts_of_equal_size(world_size, local_size),
        tasks_per_host=local_size,
        host=host,
        launch_id=f"variables/{where}" if where != ":" else "",
    )


# By the name that CORDEE_LAUNCHER gives; the innermost first.
LAUNCHERS: dict[str, Callable[[Mapping[str, str], str], LaunchedTask | None]] = {
    "torchrun": _torchrun,
    "openmpi": _openmpi,
    "mpich": _mpich,
    "slurm": _slurm,
    "kubeflow": _kubeflow,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "variables": _variables,
}


def _one_task_each(
    launcher: str,
    rank: int,
    world_size: int,
    host: str,
    *,
    launch_id: str,
    first_host: str = "",
    job_id: str = "",
) -> LaunchedTask:
    """Return the place of a process that is the only one on its host."""
    return LaunchedTask(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=0,
        num_hosts=world_size,
        tasks_per_host=1,
        host=host,
        first_host=first_host,
        job_id=job_id,
        launch_id=launch_id,
    )


def expand_node_list(text: str) -> list[str]:
    """Return the names in a node list of Slurm, in its order: "n[1-2,07],login" is n1, n2, n07, login."""
    names: list[str] = []
    for part in _split_list(text):
        for name in _expand_part(part):
            names.append(name)
            if len(names) > _MOST_HOSTS:
                raise JobError(f"Slurm's node list {text[:80]!r} has more than {_MOST_HOSTS:,} names")
    return names


def _split_list(text: str) -> list[str]:
    """Cut at the commas that are not in brackets."""
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise JobError(f"Slurm's node list {text!r} has brackets that do not match")
    return re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)


def _expand_part(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, tail = rest.partition("]")
    for item in numbers.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise JobError(f"Slurm's node list has {part!r}: {item!r} is not a number or a range")
        for number in range(int(first), int(last) + 1):
            for end in _expand_part(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def expand_counts(text: str) -> list[int]:
    """Return the numbers in a list of Slurm that repeats some: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(",") if text else []:
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if found is None or int(found[2] or 1) > _MOST_HOSTS:
            raise JobError(f"Slurm's list of tasks {text!r} is not understood: {item!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _hosts_of_equal_size(world_size: int, local_size: int) -> int:
    """Return how many hosts there are if all are like this one; 0 if they cannot be."""
    return world_size // local_size if local_size and world_size % local_size == 0 else 0


def _numbers(launcher: str, environ: Mapping[str, str], *names: str) -> list[int]:
    return [_number(launcher, environ, name) for name in names]


def _number(launcher: str, environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        said = f"{name}={text!r}" if text is not None else f"no {name}"
        raise JobError(f"the environment says {said}, which {launcher} sets: it must be a whole number")
    return int(text)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
