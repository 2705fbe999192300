"""Observe a stage: run batches through it, and sum what the methods need of the inputs of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue

from ..layers.linear_layers import is_linear
from .batches import naming_batch
from .ranks import TreeSum

Group = tuple[str, ...]
"""Names of layers that get the same input."""
Pieces = Sequence[tuple[int, Iterable[int]]]
"""The pieces of the calling rank in order, each with the numbers of its batches."""


@dataclass(slots=True)
class Observed:
    """The inputs of the layers of a stage on this rank.

    `sums` has xᵀx by group, or the sums of magnitudes. `extremes` has the largest x and the largest -x of each input
    feature [2, k], and `producers` the norm whose result is the input. `outputs` has the results of the stage by batch.
    """

    sums: dict[Group, TreeSum] = field(default_factory=dict[Group, TreeSum])
    extremes: dict[Group, Tensor] = field(default_factory=dict[Group, Tensor])
    producers: dict[Group, str] = field(default_factory=dict[Group, str])
    outputs: dict[int, TorchValue] = field(default_factory=dict[int, TorchValue])


def observe(
    module: nn.Module,
    layers: Mapping[str, str],
    pieces: Pieces,
    run: Callable[[int], TorchValue],
    summed: Callable[[Tensor], Tensor],
) -> Observed:
    """Run batches through a module whose layers are given by full name and name inside, piece by piece.

    `summed` returns what is summed of the rows of an input: `hessian` or `magnitudes`.
    """
    seen = Observed()
    inputs: dict[int, tuple[Tensor, list[str]]] = {}
    norms: dict[int, tuple[Tensor, str]] = {}
    hooks = [
        module.get_submodule(inner).register_forward_pre_hook(partial(_note_input, inputs, name))
        for name, inner in layers.items()
    ]
    hooks += [
        m.register_forward_hook(partial(_note_result, norms, n)) for n, m in module.named_modules() if _is_norm(m)
    ]
    try:
        for piece, batches in pieces:
            sums: dict[Group, Tensor] = {}
            for i in batches:
                inputs.clear()
                norms.clear()
                with naming_batch(i):
                    seen.outputs[i] = run(i)
                _add_inputs(seen, sums, inputs, norms, summed)
            for group in seen.sums.keys() | sums.keys():
                _tree(seen, group, piece, pieces[0][0]).add(piece, sums.get(group))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def hessian(rows: Tensor) -> Tensor:
    """Return xᵀx [k, k] of the rows [m, k] of an input."""
    return rows.t() @ rows


def magnitudes(rows: Tensor) -> Tensor:
    """Return the sum [k] of the magnitudes in the rows [m, k] of an input."""
    return rows.abs().sum(0)


def _is_norm(module: nn.Module) -> bool:
    """True for a module with one weight per feature, as norms have it."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1 and not is_linear(module)


def _note_input(inputs: dict[int, tuple[Tensor, list[str]]], name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    """Record the input of a layer, under the identity of the tensor."""
    inputs.setdefault(id(args[0]), (args[0], []))[1].append(name)


def _note_result(norms: dict[int, tuple[Tensor, str]], name: str, _: nn.Module, __: object, out: TorchValue) -> None:
    if isinstance(out, Tensor):
        norms[id(out)] = (out, name)


def _add_inputs(
    seen: Observed,
    sums: dict[Group, Tensor],
    inputs: Mapping[int, tuple[Tensor, list[str]]],
    norms: Mapping[int, tuple[Tensor, str]],
    summed: Callable[[Tensor], Tensor],
) -> None:
    """Add each input to the sums of its group. A layer that ran several times has several inputs."""
    for key, (x, names) in inputs.items():
        rows = x.flatten(0, -2).float()
        group = tuple(dict.fromkeys(names))
        added, found = summed(rows), torch.stack((rows.amax(0), -rows.amin(0)))
        sums[group] = sums[group] + added if group in sums else added
        seen.extremes[group] = torch.maximum(seen.extremes[group], found) if group in seen.extremes else found
        if key in norms:
            seen.producers[group] = norms[key][1]


def _tree(seen: Observed, group: Group, piece: int, first: int) -> TreeSum:
    """Return the tree of a group; pieces before its first input are empty."""
    if group not in seen.sums:
        seen.sums[group] = TreeSum()
        for earlier in range(first, piece):
            seen.sums[group].add(earlier, None)
    return seen.sums[group]
