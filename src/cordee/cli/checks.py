"""Commands that put Cordée to the test: the machine, a run, the framework itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_note, print_text
from cordee.cli.run_commands import found
from cordee.core.interrupts import INTERRUPTED


def chaos(
    job: Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Which of kill, freeze, slow, full-disk, partition, coordinator, leave. kill,freeze unless --at.",
            show_default=False,
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="POINT[:PROCESS[:VISIT]]", help="A fault at a fault point.", show_default=False),
    ] = None,
    do: Annotated[str, typer.Option(help="What happens there: kill, freeze or error.", metavar="WHAT")] = "kill",
    lose_messages: Annotated[
        float, typer.Option(metavar="SHARE", help="Messages to parameter servers that are lost or late.")
    ] = 0.0,
    points: Annotated[bool, typer.Option("--points", help="List the fault points.")] = False,
    every: Annotated[str, typer.Option(help="Time between two faults.", metavar="TIME")] = "5s",
    duration: Annotated[str, typer.Option("--for", help="How long faults happen.", metavar="TIME")] = "1m",
    calm: Annotated[
        str,
        typer.Option(help="How long nothing happens, half of it before and half after the faults.", metavar="TIME"),
    ] = "0s",
    seed: Annotated[int, typer.Option(help="Chooses faults and workers.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="As in cordee train.", metavar="K=V", show_default=False)
    ] = None,
) -> None:
    """Train a job while real faults hit its workers, then check the run by its events.

    Exit code 1 if the run fails, hangs, or is not sound, or if a process does not get to where --at aims.
    """
    from cordee.core import Job
    from cordee.core.durations import parse_duration
    from cordee.core.env import runs_folder
    from cordee.core.errors import JobError
    from cordee.core.fault_points import POINTS
    from cordee.monitoring import new_run_path
    from cordee.tools.audit import CONCLUSIONS
    from cordee.tools.chaos import aim, plan_faults, run_with_faults, train_command
    from cordee.tools.doctor import can_train, render_findings

    if points:
        width = max(map(len, POINTS))
        print_text("\n".join(f"{name:{width}}  {what}" for name, what in POINTS.items()))
        return
    if job is None:
        raise JobError("which job? cordee chaos JOB.toml, or cordee chaos --points")
    aimed = aim(at or [], do)
    if not 0 <= lose_messages < 0.5:
        raise JobError(f"--lose-messages {lose_messages}: it must be at least 0 and below 0.5")
    loaded = Job.load(job, overrides=overrides or [])
    for_s, calm_s = parse_duration(duration, "--for"), parse_duration(calm, "--calm")
    kinds = (faults if faults is not None else "kill,freeze").split(",")
    plan = []
    if faults is not None or not aimed:
        plan = plan_faults(kinds, every_s=parse_duration(every, "--every"), for_s=for_s, seed=seed)
    folder = run_dir or new_run_path(runs_folder(), f"{loaded.name}-chaos")
    command = train_command(job, folder, overrides or [])
    outcome = run_with_faults(
        command, folder, plan, for_s=for_s, calm_s=calm_s, aimed=aimed, lose_messages=lose_messages, say=print_text
    )
    print_text(render_findings(outcome.findings, as_json=False, conclusions=CONCLUSIONS))
    print_text(
        f"{len(outcome.faults)} faults in {outcome.seconds:.0f} s, {outcome.recoveries} recoveries, the slowest in "
        f"{outcome.slowest_recovery_s:.2f} s, {outcome.steps_redone} steps redone, "
        f"{outcome.samples_per_second:,.0f} samples/s; the run is {folder}"
    )
    if outcome.calm_samples_per_second:
        share = outcome.samples_per_second / outcome.calm_samples_per_second
        print_text(
            f"without faults {outcome.calm_samples_per_second:,.0f} samples/s, with a fault every {every} "
            f"{outcome.samples_per_second:,.0f}: {share:.1%}"
        )
    if not can_train(outcome.findings):
        raise typer.Exit(1)


def profile(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Steps that are profiled.", metavar="N")] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before them.", metavar="N")] = 5,
    worker: Annotated[int, typer.Option(help="The worker that is profiled.", metavar="W", min=0)] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written; else a new folder in ./runs.", metavar="D")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. strategy.workers=2.", metavar="K=V")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the operations as JSON.")] = False,
) -> None:
    """Train a job for some steps with torch's profiler on one worker, and say in words where the time goes.

    Writes profile.json and profile.trace.json.gz, which ui.perfetto.dev opens, into the run directory. Not for
    parameter servers, where no worker takes whole steps.
    """
    from cordee.core import Job
    from cordee.core.env import runs_folder
    from cordee.monitoring import new_run_path

    loaded = Job.load(job, settings or [])
    folder = (run_dir or new_run_path(runs_folder(), f"{loaded.name}-profile")).absolute()
    from cordee.launch import train
    from cordee.tools.profiling import TRACE_FILE, describe_profile, phases_of, profile_overrides, read_profile

    overrides = [*(settings or []), *profile_overrides(folder, worker, warmup, steps)]
    ended = train(job, overrides=overrides, run_dir=folder, quiet=True)
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    found = read_profile(folder)
    if as_json:
        print_json(found)
        return
    print_text("\n".join(describe_profile(found, phases_of(folder, worker))))
    print_text(f"trace: {folder / TRACE_FILE} (ui.perfetto.dev opens it)")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of lines.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="E",
            help="Check a cluster: this engine, as `cordee train --engine E` would use it.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="Check this run's events instead of the machine.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Train on this machine's GPUs, and compare with the CPU and with DDP.")
    ] = False,
    report: Annotated[
        Path, typer.Option("--report", help="With --gpus: where the report is written.", metavar="FILE")
    ] = Path("cordee-gpus.json"),
) -> None:
    """Check this machine: Python, torch, devices, cores, memory, disk, ports, data; say what to fix.

    With --run, check a run from its own events: every sample counted once per epoch, generations that do not
    overlap, steps that only grow, members that agree on the weights. With --engine, check a cluster before a run;
    `env` is checked in all processes of a launch, for example `srun cordee doctor --engine env`. With --gpus, train
    with every strategy on the GPUs, in a few minutes, and write a report. Exit code 1 if something is wrong, or if
    there is no GPU.
    """
    from cordee.tools.doctor import can_train, examine, examine_engine, render_findings

    if sum([run is not None, engine is not None, gpus]) > 1:
        raise typer.BadParameter("--run, --engine and --gpus are different checks: give one of them")
    if gpus:
        from cordee.bench.gpu_check import CONCLUSIONS as OF_GPUS
        from cordee.bench.gpu_check import examine_gpus

        findings = examine_gpus(report, print_note)
        print_text(render_findings(findings, as_json=as_json, conclusions=OF_GPUS))
    elif engine is not None:
        findings = examine_engine(engine)
        print_text(render_findings(findings, as_json=as_json))
    elif run is not None:
        from cordee.tools.audit import CONCLUSIONS, audit_run

        findings = audit_run(found(run))
        print_text(render_findings(findings, as_json=as_json, conclusions=CONCLUSIONS))
    else:
        findings = examine()
        print_text(render_findings(findings, as_json=as_json))
    if not can_train(findings):
        raise typer.Exit(1)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A benchmark of the list below.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the raw figures to this JSON file.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Interleaved rounds; the medians are compared. 7, or 3 for planner, unless given.",
            min=1,
            show_default=False,
        ),
    ] = None,
    cases: Annotated[
        str,
        typer.Option(
            help="Only these cases: of planner as in 'lenet,gpt/tensor,*/pipeline/4', of engines as in "
            "'speed/ray,loss', of hosts as in 'full/lenet', of kernels as in 'resnet20'. Engines, frameworks, hosts "
            "and kernels keep the figures of other cases that are in the output file.",
            metavar="LIST",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Measure Cordée: against its peers, interleaved in one run, or against the goals of the shipped jobs."""
    from cordee.bench import run_benchmark

    run_benchmark(name, rounds=rounds, output=output, cases=[case for case in cases.split(",") if case.strip()])
