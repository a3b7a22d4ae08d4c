"""Differential privacy: clipping, noise, and the accountant that says what was spent.

The unit of privacy is a client: ε bounds what the parameters of all rounds say about whether a client took part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cordee.core.errors import MissingExtraError
from cordee.strategies.federated.keyed import normals
from cordee.strategies.federated.settings import FederatedSettings, PrivacySettings


def clip(vector: Tensor, most_norm: float) -> float:
    """Scale a vector in place so that its norm is at most `most_norm`; return the norm as it was."""
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if norm > most_norm:
        vector.mul_(most_norm / norm)
    return norm


def add_noise(vector: Tensor, deviation: float, key: int, *place: int | str) -> None:
    """Add normal noise in place. Who knows the key can take it off again: between real sites it must be secret."""
    noise = torch.from_numpy(normals(vector.numel(), key, *place)).view(vector.shape)
    vector.add_(noise.to(vector.dtype), alpha=deviation)


def accounted(settings: FederatedSettings, num_clients: int) -> list[Any] | None:
    """Return all that ε of a round depends on, for a checkpoint; None without privacy."""
    if (privacy := settings.parts.privacy) is None:
        return None
    share = settings.fraction if settings.sampling == "poisson" else settings.num_asked(num_clients)
    return [privacy.noise, privacy.where, settings.sampling, share, num_clients]


class Accountant:
    """What so many rounds have cost, by the library `dp-accounting`. Pure: a function of the settings and a count.

    With `poisson` sampling every round is a Poisson-sampled Gaussian mechanism, with neighbours that differ by one
    client more or less. With `fixed` sampling a round draws without replacement: neighbours differ by one client being
    another, the sum may differ by twice the norm, and only RDP knows the amplification; PLD then counts none. Where
    all clients take part, or each adds the noise itself, there is no amplification.
    """

    def __init__(self, settings: FederatedSettings, privacy: PrivacySettings, num_clients: int) -> None:
        """Raises MissingExtraError where `dp-accounting` is not installed."""
        try:
            import dp_accounting
        except ImportError:
            raise MissingExtraError("strategy.privacy", "federated") from None
        self._library: Any = dp_accounting
        self._privacy = privacy
        self._event = self._round_event(settings, num_clients)
        self._replaces_one = isinstance(self._event, dp_accounting.SampledWithoutReplacementDpEvent)
        self._known: dict[int, float] = {0: 0.0}

    def epsilon(self, num_rounds: int) -> float:
        """Return ε at the job's delta after so many rounds."""
        if num_rounds not in self._known:
            library = self._library
            relation = library.NeighboringRelation
            if self._privacy.accountant == "pld":
                accountant = library.pld.PLDAccountant()
            elif self._replaces_one:
                accountant = library.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
            else:
                accountant = library.rdp.RdpAccountant()
            accountant.compose(self._event, num_rounds)
            self._known[num_rounds] = float(accountant.get_epsilon(self._privacy.delta))
        return self._known[num_rounds]

    def allows(self, num_rounds: int) -> bool:
        """Whether so many rounds stay within `max_epsilon`."""
        limit = self._privacy.max_epsilon
        return not limit or self.epsilon(num_rounds) <= limit

    def _round_event(self, settings: FederatedSettings, num_clients: int) -> Any:
        library, privacy = self._library, self._privacy
        gaussian = library.GaussianDpEvent(privacy.noise)
        if privacy.where == "local":
            # What a client sends could be that of any other: two clipped vectors are up to 2 · clip_norm apart.
            return library.GaussianDpEvent(privacy.noise / 2)
        if settings.sampling == "poisson":
            assert settings.fraction is not None
            return library.PoissonSampledDpEvent(settings.fraction, gaussian)
        num_asked = settings.num_asked(num_clients)
        if num_asked == num_clients:
            return gaussian
        replaced = library.GaussianDpEvent(privacy.noise / 2)
        if privacy.accountant == "rdp":
            return library.SampledWithoutReplacementDpEvent(num_clients, num_asked, replaced)
        return replaced
