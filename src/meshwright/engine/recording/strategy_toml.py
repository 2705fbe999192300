"""Read and write strategies as TOML; a strategy that is written and read is equal to the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from meshwright.graph import Pass
from meshwright.layout import InputError, read_toml
from meshwright.search import quoted

from .._errors import StrategyError
from .strategy import Strategy


def strategy_to_toml(strategy: Strategy) -> str:
    """Return the options that differ from their defaults, as TOML. Raises StrategyError if `layouts` are set.

    >>> print(strategy_to_toml(Strategy(compiler="inductor")))
    compiler = "inductor"
    """
    if strategy.layouts is not None:
        raise StrategyError(
            "a strategy in TOML",
            "layouts, which refer to meshes",
            "TOML cannot express a mesh",
            "write str(dist_model.layouts) to its own file, and read it with parse_layouts(text, mesh)",
        )
    lines = [*_lines(strategy)]
    for section in fields(strategy):
        value = getattr(strategy, section.name)
        if is_dataclass(value) and not isinstance(value, Pass):
            body = [*_lines(value)]
            lines += ["", f"[{section.name}]", *body] if body else []
    for each in strategy.passes:
        lines += ["", "[[passes]]", f'name = "{each.name}"', *_lines(each)]
    return "\n".join(lines).strip()


def strategy_from_toml(text: str) -> Strategy:
    """Return the strategy that a TOML text describes.

    Raises:
        StrategyError: the text is no TOML, or a key is unknown; the message names the closest match.

    >>> strategy_from_toml("[sharding]\\nenable = true\\nstage = 2").sharding.stage
    2
    """
    try:
        found = read_toml(text)
    except InputError as error:
        raise StrategyError(
            "a strategy in TOML", error.found, error.why, 'write lines such as compiler = "inductor"'
        ) from error
    return Strategy.of(**found)


def _lines(value: Any) -> Iterator[str]:
    """Yield lines for the plain fields that differ from their defaults."""
    for each in fields(value):
        item = getattr(value, each.name)
        if item != _default(each) and not is_dataclass(item) and each.name != "passes" and item is not None:
            yield f"{each.name} = {_written(item, each.name)}"


def _default(each: Field[Any]) -> object:
    if each.default is not MISSING:
        return each.default
    return each.default_factory() if each.default_factory is not MISSING else MISSING


def _written(item: object, name: str) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, int):
        return repr(int(item))
    if isinstance(item, float):
        return repr(float(item))  # a number of NumPy shows its type
    if isinstance(item, str):
        return quoted(item)
    if isinstance(item, (tuple, list)):
        return "[" + ", ".join(_written(v, name) for v in item) + "]"
    raise StrategyError(
        f"{name} in TOML",
        type(item).__name__,
        "TOML holds numbers, strings, and lists of them",
        "use a value of such a type",
    )
