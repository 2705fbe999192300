"""What code names: locals, cells and globals with the attributes that are read or written of each, by its instructions.

>>> def loss(out):
...     return out * config.loss.factor
>>> chains(loss.__code__)
(Chain(kind='own', name='out', path=(), stored=False), Chain(kind='global', name='config', path=('loss', 'factor'), \
stored=False))
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType
from typing import Literal, NamedTuple

Kind = Literal["own", "cell", "global"]
_LOADS: dict[str, Kind] = {
    "LOAD_FAST": "own", "LOAD_FAST_CHECK": "own", "LOAD_FAST_BORROW": "own", "LOAD_FAST_LOAD_FAST": "own",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": "own", "STORE_FAST_LOAD_FAST": "own", "LOAD_DEREF": "cell",
    "LOAD_CLASSDEREF": "cell", "LOAD_FROM_DICT_OR_DEREF": "cell", "LOAD_GLOBAL": "global", "LOAD_NAME": "global",
    "LOAD_FROM_DICT_OR_GLOBALS": "global",
}  # fmt: skip
_STORES: dict[str, Kind] = {"STORE_DEREF": "cell", "STORE_GLOBAL": "global"}
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"})
_PASSES = frozenset({"COPY", "EXTENDED_ARG", "CACHE", "PRECALL", "NOT_TAKEN", "NOP"})
"""What leaves the value that was loaded last where it is."""


class Chain(NamedTuple):
    """A name of the function's own (a parameter, for one), of a cell or a global, and the attributes behind it."""

    kind: Kind
    name: str
    path: tuple[str, ...] = ()
    stored: bool = False
    """Whether the name itself is bound to something else."""


@lru_cache(maxsize=4096)
def chains(code: CodeType) -> tuple[Chain, ...]:
    """All that the code, and what is defined in it, names; of inner functions not their own names."""
    inner = [c for const in code.co_consts if isinstance(const, CodeType) for c in chains(const)]
    return tuple(dict.fromkeys([*_named(code), *(c for c in inner if c.kind != "own")]))


def _named(code: CodeType) -> list[Chain]:
    found: list[Chain] = []
    is_open = False
    for i in dis.get_instructions(code):
        if kind := _LOADS.get(i.opname):
            names: tuple[str, ...] = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            found += [Chain(kind, name) for name in names]
            is_open = True
        elif is_open and i.opname in _ATTRIBUTES:
            last = found.pop()
            found.append(last._replace(path=(*last.path, i.argval)))
            is_open = not i.opname.startswith(("STORE", "DELETE"))
        elif i.opname in _STORES:
            found.append(Chain(_STORES[i.opname], i.argval, stored=True))
            is_open = False
        elif is_open and i.opname == "CALL" and found[-1][:3] == ("global", "super", ()):
            found[-1] = Chain("own", code.co_varnames[0] if code.co_argcount else "")
        else:
            is_open = is_open and i.opname in _PASSES
    return found
