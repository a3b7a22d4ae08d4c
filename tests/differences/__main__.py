"""`python -m differences --seeds 0..500 --minutes 60`, in the folder `tests`: compare many random jobs."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from differences.campaign import Campaign, report
from differences.generator import PLAIN
from differences.running import Runner, WarmServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m differences", description=__doc__)
    parser.add_argument("--seeds", default="0..100", help="FIRST..LAST, or one seed")
    parser.add_argument("--trial", default="", help="the choices of one trial as JSON, as a report prints them")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so long; 0: when all seeds are done")
    parser.add_argument("--strategies", type=int, default=4, help="strategies for each job")
    parser.add_argument("--only", default="", help="only trials of this strategy")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first difference")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("..")
    deadline_s = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with tempfile.TemporaryDirectory(prefix="differences-") as folder, WarmServer() as server:
        campaign = Campaign(Runner(server, Path(folder)), num_strategies=options.strategies, only=options.only)
        if options.trial:
            return _repeat(campaign, json.loads(options.trial))
        for seed in range(int(first), int(last or first) + 1):
            if time.monotonic() > deadline_s:
                break
            for failure in campaign.run(seed):
                print(report(failure if options.no_shrink else campaign.shrink(failure)), flush=True)
                if not options.keep_going:
                    return 1
            print(f"seed {seed}: {dict(Counter(campaign.verdicts))}", flush=True)
        print(campaign.account(), flush=True)
    return 1 if campaign.verdicts["different"] else 0


def _repeat(campaign: Campaign, choices: dict[str, Any]) -> int:
    """Run one trial again and print what comes out."""
    trial = {**PLAIN, **choices}
    verdict, problems = campaign.judge(trial)
    print("\n".join([verdict, *problems]))
    return int(verdict == "different")


if __name__ == "__main__":
    sys.exit(main())
