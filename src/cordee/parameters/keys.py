"""The key of a store: one secret from which its servers and its clients each derive their pair.

Whoever has it may do everything with the store. It reaches processes through the environment or a file that only its
owner can read.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import zmq
from zmq.utils import z85

from cordee.communication.keys import ClientKeys, Keys, ServerKeys
from cordee.core.env import cache_folder
from cordee.core.errors import CommunicationError, StoreError

KEY_VARIABLE = "CORDEE_STORE_KEY"
KEY_FILE_VARIABLE = "CORDEE_STORE_KEY_FILE"


@dataclass(frozen=True, kw_only=True, repr=False)
class StoreKey(Keys):
    """The secret of one store."""

    kind: ClassVar[str] = "store"

    secret: bytes

    def parts(self) -> list[bytes]:
        return [self.secret]

    @classmethod
    def from_parts(cls, parts: list[bytes]) -> Self:
        (secret,) = parts
        return cls(secret=secret)

    @classmethod
    def make(cls) -> Self:
        return cls(secret=secrets.token_bytes(32))

    @property
    def run(self) -> str:
        """The name of the store on the wire: two stores that meet by mistake tell each other apart by it."""
        return f"store-{self._derive('name').hex()[:16]}"

    def server_keys(self) -> ServerKeys:
        public, secret = self._pair("server")
        return ServerKeys(public=public, secret=secret, admitted=(self._pair("client")[0],))

    def client_keys(self) -> ClientKeys:
        public, secret = self._pair("client")
        return ClientKeys(server_public=self._pair("server")[0], public=public, secret=secret)

    def _pair(self, purpose: str) -> tuple[bytes, bytes]:
        secret = self._derive(purpose)
        return z85.decode(zmq.curve_public(z85.encode(secret))), secret

    def _derive(self, purpose: str) -> bytes:
        return hashlib.sha256(b"cordee store " + purpose.encode() + b":" + self.secret).digest()


def default_key_file(port: int) -> Path:
    """Return where a store that listens at this port leaves its key unless told otherwise."""
    return cache_folder() / f"store-{port}.key"


def save_key(key: StoreKey, path: Path) -> None:
    """Write the key for processes of the same user."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the key could not be written to {path}: {error.strerror}") from error
    key.save(path)


def find_key(address: str, text: str, path: Path | None) -> StoreKey:
    """Return the key of the store at an address, from the text given, else from the file.

    Raises StoreError that says where it was looked for.
    """
    if text:
        try:
            return StoreKey.from_text(text)
        except CommunicationError as error:
            raise StoreError(f"{KEY_VARIABLE} is not the key of a store: {error}") from error
    port = address.rpartition(":")[2]
    place = path or default_key_file(int(port) if port.isdecimal() else 0)
    if not place.exists():
        raise StoreError(
            f"no key for the store at {address}: there is no file {place}. Copy it from the server's host, "
            f"which says at its start where it is, and name it by --key-file or {KEY_FILE_VARIABLE}; or put its "
            f"text into {KEY_VARIABLE}"
        )
    try:
        return StoreKey.load(place)
    except CommunicationError as error:
        raise StoreError(f"no key for the store at {address}: {error}") from error
