"""FedAvg with clients that send the opposite of what they learnt, ten times as large: for `federated_quality.py`."""

from dataclasses import replace

from cordee.strategies.federated.algorithms import Algorithm, Finished, LocalTraining
from cordee.strategies.federated.algorithms.fedavg import fedavg


def sign_flipping(wrong: int = 2, factor: float = 10.0) -> Algorithm:
    """The first `wrong` clients are wrong in every round."""

    def finish(local: LocalTraining) -> Finished:
        difference = local.here - local.start
        return Finished(difference * (-factor if int(local.client) < wrong else 1.0), {}, {})

    return replace(fedavg(), finish=finish)
