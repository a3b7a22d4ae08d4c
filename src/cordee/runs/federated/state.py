"""What a coordinator of a federated run knows: all that its successor needs. The vectors are in files (spool.py)."""

from __future__ import annotations

import msgspec

from cordee.compute import Metrics
from cordee.runs.dispatched.state import OnDemandState
from cordee.runs.federated.board import BoardState
from cordee.training.progress import Progress


class FederatedOutcome(msgspec.Struct, kw_only=True):
    """How the run ended, as far as it has."""

    stopped_by: str | None = None
    is_final: bool = False  # the run ends with the round that is under way
    end_reason: str = ""  # why it ends early although nobody failed
    metrics: Metrics | None = None
    weights_sha256: str = ""
    problem: str = ""  # why the last checkpoint is missing
    epsilon: float | None = None
    saved_step: int = -1
    is_counted: bool = False  # the round that is under way is in the progress: what is left is to save it
    last_refusal: str = ""
    bytes_sent: int = 0


class FederatedState(OnDemandState, kw_only=True):
    """What a coordinator must know to take up where another was."""

    samples_at_round: int = 0  # before the round that is under way
    num_rounds: int = 0  # of the job
    round_begun_s: float = 0.0
    begun_s: float | None = None  # when the first client was handed out
    progress: Progress
    board: BoardState
    outcome: FederatedOutcome = msgspec.field(default_factory=FederatedOutcome)
