"""The tensors of a model, by name: their specs, their parts on this rank, and their replacement by other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import World
from meshwright.layout import Spec, TorchValue, replicated
from meshwright.tensor import DistTensor, as_dist_tensor, mark_of

from ._errors import WeightError


def module_of(holder: Any) -> nn.Module:
    """Return the module of a trainer or a sampler: itself, the network of a static model, or a sampler's model.

    Raises WeightError for anything else.
    """
    for found in (holder, getattr(holder, "network", None), getattr(holder, "model", None)):
        if isinstance(found, nn.Module):
            return found
    raise WeightError(
        "the weights of a model",
        f"a {type(holder).__name__}",
        "weights are the parameters and buffers of a torch.nn.Module",
        "pass the model, the result of mw.to_static, or a sampler",
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name; a tensor with several names has an entry for each."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def spec_of(x: Tensor, world: World) -> Spec:
    """Return the spec of a tensor; a plain tensor is replicated on all ranks."""
    return x.spec if isinstance(x, DistTensor) else Spec(world.mesh, replicated(x.dim()), x.shape, x.dtype)


def part_of(x: Tensor) -> Tensor:
    """Return this rank's part, which shares the memory of the tensor and its count of writes."""
    return x.to_local().detach() if isinstance(x, DistTensor) else x.detach()


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """True if the parts of both tensors are the same memory."""
    return mark_of(x)[:2] == mark_of(y)[:2]


def with_part(like: Tensor, part: Tensor) -> Tensor:
    """Return a tensor with this part, in the layout and of the class of `like`; it requires no gradient."""
    if not isinstance(like, DistTensor):
        return nn.Parameter(part, requires_grad=False) if isinstance(like, nn.Parameter) else part
    found: TorchValue = as_dist_tensor(part, like.spec)
    if isinstance(like, nn.Parameter):
        found._is_param = True
    return found


def empty_part(like: Tensor, device: torch.device) -> Tensor:
    """Return new memory for the part of this rank."""
    part = part_of(like)
    return torch.empty_like(part, device=device, memory_format=torch.contiguous_format)


def replace_tensor(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put `new` in every place of the model that has the parameter or buffer `old`."""
    for module in model.modules():
        for table in _tables(module):
            for name, x in table.items():
                if x is old:
                    table[name] = new


def _tables(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers
