"""Keep the memory that tensors of a module share when the module is distributed over a mesh, or raise an error.

On one device, a write to one of two tensors on the same memory changes both. Distributed over a mesh, each tensor gets
parts in new memory. Two cases differ:

    the very same elements, one layout    the parts share memory, too, as by `q.data = p.data`
    any other overlap                     the parts cannot share memory as the whole tensors do: SharedMemoryError

One tensor object that several modules hold is not such a case: it is distributed once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import Spec, TorchValue
from meshwright.tensor import DistTensor, check_library, shared_memory

from .._errors import SharedMemoryError

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The place of a tensor in a module: its path, table and key, and the tensor before the module was distributed."""

    path: str
    table: dict[str, Any]
    key: str
    tensor: Tensor
    is_held: bool
    """True for a parameter or buffer. Another attribute (False) is distributed only if it shares memory."""

    @property
    def now(self) -> TorchValue:
        return self.table.get(self.key)


@contextmanager
def keep_shared_memory(model: nn.Module, asked: str) -> Generator[None]:
    """Keep shared memory shared while the body of the `with` statement distributes `model` over a mesh.

    Raises SharedMemoryError before the body if two tensors share only some elements. After the body, tensors with the
    very same elements share memory again; SharedMemoryError is raised if their layouts differ. After an error, a model
    with shared memory gets back its former tensors and hooks.
    """
    memory = ModuleMemory(model, asked)
    kept = _contents(model) if memory.is_shared else []
    try:
        yield
        memory.check(lambda slot: _spec(slot.now))
    except BaseException:
        for table, content in kept:
            table.clear()
            table.update(content)
        raise
    memory.tie()


class ModuleMemory:
    """The tensors of a module that share memory.

    Raises SharedMemoryError if they share it in a way that parts cannot, and OperationError for a tensor of torchao.
    """

    def __init__(self, model: nn.Module, asked: str) -> None:
        self._asked = asked
        by_object = _by_object(sorted(_slots(model), key=lambda slot: not slot.is_held))
        check_library(asked, "", (slots[0].tensor for slots in by_object))
        held = sum(slots[0].is_held for slots in by_object)
        groups, pairs = shared_memory([slots[0].tensor for slots in by_object], held)
        self._pairs = [(by_object[one][0], by_object[other][0]) for one, other in pairs]
        self._groups = [[slot for at in group for slot in by_object[at]] for group in groups]
        grouped = set(chain.from_iterable(groups))
        self._groups += [slots for at, slots in enumerate(by_object) if at not in grouped and _is_mixed(slots)]
        self._check_before()

    @property
    def is_shared(self) -> bool:
        """True if some tensors of the module share memory."""
        return bool(self._groups or self._pairs)

    def _check_before(self) -> None:
        for one, other in self._pairs:
            if any(slot.is_held and not isinstance(slot.tensor, DistTensor) for slot in (one, other)):
                raise self._overlap_error(one, other)
        for group in self._groups:
            computed = next((s for s in group if not s.is_held and not s.tensor.is_leaf), None)
            if computed is not None and group[0].tensor is not computed.tensor:
                raise SharedMemoryError(
                    self._asked,
                    f"{computed.path}, which was computed from {group[0].path} and shares its memory",
                    "its gradient history begins at the tensor that the module had before it was distributed",
                    f"compute {computed.path} in forward(), or use {computed.path}.detach()",
                )

    def check(self, spec_of: Callable[[_Slot], Spec | None]) -> None:
        """Raise SharedMemoryError if tensors with the same elements get different layouts."""
        for one, other in self._pairs:
            if any(slot.now is not slot.tensor for slot in (one, other)):
                raise self._overlap_error(one, other)
        for group in self._groups:
            first = spec_of(group[0])
            for slot in group[1:]:
                follows = not slot.is_held and slot.now is slot.tensor
                spec = first if follows else spec_of(slot)
                if first is not None and spec is not first:
                    raise SharedMemoryError(
                        self._asked,
                        f"{group[0].path} gets {first!r}, and {slot.path} gets {spec!r}",
                        "tensors that share memory must have the same layout",
                        f"give both the same layout; or {_fix(group[0], slot)}",
                    )

    def tie(self) -> None:
        """Give the distributed tensors of each group one memory."""
        for group in self._groups:
            if not isinstance(group[0].now, DistTensor):
                continue
            became: dict[int, Any] = {id(group[0].tensor): group[0].now}
            for slot in group:
                if id(slot.tensor) not in became:
                    became[id(slot.tensor)] = _on_memory(group[0].now, slot)
                if not slot.is_held:
                    slot.table[slot.key] = became[id(slot.tensor)]

    def _overlap_error(self, one: _Slot, other: _Slot) -> SharedMemoryError:
        shapes = [tuple(slot.tensor.shape) for slot in (one, other)]
        return SharedMemoryError(
            self._asked,
            f"{one.path} of shape {shapes[0]} and {other.path} of shape {shapes[1]} share some elements",
            "on a mesh each would have its own parts, and a write to one would not reach the other",
            _fix(one, other),
        )


def refuse_shared_parameters(parameters: Iterable[Tensor], asked: str) -> None:
    """Raise SharedMemoryError if two of the parameters share memory, before each gets memory of its own."""
    found = list({id(p): p for p in parameters}.values())
    groups, pairs = shared_memory(found, len(found))
    numbers = next((tuple(group[:2]) for group in groups), None) or next(iter(pairs), None)
    if numbers is not None:
        one, other = (found[at] for at in numbers)
        raise SharedMemoryError(
            asked,
            f"parameters of shapes {tuple(one.shape)} and {tuple(other.shape)} that share memory",
            "each would get its own memory, and an update of one would not reach the other",
            "use one parameter for both, as in head.weight = embedding.weight, or write p.data = p.data.clone()",
        )


def _slots(model: nn.Module) -> Iterable[_Slot]:
    for path, module in model.named_modules():
        tables = ((module._parameters, True), (module._buffers, True), (module.__dict__, False))
        for table, is_held in tables:
            for key, x in table.items():
                if isinstance(x, Tensor):
                    yield _Slot(f"{path}.{key}" if path else key, table, key, x, is_held)


def _by_object(slots: Iterable[_Slot]) -> list[list[_Slot]]:
    """Return the slots of each tensor object."""
    found: dict[int, list[_Slot]] = {}
    for slot in slots:
        found.setdefault(id(slot.tensor), []).append(slot)
    return list(found.values())


def _is_mixed(group: Sequence[_Slot]) -> bool:
    """True if one object is both a parameter or buffer and another attribute; the attributes are last in a group."""
    return group[0].is_held and not group[-1].is_held


def _contents(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the tables of the modules that laying changes, each with a copy."""
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += [module.__dict__, module._parameters, module._buffers]
        tables += [vars(module)[name] for name in _HOOKS if name in vars(module)]
    return [(table, dict(table)) for table in tables]


def _spec(x: object) -> Spec | None:
    return x.spec if isinstance(x, DistTensor) else None


def _on_memory(first: Tensor, slot: _Slot) -> Tensor:
    """Return the tensor of a slot on the memory of `first`: the distributed one, or a new one for an attribute."""
    with torch.no_grad():
        if not slot.is_held:
            return first.data.requires_grad_(slot.tensor.requires_grad)
        if not shared_memory([first, slot.now], 1)[0]:
            slot.now.data = first.data
        return slot.now


def _fix(one: _Slot, other: _Slot) -> str:
    """Return the advice to make one tensor of both, or to give each memory of its own."""
    if one.is_held and other.is_held:
        clone = f"{other.path}.data = {other.path}.data.clone()"
        return f"use one tensor for both, as in {one.path} = {other.path}, or write {clone}"
    return f"create the view of {one.path} in forward(), or write {other.path} = {other.path}.clone()"
