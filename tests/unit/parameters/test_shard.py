"""Values, versions, updaters, and that each push counts once."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.core.errors import StoreError
from cordee.parameters.replication import decode_state, encode_state
from cordee.parameters.shard import Shard
from cordee.parameters.updaters import load_functions

UPDATES = """
def decay(value, pushed, state, rate=0.5):
    state["n"] = state.get("n", 0) + 1
    state["least"] = min(state.get("least", float("inf")), float("inf"))  # JSON has no such number
    value.mul_(rate).add_(pushed)
"""


def shard_with(value: torch.Tensor, updater: str = "add", *, is_cut: bool = False, **options: float) -> Shard:
    shard = Shard()
    shard.set_updater(updater, options)
    shard.create(0, "w", str(value.dtype).removeprefix("torch."), tuple(value.shape), is_cut)
    shard.fill(0, 0, value.reshape(-1))
    return shard


def push_all(shard: Shard, value: torch.Tensor, sequence: int, client: str = "c", step: int = 3) -> None:
    flat = value.reshape(-1)
    for start in range(0, len(flat), step):
        shard.push(0, client, 1, sequence, start, flat[start : start + step])


@settings(deadline=None)
@given(st.data())
def test_pushes_count_once_however_often_and_in_whatever_order_their_pieces_come(data: st.DataObject) -> None:
    shard = shard_with(torch.zeros(7))
    for sequence in range(1, 4):
        pieces = [(start, torch.arange(7.0)[start : start + 3]) for start in (0, 3, 6)]
        sent = data.draw(st.permutations(pieces + data.draw(st.lists(st.sampled_from(pieces), max_size=3))))
        for start, piece in sent:
            shard.push(0, "c", 1, sequence, start, piece)
        late = data.draw(st.sampled_from(pieces))
        shard.push(0, "c", 1, sequence - 1, *late)  # of the push before
    part = shard.part(0)
    assert torch.equal(part.values, 3 * torch.arange(7.0)) and part.version == 3


def test_clients_and_incarnations_are_told_apart() -> None:
    shard = shard_with(torch.zeros(2))
    for client, incarnation, sequence in (("a", 1, 1), ("b", 1, 1), ("a", 1, 1), ("a", 2, 1), ("a", 1, 2)):
        shard.push(0, client, incarnation, sequence, 0, torch.ones(2))
    assert shard.part(0).values.tolist() == [3, 3], (
        "the repeat, and what an earlier incarnation says late, are passed over"
    )
    shard.forget("a")
    assert list(shard.part(0).journals) == ["b"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.01}),
        ("adagrad", {"lr": 0.1}),
        ("rmsprop", {"lr": 0.01}),
        ("adafactor", {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("step", [3, 100])
def test_an_optimizer_on_the_server_does_what_it_does_at_home(name: str, options: dict[str, float], step: int) -> None:
    torch.manual_seed(0)
    value, gradients = torch.randn(4, 5), [torch.randn(4, 5) for _ in range(4)]
    home = value.clone().requires_grad_()
    classes = {key.lower(): optimizer for key, optimizer in vars(torch.optim).items()}
    optimizer = classes[name.lower()]([home], **options)
    shard = shard_with(value, name, **options)
    for sequence, gradient in enumerate(gradients):
        push_all(shard, gradient, sequence, step=step)
        home.grad = gradient.clone()
        optimizer.step()
        shard.set_updater(name, options)  # another worker says the same: the state stays
    torch.testing.assert_close(shard.part(0).values, home.detach(), rtol=1e-6, atol=1e-7)
    assert shard.part(0).version == 4


def test_a_push_that_did_not_come_whole_has_no_effect_on_an_optimizer() -> None:
    shard = shard_with(torch.zeros(6), "sgd", lr=1.0)
    part = shard.push(0, "dies", 1, 1, 0, torch.ones(3))
    assert not shard.is_whole(part, "dies")
    push_all(shard, torch.full((6,), 2.0), 1, client="lives")
    assert part.values.tolist() == [-2.0] * 6 and part.version == 1


def test_rows() -> None:
    shard = shard_with(torch.zeros(4, 2))
    rows, values = torch.tensor([1, 3, 1]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    for _ in range(2):  # the second is the same push, sent again
        part = shard.push_rows(0, "c", 1, 1, rows, values)
    assert part.values.tolist() == [[0, 0], [6, 8], [0, 0], [3, 4]] and part.version == 1
    assert shard.pull_rows(0, torch.tensor([3, 0]))[1].tolist() == [[3, 4], [0, 0]]
    shard.set_updater("assign", {})
    assert shard.push_rows(0, "c", 1, 2, torch.tensor([0]), torch.ones(1, 2)).values[0].tolist() == [1, 1]
    shard.set_updater("sgd", {"lr": 1.0})
    assert shard.push_rows(0, "c", 1, 3, rows, values).values.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    shard.set_updater("adam", {"lr": 1.0})
    with pytest.raises(StoreError, match=r"updater 'adam' cannot apply the push to key 'w': .*SparseAdam"):
        shard.push_rows(0, "c", 1, 4, rows, values)
    for wrong in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(StoreError, match="key 'w' has rows 0 to 3"):
            shard.push_rows(0, "c", 1, 5, wrong, torch.ones(1, 2))
    with pytest.raises(StoreError, match="rows of key 'w' are a list of int64"):
        shard.pull_rows(0, torch.tensor([0.5]))
    with pytest.raises(StoreError, match=r"1 rows of key 'w' are torch.float32 of shape \(1, 2\)"):
        shard.push_rows(0, "c", 1, 5, torch.tensor([0]), torch.ones(1, 3))


def test_functions_by_name_and_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_updates")
    exec(UPDATES, vars(module))
    monkeypatch.setitem(sys.modules, "my_updates", module)
    shard = Shard(load_functions(["my_updates"]))
    shard.create(0, "w", "float64", (2,), False)
    shard.set_updater("my_updates:decay", {"rate": 0.25})
    for sequence in (1, 2):
        shard.push(0, "c", 1, sequence, 0, torch.full((2,), 4.0, dtype=torch.float64))
    assert shard.part(0).values.tolist() == [5, 5] and shard.part(0).state["n"] == 2
    for name, options, message in (
        ("my_updates:decoy", {}, "do not know 'my_updates:decoy'; did you mean 'my_updates:decay'"),
        ("other:f", {}, "start them with --updaters other"),
        ("os:system", {}, "start them with --updaters os"),
        ("my_updates:decay", {"ratio": 1}, "has no setting 'ratio'; did you mean 'rate'"),
        ("sdg", {}, "'sdg' is not known; did you mean 'sgd'"),
        ("sgd", {"lrr": 1}, "did you mean 'lr'"),
        ("sgd", {"lr": -1}, "Invalid learning rate"),
        ("add", {"lr": 1}, "'add' has no settings, and got 'lr'"),
        ("lbfgs", {}, "evaluates the model many times"),
    ):
        with pytest.raises(StoreError, match=message):
            shard.set_updater(name, options)
    with pytest.raises(StoreError, match="--updaters no_such_module: importing it raised ModuleNotFoundError"):
        load_functions(["no_such_module"])
    with pytest.raises(StoreError, match=r"--updaters cordee.parameters: the module has no functions of its own"):
        load_functions(["cordee.parameters"])


def test_updaters_that_cannot_work_on_a_key_say_so() -> None:
    shard = shard_with(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(StoreError, match="needs floating-point values, and key 'w' is int64"):
        shard.set_updater("sgd", {"lr": 1})
    cut = shard_with(torch.zeros(2, 3), is_cut=True)
    with pytest.raises(StoreError, match="'muon' may look at whole arrays, and key 'w' is cut over several servers"):
        cut.set_updater("muon", {"lr": 1})
    cut.set_updater("sgd", {"lr": 1})


def test_what_does_not_fit_is_refused() -> None:
    shard = shard_with(torch.zeros(4))
    for start, piece in (
        (0, torch.zeros(5)),
        (3, torch.zeros(2)),
        (0, torch.zeros(4).double()),
        (0, torch.zeros(2, 2)),
    ):
        with pytest.raises(StoreError, match="does not fit key 'w'"):
            shard.push(0, "c", 1, 1, start, piece)
    with pytest.raises(StoreError, match="started again since, and its values are lost"):
        shard.part(7)
    with pytest.raises(StoreError, match="elements 2 to 9 of key 'w'"):
        shard.part(0).check_range(2, 9)
    with pytest.raises(StoreError, match="no memory for key 'huge'"):
        shard.create(1, "huge", "float64", (2**46,), False)


@pytest.mark.parametrize(
    ("updater", "options"),
    [("add", {}), ("sgd", {"lr": 0.5, "momentum": 0.5}), ("adam", {}), ("updates_of_test:decay", {})],
)
def test_a_second_that_was_given_everything_continues_exactly_there(
    updater: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("updates_of_test")
    exec(UPDATES, module.__dict__)
    monkeypatch.setitem(sys.modules, "updates_of_test", module)
    functions = load_functions(["updates_of_test"])
    first, second = Shard(functions), Shard(functions)
    first.set_updater(updater, options)
    first.create(0, "w", "float32", (2, 3), True)
    first.create(1, "n", "float32", (4,), True)
    first.set_updater("assign", {}, [1])
    first.fill(0, 0, torch.arange(6.0))
    push_all(first, torch.ones(2, 3), 1)
    first.push(0, "c", 1, 2, 0, torch.ones(3))  # half of a push
    second.set_updater(*first.chosen)
    for number in first.parts:
        names, buffers = encode_state(first.dump_part(number))
        second.restore_part(number, decode_state(names, [buffer.clone() for buffer in buffers]))
    for shard in (first, second):
        shard.push(0, "c", 1, 2, 0, torch.ones(3))  # sent again
        shard.push(0, "c", 1, 2, 3, torch.full((3,), 2.0))
        push_all(shard, torch.ones(2, 3), 3)
        push_all(shard, torch.ones(2, 3), 1)  # long past
        shard.push(1, "c", 1, 4, 0, torch.full((4,), 7.0))
    assert torch.equal(first.part(0).values, second.part(0).values)
    assert first.part(0).version == second.part(0).version == 3
    assert second.part(1).values.tolist() == [7] * 4, "its own updater went along"
    if ":" in updater:
        assert second.part(0).state == first.part(0).state == {"n": 3, "least": float("inf")}


def test_state_that_cannot_be_given_to_a_second_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("updates_of_test")
    exec("def remember(value, pushed, state):\n    state['seen'] = [pushed]\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "updates_of_test", module)
    shard = Shard(load_functions(["updates_of_test"]))
    shard.set_updater("updates_of_test:remember", {})
    shard.create(0, "w", "float32", (2,), False)
    shard.push(0, "c", 1, 1, 0, torch.ones(2))
    with pytest.raises(StoreError, match="keeps 'seen', a list, of key 'w': a follower can be given numbers"):
        shard.dump_part(0)
