"""What a server of federated learning has, and how a round changes it. Without I/O: simulation and deployment share it.

The server is the parameters that clients share, with their buffers, its optimizer, and what the algorithm keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cordee.checkpoint import State
from cordee.core.errors import CheckpointError
from cordee.strategies.federated.aggregation import Contribution
from cordee.strategies.federated.algorithms import Algorithm, RoundSum, Vectors
from cordee.strategies.federated.client import Sent
from cordee.strategies.federated.privacy import accounted, add_noise
from cordee.strategies.federated.settings import FederatedSettings
from cordee.strategies.outer import OuterStep

_SHARED = "shared"  # name of the one vector that the outer step knows


@dataclass(frozen=True)
class RoundOutcome:
    """What a round did to the parameters."""

    step_norm: float  # of the change of the parameters
    num_clients: int  # that took part


class FederatedServer:
    """The state of a server, changed by `finish_round` alone. The same rounds give the same bits anywhere."""

    def __init__(
        self,
        settings: FederatedSettings,
        algorithm: Algorithm,
        start: Tensor,
        buffers: Tensor,
        *,
        num_clients: int,
        noise_key: int,
        python_path: Sequence[str] = (),
    ) -> None:
        """Begin with a copy of the parameters. Central noise follows from `noise_key`: secret between sites."""
        self._settings = settings
        self._parts = settings.parts
        self._algorithm = algorithm
        self._outer = OuterStep({_SHARED: start}, algorithm.outer or None, python_path=python_path)
        self._own: Vectors = algorithm.begin_server(start)
        self._buffers = buffers.clone()
        self._num_clients = num_clients
        self._noise_key = noise_key
        self.num_rounds = 0  # that are finished

    @property
    def parameters(self) -> Tensor:
        """The parameters that clients share; changed in place by `finish_round`."""
        return self._outer.start[_SHARED]

    @property
    def buffers(self) -> Tensor:
        return self._buffers

    @property
    def own(self) -> Vectors:
        """What the algorithm keeps on the server."""
        return self._own

    def sent(self) -> Sent:
        """Return what clients are sent now; it shares memory with the server."""
        own = self._own if self._algorithm.sends_own else {}
        return Sent(self.num_rounds, self.parameters, self._buffers, own)

    def finish_round(self, total: Contribution | None, robust: Tensor | None = None) -> RoundOutcome:
        """Take the sum of a round, or what a robust rule made of it instead of its mean difference.

        None: nobody took part, and nothing changes; with privacy the noise is added all the same.
        """
        before = self.parameters.clone()
        privacy = self._parts.privacy
        if total is None and privacy is not None:
            zero = torch.zeros_like(before, dtype=torch.float64)
            total = Contribution(zero, torch.zeros_like(self._buffers), {}, 0.0, 0.0, 0, 0)
        if total is not None:
            mean, self._own = self._combine(total, robust)
            self._outer.step({_SHARED: mean.to(before.dtype)})
            if total.num_samples and privacy is None:
                self._buffers = total.buffers / total.num_samples
        self.num_rounds += 1
        norm = float(torch.linalg.vector_norm(self.parameters - before, dtype=torch.float64))
        return RoundOutcome(norm, total.num_clients if total is not None else 0)

    def _combine(self, total: Contribution, robust: Tensor | None) -> tuple[Tensor, Vectors]:
        privacy, whole = self._parts.privacy, total.total(self._num_clients)
        if robust is not None:
            return robust, self._own
        if privacy is not None:
            # The divisor says nothing about who took part: all clients weigh 1, and so many are expected.
            expected = float(self._settings.num_asked(self._num_clients))
            if self._settings.fraction is not None and self._settings.sampling == "poisson":
                expected = self._settings.fraction * self._num_clients
            whole = RoundSum(
                whole.difference, whole.summed, expected, whole.weighted_scale, whole.num_clients, self._num_clients
            )
            if privacy.where == "central":
                deviation = privacy.clip_norm * privacy.noise
                add_noise(whole.difference, deviation, self._noise_key, "privacy", self.num_rounds)
        return self._algorithm.combine(whole, self._own)

    def state_dict(self) -> State:
        """Return all that the server continues from but the parameters and buffers; it shares memory."""
        tensors = {f"own.{name}": vector for name, vector in self._own.items()}
        outer = self._outer.state_dict()
        tensors |= {f"outer.{name}": tensor for name, tensor in outer.tensors.items()}
        spent_by = accounted(self._settings, self._num_clients)
        return State(tensors, {"rounds": self.num_rounds, "outer": outer.values, "accounted": spent_by})

    @torch.no_grad()
    def load_state_dict(self, state: State, parameters: Tensor, buffers: Tensor) -> None:
        """Continue from a state and the parameters that belong to it. Raises CheckpointError if it does not fit."""
        own = state.part("own").tensors
        if own.keys() != self._own.keys():
            raise CheckpointError(
                f"the checkpoint has {sorted(own) or 'nothing'} of another algorithm, and strategy.algorithm = "
                f"{self._settings.algorithm!r} keeps {sorted(self._own) or 'nothing'}: set it as it was"
            )
        was, now = state.values.get("accounted"), accounted(self._settings, self._num_clients)
        if was != now and int(state.values["rounds"]):
            raise CheckpointError(
                f"the rounds of the checkpoint were made with {_words(was)}, and the job has {_words(now)}: ε of all "
                "rounds would be wrong. Continue with the settings that the run had, or start a new run"
            )
        self._own = {name: vector.clone() for name, vector in own.items()}
        self._outer.set_start({_SHARED: parameters})
        self._outer.load_state_dict(state.part("outer"))
        self._buffers = buffers.clone()
        self.num_rounds = int(state.values["rounds"])


def _words(spent_by: list[Any] | None) -> str:
    if spent_by is None:
        return "no strategy.privacy"
    noise, where, sampling, share, num_clients = spent_by
    return f"noise = {noise} (where = '{where}'), sampling = '{sampling}' of {share} of {num_clients} clients"
