"""A program that stays connected to a cluster, as a notebook does, and trains one job for each line that it reads.

Run as `python driver.py ENGINE CONNECT`. A line is the JSON of the arguments of `cordee.train`; so is the answer, with
the status of the run or why there is none.
"""

from __future__ import annotations

import json
import sys
import traceback


def connect(engine: str, address: str) -> None:
    if engine == "ray":
        import ray

        ray.init(address, log_to_driver=False)
    else:
        from pyspark.sql import SparkSession

        SparkSession.builder.master(address).getOrCreate()


def main() -> None:
    import cordee

    engine, address = sys.argv[1:]
    connect(engine, address)
    for line in sys.stdin:
        try:
            answer = cordee.train(**json.loads(line), quiet=True).status
        except BaseException:  # noqa: BLE001 - the test says what it was, and the next test may do better
            answer = traceback.format_exc()
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
