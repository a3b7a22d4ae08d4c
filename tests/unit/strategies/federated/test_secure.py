"""Secure aggregation: the sum of the encoded updates for every pattern of drop-outs that allows one, else none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import numpy as np
import pytest

from cordee.core.errors import TrainingError
from cordee.strategies.federated.fixed_point import FixedPoint
from cordee.strategies.federated.masking import PublicKeys, SecureAggregationError, add_mask, join_shares
from cordee.strategies.federated.secure import (
    Revealed,
    SecureClient,
    SecureRound,
    SecureServer,
    SharesMessage,
    check_threshold,
    least_threshold,
)

STAGES = ("keys", "shares", "masked", "revealed")
NUM_WORDS = 37


class Attempt:
    """Clients and a server without a network. `lost` says who sends nothing from which stage on."""

    def __init__(self, num_clients: int, threshold: int, word_bits: int = 32) -> None:
        self.names = [f"site-{number}" for number in range(num_clients)]
        self.agreed = SecureRound(
            context="run 1 0", threshold=threshold, num_words=NUM_WORDS, word_bits=64 if word_bits == 64 else 32
        )
        self.clients = {name: SecureClient(name, self.agreed) for name in self.names}
        self.server = SecureServer(self.agreed, self.names)
        random = np.random.default_rng(5)
        self.fixed = FixedPoint(largest=4.0, bits=20 if word_bits == 32 else 36, num_clients=num_clients)
        self.updates = {name: self.fixed.encode(random.normal(size=NUM_WORDS).clip(-4, 4)) for name in self.names}

    def run(self, lost: dict[str, str] | None = None) -> np.ndarray:
        lost = lost or {}
        server = self.server
        for name in self.present(lost, "keys"):
            server.take_keys(name, self.clients[name].advertise())
        server.advance()
        directory = server.directory()
        for name in self.present(lost, "shares"):
            server.take_shares(name, self.clients[name].share(directory))
        server.advance()
        for name in self.present(lost, "masked"):
            server.take_masked(name, self.clients[name].mask(server.sealed_for(name), self.updates[name]))
        server.advance()
        for name in self.present(lost, "revealed"):
            server.take_revealed(name, self.clients[name].reveal(server.survivors))
        server.advance()
        return server.result()

    def present(self, lost: dict[str, str], stage: str) -> list[str]:
        at = STAGES.index(stage)
        return [name for name in sorted(self.server.asked) if name not in lost or STAGES.index(lost[name]) > at]

    def plain_sum(self, names: Collection[str]) -> np.ndarray:
        total = np.zeros(NUM_WORDS, self.agreed.dtype)
        for name in names:
            total = total + self.updates[name]
        return total


@pytest.mark.parametrize("num_clients, threshold", [(2, 2), (3, 2), (4, 3), (5, 3), (5, 4)])
def test_every_pattern_of_dropouts(num_clients: int, threshold: int) -> None:
    """Each client is lost at one of the four stages, or never: all ways for up to 3 clients."""
    names = [f"site-{number}" for number in range(num_clients)]
    fates = (*STAGES, "never")
    if num_clients <= 3:
        patterns = list(itertools.product(fates, repeat=num_clients))
    else:  # how many are lost at which stage matters, not who: the last clients in the order, then the first
        drawn = list(itertools.combinations_with_replacement(fates, num_clients))
        patterns = [*drawn, *(tuple(reversed(pattern)) for pattern in drawn)]
    num_sums = num_aborts = 0
    for pattern in patterns:
        lost = {name: fate for name, fate in zip(names, pattern, strict=True) if fate != "never"}
        attempt = Attempt(num_clients, threshold)
        survivors = [name for name in names if lost.get(name, "revealed") == "revealed"]
        can_end = sum(fate == "never" for fate in pattern) >= threshold
        if can_end:
            assert np.array_equal(attempt.run(lost), attempt.plain_sum(survivors)), lost
            assert attempt.server.survivors == set(survivors)
            num_sums += 1
        else:
            with pytest.raises(SecureAggregationError, match=f"threshold of {threshold}"):
                attempt.run(lost)
            num_aborts += 1
    assert num_sums and num_aborts


@pytest.mark.parametrize("word_bits", [32, 64])
def test_ten_clients_as_floating_point_numbers(word_bits: int) -> None:
    attempt = Attempt(10, 6, word_bits)
    lost = {"site-3": "masked", "site-8": "shares", "site-1": "revealed", "site-0": "masked"}
    total = attempt.fixed.decode(attempt.run(lost))
    kept = [name for name in attempt.names if lost.get(name, "revealed") == "revealed"]
    exact = sum(attempt.fixed.decode(attempt.updates[name]) for name in kept)
    assert np.array_equal(total, exact)  # sums of multiples of one power of two are exact in float64


def test_what_is_sent_looks_random_and_differs_each_time() -> None:
    update = np.zeros(4096, np.uint32)
    sent = []
    for _ in range(2):
        agreed = SecureRound(context="run 1 0", threshold=2, num_words=4096)
        clients = {name: SecureClient(name, agreed) for name in ("a", "b")}
        directory = {name: client.advertise() for name, client in clients.items()}
        shares = {name: client.share(directory) for name, client in clients.items()}
        sent.append(clients["a"].mask({"b": shares["b"].sealed["a"]}, update))
    assert not np.array_equal(*sent)
    for masked in sent:
        ones = np.unpackbits(masked.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(masked.nbytes * 8)


def test_a_client_gives_one_kind_of_share_only() -> None:
    attempt = Attempt(4, 3)
    attempt.run()
    client = attempt.clients["site-0"]
    first = client.reveal(attempt.names)
    assert client.reveal(list(reversed(attempt.names))) == first  # the same request again: the same answer
    with pytest.raises(SecureAggregationError, match="both kinds of shares"):
        client.reveal(attempt.names[:3])
    assert not set(first.self_seeds) & set(first.mask_secrets)


def test_a_client_refuses_to_reveal_before_it_has_sent() -> None:
    attempt = Attempt(3, 2)
    with pytest.raises(SecureAggregationError, match="before it has this client's update"):
        attempt.clients["site-0"].reveal(attempt.names)
    with pytest.raises(SecureAggregationError, match="before keys were exchanged"):
        attempt.clients["site-0"].mask({}, attempt.updates["site-0"])


@pytest.mark.parametrize(
    "survivors, message",
    [
        (["site-0", "site-1"], "fewer than the threshold of 3"),
        (["site-1", "site-2", "site-3"], "did not take part"),  # without the client itself
        (["site-0", "site-1", "stranger"], "did not take part"),
    ],
)
def test_a_client_refuses_survivors_that_cannot_be(survivors: list[str], message: str) -> None:
    attempt = Attempt(4, 3)
    attempt.run()
    fresh = Attempt(4, 3)
    directory = {name: client.advertise() for name, client in fresh.clients.items()}
    shares = {name: client.share(directory) for name, client in fresh.clients.items()}
    client = fresh.clients["site-0"]
    client.mask({n: s.sealed["site-0"] for n, s in shares.items() if n != "site-0"}, fresh.updates["site-0"])
    with pytest.raises(SecureAggregationError, match=message):
        client.reveal(survivors)


def test_a_client_refuses_other_keys_or_masks_in_the_same_attempt() -> None:
    attempt = Attempt(3, 2)
    directory = {name: client.advertise() for name, client in attempt.clients.items()}
    client = attempt.clients["site-0"]
    shares = {name: each.share(directory) for name, each in attempt.clients.items()}
    assert client.share(directory) == shares["site-0"]
    other = {**directory, "site-2": SecureClient("site-2", attempt.agreed).advertise()}
    with pytest.raises(SecureAggregationError, match="another list of keys"):
        client.share(other)
    sealed = {name: shares[name].sealed["site-0"] for name in ("site-1", "site-2")}
    masked = client.mask(sealed, attempt.updates["site-0"])
    assert client.mask(sealed, attempt.updates["site-0"]) is masked
    with pytest.raises(SecureAggregationError, match="second update"):
        client.mask({"site-1": sealed["site-1"]}, attempt.updates["site-0"])


def test_a_client_refuses_a_list_of_keys_that_was_tampered_with() -> None:
    attempt = Attempt(3, 2)
    directory = {name: client.advertise() for name, client in attempt.clients.items()}
    client = attempt.clients["site-0"]
    with pytest.raises(SecureAggregationError, match="other keys for site-0 than its own"):
        client.share({**directory, "site-0": directory["site-1"]})
    with pytest.raises(SecureAggregationError, match="a key twice"):
        client.share({**directory, "site-2": directory["site-1"]})
    with pytest.raises(SecureAggregationError, match="not safe"):
        client.share({**directory, "a": PublicKeys(b"1" * 32, b"2" * 32), "b": PublicKeys(b"3" * 32, b"4" * 32)})
    with pytest.raises(SecureAggregationError, match="fewer than the threshold"):
        Attempt(3, 3).clients["site-0"].share({"site-0": directory["site-0"]})


def test_clients_that_saw_different_lists_notice() -> None:
    """The server gives site-1 a list in which site-2 has a key of the server's own."""
    attempt = Attempt(3, 2)
    directory = {name: client.advertise() for name, client in attempt.clients.items()}
    forged = {**directory, "site-2": SecureClient("site-2", attempt.agreed).advertise()}
    shares = attempt.clients["site-1"].share(forged)
    attempt.clients["site-0"].share(directory)
    with pytest.raises(SecureAggregationError, match="another list of keys than site-0"):
        attempt.clients["site-0"].mask({"site-1": shares.sealed["site-0"]}, attempt.updates["site-0"])


def test_shares_of_another_attempt_cannot_be_opened() -> None:
    attempt = Attempt(3, 2)
    directory = {name: client.advertise() for name, client in attempt.clients.items()}
    shares = {name: client.share(directory) for name, client in attempt.clients.items()}
    damaged = bytearray(shares["site-1"].sealed["site-0"])
    damaged[3] ^= 1
    with pytest.raises(SecureAggregationError, match="cannot be decrypted"):
        attempt.clients["site-0"].mask({"site-1": bytes(damaged)}, attempt.updates["site-0"])
    with pytest.raises(SecureAggregationError, match="cannot be decrypted"):  # that was for another client
        attempt.clients["site-0"].mask({"site-1": shares["site-1"].sealed["site-2"]}, attempt.updates["site-0"])


@pytest.mark.parametrize("kind", ["self_seeds", "mask_secrets"])
def test_a_wrong_share_ends_the_attempt(kind: str) -> None:
    attempt = Attempt(4, 3)
    lost = {"site-3": "masked"}
    server = attempt.server
    for name in attempt.names:
        server.take_keys(name, attempt.clients[name].advertise())
    server.advance()
    for name in attempt.names:
        server.take_shares(name, attempt.clients[name].share(server.directory()))
    server.advance()
    for name in attempt.present(lost, "masked"):
        server.take_masked(name, attempt.clients[name].mask(server.sealed_for(name), attempt.updates[name]))
    server.advance()
    for name in attempt.present(lost, "revealed"):
        revealed = attempt.clients[name].reveal(server.survivors)
        if name == "site-1":
            wrong = dict.fromkeys(getattr(revealed, kind), bytes(16))
            revealed = revealed._replace(**{kind: wrong})
        assert server.take_revealed(name, revealed)
    server.advance()
    with pytest.raises(SecureAggregationError, match="the sum is lost"):
        server.result()


def test_the_server_counts_a_client_once_and_strangers_never() -> None:
    attempt = Attempt(3, 2)
    server, clients = attempt.server, attempt.clients
    assert not server.take_keys("stranger", SecureClient("stranger", attempt.agreed).advertise())
    for name in attempt.names:
        assert server.take_keys(name, clients[name].advertise())
        assert not server.take_keys(name, clients[name].advertise())
    server.advance()
    for name in attempt.names:
        assert server.take_shares(name, clients[name].share(server.directory()))
    server.advance()
    assert not server.take_shares("site-0", SharesMessage({}, b""))  # late
    for name in attempt.names:
        masked = clients[name].mask(server.sealed_for(name), attempt.updates[name])
        assert server.take_masked(name, masked)
        assert not server.take_masked(name, masked)
    server.advance()
    for name in attempt.names:
        server.take_revealed(name, clients[name].reveal(server.survivors))
    server.advance()
    assert np.array_equal(server.result(), attempt.plain_sum(attempt.names))


def test_the_server_refuses_messages_that_do_not_fit() -> None:
    attempt = Attempt(3, 2)
    server, clients = attempt.server, attempt.clients
    with pytest.raises(SecureAggregationError, match="wrong size"):
        server.take_keys("site-0", PublicKeys(b"short", b"s"))
    keys = clients["site-0"].advertise()
    server.take_keys("site-0", keys)
    with pytest.raises(SecureAggregationError, match="in use"):
        server.take_keys("site-1", keys)
    for name in ("site-1", "site-2"):
        server.take_keys(name, clients[name].advertise())
    server.advance()
    shares = clients["site-0"].share(server.directory())
    with pytest.raises(SecureAggregationError, match="shares for 1 of 2 clients"):
        server.take_shares("site-0", SharesMessage({"site-1": b"x"}, shares.commitment))
    for name in attempt.names:
        server.take_shares(name, clients[name].share(server.directory()))
    server.advance()
    with pytest.raises(SecureAggregationError, match=r"float32 of shape \(3,\)"):
        server.take_masked("site-0", np.zeros(3, np.float32))
    for name in attempt.names[:2]:
        server.take_masked(name, clients[name].mask(server.sealed_for(name), attempt.updates[name]))
    server.advance()
    with pytest.raises(SecureAggregationError, match="other clients than it was asked for"):
        server.take_revealed("site-0", Revealed(1, {}, {}))
    revealed = clients["site-0"].reveal(server.survivors)
    with pytest.raises(SecureAggregationError, match="not its own"):
        server.take_revealed("site-0", revealed._replace(number=2))


def test_half_the_clients_are_not_enough() -> None:
    """A server that tells half the clients one thing and half another must not get enough of both kinds of shares."""
    for num_clients in range(2, 30):
        threshold = least_threshold(num_clients)
        assert 2 * threshold > num_clients
        check_threshold(threshold, num_clients)
        with pytest.raises(SecureAggregationError, match="not safe"):
            check_threshold(threshold - 1, num_clients)


def test_fewer_shares_than_the_threshold_tell_nothing() -> None:
    attempt = Attempt(5, 4)
    server = attempt.server
    attempt.run()
    told = [client.reveal(server.survivors) for client in attempt.clients.values()]
    shares = [(message.number, message.self_seeds["site-0"]) for message in told]
    assert join_shares(shares[:4]) == join_shares(shares[1:5])
    assert join_shares(shares[:3]) != join_shares(shares[1:4])


def test_a_mask_is_undone_by_itself() -> None:
    words = np.arange(100_000, dtype=np.uint32)
    masked = words.copy()
    add_mask(masked, b"k" * 32, 1)
    assert not np.array_equal(masked, words)
    add_mask(masked, b"k" * 32, -1)
    assert np.array_equal(masked, words)


@pytest.mark.parametrize("bits", [2, 8, 20, 24, 32, 40])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 10, 255, 4096])
@pytest.mark.parametrize("largest", [1e-6, 0.1, 1.0, 3.7, 1e6])
def test_the_largest_sum_fits(bits: int, num_clients: int, largest: float) -> None:
    fixed = FixedPoint(largest=largest, bits=bits, num_clients=num_clients)
    for sign in (1, -1):
        word = fixed.encode(np.array([sign * largest]))
        total = np.zeros(1, fixed.dtype)
        for _ in range(num_clients):
            total = total + word
        assert fixed.decode(total)[0] == num_clients * fixed.decode(word)[0]
        assert abs(fixed.decode(word)[0] - sign * largest) <= fixed.step / 2
    assert math.log2(fixed.step) == int(math.log2(fixed.step))
    assert fixed.step <= 2 * largest / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize(
    "value, message", [(2.1, r"value of 2.1.*range = 2"), (math.nan, "not numbers"), (-math.inf, "not numbers")]
)
def test_what_does_not_fit_is_refused_before_it_is_sent(value: float, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        FixedPoint(largest=2.0, bits=20, num_clients=3).encode(np.array([0.0, value]))
