"""Which operations all ranks ask for: decided from what each proposes."""

from __future__ import annotations

from cordee.horovod.requests import Part, Proposal, Request, agree, digest

F3 = (Part("torch.float32", (3,)),)


def reduce(name: str, parts: tuple[Part, ...] = F3, reduction: str = "Average") -> Request:
    return Request(name, "allreduce", parts, reduction)


def test_what_all_ask_for_is_ready_in_one_order() -> None:
    one, other = Proposal((reduce("b"), reduce("a"))), Proposal((reduce("a"), reduce("c"), reduce("b")))
    agreement = agree({0: one, 1: other})
    assert [request.name for request in agreement.ready] == ["a", "b"]
    assert not agreement.failures and not agreement.joined


def test_the_digest_does_not_depend_on_the_order() -> None:
    assert digest(Proposal((reduce("b"), reduce("a")))) == digest(Proposal((reduce("a"), reduce("b"))))
    assert digest(Proposal((reduce("a"),))) != digest(Proposal((reduce("a", reduction="Sum"),)))
    assert digest(Proposal(())) != digest(Proposal((), has_joined=True))


def test_a_difference_is_named_with_its_ranks() -> None:
    odd = reduce("a", (Part("torch.float64", (3,)),))
    agreement = agree({0: Proposal((reduce("a"), reduce("b"))), 1: Proposal((reduce("b"), odd)), 2: Proposal((odd,))})
    assert not agreement.ready  # rank 2 has not asked for b
    (message,) = agreement.failures.values()
    assert message.startswith("ranks call 'a' differently: rank 0 allreduce 'a' (Average of float32 [3]), ranks 1, 2 ")
    assert "allreduce 'a' (Average of float64 [3])" in message


def test_the_tensor_of_many_that_differs_is_named() -> None:
    ours = reduce("g", (*F3, *F3, Part("torch.float32", (2, 2)), *F3))
    theirs = reduce("g", (*F3, *F3, Part("torch.float32", (2, 3)), *F3))
    (message,) = agree({0: Proposal((ours,)), 1: Proposal((theirs,))}).failures.values()
    assert "(tensor 2: float32 [2, 2] and float32 [2, 3])" in message and "and 1 more" in message


def test_ranks_that_wait_for_different_calls_fail_all_of_them() -> None:
    broadcast = Request("b", "broadcast", F3, root=0)
    agreement = agree({0: Proposal((reduce("a"),)), 1: Proposal((broadcast,))})
    assert set(agreement.failures) == {"a", "b"} and not agreement.ready
    message = agreement.failures["a"]
    assert "rank 0 is in allreduce 'a' (Average of float32 [3]); rank 1 is in broadcast 'b' (float32 [3]" in message


def test_a_rank_that_has_joined_is_not_waited_for() -> None:
    agreement = agree({0: Proposal((reduce("a"),)), 1: Proposal((), has_joined=True)})
    assert [request.name for request in agreement.ready] == ["a"] and agreement.joined == [1]
    everybody = agree({0: Proposal((), has_joined=True), 1: Proposal((), has_joined=True)})
    assert everybody == ([], {}, [0, 1])


def test_what_has_no_neutral_element_is_refused_after_a_join() -> None:
    for request in (reduce("a", reduction="Max"), Request("g", "allgather", F3)):
        agreement = agree({0: Proposal((request,)), 1: Proposal((), has_joined=True)})
        assert not agreement.ready
        assert "rank 1 called join()" in agreement.failures[request.name]
