"""Rules of losses: elementwise losses with a reduction, and losses over classes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..forms import class_losses as forms
from ..notation.dim_names import dim_names, operand_text
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, LocalForm, Rule
from ..torch_hooks import register_meta_kernel

MEAN, SUM = 1, 2


def class_loss(form: LocalForm, invariant: bool = False) -> Entry:
    """Return the rule of a loss over classes, which are dim 1, or dim 0 without a batch.

    Targets are class indices or class probabilities. With `invariant`, the form returns the whole loss if classes are
    sharded, otherwise a term of it.
    """

    def entry(
        x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, *rest: TorchValue, **kw: TorchValue
    ) -> Rule:
        names = dim_names(x)
        c = min(x.dim() - 1, 1)
        spread = [n for d, n in enumerate(names) if d != c]
        ids = names if target.dtype.is_floating_point else spread
        result = spread if reduction == 0 else []
        text = f"{operand_text(names)}, {operand_text(ids)}, {names[c]} -> {operand_text(result)}"
        cut = names if reduction else [names[c]]
        whole = frozenset([names[c]] if invariant else [])
        return Rule(text, over="sum", forms=dict.fromkeys(cut, form), invariant=whole)

    return entry


def element_loss(name: str, operands: int, at: int) -> Entry:
    """Return the rule of an elementwise loss with reduction none, mean or sum; `at` is the reduction's position."""
    op = getattr(torch.ops.aten, name)

    def entry(*args: TorchValue, **kwargs: TorchValue) -> Rule:
        reduction = args[at] if len(args) > at else kwargs.get("reduction", MEAN)
        if reduction == 0:
            return Rule(f"{', '.join(['...'] * operands)} -> ...")
        given: list[TorchValue] = [*args, *kwargs.values()]
        shape = torch.broadcast_shapes(*(x.shape for x in given if isinstance(x, Tensor)))
        names = [f"a{d}" for d in range(len(shape))]
        sides = [_trailing_text(names, x) for x in given[:operands]]
        sides += ["..."] * (operands - len(sides))
        count = prod(shape) if reduction == MEAN else 1

        def local_terms(call: LocalCall, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
            return _with_sum(op, at, args, kwargs) / count

        return Rule(f"{', '.join(sides)} ->", over="sum", forms=dict.fromkeys(names, local_terms))

    return entry


def _trailing_text(names: list[str], x: TorchValue) -> str:
    """Return the text of an operand that has the last of the dims `names`, or of a number."""
    return operand_text(names[len(names) - x.dim() :]) if isinstance(x, Tensor) else "..."


def _with_sum(
    op: Callable[..., Tensor], at: int, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]
) -> Tensor:
    """Return the call's result with the reduction replaced by the sum."""
    if len(args) > at:
        return op(*args[:at], SUM, *args[at + 1 :], **kwargs)
    return op(*args, **{**kwargs, "reduction": SUM})


def ctc_rule(
    x: Tensor, target: Tensor, times: Tensor, lengths: Tensor, *rest: TorchValue, **kwargs: TorchValue
) -> Rule | None:
    """Return the rule of `ctc_loss(x, target, times, lengths, blank, reduction)`.

    Samples are independent if each has a row of targets; otherwise there is no rule.
    """
    if x.dim() != TIMES_SAMPLES_CLASSES or target.dim() != SAMPLES_TARGETS:
        return None
    reduction = rest[1] if len(rest) > 1 else kwargs.get("reduction", MEAN)
    ends = "n" if reduction == 0 else ""
    return Rule(f"t! n c!, n s!, n, n -> {ends}", over=None if ends else "sum", forms={"n": _ctc_terms})


def _ctc_terms(
    call: LocalCall,
    x: Tensor,
    target: Tensor,
    times: Tensor,
    lengths: Tensor,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the term of this rank's samples; in a mean, each loss is divided by the length of its target."""
    if not x.shape[1]:
        return x.sum((0, 2)) if reduction == 0 else x.sum()
    losses = torch.ctc_loss(x, target, times, lengths, blank, 0, zero_infinity)
    if reduction == MEAN:
        losses = losses / lengths.clamp_min(1) / call.total(0, 1)
    return losses if reduction == 0 else losses.sum()


def _ctc_shapes(x: Tensor, target: Tensor, *rest: TorchValue) -> tuple[Tensor, Tensor]:
    """Return empty results: a loss per sample, and a value per sample, time and label with blanks in between."""
    samples = x.shape[1:-1]
    return x.new_empty(samples), x.new_empty((*samples, x.shape[0], 2 * target.shape[-1] + 1))


TIMES_SAMPLES_CLASSES, SAMPLES_TARGETS = 3, 2
register_meta_kernel("_ctc_loss.Tensor", _ctc_shapes)

LOSSES: dict[str, Entry] = {
    "aten.ctc_loss.Tensor": ctc_rule,
    "aten.cross_entropy_loss": class_loss(forms.cross_entropy, invariant=True),
    "aten.nll_loss": class_loss(forms.nll_loss),
    "aten.nll_loss_nd": class_loss(forms.nll_loss),
    "aten.nll_loss2d": class_loss(forms.nll_loss),
    "aten.mse_loss": element_loss("mse_loss", 2, 2),
    "aten.l1_loss": element_loss("l1_loss", 2, 2),
    "aten.smooth_l1_loss": element_loss("smooth_l1_loss", 2, 2),
    "aten.huber_loss": element_loss("huber_loss", 2, 2),
    "aten.soft_margin_loss": element_loss("soft_margin_loss", 2, 2),
    "aten.kl_div": element_loss("kl_div", 2, 2),
    "aten.poisson_nll_loss": element_loss("poisson_nll_loss", 2, 5),
    "aten.hinge_embedding_loss": element_loss("hinge_embedding_loss", 2, 3),
    "aten.margin_ranking_loss": element_loss("margin_ranking_loss", 3, 4),
    "aten.binary_cross_entropy": element_loss("binary_cross_entropy", 3, 3),
    "aten.binary_cross_entropy_with_logits": element_loss("binary_cross_entropy_with_logits", 4, 4),
}
