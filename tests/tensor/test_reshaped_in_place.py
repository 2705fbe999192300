"""In-place changes of shape keep aliases, leaves and `requires_grad` in every layout, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_(0)": lambda x: x.unsqueeze_(0),
    "unsqueeze_(-1)": lambda x: x.unsqueeze_(-1),
    "squeeze_()": lambda x: x.squeeze_(),
    "squeeze_(0)": lambda x: x.squeeze_(0),
    "squeeze_(0, -1)": lambda x: x.squeeze_(0, -1),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(0, -1),
    "as_strided_": lambda x: x.as_strided_((x.numel(),), (1,)),
}
ALIASES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda x: None,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "parameter": nn.Parameter,
    "slice": lambda x: x[:1],
    "flat": lambda x: x.view(-1),
}
KINDS = ("plain", "leaf", "computed")
LAYOUTS: list[tuple[tuple[int, ...], int, Any]] = [
    ((1, 6), 2, mw.Shard(0)),
    ((5, 1), 3, mw.Shard(1)),
    ((5, 1), 2, mw.Shard(0)),
    ((4, 6), 2, mw.Shard(1)),
    ((1, 1), 1, mw.Shard(0)),
]
REFUSED = "refused"
"""Outcome of a change that raised one of our errors."""


def _outcome(change: str, alias: str, kind: str, lay: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Any:
    """Return the facts that a program reads of a tensor and of an alias that was made before the change."""
    x = lay(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape))
    x = x if kind == "plain" else x.requires_grad_() if kind == "leaf" else x.requires_grad_() * 1
    other = ALIASES[alias](x)
    try:
        with torch.set_grad_enabled(kind != "leaf"):
            CHANGES[change](x)
    except mw.MeshwrightError:
        return REFUSED
    found: list[Any] = [x.requires_grad, x.is_leaf, tuple(x.shape), x.is_contiguous()]
    with torch.no_grad():
        x.mul_(3)
        if other is not None:
            found.append(other.tolist())
            other.add_(1)
            found += [x.tolist(), other.requires_grad]
            x.fill_(2)
            found.append(other.tolist())
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("shape", "ranks", "placement"), LAYOUTS)
def test_a_change_of_shape_in_place_keeps_aliases(
    shape: tuple[int, ...], ranks: int, placement: Any, change: str
) -> None:
    cases = [(alias, kind) for alias in ALIASES for kind in KINDS]
    expected = {case: _outcome(change, *case, lambda t: t, shape) for case in cases}

    def program() -> dict[Any, Any]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        return {case: _outcome(change, *case, lambda t: mw.shard_tensor(t, mesh, [placement]), shape) for case in cases}

    found = mw.simulate(program, ranks)[0]
    wrong = {case: (out, expected[case]) for case, out in found.items() if out not in (expected[case], REFUSED)}
    assert not wrong
    refused = {alias for (alias, _), out in found.items() if out == REFUSED}
    assert refused <= {"slice", "flat"}


def test_a_reshape_of_a_leaf_recorded_by_autograd_is_refused() -> None:
    def program() -> None:
        x = mw.shard_tensor(torch.ones(1, 6), mw.ProcessMesh(range(2), ["x"]), [mw.Shard(0)]).requires_grad_()
        with pytest.raises(mw.MeshwrightError, match="a leaf that requires grad"):
            x.squeeze_(0)

    mw.simulate(program, 2)
