"""What members of a generation store at the coordinator, which may be asked for twice and may forget everything."""

from __future__ import annotations

from cordee.cluster.rendezvous import GenerationStore
from cordee.communication.messages import (
    Message,
    StoreAdd,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreRequest,
    StoreSet,
    StoreSwap,
    StoreValue,
)


def ask(store: GenerationStore, message: StoreRequest, sender: str = "store-0") -> bytes | None:
    answer: Message = store.handle(sender, message)
    return answer.value if isinstance(answer, StoreValue) else None


def test_values_are_found_once_they_are_set_and_until_they_are_deleted() -> None:
    store = GenerationStore()
    assert ask(store, StoreGet(1, "key")) is None
    ask(store, StoreSet(1, "key", b"value"))
    assert ask(store, StoreGet(1, "key")) == b"value"
    assert ask(store, StoreCount(1)) == b"1"
    assert ask(store, StoreDelete(1, "key")) == b"value"
    assert ask(store, StoreDelete(1, "key")) is None
    assert ask(store, StoreCount(1)) == b"0"


def test_adding_again_what_was_added_changes_nothing() -> None:
    store = GenerationStore()
    assert ask(store, StoreAdd(1, "count", 1), "store-0") == b"1"
    assert ask(store, StoreAdd(1, "count", 1), "store-1") == b"2"
    assert ask(store, StoreAdd(1, "count", 1), "store-0") == b"2"  # its answer was lost, and it asks again
    assert ask(store, StoreAdd(1, "count", 3), "store-0") == b"4"
    assert ask(store, StoreGet(1, "count")) == b"4"


def test_a_value_is_swapped_by_one_of_those_who_want_to() -> None:
    store = GenerationStore()
    assert ask(store, StoreSwap(1, "leader", b"nobody", b"a")) == b"nobody"  # as torch's stores answer
    assert ask(store, StoreSwap(1, "leader", b"", b"a")) == b"a"
    assert ask(store, StoreSwap(1, "leader", b"", b"a")) == b"a"  # again
    assert ask(store, StoreSwap(1, "leader", b"", b"b")) == b"a"
    assert ask(store, StoreSwap(1, "leader", b"a", b"b")) == b"b"
