"""A job as values, with live objects as its parts: prints what came out as JSON."""

from __future__ import annotations

import json
import sys

import parts

import cordee


def main() -> None:
    job = cordee.Job(
        name="from-python",
        seed=3,
        model=parts.BatchNormNet,
        data=parts.images(100, 8),
        optimizer=cordee.Use("sgd", lr=0.05),
        training=cordee.Training(batch_size=16, epochs=3, threads=1, device="cpu", shards=4, reproducible=True),
        stop=cordee.Stop(accuracy=0.99, steps=10),
    )
    run = cordee.train(job, run_dir=sys.argv[1], quiet=True, overrides=["evaluation.every_steps=4"])
    found = {"status": run.status, "accuracy": run.test_accuracy, "stopped_by": run.summary.stopped_by}
    kinds = sorted({event["type"] for event in run.events()})
    print(json.dumps({**found, "events": kinds, "model": type(run.model).__name__}))


if __name__ == "__main__":
    main()
