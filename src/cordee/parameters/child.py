"""The main function of a server that `KVStore.local` starts."""

from __future__ import annotations

import os
import select
import signal
import sys

import msgspec

from cordee.core.errors import CordeeError
from cordee.parameters.keys import StoreKey
from cordee.parameters.local import ChildOrder
from cordee.parameters.membership import Link
from cordee.parameters.process import ServerSettings, serve_member, serve_root


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildOrder)
    sys.path.extend(path for path in order.python_path if path not in sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business

    def answer(**fields: str) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
        sys.stdout.buffer.flush()

    def is_told_to_end() -> bool:
        # A fork of the parent may hold the other end of the pipe open after the parent's death.
        return os.getppid() != order.parent or bool(select.select([sys.stdin], [], [], 0)[0])

    settings = ServerSettings(
        num_servers=order.num_servers,
        replicas=order.replicas,
        updaters=order.updaters,
        failure_timeout_s=order.failure_timeout_s,
        key=StoreKey.from_text(order.key),
    )
    try:
        if order.root:
            link = Link(order.root, order.key, None, order.failure_timeout_s)
            serve_member(
                settings, link, say=_say, is_told_to_end=is_told_to_end, ready=lambda address: answer(address=address)
            )
        else:
            serve_root(settings, say=_say, is_told_to_end=is_told_to_end, ready=lambda address: answer(address=address))
    except CordeeError as error:
        answer(error=str(error))
        return 1
    return 0


def _say(line: str) -> None:
    """Nobody asked for news of these servers: their client says what concerns its user."""


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # all is closed; taking torch down would take half a second more
