"""The cryptography of secure aggregation: keys, masks, shares of secrets, and their encryption.

Every primitive comes from `cryptography` (X25519, HKDF-SHA256, AES-CTR, AES-GCM) or `pycryptodome` (Shamir's sharing in
GF(2^128)), and every random byte from the operating system. All keys are made for one attempt of one round.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cordee.core.errors import CommunicationError, MissingExtraError

SECRET_BYTES = 16  # of what is shared: an element of GF(2^128); keys of 32 bytes are derived from such a secret
KEY_BYTES = 32
_DIGEST_BYTES = 32
_SHARE = struct.Struct(f"<H{SECRET_BYTES}s{SECRET_BYTES}s{_DIGEST_BYTES}s")
_ZEROS = bytes(1 << 16)

Words: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # uint32 or uint64; sums wrap, which is arithmetic modulo 2^k


class SecureAggregationError(CommunicationError):
    """A step of secure aggregation that would give a wrong sum, or tell more than the sum."""


class PublicKeys(NamedTuple):
    """What a client shows of its keys of one attempt."""

    encryption: bytes  # others encrypt shares to its owner
    masking: bytes  # two of them make the mask of a pair


class PairShare(NamedTuple):
    """What one client holds of another client's two secrets."""

    number: int  # of the share, from 1
    mask_secret: bytes  # share of the secret that the private masking key is derived from
    self_seed: bytes  # share of the seed of the client's own mask


class PrivateKeys:
    """The secrets of one client for one attempt."""

    def __init__(self) -> None:
        self.mask_secret = secrets.token_bytes(SECRET_BYTES)
        self.self_seed = secrets.token_bytes(SECRET_BYTES)
        self._encryption = X25519PrivateKey.generate()

    def __repr__(self) -> str:  # logs and tracebacks must not show secrets
        return "<PrivateKeys>"

    def public(self) -> PublicKeys:
        return PublicKeys(self._encryption.public_key().public_bytes_raw(), masking_public(self.mask_secret))

    def seal(self, context: str, sender: str, receiver: str, theirs: PublicKeys, plain: bytes) -> bytes:
        """Encrypt from `sender`, whose keys these are, to `receiver`."""
        key = self._channel_key(context, sender, receiver, theirs)
        return AESGCM(key).encrypt(bytes(12), plain, None)  # each key encrypts one message

    def open(self, context: str, sender: str, receiver: str, theirs: PublicKeys, sealed: bytes) -> bytes:
        """Decrypt what `sender` sealed. Raises SecureAggregationError if it was changed, or is for another attempt."""
        key = self._channel_key(context, sender, receiver, theirs)
        try:
            return AESGCM(key).decrypt(bytes(12), sealed, None)
        except (InvalidTag, ValueError):
            raise SecureAggregationError(f"the shares that {sender} sent to {receiver} cannot be decrypted") from None

    def _channel_key(self, context: str, sender: str, receiver: str, theirs: PublicKeys) -> bytes:
        agreed = exchange(self._encryption, theirs.encryption)
        return derive(agreed, "shares", context, sender, receiver)


def derive(secret: bytes, purpose: str, *context: str) -> bytes:
    """Return a key of 32 bytes. Other words give another key."""
    info = b"".join(struct.pack("<I", len(word := text.encode())) + word for text in (purpose, *context))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"cordee secure aggregation" + info).derive(secret)


def exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return what both ends of a pair compute. Raises SecureAggregationError for a key that is none."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureAggregationError("a public key of secure aggregation is not a point of X25519") from None


def masking_private(mask_secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(mask_secret, "masking key"))


def masking_public(mask_secret: bytes) -> bytes:
    return masking_private(mask_secret).public_key().public_bytes_raw()


def commit(context: str, owner: str, self_seed: bytes) -> bytes:
    """Return what a reconstructed seed is compared with. The seed has 128 random bits: its hash tells nothing of it."""
    return derive(self_seed, "commitment", context, owner)


def is_equal(left: bytes, right: bytes) -> bool:
    return hmac.compare_digest(left, right)


# Masks: a key stream, added to the words of an update.


def add_mask(words: Words, key: bytes, sign: int) -> None:
    """Add the key stream of `key` to `words`, or subtract it, modulo 2^32 or 2^64. The key is used for nothing else."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    per_chunk = len(_ZEROS) // words.itemsize
    for start in range(0, len(words), per_chunk):
        part = words[start : start + per_chunk]
        stream = np.frombuffer(encryptor.update(_ZEROS[: part.nbytes]), part.dtype.newbyteorder("<"))
        if sign > 0:
            np.add(part, stream, out=part)
        else:
            np.subtract(part, stream, out=part)


def pair_key(private: X25519PrivateKey, public: bytes, context: str, left: str, right: str) -> bytes:
    """Return the key of the mask that two clients share; `left` < `right`. `left` adds the mask, `right` subtracts."""
    assert left < right, (left, right)
    return derive(exchange(private, public), "pair mask", context, left, right)


def self_key(self_seed: bytes, context: str, owner: str) -> bytes:
    return derive(self_seed, "self mask", context, owner)


# Shares.


def split_secrets(keys: PrivateKeys, threshold: int, num_shares: int) -> list[PairShare]:
    """Return `num_shares` shares of both secrets; any `threshold` of them tell the secrets, fewer nothing."""
    shamir = _shamir()
    masks = shamir.split(threshold, num_shares, keys.mask_secret)
    seeds = shamir.split(threshold, num_shares, keys.self_seed)
    return [PairShare(index, mask, seed) for (index, mask), (_, seed) in zip(masks, seeds, strict=True)]


def join_shares(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the secret of which these are `threshold` shares. With a share that is wrong, another value."""
    return bytes(_shamir().combine(list(shares)))


def pack_share(share: PairShare, directory_digest: bytes) -> bytes:
    return _SHARE.pack(share.number, share.mask_secret, share.self_seed, directory_digest)


def unpack_share(plain: bytes) -> tuple[PairShare, bytes]:
    """Return a share, and the digest of the directory that its sender has seen."""
    if len(plain) != _SHARE.size:
        raise SecureAggregationError(f"shares of {len(plain)} bytes: they have {_SHARE.size}")
    index, mask_secret, self_seed, digest = _SHARE.unpack(plain)
    return PairShare(index, mask_secret, self_seed), digest


def digest_directory(context: str, directory: Mapping[str, PublicKeys]) -> bytes:
    """Return a hash of who takes part with which keys."""
    digest = hashlib.sha256()
    for text in (context.encode(), *(part for name in sorted(directory) for part in (name.encode(), *directory[name]))):
        digest.update(struct.pack("<I", len(text)) + text)
    return digest.digest()


def _shamir() -> Any:
    try:
        from Crypto.Protocol.SecretSharing import Shamir
    except ImportError:
        raise MissingExtraError("secure aggregation", "federated") from None
    return Shamir
