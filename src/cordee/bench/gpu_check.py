"""`cordee doctor --gpus`: trains on this machine's GPUs, and compares with the CPU and with DDP on NCCL.

For people who have GPUs: the project has none. The report is one file that can be sent in.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cordee.core import Job
from cordee.core.env import child_environment, place
from cordee.core.errors import CordeeError, TrainingError
from cordee.core.findings import Finding
from cordee.monitoring.run_directory import SUMMARY_FILE
from cordee.monitoring.summary import read_summary
from cordee.version import __version__

STEPS, BATCH = 200, 256
# Sums in another order: after so many steps the loss of a GPU, or of two, is close to that of the CPU and not the same.
LOSS_TOLERANCE = 0.05
LEAST_SPEED = 0.9  # of DDP's
RUN_TIMEOUT_S = 600.0
ADVICE = "please send in the report"
CONCLUSIONS = ("the GPUs of this machine train as the CPU does", "wrong on the GPUs of this machine")

PARTS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "data_parallel, flat": {"reducer": "flat"},
    "sharded": {},
    "sharded, offload": {"offload": True},
    "pipeline": {},
    "tensor": {},
    "local_sgd": {"sync_every": 8},
}


def job_of(strategy: str, workers: int, device: str, settings: dict[str, Any], **training: Any) -> Job:
    """Return the job that is trained: a perceptron, on data that is made up, with the same seed everywhere."""
    return Job.from_dict(
        {
            "name": "gpu-check",
            "model": {"use": "mlp", "hidden": [1024, 1024]},
            "data": {"use": "synthetic", "size": 20_000, "test_size": 2_000},
            "optimizer": {"use": "sgd", "lr": 0.05},
            "training": {"batch_size": BATCH, "steps": STEPS, "device": device, **training},
            "strategy": {"name": strategy, "workers": workers, **settings},
        }
    )


def examine_gpus(report: Path, tell: Callable[[str], None]) -> list[Finding]:
    """Train on the GPUs of this machine and write what came out to `report`. Takes minutes.

    Without a GPU nothing is trained nor written, and the finding is a problem.
    """
    import torch

    if not torch.cuda.is_available() or not torch.cuda.device_count():
        kind = "torch finds none" if torch.version.cuda or torch.version.hip else "this torch was built without CUDA"
        return [Finding("GPUs", "problem", f"there is no GPU to check: {kind}", "run this where a GPU is")]
    num_gpus = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    findings = [Finding("GPUs", "ok", f"{num_gpus}: {', '.join(names)}")]
    figures: dict[str, Any] = {"machine": _machine(torch, names), "losses": {}, "rates": {}}
    with tempfile.TemporaryDirectory(prefix="cordee-gpus-") as folder:
        runs = Path(folder)
        tell("training on the CPU, to compare with")
        expected, _ = _train(job_of("single", 1, "cpu", {}), runs / "cpu")
        figures["losses"]["cpu"] = expected
        for label, job in _jobs(num_gpus):
            tell(f"training: {label}")
            findings.append(_try_job(label, job, runs, expected, figures))
        if num_gpus > 1:
            tell("measuring against DDP on NCCL")
            findings.append(_compare_speed(num_gpus, runs, figures))
    figures["findings"] = [[one.subject, one.state, one.detail] for one in findings]
    report.write_text(json.dumps(figures, indent=1) + "\n")
    findings.append(Finding("report", "ok", f"{report}: {ADVICE}"))
    return findings


def _jobs(num_gpus: int) -> list[tuple[str, Job]]:
    """Return what is trained: one GPU in each precision, then every strategy on as many workers as there are GPUs."""
    single = [(f"single, {kind}", job_of("single", 1, "cuda", {}, precision=kind)) for kind in ("fp32", "bf16", "fp16")]
    if num_gpus == 1:
        return single
    workers = 2 if num_gpus < 4 else 4
    together: list[tuple[str, Job]] = []
    for label, settings in PARTS.items():
        name = label.partition(",")[0]
        together.append((f"{label}, {workers} workers", job_of(name, workers, "cuda", settings)))
    return [*single, *together]


def _try_job(label: str, job: Job, runs: Path, expected: float, figures: dict[str, Any]) -> Finding:
    try:
        loss, rate = _train(job, runs / label.replace(", ", "-").replace(" ", "-"))
    except CordeeError as error:
        return Finding(label, "problem", str(error), ADVICE)
    figures["losses"][label], figures["rates"][label] = loss, rate
    return judge_loss(label, loss, expected, rate)


def judge_loss(label: str, loss: float, expected: float, rate: float) -> Finding:
    """Return whether a run on GPUs came to where the one on the CPU did. Pure."""
    detail = f"test loss {loss:.4f}, on the CPU {expected:.4f}; {rate:,.0f} samples/s"
    if not math.isfinite(loss) or abs(loss - expected) > LOSS_TOLERANCE * max(1.0, abs(expected)):
        return Finding(label, "problem", detail, ADVICE)
    return Finding(label, "ok", detail)


def judge_speed(ours: Sequence[float], theirs: Sequence[float]) -> Finding:
    """Return how fast data_parallel is beside DDP, rounds in turn: the median of the ratios. Pure."""
    ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
    detail = f"data_parallel takes {ratio:.2f} of the steps of DDP on NCCL in a second ({len(ours)} rounds)"
    return Finding("speed", "ok" if ratio >= LEAST_SPEED else "note", detail)


def _compare_speed(num_gpus: int, runs: Path, figures: dict[str, Any]) -> Finding:
    workers = 2 if num_gpus < 4 else 4
    ours, theirs = [], []
    for turn in range(3):
        try:
            _, rate = _train(job_of("data_parallel", workers, "cuda", {}), runs / f"speed-{turn}")
        except CordeeError as error:
            return Finding("speed", "problem", str(error), ADVICE)
        ours.append(rate)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        try:
            done = subprocess.run(
                [*command, __file__, str(STEPS), str(BATCH // workers)],
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
                env=child_environment({"OMP_NUM_THREADS": "1"}),
            )
        except subprocess.TimeoutExpired:
            return Finding("speed", "note", f"DDP on NCCL did not end within {RUN_TIMEOUT_S:g} s", ADVICE)
        lines = [line for line in done.stdout.splitlines() if line.startswith("samples/s ")]
        if done.returncode or not lines:
            return Finding("speed", "note", f"DDP on NCCL did not run: {done.stderr.strip()[-300:]}", ADVICE)
        theirs.append(float(lines[-1].split()[1]))
    figures["rates"] |= {"data_parallel, in turn": ours, "DDP on NCCL, in turn": theirs}
    return judge_speed(ours, theirs)


def _train(job: Job, run_dir: Path) -> tuple[float, float]:
    """Return the loss on the test set and the samples per second of a run. Raises TrainingError.

    In a process of its own: this one must not use a GPU, or what it starts could not, and a run that hangs is ended.
    """
    path = run_dir.with_suffix(".toml")
    path.write_text(job.to_toml())
    command = [sys.executable, "-m", "cordee", "train", str(path), "--quiet", "--run-dir", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise TrainingError(f"it did not end within {RUN_TIMEOUT_S:g} s") from None
    summary = read_summary(run_dir / SUMMARY_FILE)
    if done.returncode or summary is None or summary.test_loss is None:
        raise TrainingError(done.stderr.strip()[-1000:] or f"it ended with the code {done.returncode}")
    return summary.test_loss, summary.samples_per_second or math.nan


def _machine(torch: Any, names: Sequence[str]) -> dict[str, Any]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    return {
        "cordee": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "nccl": nccl,
        "gpus": list(names),
        "capabilities": [list(torch.cuda.get_device_capability(index)) for index in range(len(names))],
    }


def run_ddp(num_steps: int, batch_size: int) -> None:
    """Train the same model with DDP on NCCL, as a member of a torchrun; the first prints the samples/s of all."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    member = place()
    assert member is not None
    index = member.local_rank
    torch.cuda.set_device(index)
    dist.init_process_group("nccl")
    sizes = [784, 1024, 1024, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (given, made) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(given, made), *([nn.ReLU()] if number < 2 else [])]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, targets = torch.randn(20_000, 1, 28, 28), torch.randint(10, (20_000,))
    started = 0.0
    for step in range(num_steps + 10):
        if step == 10:  # the first ones make what is kept
            torch.cuda.synchronize()
            started = time.perf_counter()
        rows = torch.randint(len(inputs), (batch_size,))
        loss = nn.functional.cross_entropy(model(inputs[rows].cuda()), targets[rows].cuda())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # as a loop that records its loss does
    torch.cuda.synchronize()
    rate = num_steps * batch_size * member.world_size / (time.perf_counter() - started)
    dist.destroy_process_group()
    if member.rank == 0:
        sys.stdout.write(f"samples/s {rate}\n")


if __name__ == "__main__":
    run_ddp(int(sys.argv[1]), int(sys.argv[2]))
