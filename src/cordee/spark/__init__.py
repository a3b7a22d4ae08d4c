"""What Spark's users get back: a trained model that scores DataFrames on the executors."""

from cordee.spark.scoring import Scorer, make_scorer
from cordee.spark.transformer import ModelTransformer

__all__ = ["ModelTransformer", "Scorer", "make_scorer"]
