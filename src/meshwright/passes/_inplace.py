"""In-place reuse: an operator writes over an operand that nothing reads any more, or over the input that it renews.

The last of all passes: what it makes are writing nodes (`add_` for `add`), which others neither move nor merge. The law
of such nodes is checked (`verify`): what was in memory before is read no more. Inputs that the program writes back,
parameters and the optimizer's states, take their new values in place, so that no second copy of them ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from meshwright.graph import (
    Change,
    Draft,
    Memories,
    Node,
    Op,
    Pass,
    Program,
    Value,
    live_memory,
    looked_at,
    memories,
    overwriting,
    register_pass,
    strides_of,
    values_in,
)
from meshwright.layout import hint

aten = torch.ops.aten

COMMUTES = {aten.add.Tensor, aten.mul.Tensor}
"""Operators of two operands that may write over either."""


@register_pass
@dataclass(frozen=True)
class InPlace(Pass):
    """Writes results over operands that are read for the last time; with `inputs`, also over inputs that it renews."""

    name: ClassVar[str] = "in_place"
    inputs: bool = True

    def run(self, program: Program) -> Program:
        reuse = _Reuse(program, self.inputs)
        draft = Draft(program)
        for at, (node, spot) in enumerate(zip(program.nodes, list(draft), strict=True)):
            found = reuse.at(at, node)
            if found is not None:
                spot.op, args = found
                draft.set_args(spot, args)
        if not reuse.saved:
            return program
        out = draft.finish()
        before, after = live_memory(program).peak, live_memory(out).peak
        what = f"{len(reuse.saved)} operators write over an operand, {reuse.renewed} of them over an input"
        saved = {"bytes": before - after, "allocated bytes": sum(reuse.saved)}
        return out.with_changes(Change(self.name, f"{what}: peak {before:,} → {after:,} bytes", "", saved))


@dataclass
class _Reuse:
    """Who may write where, decided node by node; `saved` are the bytes that each decision does not allocate."""

    program: Program
    inputs: bool
    saved: list[int] = field(default_factory=list[int])
    renewed: int = 0
    found: Memories = field(init=False)
    last: dict[Value, int] = field(default_factory=dict[Value, int])
    """Memory → the last node that reads it; results are read at the end."""
    whole: set[Value] = field(init=False)
    """Inputs that are written back, and what was written over them: values that fill an input exactly."""
    homes: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Memory → the first input there that is written back."""
    ends: dict[Value, list[tuple[Value | None, Value]]] = field(default_factory=dict[Value, Any])
    """Memory → the results there, each with the input that it is written to; None for an output."""

    def __post_init__(self) -> None:
        self.found = memories(self.program)
        self.strides = strides_of(self.program)
        given = {i.value for i in self.program.inputs}
        self.roots = {self.found.of(v) for v in given}
        self.whole = {x for x, _ in self.program.writes} & given if self.inputs else set[Value]()
        for at, node in enumerate(self.program.nodes):
            for v in (*node.ins, *node.outs):
                self.last[self.found.of(v)] = at
        for v in self.program.results:
            self.last[self.found.of(v)] = len(self.program.nodes)
        for x, v in self.program.writes:
            self.homes.setdefault(self.found.of(x), x)
            self.ends.setdefault(self.found.of(v), []).append((x, v))
        for v in values_in(self.program.outputs):
            self.ends.setdefault(self.found.of(v), []).append((None, v))

    def at(self, at: int, node: Node) -> tuple[Op, tuple[Any, ...]] | None:
        """The writing operator and its arguments, where node number `at` may write over its first operand."""
        twin = overwriting(node.op)
        if twin is None or any(True for _ in looked_at(node)):
            return None
        for args in _orders(node):
            olds, news = list(values_in(args[0])), list(node.outs)
            if self._may_write(at, node, olds, news):
                self._write(olds, news)
                return twin, args
        return None

    def _may_write(self, at: int, node: Node, olds: Sequence[Value], news: Sequence[Value]) -> bool:
        roots = [self.found.of(v) for v in olds]
        if len(olds) != len(news) or len(set(roots)) != len(roots) or not olds:
            return False
        there = [v for v in node.ins if self.found.of(v) in roots]
        if len(there) != len(olds):
            return False
        return all(map(self._fits, olds, news)) and all(
            self._is_over(at, v, new) for v, new in zip(olds, news, strict=True)
        )

    def _fits(self, old: Value, new: Value) -> bool:
        """Symbolic sizes are the same where their texts are: to ask would bind them to what they happen to be."""
        if not old.is_tensor or old.dtype != new.dtype or not {old, new} <= self.strides.keys():
            return False
        return str(old.shape) == str(new.shape) and self._lie(old) == self._lie(new)

    def _lie(self, v: Value) -> list[int]:
        """The strides of dims that have more than one place."""
        return [step for n, step in zip(v.shape, self.strides[v], strict=True) if hint(n) != 1]

    def _is_over(self, at: int, old: Value, new: Value) -> bool:
        """Nothing reads the memory of `old` behind this node, and it may be written to."""
        root = self.found.of(old)
        if self.last[root] != at:
            return False
        if root not in self.roots:
            return True
        return old in self.whole and self._goes_home(old, root, new)

    def _goes_home(self, old: Value, root: Value, new: Value) -> bool:
        """True where no result lies in the memory of `new` but `new` itself, for the input that it is written to."""
        home = self.homes.get(root)
        return all(x is not None and x is home and v is new for x, v in self.ends.get(self.found.of(new), ()))

    def _write(self, olds: Sequence[Value], news: Sequence[Value]) -> None:
        for old, new in zip(olds, news, strict=True):
            mine, other = self.found.of(old), self.found.of(new)
            self.renewed += mine in self.roots
            if old in self.whole:
                self.whole.add(new)
            self.found.join(old, new)
            root = self.found.of(new)
            self.last[root] = max(self.last[mine], self.last[other])
            self.ends[root] = [end for memory in dict.fromkeys((mine, other)) for end in self.ends.pop(memory, ())]
            if (home := self.homes.pop(mine, None) or self.homes.pop(other, None)) is not None:
                self.homes[root] = home
            self.saved.append(new.nbytes)


def _orders(node: Node) -> Iterator[tuple[Any, ...]]:
    """The arguments, and with the operands exchanged where that gives the same."""
    yield node.args
    if node.op in COMMUTES and not node.kwargs and len(node.args) == 2 and isinstance(node.args[1], Value):
        yield (node.args[1], node.args[0])
