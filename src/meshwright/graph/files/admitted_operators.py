"""Check of the operators in a program file: only functions of tensors and numbers are admitted.

An operator is admitted if it is in one of NAMESPACES, takes and returns values of TYPES, has a tensor among them, and
its string arguments are in WORDS, such as `reduce="sum"`. A schema that takes a file name, a process group, an object
or a callback has other types or other arguments, and is refused. SIDE_EFFECTS matches operators whose schema does not
show their effects. Operators of other libraries are admitted if the caller names them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from ..program.node import Op
from ..torch_hooks import Operator

NAMESPACES = frozenset({"aten", "prims"})
OWN = frozenset({"meshwright::matmul"})
"""Admitted operators of this library. Its other operators refer to conversions by numbers of this process."""

TYPES = frozenset({"Tensor", "int", "float", "bool", "complex", "number", "Device", "Generator", "str"})
"""Admitted types of arguments and results, also as lists and as optional values."""

WORDS = frozenset({
    "UPLO", "activation", "algorithm", "approximate", "assert_msg", "driver", "equation", "indexing", "interpolation",
    "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side",
})  # fmt: skip
"""Names of string arguments that only choose an algorithm."""

SIDE_EFFECTS = re.compile(
    r"_?backward|dist_backward|requires_grad_|retain_grad|set_data|_make_dual|_fw_primal|_unpack_dual"  # autograd
    r"|_propagate_xla_data|_sync|_lazy_clone|_sink_tokens|_cudnn_init_dropout_state"  # state of the process
    r"|set_|set|_set_.*|.*_unsafe(_out)?|_reshape_alias_unsafe|_use_.*"  # memory of another tensor; nothing is checked
    r"|_test_.*|_triton_.*|_debug_.*|_linalg_check_errors|_validate_.*|_nested_view_from_.*"  # of torch's own tests
)
"""Names of operators whose effects are not in their schemas."""

_INSIDE = re.compile(r"(?:List|Optional)\[(.*)\]")
CHECKS = frozenset({
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size",
})  # fmt: skip
"""Operators that return nothing and write nothing, but raise an error."""


def is_admitted(op: Operator, operators: Collection[str] = ()) -> bool:
    """True if a program file may name the operator.

    `operators` names admitted operators of other libraries: `mylib` for all of them, or `mylib.scale` for one.
    """
    name = op._schema.name
    library, _, short = name.partition("::")
    if library in operators or f"{library}.{short}" in operators or name in OWN:
        return True
    return library in NAMESPACES and SIDE_EFFECTS.fullmatch(short) is None and is_function(op._schema, short)


def is_function(schema: torch.FunctionSchema, short: str = "") -> bool:
    """True if the schema has only TYPES, at least one tensor, and results or writes (or `short` is in CHECKS)."""
    given, returned = [_type(a) for a in schema.arguments], [_type(r) for r in schema.returns]
    words = {a.name for a, kind in zip(schema.arguments, given, strict=True) if kind == "str"}
    has_tensor = "Tensor" in given or "Tensor" in returned
    has_result = bool(returned) or schema.is_mutable
    return ((has_tensor and has_result) or short in CHECKS) and TYPES.issuperset([*given, *returned]) and words <= WORDS


def _type(argument: torch.Argument) -> str:
    """Return the type of an argument without enclosing `List[...]` and `Optional[...]`."""
    kind = str(argument.type)
    while found := _INSIDE.fullmatch(kind):
        kind = found[1]
    return kind


def libraries_of(ops: Collection[Op]) -> frozenset[str]:
    """Return the namespaces of the operators that are neither torch's nor this library's."""
    found = {op._schema.name.partition("::")[0] for op in ops if isinstance(op, Operator)}
    return frozenset(found - NAMESPACES - {"meshwright"})
