"""Kinds of change: globals of the script, and names in other modules."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ._stale_case import Case, Change, Run, attribute, item, kind, reads

script_scale = 1.0
SETTINGS = {"model": {"scale": 1.0}}


def global_factor() -> float:
    """Return the factor of a global."""
    return script_scale


def by_global(run: Run) -> Change:
    """Return the change that sets a global of this file, which the run restores."""
    run.set_item(globals(), "script_scale", 1.0)
    return item(globals(), "script_scale")


# --- globals ---------------------------------------------------------------------------------------------------------


@kind
def global_of_the_script(run: Run) -> Case:
    return reads(run, lambda self: script_scale, by_global(run))


@kind
def global_that_a_function_reads(run: Run) -> Case:
    return reads(run, lambda self: global_factor(), by_global(run))


@kind
def value_in_a_global_dict(run: Run) -> Case:
    run.set_item(SETTINGS["model"], "scale", 1.0)
    return reads(run, lambda self: SETTINGS["model"]["scale"], item(SETTINGS["model"], "scale"))


@kind
def global_by_globals(run: Run) -> Case:
    return reads(run, lambda self: globals()["script_scale"], by_global(run))


@kind
def global_by_the_table_of_modules(run: Run) -> Case:
    return reads(run, lambda self: sys.modules[__name__].script_scale, by_global(run))


@kind
def global_by_an_imported_module(run: Run) -> Case:
    return reads(run, lambda self: importlib.import_module(__name__).script_scale, by_global(run))


@kind
def global_by_eval(run: Run) -> Case:
    return reads(run, lambda self: eval("script_scale"), by_global(run))


@kind
def global_function_replaced(run: Run) -> Case:
    run.set_item(globals(), "global_factor", global_factor)
    return reads(run, lambda self: global_factor(), lambda f: item(globals(), "global_factor")(lambda: f))


@kind
def name_in_builtins(run: Run) -> Case:
    run.set_attribute(builtins, "STALE_SCALE", 1.0)
    return reads(run, lambda self: STALE_SCALE, attribute(builtins, "STALE_SCALE"))  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def factor_set(to: float) -> Generator[None]:
    """Set the global factor inside."""
    global script_scale  # noqa: PLW0603
    before, script_scale = script_scale, to
    try:
        yield
    finally:
        script_scale = before


@kind
def global_set_around_the_step(run: Run) -> Case:
    now = [1.0]
    case = reads(run, lambda self: script_scale, item(now, 0))
    return Case(case.model, case.change, around=lambda: factor_set(now[0]))


# --- modules ---------------------------------------------------------------------------------------------------------


def settings_module(run: Run) -> Any:
    """Return a module that can be imported until the run ends."""
    settings: Any = ModuleType("stale_settings")
    settings.scale, settings.__file__ = 1.0, __file__
    run.set_item(sys.modules, "stale_settings", settings)
    return settings


@kind
def module_imported_in_forward(run: Run) -> Case:
    def read(self: Any) -> float:
        import stale_settings  # pyright: ignore[reportMissingImports]

        return stale_settings.scale

    return reads(run, read, attribute(settings_module(run), "scale"))


@kind
def name_imported_from_a_module_in_forward(run: Run) -> Case:
    def read(self: Any) -> float:
        from stale_settings import scale  # pyright: ignore[reportMissingImports]

        return scale

    return reads(run, read, attribute(settings_module(run), "scale"))


@kind
def function_of_another_module_replaced(run: Run) -> Case:
    settings = settings_module(run)
    settings.factor = lambda: 1.0
    return reads(run, lambda self: settings.factor(), lambda factor: setattr(settings, "factor", lambda: factor))


@kind
def module_in_the_table_of_modules_replaced(run: Run) -> Case:
    settings_module(run)

    def read(self: Any) -> float:
        import stale_settings  # pyright: ignore[reportMissingImports]

        return stale_settings.scale

    def change(factor: float) -> None:
        other: Any = ModuleType("stale_settings")
        other.scale = factor
        sys.modules["stale_settings"] = other

    return reads(run, read, change)
