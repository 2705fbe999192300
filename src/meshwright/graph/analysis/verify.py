"""Verification of programs: each value is produced once and before it is read, and operators accept their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from .._errors import ProgramError
from ..program.node import Node, Value, name_of, values_in
from ..program.node_text import node_text, type_text
from ..program.program import Program
from ..program.shape_inference import FreshNames, infer
from .live_memory import overwritten


def verify(program: Program, by: str = "", deep: bool = False) -> Program:
    """Return `program` if it is valid. `deep` runs every operator on fake tensors and compares shapes and dtypes.

    A program does not change, so it is checked once.

    Raises:
        ProgramError: the program is invalid; the message names the node, and `by`, the maker of the program.
    """
    if not deep and _VERIFIED in vars(program):
        return program
    checks = [_order_violations, _result_violations, overwritten]
    if deep:
        checks.append(_type_violations)
    violations = chain.from_iterable(check(program) for check in checks)  # later checks need what earlier ones hold
    for what, found, why in violations:
        raise ProgramError(
            f"a program{f' made by {by}' if by else ''}",
            f"{what}: {found}",
            why,
            "in the pass, add values before their readers, and replace values before removal (Draft does both)",
        )
    vars(program)[_VERIFIED] = True
    return program


_VERIFIED = "_verified"
"""Attribute of a program that was found valid."""


def _order_violations(program: Program) -> Iterator[tuple[str, str, str]]:
    known = {given.value for given in program.inputs}
    for node in program.nodes:
        for v in node.ins:
            if v not in known:
                yield node_text(node), repr(v), "it is read before it is computed"
        for v in node.outs:
            if v in known:
                yield node_text(node), repr(v), "it is computed twice"
        known.update(node.outs)


def _result_violations(program: Program) -> Iterator[tuple[str, str, str]]:
    inputs = {given.value for given in program.inputs}
    known = inputs | set(program.producers)
    for v in values_in(program.outputs):
        if v not in known:
            yield "return", repr(v), "no node computes it"
    for x, v in program.writes:
        if x not in inputs or v not in known:
            unknown = v if x in inputs else x
            yield f"{x!r} <- {v!r}", repr(unknown), "a write must assign a value of the program to an input"
        elif (x.sizes, x.dtype) != (v.sizes, v.dtype):
            yield f"{x!r} <- {v!r}", f"{type_text(v)} into {type_text(x)}", "an input must keep its shape and dtype"


def _type_violations(program: Program) -> Iterator[tuple[str, str, str]]:
    for node in program.nodes:
        try:
            out = infer(node.op, node.args, node.kwargs, program.rank, FreshNames())
        except Exception as error:  # torch raises various errors for such arguments
            yield node_text(node), str(error).split("\n")[0], f"{name_of(node.op)} does not take such arguments"
            return
        yield from _differences(node, tuple(values_in(out)))


def _differences(node: Node, found: tuple[Value, ...]) -> Iterator[tuple[str, str, str]]:
    if len(found) != len(node.outs):
        why = f"the operator returns {len(found)}, the node has {len(node.outs)}"
        yield node_text(node), f"{len(found)} results", why
    for v, w in zip(node.outs, found, strict=False):
        if (v.sizes, v.dtype) != (w.sizes, w.dtype):
            yield node_text(node), type_text(v), f"the operator returns {type_text(w)}"
