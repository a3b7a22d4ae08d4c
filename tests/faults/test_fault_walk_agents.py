"""Dies, freezes or fails at every fault point of an agent: the run ends with the same weights, and nothing is left."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from fault_trials import job_text
from fault_walk import AGENT_WALK, MODEL

from agent_runs import AgentRun, agent_run
from cordee.core import fault_points
from cordee.core.fault_points import Fault

JOB = job_text(MODEL, 'name = "data_parallel"', steps=12, save_every=4)
IN_SHORT = (("agent.enrol", "kill", 1), ("agent.command", "kill", 1))
CASES = [
    pytest.param(
        Fault(point, "agent-1", action, visit),
        id=f"{point}-{visit}-{action}",
        marks=() if (point, action, visit) in IN_SHORT else pytest.mark.long,
    )
    for point, visits in AGENT_WALK.items()
    for visit in visits
    for action in ("kill", "freeze", "error")
    if action != "error" or point == "agent.enrol"
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.toml").write_text(JOB)
    with agent_run(folder / "job.toml", folder / "run") as agents:
        return str(agents.finish()["weights_sha256"])


def _await_fault(agents: AgentRun, faults: Path, fault: Fault) -> subprocess.Popen[str]:
    """Wait until the fault has happened; return the process that it has hit."""
    deadline_s = time.monotonic() + 60
    while fault not in fault_points.happened(faults):
        assert time.monotonic() < deadline_s, agents.describe()
        time.sleep(0.05)
    return agents.agents[1]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("fault", CASES)
def test_a_fault_of_an_agent(fault: Fault, expected: str, tmp_path: Path) -> None:
    job, faults = tmp_path / "job.toml", tmp_path / "faults"
    job.write_text(JOB)
    environment = fault_points.ask_for(faults, (fault,))
    with agent_run(job, tmp_path / "run", environment=environment) as agents:
        if fault.point == "agent.enrol" and fault.action != "error":
            # Nobody has heard of it, and its ticket is still good: its user starts it again.
            lost = _await_fault(agents, faults, fault)
            lost.kill()
            lost.wait()
            agents.start(1)
        summary = agents.finish()
        assert fault in fault_points.happened(faults), agents.describe()
        assert summary["weights_sha256"] == expected, agents.describe()
        frozen = agents.agents[1] if fault.action == "freeze" and fault.point != "agent.enrol" else None
        family = psutil.Process(agents.agents[1].pid).children(recursive=True) if frozen else []
        if frozen is not None:
            frozen.kill()
        for agent in agents.agents.values():
            agent.wait(40)
        assert not psutil.wait_procs(family, timeout=5)[1]
