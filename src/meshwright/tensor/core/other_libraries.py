"""Tensors and operators of libraries whose tensor classes cannot be combined with distributed tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._errors import OperationError

TORCHAO = "torchao"


def check_library(asked: str, module: str, tensors: Iterable[Tensor]) -> None:
    """Raise OperationError for a function or a tensor of torchao; `module` is that of the function."""
    found = next((type(x) for x in tensors if _is_of_torchao(type(x).__module__)), None)
    if found is None and not _is_of_torchao(module):
        return
    raise OperationError(
        asked,
        f"a {found.__name__} of torchao" if found is not None else "a distributed tensor",
        "a tensor class of torchao and a distributed tensor do not know each other's operators",
        'mark the plain model, and call mw.quantize(model, "int8") or with another scheme, not torchao.quantize_',
    )


def _is_of_torchao(module: str) -> bool:
    return TORCHAO in module.split(".")
