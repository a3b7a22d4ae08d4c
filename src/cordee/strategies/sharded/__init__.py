"""`sharded`: a share of the data and a slice of each parameter each, gathered on use (FSDP2)."""

from cordee.strategies.sharded.strategy import Sharded, ShardedSettings

__all__ = ["Sharded", "ShardedSettings"]
