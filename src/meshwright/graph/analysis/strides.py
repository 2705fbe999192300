"""Run of a program on meta tensors, to find the strides of every value."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Cache, TorchValue, hint
from meshwright.reshard import View
from meshwright.tensor import key_of_tree, map_tensors

from ..program.node import Conversion, Node, Start, Value, Wait, bind_values
from ..program.program import Input, Program
from ..torch_hooks import FakeMode, Operator, ShapeEnv, imagining, no_modes

NOWHERE = torch.device("meta")
"""The meta device. Operators on it are faster than on fake tensors, which are the fallback if an operator fails."""


def strides_of(program: Program) -> dict[Value, tuple[int, ...]]:
    """Return the strides of the tensors of a program with contiguous inputs. Symbolic sizes have their recorded values.

    A view that is impossible for contiguous inputs shows that some inputs are not contiguous. Then the view and the
    values computed from it are left out.
    """
    known: dict[Value, Any] = {}
    with no_modes(), torch.no_grad():
        for given in program.inputs:
            known[given.value] = _metadata_of(_meta_input(given, program))
        for node in program.nodes:
            if all(v in known for v in node.ins):
                with suppress(ValueError):
                    bind_values(node.out, _result_of(node, known, program.rank), known)
    return {v: x.strides for v, x in known.items() if isinstance(x, _Metadata)}


def _meta_input(given: Input, program: Program) -> TorchValue:
    v = given.value
    if isinstance(v.dtype, torch.dtype):
        return torch.empty(_recorded_sizes(v.shape), dtype=v.dtype, device=NOWHERE)
    if given.role != "size":
        return v.dtype(2)
    leaf = next(i.value for i in program.inputs if i.role == "batch" and i.source == given.source.leaf)
    return hint(leaf.shape[given.source.dim])


def _recorded_sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(map(hint, shape))


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=NOWHERE)


_results: Cache[Hashable, TorchValue] = Cache(4096)
"""Results of operators, by operator and arguments. Each tensor is its metadata. Layers of models repeat their calls."""


def _result_of(node: Node, known: dict[Value, Any], rank: int) -> TorchValue:
    """Return the results of a node, tensors as metadata; those of operators are memoized."""
    if not isinstance(node.op, Operator):
        return map_tensors(_metadata_of, _run(node, known, rank))
    given = key_of_tree(node.mapped_arguments(known.__getitem__), lambda x: (type(x), x))
    key = node.op, given, torch.get_default_dtype(), *(v.device for v in node.outs if v.is_tensor)
    if key not in _results:
        _results[key] = map_tensors(_metadata_of, _run(node, known, rank))
    return _results[key]


def _metadata_of(x: TorchValue) -> TorchValue:
    return _Metadata(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _tensor_of(x: TorchValue) -> TorchValue:
    return x.tensor() if isinstance(x, _Metadata) else x


def _run(node: Node, known: dict[Value, Any], rank: int) -> TorchValue:
    args, kwargs = node.mapped_arguments(lambda v: _tensor_of(known[v]))
    if isinstance(node.op, Wait):
        return args[0]
    if isinstance(node.op, Start):
        return args[0].new_empty(_recorded_sizes(node.op.carry.dst.local_shape(rank)))
    if isinstance(node.op, Conversion):
        shape = _recorded_sizes(node.op.dst.local_shape(rank))
        return args[0].reshape(shape) if isinstance(node.op.step, View) else args[0].new_empty(shape)
    if isinstance(node.op, Operator) and isinstance(node.out, Value) and not isinstance(node.out.dtype, torch.dtype):
        return node.out.dtype(2)
    elsewhere = {key: NOWHERE if isinstance(value, torch.device) else value for key, value in kwargs.items()}
    try:
        return node.op(*args, **elsewhere)
    except (RuntimeError, NotImplementedError):
        return _run_on_fakes(node, args, kwargs)


def _run_on_fakes(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchValue:
    """Return the results of a node as meta tensors, from a run on fake tensors of the node's device."""
    device = next((v.device for v in (*node.ins, *node.outs) if v.is_tensor), "cpu")

    def there(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with imagining(FakeMode(shape_env=ShapeEnv())):
        out: TorchValue = node.op(*map_tensors(there, args), **map_tensors(there, kwargs))  # pyright: ignore[reportCallIssue] - no step
    return map_tensors(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=NOWHERE), out)
