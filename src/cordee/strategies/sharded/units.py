"""Which modules are gathered together: decided by size, without torch's sharding."""

from __future__ import annotations

from collections import Counter

from torch import nn


def choose_units(model: nn.Module, unit_bytes: int) -> list[nn.Module]:
    """Return the modules whose parameters are gathered and freed as one, inner ones first, the model itself last.

    A module is a unit if it has at least `unit_bytes` of parameters that no unit inside it has. A parameter that is
    used in several places belongs to the smallest module around all of them. So each is in one unit only.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Choose among what is inside; return the bytes left over for the module around it."""
        own_uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        has_shared = any(count < uses[key] for key, count in own_uses.items())
        left = sum(visit(child) for child in module.children())
        left += sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        # A list of modules is never called itself, and gathering happens when a unit is called.
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if module is model or has_shared or not is_called or left < unit_bytes:
            return left
        units.append(module)
        return 0

    visit(model)
    return [*units, model]
