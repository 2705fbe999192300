"""Reductions, normalisations and running sums: dims that go, or that every element looks along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import _forms_reduce as forms
from ._rule import Entry, Form, Rule
from ._rules_dims import dims_at, names_of, written
from ._rules_pointwise import keeps_sums


def reduction(linear: bool, over: str | None = None, form: Form | None = None) -> Entry:
    """A rule for `op(x, dim, keepdim)`: with a form, the reduced dims may be cut too, whatever joins them."""

    def entry(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Rule:
        return reduced(x, dims_at(dim, x.dim()), keepdim, linear and keeps_sums(x.dtype, dtype or x.dtype), over, form)

    return entry


def reduced(
    x: Tensor, dims: Sequence[int], keepdim: bool, linear: bool, over: str | None, form: Form | None, results: int = 1
) -> Rule:
    names = names_of(x)
    kept = " ".join(("1" if keepdim else "") if d in dims else n for d, n in enumerate(names))
    free = linear or over or form
    left = written(names, () if free else dims) + ("" if linear else ",")
    text = f"{left} -> {' ; '.join([kept] * results)}"
    return Rule(text, over, forms={names[d]: form for d in dims} if form else {})


def arg_reduction(form: Form | None) -> Entry:
    """`argmax(x, dim)`: without a dim it counts through the whole tensor."""

    def entry(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
        return reduced(x, dims_at(dim, x.dim()), keepdim, False, None, None if dim is None else form)

    return entry


def max_entry(full: Form, along: Form) -> Entry:
    """`max(x)`, `max(x, dim)` with indices, and `max(x, other)` by elements."""

    def entry(x: Tensor, dim: Any = None, keepdim: bool = False) -> Rule | str:
        if isinstance(dim, Tensor):
            return "..., ... -> ..."
        dims = dims_at(dim, x.dim())
        return reduced(x, dims, keepdim, False, None, full if dim is None else along, 1 if dim is None else 2)

    return entry


def looks_along(linear: bool, form: Form | None = None, results: int = 1) -> Entry:
    """A rule for `op(x, dim)` whose result has the dims of x."""

    def entry(x: Tensor, dim: Any = -1, *args: Any, dtype: Any = None, **kwargs: Any) -> Rule:
        names, dims = names_of(x), dims_at(dim, x.dim())
        comma = "" if linear and keeps_sums(x.dtype, dtype or x.dtype) else ","
        text = f"{written(names, () if form else dims)}{comma} -> {' ; '.join([written(names)] * results)}"
        return Rule(text, forms={names[d]: form for d in dims} if form else {})

    return entry


def layer_norm_rule(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Any = None, *rest: Any, **kw: Any
) -> Rule:
    """Weight and bias lie as the last dims do; `rms_norm` has eps in the place of the bias and takes no bias."""
    names = names_of(x)
    last = names[x.dim() - len(normalized_shape) :]
    form = forms.layer_norm if "cudnn_enable" in kw else forms.layer_norm
    return Rule(
        f"{written(names)}, {written(last)}, {written(last)} -> {written(names)}", forms=dict.fromkeys(last, form)
    )


def rms_norm_rule(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Rule:
    names = names_of(x)
    last = names[x.dim() - len(normalized_shape) :]
    return Rule(f"{written(names)}, {written(last)} -> {written(names)}", forms=dict.fromkeys(last, forms.rms_norm))


REDUCE: dict[str, Entry] = {
    "aten.sum": reduction(True, "sum"),
    "aten.nansum": reduction(False, "sum"),
    "aten.count_nonzero": reduction(False, "sum"),
    "aten.mean": reduction(True, form=forms.mean),
    "aten.amax": reduction(False, form=forms.amax),
    "aten.amin": reduction(False, form=forms.amin),
    "aten.any": reduction(False, "any"),
    "aten.all": reduction(False, "all"),
    "aten.argmax": arg_reduction(None),
    "aten.argmin": arg_reduction(None),
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.special_softmax"), looks_along(False, forms.softmax)),
    **dict.fromkeys(("aten.log_softmax", "aten._log_softmax"), looks_along(False, forms.log_softmax)),
    "aten.special_log_softmax": looks_along(False, forms.log_softmax),
    "aten.cumsum": looks_along(True, forms.cumsum),
    "aten.cumprod": looks_along(False, forms.cumprod),
    "aten.layer_norm": layer_norm_rule,
    "aten.rms_norm": rms_norm_rule,
}
