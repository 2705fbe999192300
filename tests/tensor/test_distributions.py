"""Samples of torch's distributions have one device's values and gradients.

The distributions are those of torch that can be differentiated; their parameters come from their constraints.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["x"])
INSTEAD = {"logits", "covariance_matrix", "precision_matrix"}
"""Parameters that are replaced by equivalent ones."""
RSAMPLED = [d for d in vars(D).values() if inspect.isclass(d) and getattr(d, "has_rsample", None) is True]
KINDS = [kind for kind in RSAMPLED if isinstance(getattr(kind, "arg_constraints", None), dict)]
KINDS = [kind for kind in KINDS if kind.__name__ not in ("Independent", "MixtureSameFamily", "TransformedDistribution")]


def parameters(kind: Any) -> dict[str, Tensor]:
    """Return a value for each parameter that satisfies its constraint."""
    torch.manual_seed(5)
    found: dict[str, Tensor] = {}
    for name, constraint in kind.arg_constraints.items():
        lower = torch.randn(4, 3, 3).tril() * 0.1 + 2 * torch.eye(3)
        bound = 2.0 if name == "high" else 0.0
        for value in (torch.rand(4, 3) + bound, torch.rand(4, 3).softmax(-1), torch.rand(4, 3, 2), lower):
            shape_fits = name not in ("scale_tril", "cov_factor") or value.dim() == 3
            if name not in INSTEAD and shape_fits and constraint.check(value).all():
                found.setdefault(name, value)
    return found


def samples(kind: Any, given: dict[str, Tensor]) -> list[Tensor]:
    leaves = {name: value.requires_grad_() for name, value in given.items()}
    torch.manual_seed(0)
    drawn = kind(**leaves, **({"temperature": torch.tensor(0.5)} if "Relaxed" in kind.__name__ else {})).rsample()
    drawn.square().sum().backward()
    return [mw.unshard_dtensor(x.detach()) for x in (drawn, *(x.grad for x in leaves.values() if x.grad is not None))]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_samples_have_the_gradients_of_one_device(kind: Any, dim: int) -> None:
    wanted = samples(kind, parameters(kind))

    def on_rank() -> list[Tensor]:
        given = parameters(kind)
        placed = {n: mw.shard_tensor(v, MESH, [mw.Shard(min(dim, v.dim() - 1))]) for n, v in given.items()}
        return samples(kind, placed)

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, wanted, equal_nan=True)
