"""`pipeline`: micro-batches in turn through workers that have a run of layers each."""

from cordee.strategies.pipeline.strategy import Pipeline, PipelineSettings

__all__ = ["Pipeline", "PipelineSettings"]
