"""In-place reuse of memory: an operator overwrites an operand after its last read, or the input that it updates.

This must be the last pass: it creates in-place nodes (`add_` for `add`), which other passes neither move nor merge.
`verify` checks that overwritten values are not read again. Inputs that the program writes back, such as parameters and
optimizer states, are updated in place, so no second copy of them exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from meshwright.graph import (
    AliasClasses,
    Change,
    Draft,
    Node,
    Op,
    Pass,
    Program,
    Value,
    alias_classes,
    alias_pairs,
    live_memory,
    overwriting,
    register_pass,
    strides_of,
    values_in,
)
from meshwright.layout import hint

aten = torch.ops.aten

COMMUTES = {aten.add.Tensor, aten.mul.Tensor}
"""Operators of two operands that may overwrite either operand."""


@register_pass
@dataclass(frozen=True)
class InPlace(Pass):
    """Write results over operands that are read for the last time; with `inputs`, also over updated inputs."""

    name: ClassVar[str] = "in_place"
    keeps_sums: ClassVar[bool] = True
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
        what = f"{len(reuse.saved)} operators overwrite an operand, {reuse.renewed} of them an input"
        saved = {"bytes": before - after, "allocated bytes": sum(reuse.saved)}
        return out.with_changes(Change(self.name, f"{what}: peak {before:,} → {after:,} bytes", "", saved))


@dataclass
class _Reuse:
    """Decisions on memory reuse, node by node; `saved` has the bytes that each decision does not allocate."""

    program: Program
    inputs: bool
    saved: list[int] = field(default_factory=list[int])
    renewed: int = 0
    found: AliasClasses = field(init=False)
    last: dict[Value, int] = field(default_factory=dict[Value, int])
    """Memory → index of the last node that reads it; results are read at the end."""
    whole: set[Value] = field(init=False)
    """Inputs that are written back, and what was written over them: values that fill an input exactly."""
    first_inputs: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Memory → the first input there that is written back."""
    results_in: dict[Value, list[tuple[Value | None, Value]]] = field(default_factory=dict[Value, Any])
    """Memory → the results there, each with the input that it is written to; None for an output."""

    def __post_init__(self) -> None:
        self.found = alias_classes(self.program)
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
            self.first_inputs.setdefault(self.found.of(x), x)
            self.results_in.setdefault(self.found.of(v), []).append((x, v))
        for v in values_in(self.program.outputs):
            self.results_in.setdefault(self.found.of(v), []).append((None, v))

    def at(self, at: int, node: Node) -> tuple[Op, tuple[Any, ...]] | None:
        """Return the in-place operator and its arguments if node `at` may overwrite an operand, otherwise None."""
        twin = overwriting(node.op)
        if twin is None or any(True for _ in alias_pairs(node)):
            return None
        for args in _argument_orders(node):
            olds, news = list(values_in(args[0])), list(node.outs)
            if self._may_write(at, node, olds, news):
                self._write(olds, news)
                return twin, args
        return None

    def _may_write(self, at: int, node: Node, olds: Sequence[Value], news: Sequence[Value]) -> bool:
        roots = [self.found.of(v) for v in olds]
        if len(olds) != len(news) or len(set(roots)) != len(roots) or not olds:
            return False
        overlapping = [v for v in node.ins if self.found.of(v) in roots]
        if len(overlapping) != len(olds):
            return False
        return all(map(self._fits, olds, news)) and all(
            self._is_over(at, v, new) for v, new in zip(olds, news, strict=True)
        )

    def _fits(self, old: Value, new: Value) -> bool:
        """True if both values have equal dtype, shape and strides.

        Symbolic sizes are compared by text, since a comparison would add a guard for their recorded values.
        """
        if not old.is_tensor or old.dtype != new.dtype or not {old, new} <= self.strides.keys():
            return False
        return str(old.shape) == str(new.shape) and self._used_strides(old) == self._used_strides(new)

    def _used_strides(self, v: Value) -> list[int]:
        """Return the strides of dims with more than one element."""
        return [step for n, step in zip(v.shape, self.strides[v], strict=True) if hint(n) != 1]

    def _is_over(self, at: int, old: Value, new: Value) -> bool:
        """True if the memory of `old` is not read after this node and may be overwritten."""
        root = self.found.of(old)
        if self.last[root] != at:
            return False
        if root not in self.roots:
            return True
        return old in self.whole and self._is_only_result(old, root, new)

    def _is_only_result(self, old: Value, root: Value, new: Value) -> bool:
        """True where no result is in the memory of `new` but `new` itself, for the input that it is written to."""
        first_input = self.first_inputs.get(root)
        return all(
            x is not None and x is first_input and v is new for x, v in self.results_in.get(self.found.of(new), ())
        )

    def _write(self, olds: Sequence[Value], news: Sequence[Value]) -> None:
        for old, new in zip(olds, news, strict=True):
            mine, other = self.found.of(old), self.found.of(new)
            self.renewed += mine in self.roots
            if old in self.whole:
                self.whole.add(new)
            self.found.join(old, new)
            root = self.found.of(new)
            self.last[root] = max(self.last[mine], self.last[other])
            self.results_in[root] = [
                end for memory in dict.fromkeys((mine, other)) for end in self.results_in.pop(memory, ())
            ]
            if (first_input := self.first_inputs.pop(mine, None) or self.first_inputs.pop(other, None)) is not None:
                self.first_inputs[root] = first_input
            self.saved.append(new.nbytes)


def _argument_orders(node: Node) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments, and the arguments with swapped operands if the operator commutes."""
    yield node.args
    if node.op in COMMUTES and not node.kwargs and len(node.args) == 2 and isinstance(node.args[1], Value):
        yield (node.args[1], node.args[0])
