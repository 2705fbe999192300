"""Refuse calls in states of torch in which a program's step would differ from Python's."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter, is_

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import Capture, dispatch_modes, model_tensors, saving_is_hooked
from meshwright.tensor import DistTensor, flush, local_parts, shared_memory, sharing_views

from .._errors import StaticError

_GRADIENT = attrgetter("grad")


def refuse_call(optimizer: Optimizer | None) -> None:
    """Raise StaticError inside a dispatch mode or hooks of saved tensors, and if gradients are left over.

    `optimizer` is None for a call that does not train.
    """
    modes = dispatch_modes()
    if modes:
        raise StaticError(
            "dist_model(...)",
            f"inside the dispatch mode {type(modes[-1]).__name__}",
            "the mode would see the operators of the recording, not those of the step",
            "call the eager model inside the mode, or move the call out of the mode",
        )
    if optimizer is None:
        return
    if saving_is_hooked():
        raise StaticError(
            "dist_model(...)",
            "inside torch.autograd.graph.saved_tensors_hooks",
            "a program saves no tensors for autograd, so the hooks would not run",
            "use Strategy(recompute=...) or Strategy(release=...) to save memory, or move the call out of the hooks",
        )
    flush()
    with local_parts():
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        left = not all(map(is_, map(_GRADIENT, parameters), repeat(None)))
    if left:
        raise StaticError(
            "dist_model(...)",
            "parameters with gradients from an earlier backward pass",
            "an eager step would add to these gradients, but a program computes new ones",
            "call optimizer.zero_grad() first",
        )


def refuse_shared(network: nn.Module) -> None:
    """Raise StaticError if a parameter or buffer shares memory of other parts; every rank makes the call."""
    shared = {id(view) for view in sharing_views()}
    if not shared:
        return
    for name, x in (*network.named_parameters(), *network.named_buffers()):
        if id(x) in shared:
            raise StaticError(
                "dist_model(...)",
                f"{name}, which shares the memory of a tensor with other parts since {name}.data = y",
                "a program reads and writes this rank's part, and its writes would not reach the other tensor",
                f"use one parameter for both, as in head.weight = embedding.weight, or write {name}.data = y.clone()",
            )


def refuse_shared_new_layouts(captured: Capture, network: nn.Module | None = None) -> None:
    """Raise StaticError if a parameter or buffer that the program gives a new layout shares memory with another one.

    `network` is the whole model, if only a part of it was captured.
    """
    given = {i.name: i for i in captured.program.inputs if i.role in ("parameter", "buffer")}

    def is_laid(name: str, x: Tensor) -> bool:
        spec = given[name].spec
        return spec is not None and not (isinstance(x, DistTensor) and x.spec is spec)

    laid = [slot for slot in captured.slots if is_laid(slot.name, slot.tensor)]
    others = model_tensors(network) if network is not None else captured.slots
    slots = list({id(slot.tensor): slot for slot in (*laid, *others)}.values())
    groups, pairs = shared_memory([slot.tensor for slot in slots], len(laid))
    for one, other, *_ in (*groups, *pairs):
        names = slots[one].name, slots[other].name
        raise StaticError(
            "dist_model(...)",
            f"{names[0]} and {names[1]}, which share memory",
            "on a mesh each gets its own parts, and a write to one would not reach the other",
            f"use one tensor for both, as in {names[1]} = {names[0]}, or write "
            f"{names[1]}.data = {names[1]}.data.clone()",
        )
