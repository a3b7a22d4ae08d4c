"""Measurements against peers: interleaved in one run, compared as ratios of medians."""

from cordee.bench.registry import BENCHMARKS, run_benchmark

__all__ = ["BENCHMARKS", "run_benchmark"]
