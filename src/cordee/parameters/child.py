"""The main function of a server that `KVStore.local` starts."""

from __future__ import annotations

import os
import select
import signal
import sys

import msgspec

from cordee.core.errors import CordeeError
from cordee.parameters.keys import StoreKey
from cordee.parameters.local import ChildSpec
from cordee.parameters.membership import Link
from cordee.parameters.process import ServerSettings, serve_member, serve_root


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    sys.path.extend(path for path in spec.python_path if path not in sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business

    def answer(**fields: str) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(fields) + b"\n")
        sys.stdout.buffer.flush()

    def is_told_to_end() -> bool:
        # A fork of the parent may hold the other end of the pipe open after the parent's death.
        return os.getppid() != spec.parent or bool(select.select([sys.stdin], [], [], 0)[0])

    settings = ServerSettings(
        num_servers=spec.num_servers,
        replicas=spec.replicas,
        updaters=spec.updaters,
        failure_timeout_s=spec.failure_timeout_s,
        key=StoreKey.from_text(spec.key),
    )
    try:
        if spec.root:
            link = Link(spec.root, spec.key, None, spec.failure_timeout_s)
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
