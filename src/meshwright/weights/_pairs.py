"""Pairs of tensors with one name: in the model that is trained, and in the model that samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from meshwright.checkpoint import World
from meshwright.layout import Spec
from meshwright.reshard import ElementMoves, element_moves

from ._errors import WeightError
from ._tensors import named_tensors, spec_of

ASKED = "mw.weights.sync(trainer, sampler)"
_SHOWN = 3
"""Most names in an error."""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor of the trainer, and that of the sampler with the same name.

    Attributes:
        names: All names of the pair: tied weights have several.
        moves: The moves of the elements between both layouts.
        is_shared: True if each rank has equal parts on both sides, and the sampler uses the trainer's memory.
    """

    names: tuple[str, ...]
    source: Tensor
    target: Tensor
    moves: ElementMoves
    is_shared: bool


def pairs_of(trainer: nn.Module, sampler: nn.Module, world: World) -> list[TensorPair]:
    """Return the pairs of two models, in the order of the trainer's names. Raises WeightError if they do not match."""
    sources, targets = named_tensors(trainer), named_tensors(sampler)
    _check_names([*sources], [*targets])
    names: dict[tuple[int, int], list[str]] = {}
    for name, source in sources.items():
        names.setdefault((id(source), id(targets[name])), []).append(name)
    _check_tied(list(names.values()), targets)
    return [_pair(found, sources[found[0]], targets[found[0]], world) for found in names.values()]


def _check_names(trained: Sequence[str], sampled: Sequence[str]) -> None:
    missing = [name for name in sampled if name not in set(trained)]
    extra = [name for name in trained if name not in set(sampled)]
    if not missing and not extra:
        return
    counted = {"the trainer lacks": missing, "the sampler lacks": extra}
    near = get_close_matches(missing[0], extra, 1) if missing and extra else []
    raise WeightError(
        ASKED,
        "; ".join(f"{what} {_shown(names)}" for what, names in counted.items() if names),
        "each tensor of the sampler gets the values of the trainer's tensor with the same name",
        f"use one class for both models: {missing[0]} may be {near[0]} of the trainer"
        if near
        else "build both models in the same way, with the same adapters; pass the part of the trainer that samples",
    )


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _check_tied(names: Sequence[Sequence[str]], targets: Mapping[str, Tensor]) -> None:
    """Raise WeightError if one tensor of the sampler would get the values of two tensors of the trainer."""
    first: dict[int, str] = {}
    for name, *_ in names:
        other = first.setdefault(id(targets[name]), name)
        if other != name:
            raise WeightError(
                ASKED,
                f"{other} and {name} are one tensor in the sampler and two in the trainer",
                "one tensor cannot have the values of both",
                "tie the weights of both models, or of neither",
            )


def _pair(names: Sequence[str], source: Tensor, target: Tensor, world: World) -> TensorPair:
    name = names[0]
    src, dst = spec_of(source, world), spec_of(target, world)
    _check_alike(name, src, dst)
    _check_devices(name, source.device, target.device)
    moves = element_moves(src.contiguous, dst.with_dtype(src.dtype).contiguous)
    is_shared = moves.same_parts and src.dtype is dst.dtype and src.order == dst.order
    return TensorPair(tuple(names), source, target, moves, is_shared)


def _check_alike(name: str, src: Spec, dst: Spec) -> None:
    if src.shape != dst.shape:
        raise WeightError(
            f"{ASKED}: {name}",
            f"shape {tuple(src.shape)} in the trainer and {tuple(dst.shape)} in the sampler",
            "the sampler gets every element of the trainer's tensor",
            "build both models from the same configuration",
        )
    if src.dtype is not dst.dtype and not (src.dtype.is_floating_point and dst.dtype.is_floating_point):
        raise WeightError(
            f"{ASKED}: {name}",
            f"{src.dtype} in the trainer and {dst.dtype} in the sampler",
            "values are rounded from one floating point type to another, but not quantized",
            "use the same dtype in both models, or quantize both",
        )


def _check_devices(name: str, source: torch.device, target: torch.device) -> None:
    if target.type not in (source.type, "meta"):
        raise WeightError(
            f"{ASKED}: {name}",
            f"a tensor on {source.type} in the trainer and on {target.type} in the sampler",
            "ranks send parts from and to devices of one type",
            f'move the sampler: model.to("{source.type}")',
        )
