"""What servers do with pushes: the single-process step, to the bit, whatever the order and however often."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn

from cordee.checkpoint import State, load_optimizer_state, optimizer_state
from cordee.compute import OptimizerRecipe, make_optimizer_recipe, make_schedule, number_groups
from cordee.core.errors import CommunicationError, JobError
from cordee.core.references import Use
from cordee.parameters.placement import ELEMENTWISE, Layout, make_layout
from cordee.strategies.parameter_server.messages import Push
from cordee.strategies.parameter_server.settings import ParameterServerSettings
from cordee.strategies.parameter_server.shard import FixedSum, ParameterShard
from cordee.strategies.parameter_server.state import flatten_parameters, join_pieces, load_piece

NUM_STEPS = 4
NOT_HERE = {"LBFGS", "SparseAdam"}  # need a closure, sparse gradients
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    and name not in NOT_HERE
)  # fmt: skip


def make_model(optimizer: str = "SGD") -> nn.Module:
    torch.manual_seed(0)
    bias = optimizer != "Muon"  # it takes matrices only
    return nn.Sequential(nn.Linear(32, 48, bias=bias), nn.Linear(48, 16, bias=bias))  # no gaps


def recipe_for(optimizer: str, **settings: float):  # type: ignore[no-untyped-def]
    settings = settings or {"lr": 0.05}
    schedule = make_schedule(Use("cosine"), NUM_STEPS)
    return make_optimizer_recipe(Use(optimizer.lower(), **settings), schedule, lr_scale="none", num_shares=1)


class Servers:
    """All servers of a model in one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: str = "SGD",
        num_servers: int = 2,
        recipe: OptimizerRecipe | None = None,
        **settings: object,
    ) -> None:
        recipe = recipe or recipe_for(optimizer)
        self.group_of = number_groups(recipe.make(model.named_parameters()), model)
        of_parts = recipe.for_parts_of(model)
        self.settings = ParameterServerSettings(servers=num_servers, **settings)  # type: ignore[arg-type]
        self.layout: Layout = make_layout(model, num_servers, can_split=optimizer in ELEMENTWISE)
        flat = flatten_parameters(model, self.layout)
        self.shards = [
            ParameterShard(
                self.layout.of_server(server),
                lambda piece: flat[piece.start : piece.stop].clone(),
                of_parts,
                self.settings,
            )
            for server in range(num_servers)
        ]

    def push(self, gradient: Tensor, piece: int, **fields: object) -> str:
        described = self.layout.pieces[piece]
        known = {"worker": "worker-0", "count": 1, "base": 0, "floor": 0}
        push = Push(**{"piece": piece, **known, **fields})  # type: ignore[arg-type]
        part = gradient[described.start : described.stop]
        shard = self.shards[described.server]
        kind = shard.push(push, part).outcome
        if not self.settings.clip_norm:
            shard.piece(piece).apply_pending(push.step, 1.0)  # as the next pull would
        return kind

    def values(self) -> Tensor:
        flat = torch.zeros(self.layout.length)
        for piece in self.layout.pieces:
            flat[piece.start : piece.stop] = self.shards[piece.server].piece(piece.index).values
        return flat

    def optimizer_state(self) -> State:
        states = [self.shards[piece.server].piece(piece.index).optimizer.dump() for piece in self.layout.pieces]
        return join_pieces(self.layout, states, self.group_of)


def push_of(piece: int, unit: int, share: int, num_shares: int, count: float, worker: str = "worker-0") -> Push:
    """A push of the first step."""
    return Push(piece, unit, 0, share, num_shares, count, base=0, floor=0, worker=worker)


def gradients(num_units: int, length: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(length, generator=generator) for _ in range(num_units)] for _ in range(NUM_STEPS)]


def reference(model: nn.Module, optimizer: str, steps: list[Tensor], layout: Layout) -> tuple[Tensor, State]:
    recipe = recipe_for(optimizer)
    made = recipe.make(model.named_parameters())
    starts = {one.name: one.offset - one.first for piece in layout.pieces for one in piece.slices}
    for step, gradient in enumerate(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[starts[name] :][: parameter.numel()].view_as(parameter).clone()
        recipe.set_rate(made, step)
        made.step()
    return flatten_parameters(model, layout), optimizer_state(made, model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_every_optimizer_gives_the_bits_of_one_process(optimizer: str, num_servers: int) -> None:
    servers = Servers(make_model(optimizer), optimizer, num_servers)
    length = servers.layout.length
    steps = [units[0] for units in gradients(1, length)]
    for step, gradient in enumerate(steps):
        for piece in servers.layout.pieces:
            fields = {"unit": step, "step": step, "share": 0, "num_shares": 1}
            assert servers.push(gradient, piece.index, **fields) == "applied"
    expected, expected_state = reference(make_model(optimizer), optimizer, steps, servers.layout)
    assert torch.equal(servers.values(), expected)
    found = servers.optimizer_state()
    assert found.values["state"] == expected_state.values["state"]
    for name, tensor in expected_state.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def test_order_repetition_and_delay_change_nothing() -> None:
    """100 schedules in which pushes of a step come in any order, and some of them twice or three times."""
    results = set()
    for seed in range(100):
        draw = random.Random(seed)
        servers = Servers(make_model(), "Adam")
        units = gradients(3, servers.layout.length)
        for step in range(NUM_STEPS):
            pushes = [(share, piece.index) for share in range(3) for piece in servers.layout.pieces]
            pushes += draw.sample(pushes, 3)
            draw.shuffle(pushes)
            for share, piece in pushes:
                fields = {"unit": step * 3 + share, "step": step, "share": share, "num_shares": 3, "count": 2}
                servers.push(units[step][share], piece, **fields)
            late = draw.choice(pushes)  # one more, after the step is applied
            fields = {"unit": step * 3 + late[0], "step": step, "share": late[0], "num_shares": 3, "count": 2}
            assert servers.push(units[step][late[0]], late[1], **fields) == "known"
        results.add(servers.values().numpy().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("aggregate", ["weighted", "mean", "sum"])
def test_aggregation(aggregate: str) -> None:
    servers = Servers(make_model(), aggregate=aggregate)
    before = servers.values()
    (one, two), *_ = gradients(2, servers.layout.length)
    for piece in servers.layout.pieces:
        for share, (gradient, items) in enumerate([(one, 1), (two, 3)]):
            fields = {"unit": share, "step": 0, "share": share, "num_shares": 2, "count": items}
            servers.push(gradient, piece.index, **fields)
    expected = {"weighted": one / 4 + two * 3 / 4, "mean": (one + two) / 2, "sum": one + two}[aggregate]
    torch.testing.assert_close(servers.values(), before - 0.05 * expected, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_not_finite_is_refused_and_the_step_goes_on_without_it() -> None:
    servers = Servers(make_model())
    before = servers.values()
    (good, _), *_ = gradients(2, servers.layout.length)
    bad = good.clone()
    bad[::7] = float("nan")
    for piece in servers.layout.pieces:
        assert servers.push(bad, piece.index, unit=0, step=0, share=0, num_shares=2, count=4) == "refused"
        assert servers.push(good, piece.index, unit=1, step=0, share=1, num_shares=2, count=4) == "applied"
    torch.testing.assert_close(servers.values(), before - 0.05 * good, rtol=1e-6, atol=1e-7)
    assert bool(torch.isfinite(servers.values()).all())


def test_the_rate_is_divided_by_the_age_of_the_gradient() -> None:
    servers = Servers(make_model(), num_servers=1, staleness="unbounded", staleness_lr="inverse")
    gradient = torch.ones(servers.layout.length)
    for unit in range(3):
        before = servers.values()
        servers.push(gradient, 0, unit=unit, step=0, share=0, num_shares=1, base=0)
        moved = float((before - servers.values()).mean())
        assert moved == pytest.approx(0.05 / max(1, unit), rel=1e-4)
    assert servers.shards[0].ages == [1, 1, 1]


def test_delay_compensation_corrects_towards_the_gradient_at_the_new_place() -> None:
    """For f(w) = w^2/2 the compensated gradient with lambda 1/g^2 ... is exact; here the formula itself is checked."""
    servers = Servers(make_model(), num_servers=1, staleness="unbounded", delay_compensation=0.5)
    piece = servers.shards[0].piece(0)
    seen = piece.pull("slow").clone()
    gradient = torch.full((servers.layout.length,), 2.0)
    servers.push(gradient, 0, unit=0, step=0, share=0, num_shares=1, worker="fast")
    moved = servers.values()
    servers.push(gradient, 0, unit=1, step=0, share=0, num_shares=1, worker="slow")
    compensated = gradient + 0.5 * gradient * gradient * (moved - seen)
    torch.testing.assert_close(servers.values(), moved - 0.05 * compensated, rtol=1e-5, atol=1e-6)


def test_a_step_that_one_server_has_whole_waits_for_the_others() -> None:
    """Worker 1 is lost between its two pushes: who computes its part again must find what it found."""
    servers = Servers(make_model())
    before = servers.values()
    (first, second), *_ = gradients(2, servers.layout.length)
    whole, torn = servers.layout.pieces[0], servers.layout.pieces[-1]
    assert whole.server != torn.server
    for piece in servers.layout.pieces:
        push = push_of(piece.index, 0, 0, 2, 4, "worker-0")
        servers.shards[piece.server].push(push, first[piece.start : piece.stop])
    push = push_of(whole.index, 1, 1, 2, 4, "worker-1")
    outcome = servers.shards[whole.server].push(push, second[whole.start : whole.stop])
    assert outcome.outcome == "applied"
    for piece in servers.layout.pieces:  # worker 2 takes its place
        pulled = servers.shards[piece.server].piece(piece.index).pull("worker-2", apply_step=-1)
        assert torch.equal(pulled, before[piece.start : piece.stop])
    for piece in servers.layout.pieces:
        push = push_of(piece.index, 1, 1, 2, 4, "worker-2")
        servers.shards[piece.server].push(push, second[piece.start : piece.stop])
        servers.shards[piece.server].piece(piece.index).apply_pending(0, 1.0)
    expected = before - 0.05 * (first + second) / 2
    torch.testing.assert_close(servers.values(), expected, rtol=1e-5, atol=1e-6)


def test_clipping_waits_for_the_norm_of_all_servers() -> None:
    servers = Servers(make_model(), clip_norm=1.0)
    before = servers.values()
    gradient = gradients(1, servers.layout.length)[0][0]
    norms: list[float] = []
    for piece in servers.layout.pieces:
        part = gradient[piece.start : piece.stop]
        push = push_of(piece.index, 0, 0, 1, 1)
        norms += servers.shards[piece.server].push(push, part).norms
    assert torch.equal(servers.values(), before)
    scale = 1.0 / math.hypot(*norms)
    for piece in servers.layout.pieces:
        servers.shards[piece.server].piece(piece.index).pull("worker-0", apply_step=0, scale=scale)
        servers.shards[piece.server].piece(piece.index).pull("worker-1", apply_step=0, scale=scale)  # once only
    expected = before - 0.05 * gradient / gradient.norm()
    torch.testing.assert_close(servers.values(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adafactor"])
def test_optimizer_state_goes_to_any_number_of_servers_and_back(optimizer: str) -> None:
    first = Servers(make_model(), optimizer, num_servers=1)
    units = [unit for (unit,) in gradients(1, first.layout.length)]
    for step in range(2):
        for piece in first.layout.pieces:
            first.push(units[step], piece.index, unit=step, step=step, share=0, num_shares=1)
    saved, values = first.optimizer_state(), first.values()
    second = Servers(make_model(), optimizer, num_servers=2)
    for piece in second.layout.pieces:
        state = second.shards[piece.server].piece(piece.index)
        state.values.copy_(values[piece.start : piece.stop])
        load_piece(state, saved)
    for servers in (first, second):
        for piece in servers.layout.pieces:
            servers.push(units[2], piece.index, unit=2, step=2, share=0, num_shares=1)
    assert torch.equal(first.values(), second.values())
    model = make_model()
    load_optimizer_state(recipe_for(optimizer).make(model.named_parameters()), model, second.optimizer_state())


def by_place(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Rates that fall from the last layer to the first, one of them a tensor; biases, by their shape, have no decay."""
    groups: list[dict[str, object]] = []
    for depth, parameter in enumerate(reversed(parameters)):
        rate = lr * 0.5**depth
        is_matrix = parameter.ndim > 1
        groups.append({
            "params": [parameter], "lr": torch.tensor(rate) if depth == 1 else rate, "weight_decay": 0.1 * is_matrix
        })  # fmt: skip
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
def test_groups_are_those_of_the_whole_model(num_servers: int) -> None:
    """Whatever a server holds, a parameter has the settings that it has alone, and checkpoints say so."""
    recipe = make_optimizer_recipe(
        Use(by_place, lr=0.05), make_schedule(Use("cosine"), NUM_STEPS), lr_scale="none", num_shares=1
    )
    servers = Servers(make_model(), "by place", num_servers, recipe)
    model = make_model()
    alone = recipe.make(model.named_parameters())
    units = [unit for (unit,) in gradients(1, servers.layout.length)]
    for step in range(2):
        for piece in servers.layout.pieces:
            servers.push(units[step], piece.index, unit=step, step=step, share=0, num_shares=1)
        for (piece,) in zip(servers.layout.pieces):
            for one in piece.slices:
                grad = units[step][one.offset : one.offset + one.length].view(one.shape)
                model.get_parameter(one.name).grad = grad.clone()
        recipe.set_rate(alone, step)
        alone.step()
    assert torch.equal(servers.values(), flatten_parameters(model, servers.layout))
    expected, found = optimizer_state(alone, model), servers.optimizer_state()
    assert [list(group["parameters"]) for group in found.values["groups"]] == [
        list(group["parameters"]) for group in expected.values["groups"]
    ]
    again = recipe.make(model.named_parameters())
    load_optimizer_state(again, model, found)
    for one, other in zip(again.param_groups, alone.param_groups, strict=True):
        assert (float(one["lr"]), one["weight_decay"]) == (float(other["lr"]), other["weight_decay"])


def test_an_optimizer_that_leaves_out_by_place_is_refused() -> None:
    recipe = make_optimizer_recipe(
        Use(lambda parameters: torch.optim.SGD(parameters[1:] or parameters, lr=0.1)),
        make_schedule(Use("constant"), NUM_STEPS),
        lr_scale="none",
        num_shares=1,
    )
    with pytest.raises(JobError, match=r"by their shape or place, and takes '0\.weight'"):
        Servers(make_model(), "by place", 2, recipe)


def test_a_gradient_of_another_length_is_refused() -> None:
    servers = Servers(make_model(), num_servers=1)
    with pytest.raises(CommunicationError, match="the model of the worker is another one"):
        servers.shards[0].push(push_of(0, 0, 0, 1, 1), torch.zeros(3))
    with pytest.raises(CommunicationError, match="piece 7 is not on this server"):
        servers.shards[0].push(push_of(7, 0, 0, 1, 1), torch.zeros(3))


def test_what_is_remembered_of_units_does_not_grow() -> None:
    servers = Servers(make_model(), num_servers=1, staleness="unbounded")
    gradient = torch.zeros(servers.layout.length)
    for unit in range(500):
        servers.push(gradient, 0, unit=unit, step=unit, share=0, num_shares=1, floor=max(0, unit - 3))
    assert len(servers.shards[0].piece(0).applied.above) <= 4


def test_weight_decay_on_the_servers_is_that_of_sgd() -> None:
    servers, plain = Servers(make_model(), weight_decay=0.1), Servers(make_model())
    before, gradient = servers.values(), gradients(1, servers.layout.length)[0][0]
    for each in (servers, plain):
        for piece in each.layout.pieces:
            each.push(gradient, piece.index, unit=0, step=0, share=0, num_shares=1)
    torch.testing.assert_close(servers.values(), plain.values() - 0.05 * 0.1 * before)


@pytest.mark.parametrize("settings", [{}, {"staleness": 1}, {"weight_decay": 0.1}])
def test_a_parameter_without_a_gradient_is_left_alone(settings: dict[str, object]) -> None:
    """Adam would count a step for it, and momentum, or decay, would move it."""
    servers = Servers(make_model(), "Adam", num_servers=1, **settings)
    (piece,) = servers.layout.pieces
    used = [one.offset for one in piece.slices]
    gradient = gradients(1, servers.layout.length)[0][0]
    servers.push(gradient, 0, unit=0, step=0, share=0, num_shares=1)
    before = servers.values()
    for at in (used[1], used[2]):
        gradient[at : at + 16] = 0.0
    servers.push(gradient, 0, unit=1, step=1, share=0, num_shares=1, unused=frozenset({1, 2}))
    after = servers.values()
    for at, one in enumerate(piece.slices):
        place = slice(one.offset, one.offset + one.length)
        assert torch.equal(after[place], before[place]) == (at in (1, 2)), one.name
    counts = [float(tensor) for name, tensor in servers.optimizer_state().tensors.items() if name.endswith("step")]
    assert sorted(counts) == [1.0, 1.0, 2.0, 2.0]


def test_a_step_of_which_nothing_is_counted_is_none() -> None:
    servers = Servers(make_model(), "Adam", num_servers=1)
    (piece,) = servers.layout.pieces
    everything, nothing = frozenset(range(len(piece.slices))), torch.zeros(servers.layout.length)
    before = servers.values()
    for share in range(2):
        fields = {"unit": share, "step": 0, "share": share, "num_shares": 2, "count": 0}
        servers.push(nothing, 0, unused=everything, **fields)
    assert torch.equal(servers.values(), before)
    assert not servers.optimizer_state().tensors
    gradient = gradients(1, servers.layout.length)[0][0]
    fields = {"step": 1, "num_shares": 2}
    servers.push(nothing, 0, unit=2, share=0, count=0, unused=everything, **fields)
    servers.push(gradient, 0, unit=3, share=1, count=4, **fields)
    alone = Servers(make_model(), "Adam", num_servers=1)
    alone.push(gradient, 0, unit=0, step=1, share=0, num_shares=1)
    assert torch.equal(servers.values(), alone.values())


def fixed_shard() -> ParameterShard:
    layout = make_layout(make_model(), 1, can_split=True)
    settings = ParameterServerSettings()
    return ParameterShard(
        layout.pieces, lambda piece: torch.zeros(piece.length), recipe_for("SGD"), settings, FixedSum(2, 2)
    )


def test_buffers_of_a_step_that_is_over_change_nothing() -> None:
    """Sent again by a worker that was given up, after the step was applied."""
    shard = fixed_shard()
    for step in range(2):
        for share in range(2):
            shard.agree_on_extras(step, share, 2, {"mean": torch.tensor([step + share / 2])})
        shard.apply_pending_extras(step)
    for share in range(2):
        shard.agree_on_extras(0, share, 2, {"mean": torch.tensor([9.0])})
    assert not shard.waits_for_extras(5)
    assert torch.equal(shard.agreed["mean"], torch.tensor([1.25]))


def test_a_second_that_is_given_the_buffers_again_has_those_of_the_first() -> None:
    """Handing over failed in the middle the first time, and the first server has moved on since."""
    first, second = fixed_shard(), fixed_shard()
    first.agreed = {"mean": torch.zeros(1)}
    first.agree_on_extras(0, 1, 2, {"mean": torch.tensor([1.0])})
    second.restore_extras(first.dump_extras())
    first.agree_on_extras(0, 0, 2, {"mean": torch.tensor([3.0])})
    second.restore_extras(first.dump_extras())
    second.apply_pending_extras(0)
    assert torch.equal(second.agreed["mean"], torch.tensor([2.0]))


def test_how_old_the_gradients_of_each_worker_are_is_taken_once() -> None:
    servers = Servers(make_model(), num_servers=1, staleness="unbounded")
    gradient = torch.zeros(servers.layout.length)
    for unit, (worker, base) in enumerate([("worker-0", 0), ("worker-1", 0), ("worker-1", 0), ("worker-0", 3)]):
        servers.push(gradient, 0, unit=unit, step=unit, share=0, num_shares=1, base=base, worker=worker)
    (shard,) = servers.shards
    assert shard.take_ages() == {"worker-0": (2, 0, 0), "worker-1": (2, 3, 2)}
    assert shard.take_ages() == {}
