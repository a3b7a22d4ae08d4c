"""The parameter server on its own: arrays by name on server processes, for any framework."""

from cordee.store.kvstore import KVStore
from cordee.store.pending import Handle
from cordee.store.transfer import Pulled

__all__ = ["Handle", "KVStore", "Pulled"]
