"""Commands that predict and compare: `plan`, `simulate`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_note, print_table, print_text


def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    workers: Annotated[
        int | None,
        typer.Option(
            help="Look at up to N workers; else the job's, this machine's cores, or the cluster's devices.",
            metavar="N",
            min=1,
        ),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file: other machines than this one.", metavar="FILE")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is in the cache.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.batch_size=256.", metavar="K=V")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Predict step time, memory and traffic of each strategy; say which to use, and why.

    Profiles the model on this machine for some seconds, and keeps the profile in the cache folder.

    For example:

        cordee plan examples/digits.toml --workers 4

        cordee plan job.toml --cluster cluster.toml --json
    """
    from cordee.core import Job

    Job.load(job, settings or [])  # a mistake is reported before the two seconds that importing torch takes
    if cluster is not None:
        from cordee.planner.cluster_file import load_cluster

        load_cluster(cluster)

    from cordee.planner.plan import render_plan
    from cordee.planner.planning import plan as make_plan

    found = make_plan(job, overrides=settings or [], workers=workers, cluster=cluster, fresh=fresh, tell=print_note)
    if as_json:
        print_json(found.to_dict())
    else:
        print_table(render_plan(found))


def simulate(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="SCENARIO", help="A scenario file, or a published one's name.", show_default=False),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="Take step and gradients from this job, profiled here.", metavar="JOB.toml")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="With --job: take the links from here.", metavar="FILE")] = None,
    here: Annotated[
        bool, typer.Option("--here", help="With --job: simulate its steps on this machine, strategy by strategy.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override one key, e.g. staleness=4; with --here one of the job.", metavar="K=V"),
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also draw it: a page with charts.", metavar="F")] = None,
    picture: Annotated[
        Path | None, typer.Option("--png", help="Also draw it: a picture with charts.", metavar="F")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Predict scaling, idle time, staleness and failures on other clusters.

    A scenario is a TOML file (docs/reference/planner.md lists its keys), a job with a cluster file, or a published one:
    horovod-inception3, horovod-resnet101, horovod-vgg16, parameter-server.

    For example:

        cordee simulate horovod-vgg16 --set "workers=[1,64,1024]" --html a.html

        cordee simulate --job job.toml --cluster cluster.toml --set mtbf=30d

        cordee simulate --job job.toml --here
    """
    from cordee.core.errors import JobError
    from cordee.planner.simulate import (
        draw_page,
        draw_picture,
        find_scenario,
        render_outcomes,
        render_strategies,
        scenario_of_job,
        simulate_here,
        write_drawing,
    )
    from cordee.planner.simulator import simulate as run_simulation

    if (scenario is None) == (job is None):
        raise JobError("say what to simulate: a scenario, or --job JOB.toml, and not both")
    if cluster is not None and job is None:
        raise JobError("--cluster belongs to --job; a scenario has its own links")
    overrides = settings or []
    if here:
        if job is None or cluster is not None or page is not None or picture is not None:
            raise JobError("--here goes with --job alone, without a cluster, --html and --png")
        found = simulate_here(job, overrides, print_note)
        if as_json:
            print_json({"outcomes": found})
        else:
            print_table(render_strategies(found))
        return
    chosen = find_scenario(scenario, overrides) if scenario else scenario_of_job(job or "", cluster, overrides)
    outcomes = run_simulation(chosen)
    if page is not None:
        write_drawing(page, draw_page(chosen, outcomes).encode())
    if picture is not None:
        write_drawing(picture, draw_picture(chosen, outcomes))
    if as_json:
        print_json({"scenario": chosen, "outcomes": outcomes})
        return
    print_table(render_outcomes(chosen, outcomes))
    if page is not None:
        print_text(f"page: {page}")
    if picture is not None:
        print_text(f"picture: {picture}")


def compare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="JOB.toml|RUN", help="A job file, or two runs or more.", show_default=False),
    ],
    strategies: Annotated[
        str, typer.Option(help="With a job: train it by each of these.", metavar="A,B,C", show_default=False)
    ] = "",
    seeds: Annotated[int, typer.Option(help="With a job: train it with so many seeds, to see the spread.")] = 1,
    accuracy: Annotated[
        float | None,
        typer.Option(help="Measure the time to this test accuracy; else 99 % of what all runs reached.", metavar="A"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="With a job: override one key.", metavar="K=V")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The report; a .csv is written beside it.", metavar="F.html")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--png", help="Also draw the curves: a picture.", metavar="F")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare strategies on a job, or runs that have ended: figures, curves and a verdict in one HTML file.

    Runs of a job are kept in ./runs/compare-NAME. What was interrupted continues with the same command.

    For example:

        cordee compare job.toml --strategies single,data_parallel --seeds 3

        cordee compare runs/a runs/b -o report.html
    """
    from cordee.cli.run_commands import found
    from cordee.core.env import runs_folder
    from cordee.core.errors import JobError

    is_job = len(what) == 1 and what[0].endswith(".toml")
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if is_job != bool(names) or (not is_job and (settings or seeds != 1)):
        raise JobError(
            "compare takes a job file with --strategies a,b,c, or two runs or more without it: "
            "cordee compare job.toml --strategies A,B (`cordee list strategies`)"
        )
    from cordee.dashboard.comparison import compare_job, compare_runs, to_csv, to_html, to_png

    groups: list[str] = []
    if is_job:
        folder = runs_folder() / f"compare-{Path(what[0]).stem}"
        runs, groups = compare_job(Path(what[0]), names, seeds, settings or [], folder, print_note)
        output = output or folder / "report.html"
    else:
        runs = [found(name) for name in what]
    comparison = compare_runs(runs, accuracy, groups)
    output = output or Path("compare.html")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        to_html(comparison, f"Comparison of {', '.join(dict.fromkeys(groups or [run.name for run in runs]))}")
    )
    output.with_suffix(".csv").write_text(to_csv(comparison))
    if picture is not None:
        picture.write_bytes(to_png(comparison))
    if as_json:
        print_json(comparison.runs)
        return
    print_text("\n".join(comparison.verdict))
    shown = f", picture: {picture}" if picture is not None else ""
    print_text(f"report: {output}, figures: {output.with_suffix('.csv')}{shown}")
