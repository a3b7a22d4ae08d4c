"""DataFrames as training data, and trained models that score DataFrames. Run by `make test-spark`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

PROGRAM = """
import shutil, sys
from pathlib import Path
import numpy as np
import cordee
from pyspark.ml import Pipeline
from pyspark.sql import SparkSession, functions as F
from cordee.spark import ModelTransformer, make_scorer

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
draw = np.random.default_rng(0)
drawn = draw.normal(size=(400, 4))
rows = [(n, [float(v) for v in x], float(x[0] * 2), int(x.sum() > 0)) for n, x in enumerate(drawn)]
frame = spark.createDataFrame(rows, "id long, x array<double>, z double, y long").repartition(3)
job = {
    "model": {"use": "mlp", "hidden": [16]},
    "data": {"columns": ["x", "z"], "label": "y", "test_fraction": 0.2},
    "optimizer": {"use": "adam", "lr": 0.01},
    "training": {"batch_size": 16, "epochs": 8, "threads": 1, "reproducible": True},
    "strategy": {"name": "data_parallel", "workers": 2},
}
run = cordee.train(job, data=frame, engine="spark", run_dir="run", quiet=True)
print("trained", run.status, run.test_accuracy)
print("columns", (Path("run") / "job.toml").read_text().count("run-data"))

# The same rows, read without Spark, by one worker: the same weights.
alone = {**job, "data": {**job["data"], "use": "parquet", "path": "run-data"}, "strategy": {"name": "single"}}
single = cordee.train(alone, run_dir="single", quiet=True)
print("same weights", single.summary.weights_sha256 == run.summary.weights_sha256)

scored = ModelTransformer(run, scores="scores").transform(frame).cache()
print("schema", scored.schema.simpleString())
print("accuracy", scored.filter("prediction = y").count() / scored.count())
import torch
inputs = torch.tensor([[*x, z] for _, x, z, _ in rows], dtype=torch.float32)
with torch.no_grad():
    expected = run.model.eval()(inputs).argmax(1).tolist()
found = {row.id: row.prediction for row in scored.collect()}
print("same predictions", [found[n] for n in range(400)] == expected)
scorer = make_scorer("run")
by_pandas = frame.drop("y").mapInPandas(scorer.in_pandas, scorer.schema(frame.drop("y").schema))
print("pandas", {row.id: row.prediction for row in by_pandas.collect()} == found)
print("pipeline", Pipeline(stages=[ModelTransformer(run)]).fit(frame).transform(frame).count())


def refused(what, call):
    try:
        call()
    except cordee.CordeeError as error:
        print("refused", what, error)
    except Exception as error:
        print("failed", what, str(error))


def with_data(**data):
    return {**job, "data": {**job["data"], **data}}


# With a storage the rows are there, and a run without its directory resumes from them.
Path("storage").mkdir()
stored = {**job, "checkpoint": {"storage": Path("storage").absolute().as_uri()}}
half = {**stored, "stop": {"steps": 20}}
first = cordee.train(half, data=frame, run_dir="stored", quiet=True)
print("in storage", first.status, len(list(Path("storage/stored-data").glob("part-*"))), Path("stored-data").exists())
shutil.rmtree("stored")
whole = cordee.train(stored, data=frame, run_dir="stored", resume=True, quiet=True)
print("resumed", whole.status, whole.summary.weights_sha256 == run.summary.weights_sha256)

refused("label", lambda: cordee.train(with_data(label="yy"), data=frame, run_dir="a", quiet=True))
refused("use", lambda: cordee.train(with_data(use="digits"), data=frame, run_dir="b", quiet=True))
refused("path", lambda: cordee.train(with_data(path="somewhere"), data=frame, run_dir="c", quiet=True))
refused("again", lambda: cordee.train(job, data=frame, run_dir="run", quiet=True))
refused("missing", lambda: ModelTransformer(run).transform(frame.drop("z")))
refused("name", lambda: ModelTransformer(run, output="z").transform(frame))
nulls = frame.withColumn("z", F.when(F.col("id") != 7, F.col("z")))
refused("null", lambda: ModelTransformer(run).transform(nulls).collect())
ragged = frame.withColumn("x", F.slice("x", 1, 3))
refused("length", lambda: ModelTransformer(run).transform(ragged).collect())
digits = {"model": {"use": "mlp", "hidden": [8]}, "data": "digits", "training": {"steps": 2, "threads": 1}}
refused("source", lambda: make_scorer(cordee.train(digits, run_dir="digits", quiet=True), columns=["x"]))
"""

EXPECTED = {
    "label": "no column 'yy'; did you mean 'y'?",
    "use": "data.use = 'digits', and a DataFrame is given",
    "path": "and a DataFrame is given: remove one of them",
    "again": "has the data of another run",
    "missing": "has no column 'z'",
    "name": "has a column 'z' already",
    "null": "has no value (null)",
    "length": "the model takes",
    "source": "which makes inputs ready in its own way",
}


@pytest.mark.timeout(1200)
def test_a_dataframe_is_trained_on_and_scored(tmp_path: Path) -> None:
    """One program, since a session takes its time: train, compare with a run without Spark, score, bad input."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1100, env=environment)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert "trained completed" in output
    assert "same weights True" in output
    assert "prediction:bigint,scores:array<float>" in output
    assert float(output.partition("accuracy ")[2].split()[0]) > 0.85
    assert "same predictions True" in output
    assert "pandas True" in output
    assert "pipeline 400" in output
    assert "in storage stopped 3 False" in output or "in storage completed 3 False" in output, output
    assert "resumed completed True" in output, output
    for what, message in EXPECTED.items():
        lines = output.partition(f"refused {what} ")[2] or output.partition(f"failed {what} ")[2]
        assert message in lines, (what, output)
