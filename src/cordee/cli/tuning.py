"""The command that searches for the settings of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli.output import print_json, print_text
from cordee.core.interrupts import INTERRUPTED


def tune(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            help="A key and its values: K=log:1e-4..1e-1, K=lin:0..0.5, K=int:16..256, K=a|b|c (repeat for several).",
            metavar="K=VALUES",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials in all, those of earlier calls included.", metavar="N")] = 20,
    at_once: Annotated[
        int,
        typer.Option(help="Trials side by side; else as many as the cores have room for.", metavar="N"),
    ] = 0,
    metric: Annotated[
        str,
        typer.Option(
            help="What is best by: accuracy, loss or a name of [metrics]; else accuracy, or loss without classes.",
            metavar="M",
            show_default=False,
        ),
    ] = "",
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="End trials early that are worse than the median of the others.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the search; the job's seed is the job's.", min=0)] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, e.g. training.epochs=3.", metavar="K=V")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the search is; else runs/tune-NAME. A search there continues.", metavar="D"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes nowhere.")] = False,
) -> None:
    """Search for the settings of a job that give the best result.

    Each trial is a run in the folder of the search. Ctrl-C has the trials under way save and end. The same command
    continues a search that was interrupted or killed, and no trial is counted twice. Writes best.toml, a job that can
    be trained as it is, report.html, report.png and trials.csv. Exit code 1 if no trial ended well.

    For example:

        cordee tune job.toml --search optimizer.lr=log:1e-4..1e-1

        cordee tune job.toml --search 'model.dropout=0.0|0.2|0.5' --trials 3
    """
    from cordee.core import Job
    from cordee.core.env import runs_folder
    from cordee.core.errors import JobError
    from cordee.tuning.space import corners, parse_search, place

    # Mistakes are reported before the two seconds that importing torch takes.
    space = parse_search(search or [])
    loaded = Job.load(job, settings or [])
    for point in corners(space):
        Job.load(job, [*(settings or []), *place(point)])
    folder = folder or runs_folder() / f"tune-{loaded.name}"
    if (folder / "job.toml").exists():
        raise JobError(f"{folder} is the directory of a run, not of a search: choose another --folder")

    from cordee.tuning.search import BEST_FILE, Settings, describe_trial, tune

    chosen = Settings(trials=trials, at_once=at_once, metric=metric, seed=seed, prunes=prune)
    outcome = tune(job, settings or [], space, chosen, folder, _silent if as_json else print_text)
    if as_json:
        print_json(outcome)
    else:
        count = {
            state: sum(each.state == state for each in outcome.trials) for state in ("completed", "pruned", "failed")
        }
        print_text(", ".join(f"{number} {state}" for state, number in count.items()))
        if outcome.best is not None:
            print_text(f"best: {describe_trial(outcome.best, outcome.metric)}")
        if outcome.importances:
            shares = ", ".join(f"{key} {share:.0%}" for key, share in outcome.importances.items())
            print_text(f"importance: {shares}")
        print_text(f"files: {', '.join(str(path) for path in outcome.files)}" if outcome.files else f"files: {folder}")
        if outcome.best is not None:
            print_text(f"next\n  cordee train {folder / BEST_FILE}\n  cordee dashboard --runs {folder}")
    if outcome.is_interrupted:
        if not as_json:
            print_text("interrupted: the same command continues the search")
        raise typer.Exit(INTERRUPTED)
    if outcome.best is None:
        raise typer.Exit(1)


def _silent(text: str) -> None:
    pass
