"""Keys of a run: who may connect to its servers, and how a member knows that it speaks to them.

A run has one pair of keys for its servers and one for its members, made when it starts. Members get theirs as
text in the environment or as a file that only its owner can read; a command line is no place for them, for
everybody on the host can read it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import zmq
from zmq.utils import z85

from cordee.core.errors import CommunicationError

_KEY_BYTES = 32
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, repr=False)
class Keys(ABC):
    """What both kinds of keys can do: become text and a file, and come back."""

    kind: ClassVar[str]

    def __repr__(self) -> str:  # logs and tracebacks must not show secrets
        return f"<{type(self).__name__}>"

    @abstractmethod
    def parts(self) -> list[bytes]:
        """Return the keys, of 32 bytes each, in the order `from_parts` takes them."""

    @classmethod
    @abstractmethod
    def from_parts(cls, parts: list[bytes]) -> Self:
        """Read what `parts` returned. Raises ValueError if their number is wrong."""

    def to_text(self) -> str:
        """Return one line of letters, digits, '-', '_', '=' and ':', fit for an environment variable."""
        return f"cordee-{self.kind}:{base64.urlsafe_b64encode(b''.join(self.parts())).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote. The error does not repeat the text, which may be most of a secret."""
        kind, _, encoded = text.strip().partition(":")
        if kind != f"cordee-{cls.kind}":
            raise CommunicationError(f"this is no text of {cls.kind} keys: it must begin with 'cordee-{cls.kind}:'")
        try:
            joined = base64.b64decode(encoded, altchars=b"-_", validate=True)
            if not joined or len(joined) % _KEY_BYTES:
                raise ValueError
            return cls.from_parts([joined[at : at + _KEY_BYTES] for at in range(0, len(joined), _KEY_BYTES)])
        except (binascii.Error, ValueError):
            raise CommunicationError(f"the text of the {cls.kind} keys is damaged: it was cut or changed") from None

    def save(self, path: Path) -> None:
        """Write a file that only its owner can read. It appears whole or not at all, and replaces an older one."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.to_text() + "\n")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise CommunicationError(f"the keys could not be written to {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Refuses a file that is not the user's own or that others can read."""
        return cls.from_text(read_private(path, "keys"))


@dataclass(frozen=True, kw_only=True, repr=False)
class ClientKeys(Keys):
    """What a member needs to connect to the servers of its run."""

    kind: ClassVar[str] = "client"

    server_public: bytes
    public: bytes
    secret: bytes

    def parts(self) -> list[bytes]:
        return [self.server_public, self.public, self.secret]

    @classmethod
    def from_parts(cls, parts: list[bytes]) -> Self:
        server_public, public, secret = parts
        return cls(server_public=server_public, public=public, secret=secret)

    @classmethod
    def new(cls, server_public: bytes) -> Self:
        """Return a new pair, for a server that has this public key."""
        public, secret = _make_pair()
        return cls(server_public=server_public, public=public, secret=secret)


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerKeys(Keys):
    """What a server of the run needs: its own pair, and the public keys of those it lets in."""

    kind: ClassVar[str] = "server"

    public: bytes
    secret: bytes
    admitted: tuple[bytes, ...]

    def parts(self) -> list[bytes]:
        return [self.public, self.secret, *self.admitted]

    @classmethod
    def from_parts(cls, parts: list[bytes]) -> Self:
        public, secret, *admitted = parts
        return cls(public=public, secret=secret, admitted=tuple(admitted))


def read_private(path: Path, what: str) -> str:
    """Return the text of a file of secrets. Refuses a file that is not the user's own or that others can read.

    `what` is in it, in the plural, for the error.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_private(path, os.fstat(descriptor), what)
            return os.read(descriptor, _MAX_FILE_BYTES).decode()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CommunicationError(f"the {what} could not be read from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommunicationError(f"{path} holds no {what}: {error.reason}") from error


def derive_keys(secret: str, purpose: str, num_clients: int) -> tuple[ServerKeys, tuple[ClientKeys, ...]]:
    """Return the keys that everybody who has the secret derives for this purpose: the server's, and each client's own.

    HKDF-SHA256 (RFC 5869). Another purpose has other keys, and none of them tells anything of the secret.
    """
    pseudorandom = hmac.digest(b"cordee keys of a shared secret, 1", secret.encode(), "sha256")

    def derive_pair(role: str) -> tuple[bytes, bytes]:
        private = hmac.digest(pseudorandom, f"{role} {purpose}".encode() + b"\x01", "sha256")
        return z85.decode(zmq.curve_public(z85.encode(private))), private

    public, private = derive_pair("server")
    pairs = [derive_pair(f"client {number}") for number in range(num_clients)]
    clients = tuple(ClientKeys(server_public=public, public=pair[0], secret=pair[1]) for pair in pairs)
    return ServerKeys(public=public, secret=private, admitted=tuple(pair[0] for pair in pairs)), clients


def make_keys(num_clients: int = 1) -> tuple[ServerKeys, tuple[ClientKeys, ...]]:
    """Return new keys for the servers of a run and for its members: one pair for all of them, or one each."""
    public, secret = _make_pair()
    clients = []
    for _ in range(num_clients):
        clients.append(ClientKeys.new(public))
    server = ServerKeys(public=public, secret=secret, admitted=tuple(client.public for client in clients))
    return server, tuple(clients)


def _make_pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def _check_private(path: Path, status: os.stat_result, what: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CommunicationError(f"{path} holds no {what}: it is not a file")
    if status.st_uid not in (os.geteuid(), 0):
        raise CommunicationError(f"the {what} in {path} belong to user {status.st_uid}: they must be one's own")
    if status.st_mode & 0o077:
        raise CommunicationError(
            f"the {what} in {path} can be read or changed by others (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"chmod 600 {path}, and start the run again if others may have done so"
        )
