"""What a program takes for granted, in text: what another process can compare with what it has itself.

Numbers and texts stand for themselves, tensors that no module registers by what they hold, functions and classes by
the code that they are compiled to. What no text can tell stands there by its type.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import slots_of
from meshwright.layout import Spec
from meshwright.tensor import DistTensor, context, drawing_by, local_parts

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 5
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_LIBRARIES = ("torch.", "builtins.", "numpy.")


def spec_text(spec: Spec) -> str:
    """A spec and its mesh."""
    return f"{spec!r} on {spec.mesh!r}"


def lies_text(x: Any) -> str:
    """Dtype and shape of a tensor, and its layout and mesh where it is distributed."""
    if isinstance(x, DistTensor):
        return spec_text(x._spec)
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def code_of(network: nn.Module, loss: Any, optimizer: Optimizer | None) -> dict[str, str]:
    """What the programs of a model are made by: classes of its modules, the loss, the optimizer."""
    found = {f"module {path or '.'}": _class(type(part)) for path, part in network.named_modules()}
    return {**found, "loss": described(loss), "optimizer": "none" if optimizer is None else _class(type(optimizer))}


def setting_text(network: nn.Module, optimizer: Optimizer | None, read: Iterable[tuple[str, Any]]) -> str:
    """A text for all that may be switched: of the network, of the optimizer if there is one, and of what is `read`."""
    with local_parts():
        lines = [*_modes(), *_network(network), *([] if optimizer is None else _optimizer(network, optimizer))]
        lines += [f"{name} = {described(value)}" for name, value in read]
    return sha256("\n".join(lines).encode()).hexdigest()


def _modes() -> Iterator[str]:
    yield f"draws by {drawing_by()}, attends by {context()}, {torch.get_default_dtype()}"
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield f"autocast {device} {torch.get_autocast_dtype(device)}"


def _network(network: nn.Module) -> Iterator[str]:
    for slot in slots_of(network):
        grad = slot.is_parameter and slot.tensor.requires_grad
        yield f"{slot.name}: {lies_text(slot.tensor)} {grad} {_hooks(slot.tensor)}"
    for path, part in network.named_modules():
        hooks = len(part._forward_hooks), len(part._forward_pre_hooks)
        yield f"{path}: {hooks} {sorted(k for k, v in part._parameters.items() if v is None)}"
        for key, value in part.__dict__.items():
            if key not in _TABLES and "_hooks" not in key:
                yield f"{path}.{key} = {described(value)}"


def _hooks(x: Tensor) -> str:
    return "".join(described(hook) for hook in (x._backward_hooks or {}).values())


def _optimizer(network: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    names = {id(s.tensor): s.name for s in slots_of(network)}
    yield f"hooks {len(optimizer._optimizer_step_pre_hooks)} {len(optimizer._optimizer_step_post_hooks)}"
    for group in optimizer.param_groups:
        yield f"group {[names.get(id(p)) for p in group['params']]}"
        yield f"tensors {[(key, lies_text(x)) for key, x in group.items() if isinstance(x, Tensor)]}"
    for p, state in optimizer.state.items():
        yield f"{names.get(id(p))} has {[(key, lies_text(value)) for key, value in state.items()]}"


def described(value: Any, depth: int = _DEPTH) -> str:
    """A text that is another one where the value is."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return _held(value)
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} {_function(value, depth)}" if depth else value.__qualname__
    if isinstance(value, type):
        return _class(value)
    return _inside(value, depth) if depth else type(value).__qualname__


def _inside(value: Any, depth: int) -> str:
    """What a container or an object of the user's own holds."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{described(k, 0)}: {described(v, depth - 1)}" for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(described(v, depth - 1) for v in value)) + "}"
    if isinstance(value, Sequence):
        return f"{type(value).__name__}[{', '.join(described(v, depth - 1) for v in value)}]"
    held = getattr(value, "__dict__", {}).items()
    attributes = {k: v for k, v in held if "_hooks" not in k and k not in _TABLES and not _is_derived(value, k)}
    return f"{_class(type(value))} {_inside(attributes, depth - 1) if depth > 1 else ''}"


def _is_derived(value: Any, name: str) -> bool:
    """True for what an object found once from what else it holds: it may be there by then, or not yet."""
    return isinstance(getattr(type(value), name, None), cached_property)


def _held(x: Any) -> str:
    array = x if isinstance(x, np.ndarray) else x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{lies_text(x)} {sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


@lru_cache(maxsize=4096)
def _class(kind: type) -> str:
    """Name of a class, and what its own functions are compiled to, and those of its bases that no library has."""
    own = [c for c in kind.__mro__ if not f"{c.__module__}.".startswith(_LIBRARIES)]
    functions = [inspect.unwrap(f) for c in own for f in map(_plain, vars(c).values()) if isinstance(f, FunctionType)]
    return f"{kind.__module__}.{kind.__qualname__} {_short([_function(f, 2) for f in functions])}"


def _plain(member: Any) -> Any:
    """The function that a class holds as a method or property."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def _function(f: Any, depth: int) -> str:
    cells = [_cell(c.cell_contents, depth) for c in f.__closure__ or () if _is_filled(c)]
    return _short([_code(f.__code__), *cells, described(f.__defaults__, 1), described(f.__kwdefaults__, 2)])


def _cell(value: Any, depth: int) -> str:
    """What a function takes from around it; methods find their own class there, and functions themselves."""
    named = isinstance(value, type) or (callable(value) and not depth)
    return getattr(value, "__qualname__", type(value).__qualname__) if named else described(value, max(depth - 1, 0))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return _short([code.co_code.hex(), code.co_names, constants])


def _short(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]
