"""A trained model as a function that scores Arrow batches: for `mapInArrow` and `mapInPandas` on Spark's executors.

The function carries the weights as the bytes of a safetensors file, and the names from which the model is built again.
Executors need Cordée and the modules of the job's model.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from cordee import checkpoint
from cordee.compute import make_loss
from cordee.core import Job
from cordee.core.errors import CheckpointError, DataError, JobError, MissingExtraError, RunDirectoryError
from cordee.core.references import LIVE_PREFIX, name_of
from cordee.data import ArraySource, Splits, load_data
from cordee.data.columns import values_of
from cordee.data.source import check_finite, ready_inputs
from cordee.run import Run
from cordee.training.components import build_model

TABLES = ("parquet", "arrow", "csv")  # sources whose columns are inputs as they are


@dataclass(frozen=True)
class Scorer:
    """Adds what a model predicts to each row. Call it with Arrow batches; `in_pandas` takes pandas' frames.

    Classes are numbers from 0; with `scores` a second column has the output of the model for each class. Rows without a
    value in an input column, and lists of another length than in training, are a DataError that names the column.
    """

    job_text: str  # TOML
    input_shape: tuple[int, ...]
    num_classes: int | None
    weights: bytes  # safetensors
    columns: tuple[str, ...]
    has_tokens: bool = False  # inputs are whole numbers, not numbers to compute with
    output: str = "prediction"
    scores: str = ""  # name of a column with the outputs of the model; empty: there is none
    batch_size: int = 1024

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        pa = _arrow()
        model = _build(self.job_text, self.input_shape, self.num_classes, self.weights)
        for batch in batches:
            outputs = self.compute(model, self.inputs_of(batch))
            columns = [*batch.columns, pa.array(self.predictions(outputs).numpy())]
            names = [*batch.schema.names, self.output]
            if self.scores:
                columns.append(pa.array(list(outputs.float().numpy()), pa.list_(pa.float32())))
                names.append(self.scores)
            yield pa.RecordBatch.from_arrays(columns, names=names)

    def in_pandas(self, frames: Iterator[Any]) -> Iterator[Any]:
        """The same, for `mapInPandas`."""
        pa = _arrow()
        for frame in frames:
            for scored in self(iter([pa.RecordBatch.from_pandas(frame, preserve_index=False)])):
                yield scored.to_pandas()

    def schema(self, given: Any) -> Any:
        """Return the schema of a scored DataFrame, whose rows have the Spark schema `given`."""
        from pyspark.sql import types

        for name in self.columns:
            if name not in given.names:
                raise DataError(f"the DataFrame has no column {name!r}, which the model was trained with")
        for name in filter(None, (self.output, self.scores)):
            if name in given.names:
                raise JobError(f"the DataFrame has a column {name!r} already: choose another name for what is added")
        kind = types.DoubleType() if self.num_classes is None else types.LongType()
        fields = [*given.fields, types.StructField(self.output, kind)]
        if self.scores:
            fields.append(types.StructField(self.scores, types.ArrayType(types.FloatType())))
        return types.StructType(fields)

    def inputs_of(self, batch: Any) -> Tensor:
        """Return the inputs of a batch of rows, as the model takes them."""
        pa = _arrow()
        columns = [batch.column(batch.schema.names.index(name)) for name in self.columns]
        values = [values_of(pa, column, name, "the DataFrame", 0) for column, name in zip(columns, self.columns)]
        # A copy: Arrow's memory is read-only.
        parts = [torch.from_numpy(np.array(part)).reshape(batch.num_rows, -1) for part in values]
        is_bytes = all(part.dtype == torch.uint8 for part in parts)
        wanted = torch.int64 if self.has_tokens else torch.uint8 if is_bytes else torch.float32
        inputs = torch.cat([part.to(wanted) for part in parts], dim=1)
        check_finite(inputs, "the DataFrame")
        if batch.num_rows and inputs[0].numel() != torch.Size(self.input_shape).numel():
            raise DataError(
                f"a row has {inputs[0].numel()} values in {', '.join(self.columns)}, and the model takes "
                f"{' × '.join(map(str, self.input_shape))}"
            )
        ready: Tensor = ready_inputs(inputs.reshape(-1, *self.input_shape))
        return ready

    def compute(self, model: nn.Module, inputs: Tensor) -> Tensor:
        if len(inputs) == 0:
            return torch.zeros(0, self.num_classes or 1)
        with torch.inference_mode():
            return torch.cat([model(part) for part in torch.split(inputs, self.batch_size)])

    def predictions(self, outputs: Tensor) -> Tensor:
        if self.num_classes is None:
            return outputs.reshape(len(outputs), -1)[:, 0].double()
        return outputs.argmax(dim=-1)


def make_scorer(
    run: Run | Path | str, *, columns: Sequence[str] | None = None, output: str = "prediction", scores: str = ""
) -> Scorer:
    """Return the function that scores rows with the trained model of a run.

    `columns` are the inputs, in the order of training; the job's `data.columns` unless given. Raises JobError if the
    columns are not known or the model exists in this process only, CheckpointError if the run has no weights.
    """
    folder = run.directory if isinstance(run, Run) else Path(run)
    if not (folder / "job.toml").is_file():
        raise RunDirectoryError(f"{folder} is not a run directory: it has no job.toml")
    job = Job.load(folder / "job.toml")
    if str(name_of(job.model.use)).startswith(LIVE_PREFIX):
        raise JobError(
            f"the model of {folder} was an object of the program that trained it, and cannot be built on executors: "
            "define it in a module and name it 'module:callable'"
        )
    if job.data.use not in TABLES:
        raise JobError(
            f"the run was trained on {name_of(job.data.use)!r}, which makes inputs ready in its own way: a DataFrame "
            f"can be scored by models of runs on tables ({', '.join(TABLES)})"
        )
    if job.data.args.get("transform") is not None:
        raise JobError("data.transform makes the samples of this job, from rows: a DataFrame cannot be scored with it")
    names = tuple(columns or job.data.args.get("columns") or ())
    if not names:
        raise JobError("which columns are the inputs? The job's data does not say: give columns = [...]")
    splits = load_data(job.data, seed=job.seed, python_path=job.python_path, ignored=_ignored(job))
    loaded = checkpoint.load_newest(folder / "checkpoints")
    if loaded is None:
        raise CheckpointError(f"{folder} has no checkpoint: nothing was trained yet")
    weights = {name: tensor.contiguous().clone() for name, tensor in loaded.state.part("model").tensors.items()}
    example = splits.train.gather(torch.zeros(1, dtype=torch.int64)).inputs
    if not isinstance(example, Tensor):
        raise JobError("the model of this job takes several inputs; the columns of a DataFrame make one: not scored")
    return Scorer(
        job_text=job.to_toml(),
        input_shape=splits.input_shape,
        num_classes=splits.num_classes,
        weights=safetensors.torch.save(weights),
        columns=names,
        has_tokens=example.dtype == torch.int64,
        output=output,
        scores=scores,
    )


def _ignored(job: Job) -> int | None:
    return make_loss(job.loss, job.python_path).ignored


def _build(job_text: str, input_shape: tuple[int, ...], num_classes: int | None, weights: bytes) -> nn.Module:
    return _built(job_text, input_shape, num_classes, _Weights(weights))


class _Weights:
    """Bytes that are compared by their hash: a model is built once in a process, for all batches of all tasks."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._digest = hashlib.sha256(content).digest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Weights) and other._digest == self._digest


@functools.lru_cache(maxsize=2)
def _built(job_text: str, input_shape: tuple[int, ...], num_classes: int | None, weights: _Weights) -> nn.Module:
    import tomllib

    torch.set_num_threads(1)  # tasks share the cores of an executor
    job = Job.from_dict(tomllib.loads(job_text))
    nothing = ArraySource(torch.zeros(0, *input_shape), torch.zeros(0))
    model = build_model(job, Splits(nothing, None, input_shape, num_classes, job.data.use))
    checkpoint.load_model_state(model, safetensors.torch.load(weights.content))
    return model.eval()


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("scoring with Spark", "spark") from None
    return pyarrow
