"""Measurements against peers: interleaved in one run, compared as ratios of medians."""

from cordee.bench.registry import run_benchmark

__all__ = ["run_benchmark"]
