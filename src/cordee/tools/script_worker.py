"""`cordee run` inside a worker: run the user's script, and say how it failed."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from cordee.communication.exchange import find_lost_peer
from cordee.compute import share_threads
from cordee.tools.script_launcher import CONSEQUENCE


def main(order: dict[str, Any]) -> int:
    """Run the script in a fresh fork of the fork server."""
    script, account = str(order["script"]), Path(order["account"])
    sys.argv = [script, *order["args"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    share_threads(0, int(order["num_local_workers"]))
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - whatever the script raises is reported
        # The launcher prints one account: N of the same failure, or of its consequences, would hide it.
        lost = find_lost_peer(error)
        account.write_text(_traceback(error, script) if lost is None else str(lost))
        return 1 if lost is None else CONSEQUENCE
    return 0


def _traceback(error: Exception, script: str) -> str:
    """Return the traceback as Python would have printed it: from the script on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames or error.__traceback__)))
