"""A model as a chain of blocks, and where the chain is cut into stages: by time, or by hand."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from cordee.core.errors import JobError, ModelError, nearest
from cordee.models.effects import (
    EffectError,
    check_same_training,
    own_state,
    random_state,
    refuse_python_state,
    refuse_replaced_buffers,
    trace_without_effects,
    unchanged,
)


def cut_by_time(times: Sequence[float], num_stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets, so that the slowest stage is as fast as it can be.

    Among the cuts that are equally good in this the most even one is taken. Every stage gets at least one block.
    """
    num_blocks = len(times)
    assert 1 <= num_stages <= num_blocks
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    # best[k][n]: the slowest stage, the sum of squares, and where the last of k stages over n blocks starts
    best = [[(float("inf"), float("inf"), 0)] * (num_blocks + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0.0, 0)
    for k in range(1, num_stages + 1):
        for n in range(k, num_blocks - (num_stages - k) + 1):
            best[k][n] = min(
                (max(best[k - 1][m][0], sums[n] - sums[m]), best[k - 1][m][1] + (sums[n] - sums[m]) ** 2, m)
                for m in range(k - 1, n)
            )
    counts: list[int] = []
    end = num_blocks
    for k in range(num_stages, 0, -1):
        start = best[k][end][2]
        counts.append(end - start)
        end = start
    return counts[::-1]


def cut_by_hand(blocks: Sequence[Sequence[str]], placement: Sequence[Sequence[str]]) -> list[int]:
    """Return how many consecutive blocks each stage gets where its modules are named, by patterns like "layer[1-3]".

    `blocks` are the names of the modules of each. A name also stands for the modules inside it. Raises JobError for
    names that no module has, for modules that are in no stage or in two, for stages that are empty or not runs of
    consecutive blocks, and where a block would be cut apart.
    """
    names = [name for block in blocks for name in block]
    stage_of: dict[str, int] = {}
    unused = {pattern for patterns in placement for pattern in patterns}
    for name in names:
        found = [(k, p) for k, patterns in enumerate(placement) for p in patterns if _matches(name, p)]
        unused -= {pattern for _, pattern in found}
        stages = sorted({stage for stage, _ in found})
        if len(stages) != 1:
            where = f"in stages {', '.join(map(str, stages))}" if stages else "in no stage"
            raise JobError(
                f"strategy.placement puts block '{name}' {where}: it must be in one (blocks: {listed(names)})"
            )
        stage_of[name] = stages[0]
    if unused:
        pattern = sorted(unused)[0]
        raise JobError(f"strategy.placement names '{pattern}', which no block has{nearest(pattern, names)}")
    for stage in range(len(placement)):
        if stage not in stage_of.values():
            raise JobError(f"strategy.placement gives stage {stage} no blocks: name some, or remove it")
    for before, after in itertools.pairwise(names):
        if stage_of[after] not in (stage_of[before], stage_of[before] + 1):
            raise JobError(
                f"strategy.placement puts block '{after}' into stage {stage_of[after]} after one of stage "
                f"{stage_of[before]}: stages must be runs of consecutive blocks, in order (blocks: {listed(names)})"
            )
    for first, *others in blocks:
        for other in others:
            if stage_of[other] != stage_of[first]:
                raise JobError(
                    f"strategy.placement puts '{first}' and '{other}' into different stages, and they cannot be cut "
                    "apart, since one changes the other's output in place or takes slices of it: put them into one"
                )
    return [sum(stage_of[block[0]] == stage for block in blocks) for stage in range(len(placement))]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return the names as one text that is not too long."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


# A model as a chain of blocks: what may be cut apart, and what passes from one block to the next.
#
# A block takes one tensor and gives one. Residual skips are inside blocks. A plain `nn.Sequential` is a chain of its
# children, sequences inside it included; other models are traced (`trace_chain`).


@dataclass(frozen=True)
class Block:
    """Modules that are computed one after the other and are never cut apart."""

    names: tuple[str, ...]  # of its modules
    modules: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def __call__(self, inputs: Tensor) -> Tensor:
        for module in self.modules:
            inputs = module(inputs)
        return inputs

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def buffers(self) -> list[Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers()]

    def __add__(self, other: Block) -> Block:
        return Block(self.names + other.names, self.modules + other.modules)


@dataclass(frozen=True)
class Wire:
    """What a block gives for a batch of any size: each dimension is `base` + `per_sample` · samples."""

    base: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, num_samples: int) -> tuple[int, ...]:
        return tuple(base + slope * num_samples for base, slope in zip(self.base, self.per_sample, strict=True))


@dataclass(frozen=True)
class Chain:
    """Blocks in order; `wires[i]` is what block i gives."""

    blocks: tuple[Block, ...]
    wires: tuple[Wire, ...]
    bond: str = ""  # of a traced model: what keeps most of it together, in words


def make_chain(model: nn.Module, example: Tensor) -> Chain:
    """Return the model as a chain of as many blocks as possible. Local; the model is left as it was.

    Raises ModelError, with the operation and what to do, if the model is none.
    """
    with unchanged(model):
        bond = ""
        if has_hooks(model):
            raise ModelError(
                f"the model {type(model).__name__} has a hook, which does not run where its layers are computed one by "
                "one: register the hook on a layer, or use a strategy that does not cut models"
            )
        if type(model) is nn.Sequential:
            named = flatten_sequence(model)
        else:
            named, bond = trace_chain(model, example)
        blocks = [Block((name,), (module,)) for name, module in named]
        if not blocks:
            raise ModelError("the model has no layers: there is nothing to cut")
        try:
            refuse_python_state(model, repeat_to(example, 2))
        except EffectError as error:
            raise ModelError(f"the model {type(model).__name__} cannot be cut into stages: {error}") from error
        model.eval()
        return replace(_join_inseparable(blocks, example), bond=bond)


def flatten_sequence(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules of a sequence by name, those of sequences inside it in their place."""
    flat: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():  # named_children() would leave out a module that is used again
        assert child is not None
        # A subclass may have a forward of its own.
        if type(child) is nn.Sequential and not has_hooks(child):
            flat += flatten_sequence(child, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, child))
    return flat


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called when the module is computed as a whole, forwards or backwards."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _join_inseparable(blocks: Sequence[Block], example: Tensor) -> Chain:
    """Join what cannot be cut: before a block that changes its input in place, after one that gives no tensor."""
    kept: list[Block] = []
    wires: list[Wire | None] = []
    small: Any = repeat_to(example, 2)
    large: Any = repeat_to(example, 3)
    for block in blocks:
        if kept and (wires[-1] is None or _changes_input(block, small)):
            kept[-1] = kept[-1] + block
            del wires[-1]
        else:
            kept.append(block)
        small, large = _output(block, small), _output(block, large)
        is_wire = isinstance(small, Tensor) and isinstance(large, Tensor) and small.ndim == large.ndim
        wires.append(_wire(small, large) if is_wire else None)
    complete = [wire for wire in wires if wire is not None]
    if len(complete) < len(wires):
        raise ModelError(f"block '{kept[-1].name}' at the end of the model does not give a tensor")
    return Chain(tuple(kept), tuple(complete))


def _changes_input(block: Block, inputs: Tensor) -> bool:
    """Whether the block changes its input in place, which the first block of a stage must not."""
    if getattr(block.modules[0], "inplace", False):
        return True
    if not inputs.is_floating_point():
        return False
    try:
        with torch.enable_grad():
            block(inputs.detach().clone().requires_grad_())
    except RuntimeError as error:
        return "in-place" in str(error)
    return False


def _output(block: Block, inputs: Any) -> Any:
    try:
        with torch.no_grad():
            return block(inputs)
    except Exception as error:
        raise ModelError(f"block '{block.name}' cannot be computed by itself: {error}") from error


def _wire(small: Tensor, large: Tensor) -> Wire:
    """Infer from batches of 2 and of 3 samples how a shape grows with the batch."""
    slopes = tuple(b - a for a, b in zip(small.shape, large.shape, strict=True))
    return Wire(tuple(a - 2 * slope for a, slope in zip(small.shape, slopes, strict=True)), slopes, small.dtype)


def repeat_to(example: Tensor, num_samples: int) -> Tensor:
    """Return a batch of `num_samples` made of the samples of `example`, over and over."""
    return example[torch.arange(num_samples) % len(example)]


# A user's model, traced, as a chain of segments between the places where a single tensor passes.

LARGEST_BATCH = 1 << 20  # a graph that is for fewer samples than this has a branch for their number
CUT_ADVICE = "write the model as an nn.Sequential of blocks, or use a strategy that does not cut models"


def trace_chain(model: nn.Module, example: Tensor) -> tuple[list[tuple[str, nn.Module]], str]:
    """Return the segments of the model by the name of their last operation; each takes and gives one tensor.

    With them comes which value is needed for longest, in words: it is what keeps operations together.

    Tried first with torch.fx, which keeps the model's own modules, then with torch.export, which follows what depends
    on shapes. Raises ModelError that names the line that neither can follow.
    """
    traced, why_not_one = _trace(model, example)
    cuts = find_cuts(traced, repeat_to(example, 2))
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
    if why_not_one:
        segments[0][1].register_forward_pre_hook(functools.partial(_refuse_one_sample, why_not_one))
    return segments, _find_bond(traced)


def _refuse_one_sample(why: str, segment: nn.Module, inputs: tuple[Tensor]) -> None:
    if len(inputs[0]) == 1 and torch.is_grad_enabled():
        raise ValueError(why)


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


def _trace(model: nn.Module, example: Tensor) -> tuple[fx.GraphModule, str]:
    """Return a graph that trains as the model does, and why it cannot train on a single sample, if it cannot.

    Of torch.fx, else of torch.export, else of torch.fx with what it cannot trace kept whole.
    """
    two = repeat_to(example, 2)  # torch.export takes a batch of one for a constant
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
                return traced, _why_not_one(model, traced, repeat_to(example, 1))
            except Exception as error:  # noqa: BLE001 - torch raises anything it likes, and may export what it cannot trace
                errors.append(error)
    finally:
        model.train(was_training)
    first = errors[0]  # the one a reader can follow
    said = str(first).strip().partition("\n")[0]
    place = "" if isinstance(first, EffectError) else _place(first)
    raise ModelError(
        f"the model {type(model).__name__} cannot be traced, so it cannot be cut into stages: "
        f"{said}{place}: {CUT_ADVICE}"
    ) from first


def _why_not_one(model: nn.Module, traced: fx.GraphModule, one: Tensor) -> str:
    """Return why a single sample must not go through the graph, in words.

    torch.export follows the model with two samples or more. What is otherwise for one is not in the graph: other
    branches, and the check of batch norms, whose variances of one sample are not finite.
    """
    try:
        check_same_training(model, traced, one)
    except EffectError as error:
        return f"with a single sample {error}: use fewer micro-batches, or a larger training.batch_size"
    except Exception as error:  # noqa: BLE001 - whatever the model says about a single sample
        return str(error)
    return ""


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


def _place(error: BaseException) -> str:
    """Return the line of the user's own code that could not be followed."""
    frames = traceback.extract_tb(error.__traceback__)
    folders = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    own = [frame for frame in frames if not frame.filename.startswith((*folders, "<"))]
    return f" (at {own[-1].filename}:{own[-1].lineno}, {own[-1].line!r})" if own else ""
