"""Parameters chosen by patterns of their names: groups of the optimizer, and what is not trained.

A pattern is a regular expression that is searched for in the name, as in `re.search`: "bias|norm", "^features".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cordee.core.errors import JobError, nearest


@dataclass(frozen=True)
class GroupRule:
    """Settings of the parameters whose names match."""

    key: str  # of the job file
    pattern: re.Pattern[str]
    settings: Mapping[str, Any]


def read_groups(value: Any) -> tuple[GroupRule, ...]:
    """Return the rules of `[[optimizer.groups]]`. Raises JobError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, Mapping) for one in value):
        raise JobError(f"optimizer.groups = {value!r} must be tables: write [[optimizer.groups]] and match = '…' below")
    rules = []
    for number, table in enumerate(value):
        key = f"optimizer.groups[{number}]"
        if "match" not in table:
            raise JobError(f"{key} needs the key 'match'{nearest_of(table, 'match')}: a pattern of parameter names")
        settings = {name: setting for name, setting in table.items() if name != "match"}
        if not settings:
            raise JobError(f"{key} sets nothing: give it settings of the optimizer, such as weight_decay = 0.0")
        rules.append(GroupRule(key, compile_pattern(f"{key}.match", table["match"]), settings))
    return tuple(rules)


def nearest_of(table: Mapping[str, Any], wanted: str) -> str:
    """Return a hint at a key that may be a misspelt one."""
    return next((f" (not '{key}')" for key in table if nearest(key, [wanted])), "")


def compile_pattern(key: str, pattern: Any) -> re.Pattern[str]:
    """Return a pattern of names. Raises JobError that names the key."""
    if not isinstance(pattern, str) or not pattern:
        raise JobError(f"{key} = {pattern!r} must be a pattern of parameter names, such as 'bias|norm'")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise JobError(f"{key} = {pattern!r} is not a regular expression: {error}") from None


def divide(
    named_parameters: Iterable[tuple[str, Tensor]], rules: Sequence[GroupRule]
) -> list[tuple[GroupRule | None, list[tuple[str, Tensor]]]]:
    """Return the parameters of each group, those that no rule matches first. The first rule that matches counts."""
    divided: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in named_parameters:
        number = next((i for i, rule in enumerate(rules) if rule.pattern.search(name)), -1)
        divided.setdefault(number, []).append((name, parameter))
    return [(rules[number] if number >= 0 else None, divided[number]) for number in sorted(divided)]


def require_matches(rules: Sequence[GroupRule], model: nn.Module) -> None:
    """Raise JobError for a rule that changes nothing: its pattern matches no parameter, or none that is left to it."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    used = {rule.key for rule, _ in divide(trained, rules) if rule is not None}
    for rule in rules:
        if rule.key in used:
            continue
        if earlier := [name for name, _ in trained if rule.pattern.search(name)]:
            taken = next(other for other in rules if other.pattern.search(earlier[0]))
            raise JobError(
                f"{rule.key}.match = {rule.pattern.pattern!r} matches parameters that an earlier group has already "
                f"('{earlier[0]}' is in {taken.key}; the first pattern that matches counts): put it before"
            )
        _refuse(f"{rule.key}.match", rule.pattern, model)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let the parameters whose names match stay as they are. Raises JobError for a pattern that matches none."""
    for number, text in enumerate(patterns):
        pattern = compile_pattern(f"training.freeze[{number}]", text)
        found = [parameter for name, parameter in _all_names(model) if pattern.search(name)]
        if not found:
            _refuse(f"training.freeze[{number}]", pattern, model)
        for parameter in found:
            parameter.requires_grad_(False)


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _refuse(key: str, pattern: re.Pattern[str], model: nn.Module) -> None:
    named = _all_names(model)
    matched = [(name, parameter) for name, parameter in named if pattern.search(name)]
    if matched:
        name, parameter = matched[0]
        if not parameter.requires_grad:
            raise JobError(f"{key} = {pattern.pattern!r} matches '{name}' and others that are not trained: remove it")
        first = next(other for other, own in model.named_parameters() if own is parameter)
        raise JobError(f"{key} = {pattern.pattern!r} matches '{name}', which is the parameter '{first}': match that")
    names = [name for name, _ in named]
    shown = ", ".join(f"'{name}'" for name in names[:6])
    others = f" and {len(names) - 6} others" if len(names) > 6 else ""
    hint = nearest(pattern.pattern, names)
    raise JobError(
        f"{key} = {pattern.pattern!r} matches no parameter of the model{hint} (it has {shown}{others}; patterns are "
        "regular expressions that are searched for in the name)"
    )
