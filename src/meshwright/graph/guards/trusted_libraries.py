"""Trusted libraries: values that their functions read are not guarded as settings of a training step.

Trusted are torch, NumPy, SymPy, the standard library, this package without its models, and the runners of tests and
notebooks. The state that torch reads is compared separately (`backend_flags`). All other code counts, including
installed packages.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from os import sep
from pathlib import Path
from sysconfig import get_paths
from typing import Any

TRUSTED = frozenset(
    {
        *("torch", "functorch", "torchgen", "numpy", "sympy", "mpmath", "networkx", "meshwright"),
        *("pytest", "_pytest", "pluggy", "hypothesis", "xdist", "execnet", "IPython", "ipykernel", "traitlets"),
    }
)
_SITES = tuple({get_paths()[name] + sep for name in ("purelib", "platlib")})
_PYTHON = tuple({get_paths()[name] + sep for name in ("stdlib", "platstdlib")})
_OWN = str(Path(__file__).parents[2]) + sep
_MODELS = "meshwright.models"


@lru_cache(maxsize=16384)
def is_trusted_file(filename: str) -> bool:
    """True if the file belongs to a trusted library."""
    if filename.startswith(_OWN):
        return not filename.startswith(f"{_OWN}models{sep}")
    for site in _SITES:
        if filename.startswith(site):
            return filename[len(site) :].split(sep)[0].removesuffix(".py") in TRUSTED
    return filename.startswith((*_PYTHON, "<frozen "))


@lru_cache(maxsize=16384)
def is_installed_file(filename: str) -> bool:
    """True if the file belongs to a trusted library or to any installed package."""
    return is_trusted_file(filename) or filename.startswith(_SITES)


@lru_cache(maxsize=16384)
def is_trusted_module(name: str) -> bool:
    """True if the module of this name belongs to a trusted library."""
    top = name.partition(".")[0]
    if top == "meshwright":
        return not name.startswith(_MODELS)
    return top in TRUSTED or top in sys.stdlib_module_names


def is_trusted_call(function: object) -> bool:
    """True for a function or method of a trusted library without a closure."""
    code = getattr(function, "__code__", None)
    return code is not None and not getattr(function, "__closure__", None) and is_trusted_file(code.co_filename)


def is_trusted(kind: type) -> bool:
    """True if the class is built in or belongs to a trusted library."""
    module: Any = kind.__module__
    return not isinstance(module, str) or (module != "__main__" and is_trusted_module(module))
