"""Fusion of hand-written cross entropy into one operator: first the loss of each row, then the mean or sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.graph import Rewrite, RulePass, register_pass, register_rewrite

Reduction = Literal["none", "mean", "sum"]


def _rows(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, -2), t.flatten(), reduction="none").view(t.shape)


def _find_nll(x: Tensor, t: Tensor, how: Reduction) -> Tensor:
    return F.nll_loss(F.log_softmax(x, 1), t, reduction=how)


def _put_nll(x: Tensor, t: Tensor, how: Reduction) -> Tensor:
    return F.cross_entropy(x, t, reduction=how)


def _find_rows(x: Tensor, t: Tensor, squeeze: bool) -> Tensor:
    picked = F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1))
    return -(picked.squeeze(-1) if squeeze else picked)


def _put_rows(x: Tensor, t: Tensor, squeeze: bool) -> Tensor:
    return _rows(x, t) if squeeze else _rows(x, t).unsqueeze(-1)


def _find_negated(x: Tensor, t: Tensor, how: Literal["mean", "sum"], squeeze: bool) -> Tensor:
    picked = F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1))
    return -getattr(picked.squeeze(-1) if squeeze else picked, how)()


def _put_negated(x: Tensor, t: Tensor, how: Literal["mean", "sum"], squeeze: bool) -> Tensor:
    return F.cross_entropy(x.flatten(0, -2), t.flatten(), reduction=how)


def _find_difference(x: Tensor, t: Tensor) -> Tensor:
    return torch.logsumexp(x, -1) - x.gather(-1, t.unsqueeze(-1)).squeeze(-1)


def _find_reduced(x: Tensor, t: Tensor, how: Literal["mean", "sum"]) -> Tensor:
    return getattr(F.cross_entropy(x, t, reduction="none"), how)()


def _put_reduced(x: Tensor, t: Tensor, how: Literal["mean", "sum"]) -> Tensor:
    return F.cross_entropy(x, t, reduction=how)


def _find_viewed(x: Tensor, shape: list[int], how: Literal["mean", "sum"]) -> Tensor:
    return getattr(x.view(shape), how)()


def _put_viewed(x: Tensor, shape: list[int], how: Literal["mean", "sum"]) -> Tensor:
    return getattr(x, how)()


RULES = (
    Rewrite("cross_entropy", _find_nll, _put_nll, "n c, int n < c"),
    Rewrite("cross_entropy of picked rows", _find_negated, _put_negated, "... c, int ... < c"),
    Rewrite("cross_entropy of each row", _find_rows, _put_rows, "... c, int ... < c"),
    Rewrite("cross_entropy by logsumexp", _find_difference, _rows, "... c, int ... < c"),
    Rewrite("reduction of a view", _find_viewed, _put_viewed, samples={"shape": ([-1], [-1, 1])}),
    Rewrite("reduced cross_entropy", _find_reduced, _put_reduced, "n c, int n < c"),
)

for _rule in RULES:
    register_rewrite(_rule, into="fuse_loss")


@register_pass
@dataclass(frozen=True)
class FuseLoss(RulePass):
    """Replace a loss by `log_softmax` or `logsumexp` by `cross_entropy_loss`."""

    name: ClassVar[str] = "fuse_loss"
