"""Text form of nodes, for readers and for golden files."""

from __future__ import annotations

import re

import torch

from meshwright.layout import TorchValue, write_dtype

from .node import Conversion, Node, Start, Value, map_values, name_of


def type_text(v: Value) -> str:
    """Return dtype and shape, such as `f32[4, 8]`; `int` for a number.

    >>> type_text(Value("x", (4, 8), torch.bfloat16))
    'bf16[4, 8]'
    """
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype.__name__
    return f"{write_dtype(v.dtype)}[{', '.join(map(str, v.shape))}]"


def node_text(node: Node, where: bool = False) -> str:
    """Return `%out: type = op(arguments)`; with `where`, followed by phase, layer and source line."""
    args = [tree_text(a) for a in node.args] + [f"{k}={tree_text(v)}" for k, v in node.kwargs.items()]
    outs = ", ".join(f"{v!r}: {type_text(v)}" for v in node.outs)
    text = f"{outs} = {short_name(node)}({', '.join(args)})" if outs else f"{short_name(node)}({', '.join(args)})"
    note = " ".join(filter(None, [node.origin.phase, node.origin.layer, node.origin.where])) if where else ""
    return f"{text}  # {note}" if note else text


def short_name(node: Node) -> str:
    """Return the operator's name without namespace and default overload; for a step, its text in a plan."""
    if isinstance(node.op, Conversion):
        return f"{node.op!r} of {node.op.src!r} "
    if isinstance(node.op, Start):
        return f"{node.op!r} of {node.op.carry.src!r} "
    name = name_of(node.op)
    return name.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")


def tree_text(tree: TorchValue) -> str:
    """Return the text of arguments or results, with values by name."""
    return repr(map_values(_Shown, tree)).replace("torch.", "")


class _Shown:
    """Text of a value among the arguments of a node."""

    def __init__(self, value: Value) -> None:
        self._text = repr(value)

    def __repr__(self) -> str:
        return self._text


def numbered(text: str) -> str:
    """Return the text of a program with its symbols numbered in order of appearance, to compare two recordings."""
    seen: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: seen.setdefault(found[0], f"s.{len(seen)}"), text)
