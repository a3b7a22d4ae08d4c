"""Who is asked in a round. Pure: a function of the settings, the seed and the round."""

from __future__ import annotations

import numpy as np

from cordee.strategies.federated.keyed import uniforms
from cordee.strategies.federated.settings import FederatedSettings


def draw_clients(settings: FederatedSettings, num_clients: int, key: int, round_number: int) -> list[int]:
    """Return the numbers of the clients that a round asks, in order. With `poisson` there may be none.

    Where ε counts that nobody knows who was asked, the key must be secret.

    Raises JobError for more clients than there are.
    """
    drawn = uniforms(num_clients, key, "sampling", round_number)
    num_asked = settings.num_asked(num_clients)
    if settings.sampling == "poisson":
        assert settings.fraction is not None
        return [int(client) for client in np.flatnonzero(drawn < settings.fraction)]
    if num_asked == num_clients:
        return list(range(num_clients))
    return sorted(int(client) for client in np.argsort(drawn, kind="stable")[:num_asked])
