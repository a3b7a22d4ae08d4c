"""`federated`: data that is private to each client, a copy of the parameters for a round, agreement every round."""

from cordee.strategies.federated.settings import FederatedSettings
from cordee.strategies.federated.strategy import Federated, settings_of

__all__ = ["Federated", "FederatedSettings", "settings_of"]
