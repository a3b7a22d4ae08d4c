"""Arrays of many kinds in, the same kind out; and the queue of operations."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from cordee.core.errors import StoreError
from cordee.parameters.arrays import make_target, take
from cordee.parameters.keys import StoreKey, find_key
from cordee.parameters.pending import CallQueue


class Foreign:
    """An array of another library: DLPack, and a namespace that makes such arrays."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        class Namespace:
            from_dlpack = staticmethod(lambda array: Foreign(np.from_dlpack(array)))

        return Namespace


ARRAYS = {
    "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
    "big endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "strided": np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
    "torch": torch.arange(6.0).reshape(2, 3),
    "gradient": torch.arange(6.0).reshape(2, 3).requires_grad_(),
    "transposed": torch.arange(6.0).reshape(3, 2).T,
    "bfloat16": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "foreign": Foreign(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "number": 3.5,
    "empty": np.zeros((0, 4), np.int8),
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS.keys())
def test_an_array_comes_back_as_what_it_was(value: Any) -> None:
    taken = take(value)
    target = make_target(taken.kind, taken.shape, taken.origin, None)
    target.view[:] = taken.view
    result = target.finish()
    if isinstance(value, torch.Tensor):
        assert type(result) is torch.Tensor and result.dtype == value.dtype and torch.equal(result, value.detach())
    elif isinstance(value, Foreign):
        assert type(result) is Foreign and np.array_equal(result.array, value.array)
    else:
        assert type(result) is np.ndarray and np.array_equal(result, np.asarray(value))


def test_results_go_into_the_array_given_if_it_fits() -> None:
    strided, tensor = np.zeros((2, 6), np.float32)[:, ::2], torch.zeros(3, 2).T
    for out in (strided, tensor, np.zeros((2, 3), np.float32), torch.zeros(2, 3)):
        taken = take(ARRAYS["numpy"])
        target = make_target("float32", (2, 3), taken.origin, out)
        target.view[:] = taken.view
        assert target.finish() is out and np.array_equal(np.asarray(out), ARRAYS["numpy"])
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    for out, message in (
        (np.zeros((2, 3)), r"out is float64 of shape \(2, 3\), and the key is float32"),
        (torch.zeros(6), r"out is torch.float32 of shape \(6,\)"),
        ([0], "out is a list"),
        (read_only, "out cannot be written to"),
    ):
        with pytest.raises(StoreError, match=message):
            make_target("float32", (2, 3), take(ARRAYS["numpy"]).origin, out)


@pytest.mark.parametrize("value", ["text", object(), np.zeros(2, np.complex64), np.array(["a"]), None])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(StoreError, match=r"is no array|cannot be stored"):
        take(value)


def test_the_queue_keeps_the_order_of_a_key_and_runs_the_urgent_first() -> None:
    queue, started, hold, seen = CallQueue(), threading.Barrier(3), threading.Event(), []
    blocked = [queue.submit(name, 0, lambda: (started.wait(5), hold.wait(5))) for name in ("x", "y")]  # all threads
    started.wait(5)
    orders = [("a", 0, "a1"), ("a", 9, "a2"), ("b", 5, "b1"), ("c", 1, "c1")]
    handles = [queue.submit(key, priority, lambda what=what: seen.append(what)) for key, priority, what in orders]
    failing = queue.submit("d", -1, lambda: 1 // 0)
    assert not handles[0].is_done
    with pytest.raises(StoreError, match=r"operation on 'a' has not ended after 0.01 s"):
        handles[0].wait(0.01)
    hold.set()
    for handle in blocked + handles:
        handle.wait(5)
    with pytest.raises(ZeroDivisionError):
        failing.wait(5)
    queue.wait_idle()
    assert seen.index("a1") < seen.index("a2") and seen.index("b1") < seen.index("a1")
    queue.close()
    with pytest.raises(StoreError, match="closed"):
        queue.submit("a", 0, lambda: None)


def test_keys_of_a_store(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = StoreKey.make()
    assert key.server_keys().public == key.client_keys().server_public
    assert key.client_keys().public in key.server_keys().admitted
    assert StoreKey.from_text(key.to_text()) == key and key.run == StoreKey.from_text(key.to_text()).run
    assert StoreKey.make().run != key.run
    file = tmp_path / "k"
    key.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_key("tcp://h:1", "", file) == key
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path))
    with pytest.raises(StoreError, match=r"no key for the store at tcp://h:77: there is no file .*store-77.key"):
        find_key("tcp://h:77", "", None)
    with pytest.raises(StoreError, match="CORDEE_STORE_KEY is not the key of a store"):
        find_key("tcp://h:77", "nonsense", None)
    file.chmod(0o644)
    with pytest.raises(StoreError, match="can be read or changed by others"):
        find_key("tcp://h:1", "", file)
