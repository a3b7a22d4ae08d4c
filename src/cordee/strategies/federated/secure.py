"""Secure aggregation: the server learns the sum of the clients' updates, and no single update.

The protocol of Bonawitz et al. (2017), as two state machines: messages in, messages out, no sockets and no clock.

    stage     a client sends                              the server answers, when enough have come
    keys      two public keys                             the keys of all
    shares    for each other client an encrypted share    the shares that are for the client
              of its two secrets, and a commitment
    masked    its update, plus its own mask, plus or      who has sent an update
              minus one mask for each other client
    revealed  for each client that sent an update a       –
              share of its own mask's seed; for each
              client that was lost a share of the
              secret of its pair masks

The sum of all updates has the pair masks cancelled. The server takes away the own masks of those whose updates came,
and the pair masks of those who were lost. It needs `threshold` clients at every stage, else the attempt is over.

A server that had both kinds of shares of one client could read its update. A client reveals at most one kind for each
other client, once, and the threshold is more than half of the clients: a server that tells clients different things
cannot collect enough of both kinds either. What the server reconstructs is compared with public keys and commitments,
so a share that is wrong ends the attempt instead of making the sum wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from cordee.strategies.federated.masking import (
    KEY_BYTES,
    SECRET_BYTES,
    PairShare,
    PrivateKeys,
    PublicKeys,
    SecureAggregationError,
    Words,
    add_mask,
    commit,
    digest_directory,
    is_equal,
    join_shares,
    masking_private,
    masking_public,
    pack_share,
    pair_key,
    self_key,
    split_secrets,
    unpack_share,
)

Stage: TypeAlias = Literal["keys", "shares", "masked", "revealed", "done"]
NEXT_STAGE: dict[Stage, Stage] = {"keys": "shares", "shares": "masked", "masked": "revealed", "revealed": "done"}
LEAST_THRESHOLD = 2


class SecureRound(msgspec.Struct, frozen=True, kw_only=True):
    """What all clients of one attempt agree on."""

    context: str  # run, round and attempt: part of every key
    threshold: int  # clients that must be there at every stage
    num_words: int  # of an update
    word_bits: Literal[32, 64] = 32

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"uint{self.word_bits}")


class SharesMessage(NamedTuple):
    """What a client sends at the stage 'shares'."""

    sealed: dict[str, bytes]  # by receiver
    commitment: bytes  # to the seed of the client's own mask


class Revealed(NamedTuple):
    """What a client sends at the stage 'revealed': one kind of share for each client, by its name."""

    number: int  # of the sender's shares, from 1
    self_seeds: dict[str, bytes]  # of clients whose updates came
    mask_secrets: dict[str, bytes]  # of clients that were lost


def least_threshold(num_clients: int) -> int:
    """Return the smallest threshold that is safe among so many clients: more than half."""
    return max(LEAST_THRESHOLD, num_clients // 2 + 1)


def check_threshold(threshold: int, num_clients: int) -> None:
    """Raise SecureAggregationError unless a sum of so many clients can be made, and made safely."""
    least = least_threshold(num_clients)
    if threshold < least:
        raise SecureAggregationError(
            f"a threshold of {threshold} among {num_clients} clients is not safe: the server could collect both kinds "
            f"of shares of a client. It must be at least {least}"
        )
    if threshold > num_clients:
        raise SecureAggregationError(f"{num_clients} clients take part, fewer than the threshold of {threshold}")


class SecureClient:
    """One client in one attempt. Each answer is given once; the same request again gets the same answer."""

    def __init__(self, name: str, agreed: SecureRound) -> None:
        self._name, self._agreed = name, agreed
        self._keys = PrivateKeys()
        self._directory: dict[str, PublicKeys] = {}
        self._digest = b""
        self._own_shares: dict[str, PairShare] = {}
        self._shares: SharesMessage | None = None
        self._sealed: dict[str, bytes] = {}  # what came for this client, by sender
        self._held: dict[str, PairShare] = {}  # this client's shares of the others' secrets, and of its own
        self._masked: Words | None = None
        self._survivors: frozenset[str] | None = None
        self._revealed: Revealed | None = None

    def advertise(self) -> PublicKeys:
        """Return the public keys of this attempt."""
        return self._keys.public()

    def share(self, directory: Mapping[str, PublicKeys]) -> SharesMessage:
        """Take the keys of all who take part; return shares of this client's secrets for each of the others."""
        agreed, given = self._agreed, {name: PublicKeys(*keys) for name, keys in directory.items()}
        if self._shares is not None:
            if given != self._directory:
                raise SecureAggregationError("the server sent another list of keys in the same attempt: refused")
            return self._shares
        check_threshold(agreed.threshold, len(given))
        if given.get(self._name) != self.advertise():
            raise SecureAggregationError(f"the server's list of keys has other keys for {self._name} than its own")
        used = [key for keys in given.values() for key in keys]
        if len(set(used)) != len(used) or any(len(key) != KEY_BYTES for key in used):
            raise SecureAggregationError("the server's list of keys has a key twice, or one of a wrong size")
        self._directory, self._digest = given, digest_directory(agreed.context, given)
        names = sorted(given)
        split = split_secrets(self._keys, agreed.threshold, len(names))
        self._own_shares = dict(zip(names, split, strict=True))
        sealed = {
            name: self._keys.seal(agreed.context, self._name, name, given[name], pack_share(share, self._digest))
            for name, share in self._own_shares.items()
            if name != self._name
        }
        self._shares = SharesMessage(sealed, commit(agreed.context, self._name, self._keys.self_seed))
        return self._shares

    def mask(self, sealed: Mapping[str, bytes], update: Words) -> Words:
        """Take the shares that are for this client; return the update with masks. `update` is not changed."""
        agreed = self._agreed
        if self._shares is None:
            raise SecureAggregationError("the server asks for the update before keys were exchanged: refused")
        if self._masked is not None:
            if dict(sealed) != self._sealed:
                raise SecureAggregationError("the server asks for a second update with other masks: refused")
            return self._masked
        assert update.dtype == agreed.dtype and update.shape == (agreed.num_words,), (update.dtype, update.shape)
        peers = set(sealed)
        if self._name in peers or not peers <= set(self._directory):
            raise SecureAggregationError("the server sent shares of clients that are not in its list of keys")
        if len(peers) + 1 < agreed.threshold:
            raise SecureAggregationError(
                f"{len(peers) + 1} clients have sent shares, fewer than the threshold of {agreed.threshold}"
            )
        held = {self._name: self._own_shares[self._name]}
        for name in sorted(peers):
            plain = self._keys.open(agreed.context, name, self._name, self._directory[name], sealed[name])
            share, digest = unpack_share(plain)
            if not is_equal(digest, self._digest) or share.number != held[self._name].number:
                raise SecureAggregationError(f"{name} has seen another list of keys than {self._name}: refused")
            held[name] = share
        masked = update.copy()
        add_mask(masked, self_key(self._keys.self_seed, agreed.context, self._name), 1)
        private = masking_private(self._keys.mask_secret)
        for name in sorted(peers):
            _add_pair_mask(masked, private, self._directory[name].masking, agreed.context, self._name, name, 1)
        self._held, self._sealed, self._masked = held, dict(sealed), masked
        return masked

    def reveal(self, survivors: Collection[str]) -> Revealed:
        """Take the names of those whose updates came; return one share for each client that takes part.

        Refused for another list than before: with two lists the server could get both kinds of shares of a client.
        """
        asked = frozenset(survivors)
        if self._revealed is not None:
            if asked != self._survivors:
                raise SecureAggregationError(
                    "the server asks for shares a second time, with another list of lost clients: refused, since "
                    "both kinds of shares of a client would show its update"
                )
            return self._revealed
        if self._masked is None:
            raise SecureAggregationError("the server asks for shares before it has this client's update: refused")
        if not asked <= set(self._held) or self._name not in asked:
            raise SecureAggregationError("the server's list of updates has clients that did not take part: refused")
        if len(asked) < self._agreed.threshold:
            raise SecureAggregationError(
                f"updates of {len(asked)} clients came, fewer than the threshold of {self._agreed.threshold}: refused"
            )
        self._survivors = asked
        self._revealed = Revealed(
            number=self._held[self._name].number,
            self_seeds={name: self._held[name].self_seed for name in sorted(asked)},
            mask_secrets={name: share.mask_secret for name, share in sorted(self._held.items()) if name not in asked},
        )
        return self._revealed


class SecureServer:
    """The server in one attempt. `take_*` returns whether the message counts; a repeated one does not.

    Its state follows from the messages alone, so that a server that comes back takes those of its journal again.
    """

    def __init__(self, agreed: SecureRound, invited: Collection[str]) -> None:
        self.agreed = agreed
        self.stage: Stage = "keys"
        self.asked: frozenset[str] = frozenset(invited)  # who may send at this stage
        self._keys: dict[str, PublicKeys] = {}
        self._shares: dict[str, SharesMessage] = {}
        self._sum: Words = np.zeros(agreed.num_words, agreed.dtype)
        self._masked: set[str] = set()
        self._revealed: dict[str, Revealed] = {}
        check_threshold(agreed.threshold, len(self.asked))

    @property
    def heard(self) -> frozenset[str]:
        """Who has sent what this stage asks for."""
        by_stage: dict[Stage, Collection[str]] = {
            "keys": self._keys,
            "shares": self._shares,
            "masked": self._masked,
            "revealed": self._revealed,
            "done": (),
        }
        return frozenset(by_stage[self.stage])

    @property
    def missing(self) -> frozenset[str]:
        return self.asked - self.heard

    @property
    def survivors(self) -> frozenset[str]:
        """Whose updates are in the sum."""
        return frozenset(self._masked)

    def take_keys(self, name: str, keys: PublicKeys) -> bool:
        if not self._is_expected("keys", name):
            return False
        if any(len(key) != KEY_BYTES for key in keys):
            raise SecureAggregationError(f"{name} sent keys of a wrong size")
        used = {key for known in self._keys.values() for key in known}
        if used & set(keys) or keys.encryption == keys.masking:
            raise SecureAggregationError(f"{name} sent a key that is in use")
        self._keys[name] = keys
        return True

    def take_shares(self, name: str, message: SharesMessage) -> bool:
        if not self._is_expected("shares", name):
            return False
        if set(message.sealed) != self.asked - {name}:
            raise SecureAggregationError(
                f"{name} sent shares for {len(message.sealed)} of {len(self.asked) - 1} clients"
            )
        self._shares[name] = message
        return True

    def take_masked(self, name: str, masked: Words) -> bool:
        if not self._is_expected("masked", name):
            return False
        agreed = self.agreed
        if masked.dtype != agreed.dtype or masked.shape != (agreed.num_words,):
            raise SecureAggregationError(
                f"{name} sent {masked.dtype} of shape {masked.shape} as its update: this round adds "
                f"{agreed.dtype} of shape ({agreed.num_words},)"
            )
        np.add(self._sum, masked, out=self._sum)
        self._masked.add(name)
        return True

    def take_revealed(self, name: str, revealed: Revealed) -> bool:
        if not self._is_expected("revealed", name):
            return False
        lost = frozenset(self._shares) - self._masked
        if set(revealed.self_seeds) != self._masked or set(revealed.mask_secrets) != lost:
            raise SecureAggregationError(f"{name} sent shares for other clients than it was asked for")
        if any(len(s) != SECRET_BYTES for s in (*revealed.self_seeds.values(), *revealed.mask_secrets.values())):
            raise SecureAggregationError(f"{name} sent shares of a wrong size")
        if revealed.number != sorted(self._keys).index(name) + 1:
            raise SecureAggregationError(f"{name} sent shares with the number {revealed.number}, which is not its own")
        self._revealed[name] = revealed
        return True

    def _is_expected(self, stage: Stage, name: str) -> bool:
        """Whether a message of a stage counts now: late ones, repeated ones and those of strangers do not."""
        return self.stage == stage and name in self.missing

    def advance(self) -> None:
        """End this stage with those who were heard. Raises SecureAggregationError if they are too few."""
        assert self.stage != "done"
        heard = self.heard
        if len(heard) < self.agreed.threshold:
            raise SecureAggregationError(
                f"{len(heard)} of {len(self.asked)} clients were heard at the stage '{self.stage}', fewer than the "
                f"threshold of {self.agreed.threshold}: the sum cannot be made"
            )
        self.asked, self.stage = heard, NEXT_STAGE[self.stage]

    def directory(self) -> dict[str, PublicKeys]:
        """Return what clients are asked to share with."""
        return {name: self._keys[name] for name in sorted(self._keys)}

    def sealed_for(self, name: str) -> dict[str, bytes]:
        """Return the shares that are for a client."""
        return {sender: shares.sealed[name] for sender, shares in sorted(self._shares.items()) if sender != name}

    def result(self) -> Words:
        """Return the sum of the survivors' updates. Raises SecureAggregationError if a share was wrong."""
        assert self.stage == "done"
        agreed, total = self.agreed, self._sum.copy()
        heard = [self._revealed[name] for name in sorted(self._revealed)][: agreed.threshold]
        for name in sorted(self._masked):
            seed = join_shares([(message.number, message.self_seeds[name]) for message in heard])
            if not is_equal(commit(agreed.context, name, seed), self._shares[name].commitment):
                raise SecureAggregationError(f"the shares of {name}'s mask do not fit its commitment: the sum is lost")
            add_mask(total, self_key(seed, agreed.context, name), -1)
        for lost in sorted(set(self._shares) - self._masked):
            secret = join_shares([(message.number, message.mask_secrets[lost]) for message in heard])
            if not is_equal(masking_public(secret), self._keys[lost].masking):
                raise SecureAggregationError(f"the shares of {lost}'s key do not fit its public key: the sum is lost")
            private = masking_private(secret)
            for name in sorted(self._masked):  # what the lost client would have added, and cancelled
                _add_pair_mask(total, private, self._keys[name].masking, agreed.context, lost, name, 1)
        return total


def _add_pair_mask(
    words: Words, private: Any, public: bytes, context: str, own: str, other: str, direction: int
) -> None:
    """Add what `own` adds for its pair with `other`: the mask, or its negative, by the order of their names."""
    left, right = sorted((own, other))
    add_mask(words, pair_key(private, public, context, left, right), direction if own == left else -direction)
