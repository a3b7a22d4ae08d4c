"""A user's model, traced, as a chain of segments between the places where a single tensor passes."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from cordee.core.errors import ModelError
from cordee.models.effects import (
    EffectError,
    check_same_training,
    own_state,
    random_state,
    refuse_replaced_buffers,
    trace_without_effects,
    unchanged,
)

LARGEST_BATCH = 1 << 20  # a graph that is for fewer samples than this has a branch for their number
CUT_ADVICE = "write the model as an nn.Sequential of blocks, or use a strategy that does not cut models"


def trace_chain(model: nn.Module, example: Tensor) -> tuple[list[tuple[str, nn.Module]], str]:
    """Return the segments of the model by the name of their last operation; each takes and gives one tensor.

    With them comes which value is needed for longest, in words: it is what keeps operations together.

    Tried first with torch.fx, which keeps the model's own modules, then with torch.export, which follows what depends
    on shapes. Raises ModelError that names the line that neither can follow.
    """
    traced = _trace(model, example)
    cuts = find_cuts(traced, example)
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    segments: list[tuple[str, nn.Module]] = []
    start: fx.Node = next(node for node in traced.graph.nodes if node.op == "placeholder")
    pending: list[fx.Node] = []
    (result,) = next(node for node in traced.graph.nodes if node.op == "output").args
    for node in nodes:
        pending.append(node)
        if node in cuts or node is nodes[-1]:
            end = cuts.get(node, result)
            segments.append((_name(node), _segment(traced, pending, start, end)))
            start, pending = end, []
    return segments, _find_bond(traced)


def _find_bond(traced: fx.GraphModule) -> str:
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    spans = [
        (order[user] - order[node], node, user)
        for node in traced.graph.nodes
        for user in node.users
        if node.op != "get_attr" and user.op != "output"
    ]
    if not spans:
        return ""
    _, node, user = max(spans, key=lambda span: span[0])
    source = f"the input '{node.name}'" if node.op == "placeholder" else f"what '{_name(node)}' gives"
    return f"{source} is needed again by '{_name(user)}'"


def find_cuts(traced: fx.GraphModule, example: Tensor) -> dict[fx.Node, fx.Node]:
    """Return after which operations exactly one tensor is needed by what follows, and which."""
    tensors = _find_tensors(traced, example)
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in traced.graph.nodes}
    cuts: dict[fx.Node, fx.Node] = {}
    alive: list[fx.Node] = []
    for node in traced.graph.nodes:
        if node.op in ("get_attr", "output"):  # weights are there where they are used
            continue
        alive = [one for one in [*alive, node] if last_use[one] > order[node]]
        if node.op != "placeholder" and len(alive) == 1 and alive[0] in tensors:
            cuts[node] = alive[0]  # what is changed in place afterwards is found when the segments are tried
    return cuts


def _trace(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """Return a graph that trains as the model does.

    Of torch.fx, else of torch.export, else of torch.fx with what it cannot trace kept whole.
    """
    two = example[torch.arange(2) % len(example)]  # torch.export takes a batch of one for a constant
    attempts: list[Callable[[], fx.GraphModule]] = [
        lambda: trace_without_effects(model, keep_untraceable=False),
        lambda: _export(model, two),
        lambda: trace_without_effects(model, keep_untraceable=True),
    ]
    errors: list[Exception] = []
    was_training = model.training
    model.train()  # what asks for the mode in the forward pass is traced as it is trained
    try:
        for attempt in attempts:
            try:
                traced = attempt()
                check_same_training(model, traced, two)
                return traced
            except Exception as error:  # noqa: BLE001 - torch raises anything it likes, and may export what it cannot trace
                errors.append(error)
    finally:
        model.train(was_training)
    first = errors[0]  # the one a reader can follow
    place = "" if isinstance(first, EffectError) else _place(first)
    raise ModelError(
        f"the model {type(model).__name__} cannot be traced, so it cannot be cut into stages: "
        f"{_first_line(first)}{place}: {CUT_ADVICE}"
    ) from first


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, torch does not print the graphs and warnings that it has for what it cannot export."""
    threshold = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(threshold)


def _export(model: nn.Module, two: Tensor) -> fx.GraphModule:
    refuse_replaced_buffers(model, two)
    batch = {0: torch.export.Dim.DYNAMIC}
    before = random_state()
    states = [own_state(module, only_plain=True) for module in model.modules()]
    with unchanged(model), _silence():
        exported = torch.export.export(model, (two,), dynamic_shapes=(batch,), strict=False)
        if random_state() != before:
            raise EffectError("the forward pass draws random numbers while it is exported")
        if states != [own_state(module, only_plain=True) for module in model.modules()]:
            raise EffectError("the forward pass changes attributes of its modules")
    for bounds in exported.range_constraints.values():
        if bounds.lower > 2 or bounds.upper < LARGEST_BATCH:
            raise EffectError(f"the forward pass depends on the number of samples ({bounds.lower} to {bounds.upper})")
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert parameter is own[name], f"torch.export has copied '{name}'"
    return module


def _find_tensors(traced: fx.GraphModule, example: Tensor) -> set[fx.Node]:
    """Run the graph once and return the nodes whose value is a tensor."""
    found: set[fx.Node] = set()

    class Watcher(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            value: object = super().run_node(node)
            if isinstance(value, Tensor) and value.ndim:
                found.add(node)
            return value

    modules = list(traced.modules())
    modes = [module.training for module in modules]
    for module in modules:  # not eval(), which what torch.export makes refuses
        module.training = False
    try:
        with torch.no_grad():
            Watcher(traced).run(example)
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return found


def _segment(traced: fx.GraphModule, nodes: Iterable[fx.Node], start: fx.Node, end: fx.Node) -> nn.Module:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {start: graph.placeholder("inputs")}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", f"{node} comes from another segment"
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copy_of(end))
    return fx.GraphModule(traced, graph)


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _place(error: BaseException) -> str:
    """Return the line of the user's own code that could not be followed."""
    frames = traceback.extract_tb(error.__traceback__)
    folders = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    own = [frame for frame in frames if not frame.filename.startswith((*folders, "<"))]
    return f" (at {own[-1].filename}:{own[-1].lineno}, {own[-1].line!r})" if own else ""
