"""How the layers of a model are split over workers that compute the same batch: which, and along which side. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from cordee.core.errors import JobError, ModelError, nearest
from cordee.models.cutting import Block, Chain, Wire
from cordee.models.gpt import CausalSelfAttention

# column  outputs are split: takes whole activations, gives a slice of them   (an embedding: whole)
# row     inputs are split: takes a slice of the activations, gives whole ones (an embedding: splits the vocabulary)
# gather  as column, and the slices of the outputs are put together
# scatter as row, and takes whole activations
Style = Literal["column", "row", "gather", "scatter"]

_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Dropout, nn.Identity)
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


class CannotSliceError(ModelError):
    """The model has layers for which there is no style."""


def choose_slicing(model: nn.Module, num_slices: int, given: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style of each layer that is split, by name; the others stay whole on every worker.

    `given` maps name patterns to styles; without it there is a plan for perceptrons and for `gpt`. Raises JobError or
    ModelError for layers that cannot be split, and where there is no plan.
    """
    plan = _by_patterns(model, given) if given else _by_kind(model, num_slices)
    for name, style in plan.items():
        _check_divides(name, model.get_submodule(name), style, num_slices)
    return plan


def check_called(chain: Chain, model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Raise ModelError if a block uses the weight of a layer that is split without calling the layer."""
    layers = {id(model.get_submodule(name)) for name in plan}
    names = {id(p): name for name in plan for p in model.get_submodule(name).parameters(recurse=False)}
    for block in chain.blocks:
        for module in (inner for outer in block.modules for inner in outer.modules()):
            for parameter in module.parameters(recurse=False):
                if id(parameter) in names and id(module) not in layers:
                    raise ModelError(
                        f"block '{block.name}' uses the weight of '{names[id(parameter)]}' without calling the layer, "
                        "as traced models may, so that it cannot be sliced: leave it out of strategy.plan, write the "
                        "model as an nn.Sequential of blocks, or use a strategy.mesh that cuts or slices it only"
                    )


def keep_pairs(chain: Chain, model: nn.Module, plan: Mapping[str, Style]) -> Chain:
    """Return the chain with blocks joined where slices of activations pass from a 'column' layer to its 'row' one."""
    styles = {id(model.get_submodule(name)): style for name, style in plan.items()}
    blocks: list[Block] = []
    wires: list[Wire] = []
    is_open = False
    for block, wire in zip(chain.blocks, chain.wires, strict=True):
        if is_open:
            blocks[-1], wires[-1] = blocks[-1] + block, wire
        else:
            blocks.append(block)
            wires.append(wire)
        for module in (inner for outer in block.modules for inner in outer.modules()):
            if isinstance(module, nn.Linear) and id(module) in styles:
                is_open = styles[id(module)] == "column"
    return Chain(tuple(blocks), tuple(wires))


def _by_patterns(model: nn.Module, given: Mapping[str, Style]) -> dict[str, Style]:
    modules = {name: module for name, module in model.named_modules() if name}
    plan: dict[str, Style] = {}
    for pattern, style in given.items():
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            raise JobError(f"strategy.plan names '{pattern}', which no layer has{nearest(pattern, modules)}")
        for name in found:
            if not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                raise JobError(
                    f"strategy.plan gives '{name}' the style '{style}', and it is a {type(modules[name]).__name__}: "
                    "only linear layers and embeddings are split"
                )
            if isinstance(modules[name], nn.Embedding) and style not in ("column", "row"):
                raise JobError(f"strategy.plan gives the embedding '{name}' the style '{style}': use 'column' or 'row'")
            plan[name] = style
    return plan


def _by_kind(model: nn.Module, num_slices: int) -> dict[str, Style]:
    for name, module in model.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            raise CannotSliceError(f"linear layers, attention and embeddings are split, and '{name}' is a convolution")
    if any(isinstance(module, CausalSelfAttention) for module in model.modules()):
        return _slice_gpt(model, num_slices)
    leaves = [module for module in model.modules() if not list(module.children())]
    is_chain = type(model) is nn.Sequential and all(
        isinstance(leaf, (nn.Linear, nn.Flatten, *_ELEMENTWISE)) for leaf in leaves
    )
    if not is_chain:
        raise ModelError(
            f"Cordée has no plan for models of the class {type(model).__name__}: give one by the names of "
            'layers, as in strategy.plan = {"layers.*.expand" = "column", "layers.*.project" = "row"}'
        )
    return _slice_perceptron(model, num_slices)


def _slice_perceptron(model: nn.Module, num_slices: int) -> dict[str, Style]:
    """Pairs of column and row: one exchange for two layers. A layer that has no partner exchanges for itself."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan: dict[str, Style] = {}
    at = 0
    while at < len(layers):
        name, layer = layers[at]
        if at + 1 < len(layers) and layer.out_features % num_slices == 0:
            plan[name], plan[layers[at + 1][0]] = "column", "row"
            at += 2
            continue
        if layer.out_features % num_slices == 0:
            plan[name] = "gather"
        elif layer.in_features % num_slices == 0:
            plan[name] = "scatter"
        at += 1
    if not plan:
        raise ModelError(
            f"no layer of the model divides by {num_slices} workers: choose widths that do, or fewer workers"
        )
    return plan


def _slice_gpt(model: nn.Module, num_slices: int) -> dict[str, Style]:
    plan: dict[str, Style] = {}
    for name, module in model.named_modules():
        if isinstance(module, CausalSelfAttention):
            num_heads = module.project.in_features // module.head_width
            if num_heads % num_slices:
                raise ModelError(
                    f"the {num_heads} heads of '{name}' cannot be shared out over {num_slices} workers: set "
                    f"model.num_heads to a multiple of {num_slices}, or use another number of workers"
                )
            plan[f"{name}.query_key_value"], plan[f"{name}.project"] = "column", "row"
        elif name.endswith(".perceptron"):
            plan[f"{name}.expand"], plan[f"{name}.project"] = "column", "row"
    # Both ends have one weight where they are tied, so both are split along the same side: over the vocabulary, where
    # it divides, since putting logits together costs half of adding them up.
    vocabulary = model.get_submodule("output.vocabulary")
    assert isinstance(vocabulary, nn.Linear)
    over_words = vocabulary.out_features % num_slices == 0
    plan["embedding.token"] = "row" if over_words else "column"
    plan["output.vocabulary"] = "gather" if over_words else "scatter"
    return plan


def _check_divides(name: str, layer: nn.Module, style: Style, num_slices: int) -> None:
    splits_outputs = style in ("column", "gather")
    if isinstance(layer, nn.Linear):
        width, side = (layer.out_features, "outputs") if splits_outputs else (layer.in_features, "inputs")
    else:
        assert isinstance(layer, nn.Embedding)
        width, side = (layer.embedding_dim, "columns") if splits_outputs else (layer.num_embeddings, "rows")
    if width % num_slices:
        raise JobError(
            f"the {width} {side} of '{name}' cannot be shared out evenly over {num_slices} workers: change the width, "
            "the number of workers, or its style in strategy.plan"
        )
