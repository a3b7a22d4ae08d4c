"""Goes through seeds, counts what came out, and shrinks and reports what differs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import tomli_w

from cordee.core import Job
from cordee.core.errors import CordeeError
from differences.comparing import differences, judge
from differences.generator import PLAIN, Table, draw_trials, job_table, reference
from differences.running import Runner
from differences.shrinking import shrink


@dataclass(frozen=True)
class Failure:
    seed: int
    choices: Table
    problems: list[str]


class Campaign:
    """Runs trials and keeps count: verdicts by strategy, refusals by reason."""

    def __init__(self, runner: Runner, num_strategies: int = 4, only: str = "") -> None:
        self._runner = runner
        self._num_strategies = num_strategies
        self._only = only
        self.verdicts: Counter[str] = Counter()
        self.by_strategy: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()

    def run(self, seed: int) -> Iterator[Failure]:
        """Run the trials of a seed; yield those that differ."""
        for choices in draw_trials(seed, self._num_strategies):
            if self._only and choices["strategy"]["name"] != self._only:
                continue
            verdict, problems = self.judge(choices)
            self.verdicts[verdict] += 1
            self.by_strategy[choices["strategy"]["name"], verdict] += 1
            if verdict in ("refused", "no reference"):
                self.refusals[problems[0][:160]] += 1
            if verdict == "different":
                yield Failure(seed, choices, problems)
        self._runner.forget()

    def judge(self, choices: Table) -> tuple[str, list[str]]:
        alone = self._runner.run_once(reference(choices))
        verdict, problems = judge(choices, alone, self._runner.run(choices))
        if verdict == "different" and choices["training"].get("precision") == "bf16":
            training = {key: value for key, value in choices["training"].items() if key != "precision"}
            exact = {**choices, "training": training}
            if differences(choices, self._runner.run_once(reference(exact)), alone):
                return self.judge(exact)  # rounding to bf16 moves one worker as far: only without it is there an answer
        return verdict, problems

    def shrink(self, failure: Failure) -> Failure:
        """Return the smallest trial that still differs."""
        problems = {json.dumps(failure.choices, sort_keys=True): failure.problems}

        def fails(choices: Table) -> bool:
            try:
                Job.from_dict(job_table(choices))
            except CordeeError:
                return False  # simpler, and no job
            verdict, found = self.judge(choices)
            problems[json.dumps(choices, sort_keys=True)] = found
            return verdict == "different" and _kind(found) == _kind(failure.problems)

        smallest = shrink(failure.choices, fails)
        return Failure(failure.seed, smallest, problems[json.dumps(smallest, sort_keys=True)])

    def account(self) -> str:
        lines = [f"{sum(self.verdicts.values())} trials: {dict(self.verdicts)}"]
        lines += [f"  {name}: {verdict} {count}" for (name, verdict), count in sorted(self.by_strategy.items())]
        lines += [f"  {count} × {why}" for why, count in self.refusals.most_common()]
        return "\n".join(lines)


def _kind(problems: list[str]) -> str:
    """Return what must stay the same while a trial is shrunk: the message of an error, any difference else."""
    first = problems[0]
    return first.split(":", 3)[-1][:40] if first.startswith(("exit code", "alone", "one worker")) else "difference"


def report(failure: Failure) -> str:
    """Return the job as TOML, what differs, and how to repeat it."""
    changed = {key: value for key, value in failure.choices.items() if value != PLAIN[key]}
    table = job_table(failure.choices)
    before = failure.choices["before"]
    how = "cordee train trial.toml"
    if before is not None:
        at = failure.choices["resume_at"]
        how = f"with strategy = {before} to stop.steps = {at}, then this job with --resume"
    return "\n".join(
        [
            f"seed {failure.seed} differs:",
            *(f"  {problem}" for problem in failure.problems[:8]),
            f"again, in the folder tests: python -m differences --trial '{json.dumps(changed)}'",
            f"# trial.toml ({how}; compare with strategy 'single')",
            tomli_w.dumps(table),
        ]
    )
