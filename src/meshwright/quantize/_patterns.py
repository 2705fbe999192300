"""Patterns that choose layers: names, classes, and regular expressions after "re:"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import nn

from ._errors import QuantizeError

EXPRESSION = "re:"
"""The beginning of a pattern that is a regular expression."""
TARGETS = ("Linear",)
"""The layers that schemes quantize by default."""
IGNORED = ("lm_head",)
"""The layers that schemes leave out by default, if a model has them."""


def check_patterns(argument: str, patterns: object) -> None:
    """Raise QuantizeError if the argument is no tuple of patterns."""
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(pattern, str) for pattern in patterns):
        fix = f"({patterns!r},)" if isinstance(patterns, str) else "('re:.*q_proj$', 'lm_head')"
        raise QuantizeError(
            f"layers by {argument}={patterns!r}",
            f"a {type(patterns).__name__}",
            "several patterns are a tuple of strings, and the letters of one string would be patterns",
            f"write {argument}={fix}",
        )
    for pattern in patterns:
        if pattern.startswith(EXPRESSION):
            _check_expression(argument, pattern)


def _check_expression(argument: str, pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix(EXPRESSION))
    except re.error as error:
        raise QuantizeError(
            f"layers by {argument}=({pattern!r},)",
            f"no regular expression: {error}",
            "a pattern after 're:' is a regular expression of Python that matches the name from its beginning",
            f"write {argument}=({_as_expression(pattern.removeprefix(EXPRESSION))!r},)",
        ) from error


def matches(name: str, module: nn.Module, patterns: Iterable[str]) -> bool:
    """True if a pattern is the name, the name of the class, or a regular expression that matches the name."""
    classes = [cls.__name__ for cls in type(module).__mro__]
    return any(
        re.match(p.removeprefix(EXPRESSION), name) is not None
        if p.startswith(EXPRESSION)
        else p == name or p in classes
        for p in patterns
    )


def refuse_unused(
    model: nn.Module, candidates: Mapping[str, nn.Module], targets: tuple[str, ...], ignore: tuple[str, ...]
) -> None:
    """Raise QuantizeError if a target matches none of the candidates, or an ignored pattern no module at all."""
    for target in targets:
        if not any(matches(name, layer, (target,)) for name, layer in candidates.items()):
            raise _unused("targets", target, model, list(candidates))
    modules = {**candidates, **dict(model.named_modules())}
    for pattern in ignore:
        if pattern not in IGNORED and not any(matches(name, module, (pattern,)) for name, module in modules.items()):
            raise _unused("ignore", pattern, model, list(modules))


def _unused(argument: str, pattern: str, model: nn.Module, names: list[str]) -> QuantizeError:
    ends = {name.rpartition(".")[2] for name in names}
    near = get_close_matches(pattern.removeprefix(EXPRESSION).strip(r".*\$^"), [*names, *ends], 1)
    has_stars = "*" in pattern and not pattern.startswith(EXPRESSION)
    return QuantizeError(
        f"layers by {argument} with {pattern!r}",
        f"a {type(model).__name__} without such a layer" + (f"; the nearest name is {near[0]!r}" if near else ""),
        "a pattern is the name of a layer or of a class, or a regular expression after 're:'",
        f"write a regular expression: {_as_expression(pattern)!r}" if has_stars else _fix(near, names),
    )


def _fix(near: list[str], names: list[str]) -> str:
    if not near:
        return "write a name or a class of model.named_modules(), or remove the pattern"
    return f"write {near[0]!r}" if near[0] in names else f"write {EXPRESSION + '.*' + near[0] + '$'!r}"


def _as_expression(pattern: str) -> str:
    """Return the regular expression for a pattern with stars.

    >>> _as_expression("*.q_proj")
    're:.*\\\\.q_proj'
    """
    return EXPRESSION + ".*".join(re.escape(part) for part in pattern.split("*"))
