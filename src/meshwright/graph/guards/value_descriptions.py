"""Text descriptions of values, by which another process can detect if its values are equal.

Plain values are described by their repr, tensors and arrays by a checksum of their elements, functions and classes by a
checksum of their bytecode. Any other object is described by its type: its attributes have slots of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from meshwright.tensor import DistTensor

from .slots import is_plain
from .trusted_libraries import is_trusted


def described(value: object) -> str:
    """Return a text that differs if the value differs."""
    if is_plain(value):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _tensor_text(value)
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} {_function_text(value)}"
    if isinstance(value, MethodType):
        return f"method {described(value.__func__)}"
    if isinstance(value, type):
        return class_text(value)
    if isinstance(value, (tuple, list)):
        items = cast("tuple[Any, ...]", value)
        return f"{type(items).__name__}[{', '.join(map(described, items))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(described, cast('set[Any]', value))))}}}"
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        return f"{type(value).__name__} of {[described(key) for key in held]}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _tensor_text(x: Tensor | np.ndarray) -> str:
    array = x if isinstance(x, np.ndarray) else x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    lies = repr(x._spec) if isinstance(x, DistTensor) else f"{x.dtype}{list(x.shape)}"
    return f"{lies} {sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


@lru_cache(maxsize=4096)
def class_text(kind: type) -> str:
    """Return the name of a class, with a checksum of the bytecode of its functions and of its untrusted bases."""
    members = [member for base in kind.__mro__ if not is_trusted(base) for member in vars(base).values()]
    functions = [inspect.unwrap(f) for f in map(_function_behind, members) if isinstance(f, FunctionType)]
    return f"{kind.__module__}.{kind.__qualname__} {_checksum([code_text(f.__code__) for f in functions])}"


def _function_behind(member: object) -> object:
    """Return the function behind a method or property of a class."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def _function_text(f: FunctionType) -> str:
    return _checksum([code_text(f.__code__), described(f.__defaults__)])


def code_text(code: CodeType) -> str:
    """Return a checksum of the bytecode, names and constants of the code, without its file and lines."""
    constants = [code_text(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return _checksum([code.co_code.hex(), code.co_names, constants])


def _checksum(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]
