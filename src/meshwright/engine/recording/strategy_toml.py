"""Read and write strategies as TOML; a strategy that is written and read is equal to the original."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from meshwright.graph import Pass
from meshwright.layout import InputError, read_toml, write_toml

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
    sections = {
        each.name: _changed_fields(value)
        for each in fields(strategy)
        if is_dataclass(value := getattr(strategy, each.name)) and not isinstance(value, Pass)
    }
    found = _changed_fields(strategy) | {name: section for name, section in sections.items() if section}
    if strategy.passes:
        found["passes"] = [{"name": each.name, **_changed_fields(each)} for each in strategy.passes]
    try:
        return write_toml(found).strip()
    except InputError as error:
        raise StrategyError(error.asked, error.found, error.why, error.write) from error


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


def _changed_fields(value: Any) -> dict[str, object]:
    """Return the plain fields that differ from their defaults."""
    items = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "passes"}
    changed = {each.name for each in fields(value) if getattr(value, each.name) != _default(each)}
    return {name: item for name, item in items.items() if name in changed and _is_plain(item)}


def _is_plain(item: object) -> bool:
    """True for a value that TOML holds as one entry; sections are written apart, and None is left out."""
    return item is not None and not is_dataclass(item)


def _default(each: Field[Any]) -> object:
    if each.default is not MISSING:
        return each.default
    return each.default_factory() if each.default_factory is not MISSING else MISSING
