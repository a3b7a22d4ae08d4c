"""What started a process, by its environment.

Those of torchrun, Slurm and Open MPI were captured; the others are written by the documentation of their launchers.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.core.errors import JobError
from cordee.core.launchers import LaunchedTask, expand_counts, expand_node_list, recognise

TORCHRUN = {  # torchrun --nproc-per-node 2, rank 1
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "44155",
    "RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_gnlg8ahm/c3bc02bd-5612_yawy1c4n/attempt_0/1/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "c3bc02bd-5612",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
SLURM = {  # srun -N2 -n3 in a batch script, task 2
    "SLURMD_NODENAME": "node2",
    "SLURM_CLUSTER_NAME": "cordee",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SLURM_2X2 = SLURM | {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "12",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
}
SALLOC = {"SLURM_JOB_ID": "2", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}
OPEN_MPI = {  # mpirun -n 2, rank 1
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1135345665",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1135345665",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TRAIN_JOB = {  # a pod of Kubeflow's TrainJob, before torchrun
    "JOB_COMPLETION_INDEX": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
}
INDEXED_JOB = {  # examples/cluster/kubernetes/indexed-job.yaml
    "CORDEE_JOB_ID": "0b4d-uid",
    "JOB_COMPLETION_INDEX": "1",
    "MASTER_ADDR": "digits-0.digits",
    "WORLD_SIZE": "2",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-18-02-00-00-000000_digits_1",
}


def recognised(environ: dict[str, str]) -> LaunchedTask:
    return recognise(environ, host="here")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (TORCHRUN, "torchrun, 1 host × 2 tasks, this is host here"),
        (SLURM_2X2, "Slurm, 2 hosts × 2 tasks, this is host node2"),
        (SLURM, "Slurm, 3 tasks on 2 hosts, 1 of them here, this is host node2"),
        (OPEN_MPI, "Open MPI, 1 host × 2 tasks, this is host here"),
        (MPICH, "MPICH, 1 host × 2 tasks, this is host here"),
        (TRAIN_JOB, "Kubeflow, 2 hosts × 1 task, this is host here"),
        (INDEXED_JOB, "Kubernetes, 2 hosts × 1 task, this is host here"),
        (SKYPILOT, "SkyPilot, 2 hosts × 1 task, this is host here"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "RANK and WORLD_SIZE, 2 hosts × 1 task, this is host here",
        ),
    ],
)
def test_what_is_recognised_is_said(environ: dict[str, str], said: str) -> None:
    assert recognised(environ).describe() == said


def test_torchrun() -> None:
    task = recognised(TORCHRUN)
    assert (task.rank, task.world_size, task.local_rank, task.first_host) == (1, 2, 1, "localhost")
    assert task.restart_count is None
    assert task.job_id == "", "it is never started again"
    other_start = TORCHRUN | {"MASTER_PORT": "44156"}
    assert recognised(other_start).launch_id != task.launch_id


def test_torchrun_that_may_start_again_has_an_id_that_stays() -> None:
    first = recognised(TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"})
    folder = "/tmp/torchelastic_gnlg8ahm/c3bc02bd-5612_yawy1c4n/attempt_1/1/error.json"
    again = recognised(
        TORCHRUN
        | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_ERROR_FILE": folder}
    )
    assert first.job_id == again.job_id == "torchrun-yawy1c4n"
    assert again.restart_count == 1
    assert first.launch_id != again.launch_id


def test_slurm() -> None:
    task = recognised(SLURM)
    assert (task.rank, task.world_size, task.local_rank) == (2, 3, 0)
    assert (task.num_hosts, task.tasks_per_host, task.tasks_by_host) == (2, 1, {"node1": 2, "node2": 1})
    assert (task.first_host, task.job_id, task.restart_count) == ("node1", "slurm-12.0", 0)
    again = recognised(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert (again.job_id, again.restart_count) == ("slurm-12.0", 1)
    assert again.launch_id != task.launch_id


@pytest.mark.parametrize("environ", [BATCH_SCRIPT, SALLOC, SLURM | {"SLURM_STEP_ID": "4294967290"}])
def test_an_allocation_without_srun_is_no_launch(environ: dict[str, str]) -> None:
    with pytest.raises(JobError, match=r"not a task of a step: write `srun cordee train"):
        recognised(environ)


def test_slurm_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(JobError, match=r"does not fit together: SLURM_NODEID=1 of the nodes node1, node2"):
        recognised(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,2"})
    with pytest.raises(JobError, match="is heterogeneous"):
        recognised(SLURM | {"SLURM_HET_SIZE": "2"})
    first = {"SLURM_PROCID": "0", "SLURM_NODEID": "1"}
    with pytest.raises(JobError, match="task 0 is on node2, and the others would look for it on node1"):
        recognised(SLURM | first)
    assert recognised(SLURM | first | {"MASTER_ADDR": "node2"}).first_host == "node2"


def test_the_innermost_launcher_counts() -> None:
    one_each = {
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    torchrun = TORCHRUN | {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "WORLD_SIZE": "4", "RANK": "3"}
    assert recognised(SLURM | one_each | torchrun).launcher == "torchrun"
    assert recognised(SLURM | OPEN_MPI).launcher == "Open MPI", "mpirun starts its daemons by srun"
    assert recognised(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "12.0"}).launcher == "Slurm"
    assert recognised(TRAIN_JOB | TORCHRUN | {"PET_NNODES": "1:2"}).launcher == "torchrun"


def test_launchers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(JobError, match=r"process 1 of 2 on 1 host, and Slurm started torchrun 3 times: each would"):
        recognised(SLURM | TORCHRUN)
    assert recognised(SLURM | TORCHRUN | {"CORDEE_LAUNCHER": "torchrun"}).launcher == "torchrun"
    with pytest.raises(JobError, match=r"Slurm says that this is process 2 of 3, and RANK and WORLD_SIZE says"):
        recognised(SLURM | {"RANK": "0", "WORLD_SIZE": "3"})
    with pytest.raises(JobError, match=r"process 2 of 3, and the environment has WORLD_SIZE=8: which is meant\?"):
        recognised(SLURM | {"WORLD_SIZE": "8"})
    with pytest.raises(JobError, match="process 1 of 2, and RANK and WORLD_SIZE says that it is 0 of 2"):
        recognised(INDEXED_JOB | {"RANK": "0"})
    assert recognised(SLURM | {"RANK": "2", "WORLD_SIZE": "3"}).launcher == "Slurm"


def test_a_launcher_that_is_named_must_be_there() -> None:
    with pytest.raises(JobError, match="CORDEE_LAUNCHER='slrum': it is one of torchrun, openmpi"):
        recognised(SLURM | {"CORDEE_LAUNCHER": "slrum"})
    with pytest.raises(JobError, match="has none of its variables"):
        recognised(SLURM | {"CORDEE_LAUNCHER": "torchrun"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, r"no launcher is recognised in the environment: start `cordee train JOB --engine env` by torchrun"),
        ({"JOB_COMPLETION_INDEX": "0"}, r"must say how many pods it has \(env WORLD_SIZE\)"),
        ({"WORLD_SIZE": "2"}, r"RANK and WORLD_SIZE must both be set"),
        (TORCHRUN | {"RANK": "x"}, r"RANK='x', which torchrun sets: it must be a whole number"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, r"process 2 of 2: ranks go from 0 to 1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, r"process 2 of the 2 on this host"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1"}, r"SKYPILOT_NUM_NODES=2 and 1 SKYPILOT_NODE_IPS"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "4"}, r"PET_NPROC_PER_NODE=4, and this is one process: start it by `torch"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"not MPI_LOCALNRANKS"),
    ],
)
def test_what_cannot_be_right_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        recognised(environ)


def test_ids_of_jobs() -> None:
    assert recognised(INDEXED_JOB).job_id == "0b4d-uid"
    assert recognised(TRAIN_JOB).job_id == ""
    assert recognised(OPEN_MPI).job_id == ""
    given_id = recognised(OPEN_MPI | {"CORDEE_JOB_ID": "my job/1"})
    assert given_id.job_id == "my-job-1", "it names a folder"
    assert recognised(SKYPILOT).job_id == SKYPILOT["SKYPILOT_TASK_ID"]
    assert recognised(SKYPILOT).first_host == "10.0.0.1"


def test_node_lists() -> None:
    assert expand_node_list("") == []
    assert expand_node_list("login") == ["login"]
    assert expand_node_list("n[1-2,07],login,r[1-2]n[09-10]-ib") == [
        *("n1", "n2", "n07", "login"),
        *("r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"),
    ]
    for text in ("n[1-2", "n]1[", "n[a]", "n[2-1]", "n[]", "n[1-99999999]"):
        with pytest.raises(JobError, match="node list"):
            expand_node_list(text)


def test_lists_of_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("") == []
    for text in ("2(x)", "a", "1,", "2(x999999999)"):
        with pytest.raises(JobError, match="list of tasks"):
            expand_counts(text)


@given(
    st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM, *OPEN_MPI, *MPICH, *TRAIN_JOB, *SKYPILOT]), st.text(max_size=8))
)
def test_no_environment_is_worse_than_refused(changes: dict[str, str]) -> None:
    for whole in (TORCHRUN, SLURM, OPEN_MPI, MPICH, TRAIN_JOB, INDEXED_JOB, SKYPILOT):
        try:
            task = recognised(whole | changes)
        except JobError:
            continue
        assert 0 <= task.rank < task.world_size
