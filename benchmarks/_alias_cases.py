"""Calls of every operator of torch whose result may share memory with an argument, derived from torch's schemas.

A schema marks such a result by an alias annotation, such as `Tensor(a)`. Arguments are made from the schema: their
names and types give the values to try. `UNCALLED` lists the operators that are left out, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SPARSE, NESTED, MODES = "it takes sparse tensors", "it takes nested tensors", "it belongs to a mode of autograd"
SCRIPT = "it is an operator of TorchScript on Python values"

UNCALLED = {
    **dict.fromkeys(("_indices", "_values", "ccol_indices", "coalesce", "col_indices", "crow_indices"), SPARSE),
    **dict.fromkeys(("indices", "row_indices", "values", "_sparse_broadcast_to"), SPARSE),
    **dict.fromkeys(("_nested_get_values", "_nested_view_from_buffer", "_nested_view_from_jagged"), NESTED),
    **dict.fromkeys(("_fw_primal", "_make_dual", "_unpack_dual"), MODES),
    **dict.fromkeys(("_autocast_to_full_precision", "_autocast_to_reduced_precision"), SCRIPT),
    **dict.fromkeys(("_grad_sum_to_size", "_ncf_unsqueeze", "_ncf_view", "_unwrap_optional", "as_tensor"), SCRIPT),
    **dict.fromkeys(("cpu", "local_value", "to_here", "keys", "get"), SCRIPT),
    **dict.fromkeys(("cuda", "pin_memory"), "it needs an accelerator"),
    "_test_autograd_multiple_dispatch_view": "torch's own tests use it, and nothing else",
    "slice_inverse": "autograd uses it on gradients; its result has the size of another tensor",
    "_reshape_alias": "its strides must be those that `reshape` found for its argument",
}

SHAPES: dict[str, tuple[int, ...]] = {"t": (5, 4), "numpy_T": (5, 4), "matrix_H": (5, 4), "numpy_T.a": (5, 4)}
"""Operators that need a tensor of a particular shape."""
USUAL = (4, 3, 6)
COMPLEX = {"_conj", "conj", "imag", "view_as_real", "resolve_conj"}

_ARGUMENTS: dict[str, list[Any]] = {
    "dim": [0, -1], "dim0": [0], "dim1": [2], "dim2": [1], "axis0": [0], "axis1": [-1], "dimension": [0, 2],
    "source": [0], "destination": [2], "dims": [[2, 0, 1], [0, 2, 1]], "start": [1], "end": [3], "length": [2],
    "step": [1, 2], "index": [1, -1], "chunks": [2, 3], "split_size": [2], "sections": [2], "indices": [[1]],
    "split_sizes": None, "dtype": [torch.float64, torch.float32, torch.int32], "offset": [0, 1],
    "start_dim": [0, 1], "end_dim": [-1, 1], "copy": [False, True], "memory_format": [torch.contiguous_format],
    "device": [torch.device("cpu")], "storage_offset": [None], "implicit": [False], "non_blocking": [False],
}  # fmt: skip

_SIZES: dict[str, list[dict[str, Any]]] = {
    "reshape": [{"shape": [12, 6]}, {"shape": [4, 18]}, {"shape": [-1]}, {"shape": [4, 3, 6]}, {"shape": [2, 2, 3, 6]}],
    "view": [{"size": [12, 6]}, {"size": [4, 18]}, {"size": [-1]}, {"size": [4, 3, 2, 3]}],
    "expand": [{"size": [4, 3, 6]}, {"size": [2, 4, 3, 6]}],
    "broadcast_to": [{"size": [4, 3, 6]}, {"size": [2, 4, 3, 6]}],
    "as_strided": [{"size": [3, 4], "stride": [4, 1]}, {"size": [2, 3], "stride": [1, 2]}],
    "unflatten": [{"dim": 2, "sizes": [2, 3]}, {"dim": 0, "sizes": [2, -1]}],
    "unfold": [{"dimension": 0, "size": 2, "step": 2}, {"dimension": 2, "size": 3, "step": 1}],
    "permute": [{"dims": [2, 0, 1]}, {"dims": [0, 2, 1]}, {"dims": [0, 1, 2]}],
    "moveaxis": [{"source": 0, "destination": 2}], "movedim": [{"source": 0, "destination": 2}],
    "moveaxis.intlist": [{"source": [0], "destination": [2]}], "movedim.intlist": [{"source": [0], "destination": [2]}],
    "squeeze.dims": [{"dim": [0, 1]}], "split_with_sizes": [{"split_sizes": [1, 3]}, {"split_sizes": [4, 2], "dim": 2}],
    "split.sizes": [{"split_size": [1, 3]}], "tensor_split.indices": [{"indices": [1, 3]}],
    "slice": [{"dim": 0, "start": 1, "end": 3}, {"dim": 2, "start": 0, "end": 6, "step": 2}, {"dim": 0}],
    "narrow.Tensor": [{"dim": 0, "start": torch.tensor(1), "length": 2}],
    "contiguous": [{}], "hsplit.int": [{"sections": 3}], "view.dtype": [{"dtype": torch.int32}],
    "hsplit.array": [{"indices": [1]}],
    "tensor_split.tensor_indices_or_sections": [{"tensor_indices_or_sections": torch.tensor(2)}],
}  # fmt: skip
"""Arguments beside `self`, for operators whose arguments must have sizes that fit together."""


@dataclass(frozen=True, eq=False)
class ViewCall:
    """One call of an operator on a tensor `x` of `shape` and `dtype`, with the other arguments by name."""

    op: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Return the operator's name as torch prints it, with the arguments."""
        given = ", ".join(f"{k}={v}" for k, v in self.kwargs)
        return f"{self.op}({given})"

    def __call__(self, x: Any) -> Any:
        """Return the operator's result for `x`; an argument given as a function is called on `x` first."""
        return self.op(x, **{k: v(x) if v is _like else v for k, v in self.kwargs})

    def as_method(self, x: Any) -> Any:
        """Return the result of the method of `x` that has the operator's name."""
        given = {k: v(x) if v is _like else v for k, v in self.kwargs}
        names = [a.name for a in self.op._schema.arguments if not a.kwarg_only][1:]
        while names and names[-1] not in given:
            names.pop()
        at = [given.pop(name, None) for name in names]
        return getattr(torch.Tensor, self.base)(x, *at, **given)

    @property
    def base(self) -> str:
        """Return the operator's name without namespace and overload."""
        return self.op._schema.name.removeprefix("aten::")


def view_operators() -> Iterator[Any]:
    """Yield every overload of `torch.ops.aten` that writes to no argument and may return an alias of one."""
    for schema in torch._C._jit_get_all_schemas():
        returns = any(r.alias_info is not None for r in schema.returns)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        name = schema.name.removeprefix("aten::")
        if not schema.name.startswith("aten::") or writes or not returns or name in UNCALLED:
            continue
        if not schema.arguments or "Tensor" not in str(schema.arguments[0].type) or "Dict" in str(schema):
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = schema.overload_name or "default"
        in_script = overload.startswith("prim_") or (name == "split" and overload == "default")
        if packet is not None and overload in packet.overloads() and not in_script:
            yield getattr(packet, overload)


def view_calls(op: Any) -> list[ViewCall]:
    """Return the calls of one operator that torch accepts."""
    base, overload = op._schema.name.removeprefix("aten::"), op._schema.overload_name
    full = f"{base}.{overload}" if overload else base
    shape = SHAPES.get(full) or SHAPES.get(base) or USUAL
    dtype = torch.complex64 if base in COMPLEX else torch.float32
    if base == "view_as_complex":
        shape = (4, 3, 2)
    if base == "squeeze":
        shape = (1, 3, 4)
    given = _SIZES.get(full) or _SIZES.get(base) or list(_combined(op))
    calls = [ViewCall(op, shape, dtype, tuple(kw.items())) for kw in given]
    return [call for call in calls if _is_accepted(call)]


def _combined(op: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments beside `self`: all first values, then the other values of one argument at a time."""
    values: dict[str, list[Any]] = {}
    for argument in list(op._schema.arguments)[1:]:
        if str(argument.type) == "Tensor":
            values[argument.name] = [_like]
        elif argument.name in _ARGUMENTS and (not argument.has_default_value() or argument.name in _VARIED):
            values[argument.name] = _ARGUMENTS[argument.name] or []
    first = {k: v[0] for k, v in values.items() if v}
    yield first
    for name, others in values.items():
        for other in others[1:]:
            yield {**first, name: other}


_VARIED = {"dim", "copy", "start_dim", "end_dim", "offset", "step"}


def _like(x: Any) -> Any:
    return x.detach().clone()


def _is_accepted(call: ViewCall) -> bool:
    """True if torch accepts the arguments for a contiguous tensor."""
    try:
        call(torch.zeros(call.shape, dtype=call.dtype))
    except Exception:
        return False
    return True


def has_method(call: ViewCall) -> bool:
    """True if a method with the operator's name takes the arguments of the call in the schema's order."""
    try:
        call.as_method(torch.zeros(call.shape, dtype=call.dtype))
    except Exception:
        return False
    return True


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors of a result, which is a tensor or a list of tensors."""
    return [out] if isinstance(out, Tensor) else list(out)
