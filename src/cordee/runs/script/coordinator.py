"""Leads the run of a script: as a team is led, but that the script itself has model, data and loop."""

from __future__ import annotations

import msgspec

from cordee.cluster.policies import FailureReport
from cordee.core.errors import TrainingError
from cordee.monitoring import Summary
from cordee.runs.team.coordinator import TeamLeader


class ScriptLeader(TeamLeader):
    """The `Leader` of the workers of one script."""

    package = "cordee.runs.script"
    prints = True

    @property
    def _is_elastic(self) -> bool:
        return True

    def _check_size(self, num_workers: int) -> None:
        pass  # a batch that is smaller than the team leaves workers without samples, which weigh nothing

    def decide(self) -> None:
        completed = [index for index, summary in self._state.summaries.items() if summary.status == "completed"]
        ended = [record for index in completed if (record := self._membership.of(index)).phase == "member"]
        super().decide()
        for record in ended:
            if record.phase == "gone":  # also if another process has its place by now
                how = FailureReport(record.index, self.step, record.loss_reason or "was lost").describe()
                raise TrainingError(
                    f"{how} after its loop had ended and before the end of the script: what the script does there may "
                    "be incomplete. Save inside of the loop's function, or run the script again with --resume"
                )

    def summarise(self) -> Summary:
        """Return what the first of the last team says. Replicas were compared; statistics of norms may differ."""
        summaries = self._state.summaries
        if not summaries:
            raise TrainingError("the script ended on every worker before its loop of @team.elastic came to its end")
        first = next((s for s in summaries.values() if s.weights_sha256), next(iter(summaries.values())))
        self._state.summaries = {
            index: msgspec.structs.replace(summary, weights_sha256=None) for index, summary in summaries.items()
        }
        return msgspec.structs.replace(super().summarise(), weights_sha256=first.weights_sha256)
