"""Move the arguments of a pipeline's layer to its stage; lists and dicts stay the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshwright.layout import Partial, Placement, ProcessMesh, Replicate, Shard, TorchValue, layout_of
from meshwright.tensor import (
    DistTensor,
    StageArrival,
    StageOrder,
    captured_whole,
    from_all_ranks,
    map_tensors,
    pipe_split,
    tensors_in,
)

from ..marks.tensors import reshard


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A hook that moves the arguments of a layer to `home`, with the placements `batch` for plain tensors.

    `same`: True if the chunk that begins here is on the mesh of the chunk before.
    """

    order: StageOrder
    home: ProcessMesh
    batch: Sequence[Placement]
    same: bool
    _handed: list[_PassedContainers] = field(init=False, default_factory=list["_PassedContainers"])

    def put_on(self, layer: nn.Module) -> None:
        """Register the hook on `layer`."""
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(self._behind, always_call=True)

    def _before(self, _: nn.Module, args: TorchValue, kwargs: dict[str, TorchValue]) -> TorchValue:
        self.order.come_to(self.home)
        rows = next((x.shape[0] for x in tensors_in((args, kwargs)) if x.dim()), 0)
        handed = _PassedContainers(lambda x: self._moved(x, rows))
        self._handed.append(handed)
        return handed.given(args), {name: handed.given(x) for name, x in kwargs.items()}

    def _behind(self, *_: object) -> None:
        if self._handed:
            self._handed.pop().give_back()

    def _moved(self, x: Tensor, rows: int) -> Tensor:
        y = self.order.once(x, self.home, lambda: self._sent(x, rows))
        return pipe_split(y) if self.same and x.is_floating_point() else y

    def _sent(self, x: Tensor, rows: int) -> Tensor:
        note = captured_whole(x)
        if note is None:
            return reshard(from_all_ranks(x, self.home), self.home, self._placements(x, rows))
        layout = layout_of(self._placements(x, rows), x.dim(), self.home)
        return note(StageArrival(self.home, layout), (x,), lambda: x.view_as(x))

    def _placements(self, x: Tensor, rows: int) -> Sequence[Placement]:
        """Return the placements of a tensor on its new stage, with pending sums reduced.

        A tensor that was on no mesh and has another number of rows than the layer's first argument is no batch: its
        rows are replicated.
        """
        if isinstance(x, DistTensor) and x.mesh.dim_names == self.home.dim_names:
            return [Replicate() if isinstance(p, Partial) else p for p in x.placements]
        fit = [n for n in range(x.dim()) if n > 0 or x.shape[0] == rows]
        return [p if not isinstance(p, Shard) or p.dim in fit else Replicate() for p in self.batch]


class _PassedContainers:
    """Copies of the caller's lists and dicts with moved tensors; changes by the layer are copied back."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        self._move = move
        self._copies: list[tuple[Any, Any, Any]] = []
        self._origin: dict[int, tuple[Any, Any]] = {}

    def given(self, tree: TorchValue) -> TorchValue:
        """Return `tree` for the layer, with tensors moved, and lists and dicts copied.

        Values of dataclasses and other mappings are sent by the operations that read them.
        """
        if isinstance(tree, Tensor):
            return self._noted(tree, self._move(tree))
        if type(tree) is tuple:
            return tuple(self.given(x) for x in tree)
        if type(tree) is list:
            return self._copied(tree, [self.given(x) for x in tree])
        if type(tree) is dict:
            return self._copied(tree, {key: self.given(x) for key, x in tree.items()})
        return tree if isinstance(tree, Mapping) else map_tensors(self._move, tree)

    def _noted(self, old: TorchValue, new: TorchValue) -> TorchValue:
        self._origin[id(new)] = (new, old)
        return new

    def _copied(self, old: TorchValue, new: TorchValue) -> TorchValue:
        self._copies.append((old, new, new.copy()))
        return self._noted(old, new)

    def give_back(self) -> None:
        """Apply the layer's changes of its copies to the caller's lists and dicts."""
        for old, new, before in self._copies:
            if _is_same(new, before):
                continue
            if isinstance(old, list):
                old[:] = [self._of_caller(x) for x in new]
            else:
                old.clear()
                old.update({key: self._of_caller(x) for key, x in new.items()})

    def _of_caller(self, x: TorchValue) -> TorchValue:
        return self._origin[id(x)][1] if id(x) in self._origin else x


def _is_same(one: TorchValue, other: TorchValue) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return all(key in other and value is other[key] for key, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))
