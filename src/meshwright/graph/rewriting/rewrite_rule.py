"""Rewrite rules as data: `find` and `put` functions with equal arguments, and rewriters that are functions of nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .._errors import RewriteError
from .pattern import Pattern, make_pattern
from .rule_arguments import Argument, Shape, arguments_of, parse_shapes, tensor_names, variants_of


@dataclass(frozen=True)
class Rewrite:
    """A rule that replaces the computation of `find` by that of `put`, two torch functions with equal argument names.

    An argument is a tensor by default, and an optional tensor with `= None`. A default value or annotation (`eps=1e-6`,
    `dim: int`) makes it a constant, which is matched. `Literal[...]` or `bool` makes it a choice. Conversion steps are
    rewritten by a `Rewriter`.

    `shapes` relates the shapes of the tensors ("... d, d"); a match must fit it. `where` may refuse a match: it
    receives the arguments that it names (tensors as values), and the match as `match`. `samples` has two values for
    each constant without a default pair. Rules with a higher `benefit` are applied to the whole program first.

    Raises:
        RewriteError: `find` and `put` have different arguments.
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
                f"rule {self.name}",
                f"find({', '.join(sides[0])}) and put({', '.join(sides[1])})",
                "both sides must have the same arguments",
                f"def put({', '.join(sides[0])}): ...",
            )

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return arguments_of(self.find, self.samples)

    @cached_property
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """Tensor argument → its shape, if the rule gives shapes."""
        return parse_shapes(self.shapes, tensor_names(self.arguments))

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """One pattern per combination of choices, largest first."""
        found = [
            make_pattern(self.find, variant, self.tensor_shapes, self.name) for variant in variants_of(self.arguments)
        ]
        return tuple(sorted(found, key=lambda p: -len(p.ops)))

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.where).parameters) if self.where is not None else ()

    def is_met(self, arguments: Mapping[str, Any], match: object = None) -> bool:
        """True if `where` accepts these arguments, or if there is no `where`."""
        if self.where is None:
            return True
        known = {**arguments, "match": match}
        return bool(self.where(**{name: known.get(name) for name in self._asked}))


@dataclass(frozen=True)
class Rewriter:
    """A rewrite that no `Rewrite` can express: `apply(edit, spot)` inspects one node and changes the program around it.

    `apply` returns a description of the change, or None without one. `on` has the operators or step classes at whose
    nodes it is called; if `on` is empty, it is called at every node.
    """

    name: str
    apply: Callable[[Any, Any], str | None]
    on: tuple[Any, ...] = ()
    benefit: int = 0


AnyRewrite = Rewrite | Rewriter
