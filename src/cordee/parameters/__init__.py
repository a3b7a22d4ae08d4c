"""The parameter server on its own: arrays by name on server processes, for any framework."""

from cordee.parameters.kvstore import KVStore
from cordee.parameters.pending import Handle
from cordee.parameters.transfer import Pulled

__all__ = ["Handle", "KVStore", "Pulled"]
