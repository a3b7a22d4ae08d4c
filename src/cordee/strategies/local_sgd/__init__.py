"""`local_sgd`: a share of the data and a full copy of the parameters each; workers agree every so many steps."""

from cordee.strategies.local_sgd.settings import LocalSgdSettings
from cordee.strategies.local_sgd.strategy import LocalSgd

__all__ = ["LocalSgd", "LocalSgdSettings"]
