"""Gradient accumulation: a batch is processed in pieces, whose gradients are summed before one update.

The merged program contains the program of one piece once per piece, one after the other, so that only one piece's
activations are live at a time. Gradients are summed before their reduction over ranks: the ranks communicate once for
all pieces. Buffers that the forward pass updates are passed from piece to piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.graph import (
    Change,
    Draft,
    Input,
    Node,
    Origin,
    Program,
    RewriteError,
    Value,
    communication,
    linear_tail,
    map_values,
)
from meshwright.layout import Spec, TorchValue
from meshwright.tensor import DistTensor, as_part, local_parts, map_tensors, tensors_in

aten = torch.ops.aten


@dataclass(frozen=True)
class Merge:
    """Split of a batch into `pieces` along dim 0; with `average`, losses and gradients are means over the pieces.

    Leaves of the batch with as many rows as its first tensor are split. Every piece gets the other leaves whole.

    Raises:
        RewriteError: `pieces` is less than one.
    """

    pieces: int
    average: bool = True

    def __post_init__(self) -> None:
        if self.pieces < 1:
            raise RewriteError(
                f"Merge({self.pieces})",
                f"{self.pieces} pieces",
                "a batch needs at least one piece",
                "write Merge(4), or leave out Merge",
            )

    def piece(self, batch: TorchValue, number: int) -> TorchValue:
        """Return piece `number` of a batch. A piece of a DistTensor has a piece of each rank's local tensor.

        The program of one piece is recorded for the first piece.

        Raises:
            RewriteError: the pieces are uneven, or a rank holds different rows of different tensors.
        """
        rows = _first_row_count(tensors_in(batch))
        cut = [x for x in tensors_in(batch) if _first_row_count([x]) == rows]
        _check_rows(self, [x.spec if isinstance(x, DistTensor) else None for x in cut])
        return map_tensors(lambda x: self._cut(x, number) if _first_row_count([x]) == rows else x, batch)

    def _cut(self, x: Tensor, number: int) -> Tensor:
        if not isinstance(x, DistTensor):
            return self._rows(x, number)
        spec = Spec(x.spec.mesh, x.spec.layout, (self._part(x.spec.shape[0]), *x.spec.shape[1:]), x.spec.dtype)
        with local_parts():
            return as_part(self._rows(x, number).as_subclass(Tensor), spec)

    def _rows(self, x: Tensor, number: int) -> Tensor:
        rows = self._part(x.shape[0])
        return x[number * rows : (number + 1) * rows]

    def _part(self, rows: int) -> int:
        if rows % self.pieces:
            raise RewriteError(
                repr(self),
                f"{rows} rows",
                "pieces must have one size, so that their mean is that of the batch",
                f"use a batch with a multiple of {self.pieces} rows on each rank",
            )
        return rows // self.pieces

    def program(self, step: Program, leaves: Sequence[Any]) -> Program:
        """Return the program of all pieces of a batch with these leaves, made from the program of its first piece.

        Outputs are those of `record_gradients`: a loss and gradients.
        """
        return _Merged(self, step, self.leaves(leaves)).program() if self.pieces > 1 else step

    def leaves(self, leaves: Sequence[Any]) -> set[int]:
        """Return the indices of the batch's leaves that are split."""
        rows = _first_row_count(x for x in leaves if isinstance(x, Tensor))
        return {at for at, x in enumerate(leaves) if isinstance(x, Tensor) and _first_row_count([x]) == rows}


def _first_row_count(tensors: Iterable[Tensor]) -> int | None:
    """Return the number of rows of the first tensor with a dim (the global number for a DistTensor), or None."""
    return next(((x.spec.shape if isinstance(x, DistTensor) else x.shape)[0] for x in tensors if x.dim()), None)


@dataclass
class _Merged:
    """Builder of the merged program. `cut` are the indices of the batch's leaves that are split."""

    merge: Merge
    step: Program
    cut: Collection[int]
    became: dict[Value, Value] = field(default_factory=dict[Value, Value])
    specs: dict[Value, Spec] = field(default_factory=dict[Value, Spec])
    sums: dict[Value, Value] = field(default_factory=dict[Value, Value])
    draft: Draft = field(init=False)

    def program(self) -> Program:
        cut = list(filter(self._is_cut, self.step.inputs))
        _check_rows(self.merge, [piece.spec for piece in cut])
        wholes = {piece.value: self._whole(piece) for piece in cut}
        inputs = tuple(wholes.get(i.value, i) for i in self.step.inputs)
        self.draft = Draft(replace(self.step, inputs=inputs, nodes=(), writes=(), outputs=()))
        self._reserve()
        wanted = {"": self.step.outputs["out"], **self.step.outputs["grads"]}
        chains = {name: linear_tail(self.step, v) for name, v in wanted.items()}
        starts = set(map(_start_of, wanted.values(), chains.values()))
        pieces = {piece.value: self._pieces(piece, wholes[piece.value]) for piece in cut}
        for at in range(self.merge.pieces):
            self._add_piece(at, pieces, starts)
        grads = {name: self._finished_gradient(wanted[name], chain) for name, chain in chains.items()}
        return self._finished_program(inputs, {"out": grads.pop(""), "grads": grads})

    def _add_piece(self, at: int, pieces: Mapping[Value, Sequence[Value]], starts: Collection[Value]) -> None:
        """Add the nodes of one piece. It reads the buffers that the piece before has updated."""
        self.became = {x: self.became.get(v, v) if at else x for x, v in self.step.writes}
        self.became |= {x: parts[at] for x, parts in pieces.items()}
        for node in self.step.nodes:
            self._copy(node, starts)

    def _finished_program(self, inputs: tuple[Input, ...], outputs: object) -> Program:
        nodes = tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in self.draft)
        writes = tuple((x, self.became.get(v, v)) for x, v in self.step.writes)
        specs = {**self.step.specs, **self.specs}
        made = replace(self.step, inputs=inputs, nodes=nodes, outputs=outputs, writes=writes, specs=specs)
        merged = Draft(made).finish()
        before, after = (len(list(communication(p))) for p in (self.step, merged))
        saved = {"collectives": before * self.merge.pieces - after}
        return merged.with_changes(
            Change("merge", f"one update for {self.merge.pieces} pieces of the batch", "", saved)
        )

    def _reserve(self) -> None:
        """Reserve the names of the recorded step."""
        for node in self.step.nodes:
            for v in node.outs:
                self.draft.names.fresh(v.name)

    def _is_cut(self, given: Input) -> bool:
        return given.role == "batch" and given.source in self.cut

    def _whole(self, given: Input) -> Input:
        """Return the input of the whole batch for the input of its first piece."""
        v, spec = given.value, given.spec
        shape = (v.shape[0] * self.merge.pieces, *v.shape[1:])
        if spec is not None:
            spec = Spec(spec.mesh, spec.layout, (spec.shape[0] * self.merge.pieces, *spec.shape[1:]), spec.dtype)
        return replace(given, value=Value(v.name, shape, v.dtype, v.device), spec=spec)

    def _pieces(self, piece: Input, whole: Input) -> Sequence[Value]:
        made = [self._fresh(piece.value) for _ in range(self.merge.pieces)]
        args = (whole.value, self.merge.pieces, 0)
        return self.draft.add_as(aten.chunk.default, args, {}, made, self.draft.end, Origin("forward"))

    def _fresh(self, v: Value) -> Value:
        new = Value(self.draft.names.fresh(v.name), v.shape, v.dtype, v.device)
        if v in self.step.specs:
            self.specs[new] = self.step.specs[v]
        return new

    def _copy(self, node: Node, starts: Collection[Value]) -> None:
        args, kwargs = map_values(lambda v: self.became.get(v, v), (node.args, dict(node.kwargs)))
        self.became.update({v: self._fresh(v) for v in node.outs})
        out = map_values(lambda v: self.became[v], node.out)
        self.draft.add_as(node.op, args, kwargs, out, self.draft.end, node.origin)
        for v in node.outs:
            if v in starts:
                self._add(v)

    def _add(self, v: Value) -> None:
        before, new = self.sums.get(v), self.became[v]
        if before is not None:
            args = (before, new)
            new = self._fresh(v)
            self.draft.add_as(aten.add.Tensor, args, {}, new, self.draft.end, Origin("backward"))
        self.sums[v] = new

    def _finished_gradient(self, v: Value, chain: Sequence[Node]) -> Value:
        """Return the sum or mean over all pieces after the nodes of `chain`, the linear tail of `v`."""
        start = _start_of(v, chain)
        new = self.sums.get(start, start)
        if self.merge.average and start in self.sums:
            mean = self._fresh(start)
            args = (new, self.merge.pieces)
            new = self.draft.add_as(aten.div.Tensor, args, {}, mean, self.draft.end, Origin("backward"))
        for node in reversed(chain):
            became = {**self.became, node.ins[0]: new}
            args = map_values(lambda u, became=became: became.get(u, u), node.args)
            new = self._fresh(node.outs[0])
            self.draft.add_as(node.op, args, dict(node.kwargs), new, self.draft.end, node.origin)
        return new


def _check_rows(merge: Merge, specs: Sequence[Spec | None]) -> None:
    """Raise RewriteError if a rank holds different rows of tensors with these specs; None is an unsharded tensor."""
    if len({spec.layout.dims[0] if spec else () for spec in specs}) > 1:
        raise RewriteError(
            repr(merge),
            "rows in the layouts " + ", ".join(repr(spec) if spec else "a plain tensor" for spec in specs),
            "a rank would take other rows of one tensor than of the other for a piece",
            "shard the rows of all tensors of a batch along the same axes",
        )


def _start_of(v: Value, chain: Sequence[Node]) -> Value:
    return chain[-1].ins[0] if chain else v
