"""What a program writes over in place must lie in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from meshwright.graph import Program, written_inputs

from ._errors import StaticError

HELD = ("parameter", "buffer", "state")


def check_apart(program: Program, fetch: Sequence[Callable[[Sequence[Any]], Any]]) -> None:
    """Raises StaticError where two held tensors share memory and the program writes over one of them in place."""
    written = written_inputs(program)
    owners: dict[Any, tuple[str, bool]] = {}
    for given, source in zip(program.inputs, fetch, strict=True):
        x = source(()) if written and given.role in HELD else None
        if not isinstance(x, Tensor) or not x.numel():
            continue
        where, mine = x.untyped_storage().data_ptr(), given.value in written
        other, its = owners.setdefault(where, (given.name, mine))
        if other != given.name and (mine or its):
            raise StaticError(
                "to write in place", f"{given.name} and {other} share memory",
                "one would change while the other is still to be read as it was",
                "the pass InPlace(inputs=False), or tensors of their own: parameter.data = parameter.data.clone()",
            )  # fmt: skip
