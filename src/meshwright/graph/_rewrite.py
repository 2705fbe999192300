"""Rewrites as data: two functions of the same arguments, what to find and what to put; and functions on nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ._arguments import Argument, Shape, arguments_of, parse_shapes, tensor_names, variants_of
from ._errors import RewriteError
from ._pattern import Pattern, make_pattern, sample_arguments
from ._watch import Told, watch


@dataclass(frozen=True)
class Rewrite:
    """What `find` computes is computed by `put`: both are plain torch functions of arguments with the same names.

    An argument is a tensor; with `= None` one that may be left out; a number by its default value or annotation
    (`eps=1e-6`, `dim: int`), found as a constant; a choice with `Literal[...]` or `bool`; a step of a conversion with
    its class.
    `shapes` says how the tensors' shapes hang together ("... d, d"), and is held against what is found. `where` may
    refuse: it gets the arguments that it names, tensors as values, and `match` for the match itself. `samples` gives
    two values for a constant where none can be guessed. Rules of more `benefit` are tried everywhere first.
    """

    name: str
    find: Callable[..., Any]
    put: Callable[..., Any]
    shapes: str = ""
    where: Callable[..., bool] | None = None
    samples: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    benefit: int = 0

    def __post_init__(self) -> None:
        sides = [list(inspect.signature(fn).parameters) for fn in (self.find, self.put)]
        if sides[0] != sides[1]:
            raise RewriteError(
                f"rule {self.name}", f"find({', '.join(sides[0])}) and put({', '.join(sides[1])})",
                "both sides are about the same things", f"def put({', '.join(sides[0])}): ...",
            )  # fmt: skip

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return arguments_of(self.find, self.samples)

    @cached_property
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """Tensor argument → its shape, where the rule says one."""
        return parse_shapes(self.shapes, tensor_names(self.arguments))

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """What to look for, one pattern per choice; the largest first."""
        found = [
            make_pattern(self.find, variant, self.tensor_shapes, self.name) for variant in variants_of(self.arguments)
        ]
        return tuple(sorted(found, key=lambda p: -len(p.ops)))

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.where).parameters) if self.where is not None else ()

    def is_met(self, arguments: Mapping[str, Any], match: Any = None) -> bool:
        """What `where` says of these arguments."""
        if self.where is None:
            return True
        known = {**arguments, "match": match}
        return bool(self.where(**{name: known.get(name) for name in self._asked}))

    @cached_property
    def puts(self) -> tuple[Told | None, ...]:
        """The calls of `put` beside each pattern, for sample arguments; None where it needs real steps."""
        return tuple(
            None if p.variant.steps else watch(self.put, sample_arguments(p.variant, self.tensor_shapes))
            for p in self.patterns
        )


@dataclass(frozen=True)
class Rewriter:
    """What a rule cannot say: `apply(edit, spot)` looks at one node and changes the program around it.

    It returns what it did, in words, or None. `on` names the operators (or classes of steps) that it wants to see; all
    of them when it is empty.
    """

    name: str
    apply: Callable[[Any, Any], str | None]
    on: tuple[Any, ...] = ()
    benefit: int = 0


AnyRewrite = Rewrite | Rewriter
