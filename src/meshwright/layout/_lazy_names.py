"""Packages that import their public names at the first use, so that a command loads only the modules that it needs."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import resolve_name
from types import ModuleType
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose `__init__` imports its names under `if TYPE_CHECKING:`.

    These imports are the only list of names and modules: type checkers read it, and so does this function. Each use of
    a name takes it from its module.
    """
    origins = dict(imports_for_type_checkers(sys.modules[package]))

    def import_name(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        origin, original = origins[name]
        return getattr(import_module(origin), original)

    return import_name


def imports_for_type_checkers(package: ModuleType) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (name, (module, name there)) of the imports of a package under `if TYPE_CHECKING:`.

    >>> import meshwright.layout
    >>> dict(imports_for_type_checkers(meshwright.layout))["Shard"]
    ('meshwright.layout._placement', 'Shard')
    """
    for statement in ast.parse(inspect.getsource(package)).body:
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"):
            continue
        for each in statement.body:
            if isinstance(each, ast.ImportFrom):
                origin = resolve_name("." * each.level + (each.module or ""), package.__name__)
                yield from ((alias.asname or alias.name, (origin, alias.name)) for alias in each.names)
