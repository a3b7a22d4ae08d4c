"""What the workers of the tests do."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def write_environment(argument: dict[str, Any]) -> int:
    print("to the log")
    print("errors too", file=sys.stderr)
    Path(argument["file"]).write_text(f"{os.environ.get('TEST_MARK')} {os.getppid()}")
    return int(argument.get("code", 0))


def sleep(argument: dict[str, Any]) -> None:
    Path(argument["file"]).write_text("here")
    time.sleep(300)


def sleep_stubbornly(argument: dict[str, Any]) -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(argument)


def spin(argument: dict[str, Any]) -> None:
    Path(argument["file"]).write_text("here")
    while True:
        pass


def raise_error(argument: dict[str, Any]) -> None:
    raise ValueError("on purpose")


def leave(argument: dict[str, Any]) -> None:
    sys.exit(argument["code"])


def end_like_a_program(argument: dict[str, Any]) -> None:
    """Leave the rest of the work to a thread and to an exit function."""
    folder = Path(argument["folder"])

    def finish_later() -> None:
        time.sleep(0.3)
        (folder / "thread").write_text("done")

    threading.Thread(target=finish_later).start()
    atexit.register(lambda: (folder / "exit").write_text("done"))


def draw(argument: dict[str, Any]) -> None:
    import random

    import numpy as np

    Path(argument["file"]).write_text(f"{random.random()} {np.random.rand()}")


def leave_a_child(argument: dict[str, Any]) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
    Path(argument["file"]).write_text(str(pid))
    os._exit(0)
