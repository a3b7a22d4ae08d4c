"""A trained model as a stage of `pyspark.ml`: scores a DataFrame on the executors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cordee.core.errors import MissingExtraError
from cordee.run import Run
from cordee.spark.scoring import make_scorer

try:
    from pyspark.ml import Transformer
except ImportError:
    raise MissingExtraError("cordee.spark", "spark") from None


class ModelTransformer(Transformer):  # type: ignore[misc]
    """Adds the column `output` with what the model of a run predicts, and `scores` with its outputs, where named.

    `ModelTransformer(run).transform(df)`; may be the last stage of a `pyspark.ml.Pipeline`. Lazy, as all
    transformations are: a row that the model does not take is an error of the task that reads the row.
    """

    def __init__(
        self,
        run: Run | Path | str,
        *,
        columns: Sequence[str] | None = None,
        output: str = "prediction",
        scores: str = "",
    ) -> None:
        super().__init__()
        self.scorer = make_scorer(run, columns=columns, output=output, scores=scores)

    def _transform(self, dataset: Any) -> Any:
        return dataset.mapInArrow(self.scorer, self.scorer.schema(dataset.schema))
