"""Small random programs: views, duplicates, operators that write in place or not, inputs written back or not."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from meshwright.graph import Draft, Input, Node, Origin, Program, Value, runner

aten = torch.ops.aten
N = 4
VIEWS = [
    (aten.t.default,),
    (aten.slice.Tensor, 0, 1, 3),
    (aten.select.int, 0, 1),
    (aten.view.default, [-1]),
    (aten.expand.default, [2, N, N]),
    (aten._unsafe_view.default, [N, N]),
]
UNARY = [aten.exp.default, aten.neg.default, aten.sigmoid.default, aten.abs.default, aten.cumsum.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.addcmul.default, aten.addmm.default]


def program(build: Any, *shapes: tuple[int, ...]) -> Program:
    """Return the program that `build(add, *inputs)` makes with `add(op, *args)`."""
    given = tuple(Input(Value(f"x{i}", shape, torch.float32), "parameter", f"x{i}") for i, shape in enumerate(shapes))
    draft = Draft(Program(given, (), ()))

    def add(op: Any, *args: Any, **kwargs: Any) -> Any:
        return draft.add(op, *args, before=draft.end, origin=Origin(), **kwargs)

    out, writes = build(add, *(i.value for i in given))
    nodes = tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in draft)
    return Program(given, nodes, out, tuple(writes))


def random_program(seed: int, nodes: int = 12) -> Program:
    """Return a program of three square inputs, of which some are written back."""
    pick = random.Random(seed)
    given = tuple(Input(Value(f"x{i}", (N, N), torch.float32), "parameter", f"x{i}") for i in range(3))
    draft = Draft(Program(given, (), ()))
    known = [i.value for i in given]
    for _ in range(nodes):
        known += _add(draft, pick, known)
    square = [v for v in known if v.shape == (N, N)]
    outputs = tuple(pick.sample(known, pick.randint(1, 2)))
    writes = tuple((i.value, pick.choice(square[-4:])) for i in given if pick.random() < 0.7)
    made = tuple(Node(s.op, s.args, s.kwargs, s.out, s.origin) for s in draft)
    return Program(given, made, outputs, writes)


def _add(draft: Draft, pick: random.Random, known: list[Value]) -> list[Value]:
    square = [v for v in known if v.shape == (N, N)]
    kind = pick.random()
    if kind < 0.3:
        op, *rest = pick.choice(VIEWS)
        args: tuple[Any, ...] = (pick.choice(square), *rest)
    elif kind < 0.6:
        op = pick.choice(UNARY)
        args = (pick.choice(known if op is not aten.cumsum.default else square), *([0] if "cumsum" in str(op) else []))
    else:
        op = pick.choice(BINARY)
        count = 3 if "addc" in str(op) or "addmm" in str(op) else 2
        args = tuple(pick.choice(square) for _ in range(count))
    if op is aten.view.default and not _is_flat(args[0], draft):
        op = aten.reshape.default
    if op is aten._unsafe_view.default and not _is_flat(args[0], draft):
        op, args = aten.t.default, args[:1]
    return [draft.add(op, *args, before=draft.end, origin=Origin())]


def _is_flat(v: Value, draft: Draft) -> bool:
    """True for inputs and results of operators without views."""
    maker = draft.producer(v)
    return maker is None or "mm" in str(maker.op)


def results(program: Program, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies of the outputs, and of the inputs after they were written back."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.rand(N, N, generator=generator) - 0.5 for _ in program.inputs]
    outputs, written = runner(program)(*given)
    outputs = [x.clone() for x in outputs]
    place = {i.value: at for at, i in enumerate(program.inputs)}
    fresh = [x if any(x is g for g in given) else x.clone() for x in written]
    for (x, _), new in zip(program.writes, fresh, strict=True):
        given[place[x]].copy_(new)
    return outputs, given
