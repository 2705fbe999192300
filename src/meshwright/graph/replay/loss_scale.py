"""Loss scaling for float16 gradients, and the update of the scale.

This is `torch.amp.GradScaler` in recorded form. The loss is multiplied by the scale and the gradients are divided by
it. If a gradient is not finite on some rank, all ranks skip the update. The scale and its counter are inputs that the
program updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, not_finite_anywhere, redistribute

from .._errors import CaptureError
from ..program.draft import Draft
from ..program.node import Origin, Value
from ..program.program import Input, Program

aten = torch.ops.aten

LOSS_SCALE = ""
"""Owner name of the scale and its counter. The owners of other states are parameters, whose names are not empty."""

HELD = {"scale": torch.float32, "growth": torch.int32}
"""Dtypes of the state kept between steps: the scale, and the number of steps since it changed."""


@dataclass(frozen=True)
class Scaling:
    """Schedule of the scale: times `backoff` after an overflow, times `growth` after `interval` steps without one."""

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


def scale_input(key: str, device: torch.device) -> Input:
    """Return the input of the scale, or of its counter."""
    name = f"loss_scale.{key}"
    return Input(Value(name, (), HELD[key], str(device)), "state", name, None, (LOSS_SCALE, key))


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Unscaled gradients, the scale and its counter; `found` is True if a gradient was not finite."""

    grads: Mapping[str, Tensor]
    scale: Tensor
    count: Tensor
    found: Tensor

    def renew(self, schedule: Scaling) -> None:
        """Write the scale and the counter of the next step."""
        count = self.count + 1
        grown = self.scale * schedule.growth
        grows = (count == schedule.interval) & grown.isfinite()
        scale = torch.where(self.found, self.scale * schedule.backoff, torch.where(grows, grown, self.scale))
        count = torch.where(self.found | (count == schedule.interval), torch.zeros_like(count), count)
        self.scale.copy_(scale)
        self.count.copy_(count)


def unscale_gradients(
    grads: Mapping[str, Tensor], specs: Mapping[str, Spec | None], scale: Tensor, count: Tensor
) -> Unscaled:
    """Return the gradients of a scaled loss, divided by the scale.

    `specs` maps parameters to the specs of the updated parts; each gradient is converted to the spec of its parameter.
    Raises CaptureError for a float16 gradient.
    """
    inverse = scale.double().reciprocal().float()
    parts = {name: _part(x, specs[name]) for name, x in grads.items()}
    found = not_finite_anywhere(parts.values(), scale.device) > 0
    return Unscaled({name: x * inverse for name, x in parts.items()}, scale, count, found)


def _part(grad: Tensor, spec: Spec | None) -> Tensor:
    if grad.dtype == torch.float16:
        raise CaptureError(
            "recording a step with a loss scale",
            "a parameter in float16",
            "its gradient is divided by the scale in float16, and may underflow",
            "call model.float(): parameters stay in float32, operators run in float16",
        )
    if not isinstance(grad, DistTensor) or spec is None:
        return grad
    return redistribute(grad, spec.mesh, spec.layout.with_varying(()))


def skip_writes_on_overflow(program: Program, found: Value, renewed: Iterable[Value]) -> Program:
    """Return the program with writes that are skipped if `found` is true, except the writes of `renewed` inputs."""
    draft, spared = Draft(program), {*renewed}
    origin = Origin("update")
    told = {found.device: found}
    specs = dict(program.specs)
    writes: list[tuple[Value, Value]] = []
    for x, v in program.writes:
        if x in spared:
            writes.append((x, v))
            continue
        if x.device not in told:
            told[x.device] = draft.add(aten.to.device, found, x.device, torch.bool, before=draft.end, origin=origin)
        kept = draft.add(aten.where.self, told[x.device], x, v, before=draft.end, origin=origin)
        specs |= {kept: specs[v]} if v in specs else {}
        writes.append((x, kept))
    nodes = tuple(spot.node for spot in draft)
    return replace(program, nodes=nodes, writes=tuple(writes), specs=specs)
