"""`hybrid`: a mesh of data parallelism and of ways to split a model."""

from cordee.strategies.hybrid.strategy import HybridSettings, borrowed_keys, make_hybrid

__all__ = ["HybridSettings", "borrowed_keys", "make_hybrid"]
