"""Who is asked in a round. Pure: a function of the settings, the seed and the round."""

from __future__ import annotations

import torch

from cordee.core.seeds import derive_seed
from cordee.strategies.federated.settings import FederatedSettings


def draw_clients(settings: FederatedSettings, num_clients: int, seed: int, round_number: int) -> list[int]:
    """Return the numbers of the clients that a round asks, in order. With `poisson` there may be none.

    Raises JobError for more clients than there are.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "sampling", round_number))
    num_asked = settings.num_asked(num_clients)
    if settings.sampling == "poisson":
        assert settings.fraction is not None
        drawn = torch.rand(num_clients, generator=generator, dtype=torch.float64) < settings.fraction
        return [int(client) for client in drawn.nonzero()[:, 0]]
    if num_asked == num_clients:
        return list(range(num_clients))
    return sorted(torch.randperm(num_clients, generator=generator)[:num_asked].tolist())
