"""What a program takes for granted beside its inputs: which tensors there are, how they lie, and Python's state.

A program is recorded once. Before it runs again, what it was recorded of is compared with what is there now: layers
that were switched, parameters that were frozen or replaced, states that were loaded, hooks that were added.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import Snapshot, slots_of
from meshwright.tensor import DistTensor, context, drawing_by, local_parts

from ._description import lies_text, setting_text
from ._errors import StaticError
from ._local_step import own_hook

LAYER_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
REMEMBERED = 16
"""So many settings are told apart; the oldest is forgotten first."""


@dataclass(slots=True)
class Settings:
    """The settings that a network, its optimizer and what else is called were in, by number."""

    network: nn.Module
    optimizer: Optimizer | None
    calls: tuple[Any, ...] = ()
    """What is called beside the network: the loss."""
    known: dict[int, tuple[Snapshot, Any]] = field(default_factory=dict[int, "tuple[Snapshot, Any]"])
    count: int = 0
    texts: dict[int, str] = field(default_factory=dict[int, str])
    """What each setting was, for other processes."""
    marks: dict[str, str] = field(default_factory=dict[str, str])
    """How parameters and buffers lay at first."""

    def number(self, training: bool) -> int:
        """Number of the setting that holds now; a new one where it is not known."""
        with local_parts():
            now = tuple(_facts(self.network, self.optimizer if training else None))
        for number, (snapshot, facts) in reversed(self.known.items()):
            if facts == now and snapshot.holds():
                return number
        self.count += 1
        snapshot = Snapshot.of(self.network, *self.calls)
        self.known[self.count] = (snapshot, now)
        self.texts[self.count] = setting_text(self.network, self.optimizer if training else None, snapshot.read())
        self.marks = self.marks or {s.name: lies_text(s.tensor) for s in slots_of(self.network)}
        if len(self.known) > REMEMBERED:
            del self.texts[next(iter(self.known))]
            del self.known[next(iter(self.known))]
        return self.count


def _facts(network: nn.Module, optimizer: Optimizer | None) -> Iterator[Any]:
    """Everything that is compared; parameters count by identity, and all tensors by how they lie."""
    yield drawing_by(), context()
    yield torch.get_default_dtype()
    yield from ((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    for part in network.modules():
        for p in part._parameters.values():
            yield None if p is None else (id(p), p.requires_grad, _lies(p), _hooks(p, PARAMETER_HOOKS))
        yield from (None if x is None else _lies(x) for x in part._buffers.values())
        hooks = _hooks(part, LAYER_HOOKS)
        if hooks:
            yield id(part), hooks
    if optimizer is None:
        return
    yield _hooks(optimizer, STEP_HOOKS, own_hook(optimizer))
    for group in optimizer.param_groups:
        yield [id(p) for p in group["params"]], [id(x) for x in group.values() if isinstance(x, Tensor)]
    for p, state in optimizer.state.items():
        yield id(p), [(key, _lies(v) if isinstance(v, Tensor) else type(v)) for key, v in state.items()]


def _hooks(owner: Any, kinds: tuple[str, ...], own: int | None = None) -> tuple[Any, ...]:
    """The hooks of a layer, a parameter or an optimizer but our `own`, by the numbers that torch gives out once."""
    held = [tuple(number for number in getattr(owner, kind, None) or () if number != own) for kind in kinds]
    return tuple(held) if any(held) else ()


def _lies(x: Tensor) -> Any:
    return x._spec if type(x) is DistTensor else (x.shape, x.dtype, x.device)


def form_of(tree: Any) -> Any:
    """How a batch is built, without its tensors: types, lengths, keys in their order.

    Raises StaticError for a leaf that is no tensor and cannot be compared.
    """
    if isinstance(tree, (tuple, list)):
        return (type(tree), *[form_of(v) for v in tree])
    if isinstance(tree, Mapping):
        return (type(tree), *[(key, form_of(v)) for key, v in tree.items()])
    if not isinstance(tree, Tensor) and not isinstance(tree, Hashable):
        raise StaticError(
            f"a batch with a {type(tree).__name__}", "what is neither a tensor nor hashable",
            "what is no tensor becomes part of the program, and tells programs apart", "torch.as_tensor(x)",
        )  # fmt: skip
    return None
