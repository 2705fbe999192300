"""Rules of reductions, normalizations and running sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..forms import reductions as forms
from ..notation.dim_names import Dims, dim_names, dims_of, names_and_dims, operand_text, sized_name
from ..notation.rule import Entry, LocalForm, Rule
from .pointwise import is_exact_cast, sum_dtype


def reduction(linear: bool, over: str | None = None, form: LocalForm | None = None) -> Entry:
    """Return a rule for `op(x, dim, keepdim)`.

    Args:
        linear: True if the operator of a sum is the sum of the operators, in one dtype.
        over: Operation that joins the results of the shards of a reduced dim. A sum of booleans is `any`.
        form: Local function for a sharded reduced dim. Without `over`, its results are whole.
    """

    def entry(
        x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **kwargs: TorchValue
    ) -> Rule:
        passes = linear and is_exact_cast(x.dtype, dtype or sum_dtype(x.dtype))
        joins = "any" if over == "sum" and dtype == torch.bool else over
        return reduced(x, dims_of(x, dim), keepdim, passes, joins, form)

    return entry


def reduced(
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool,
    linear: bool,
    over: str | None,
    form: LocalForm | None,
    results: int = 1,
) -> Rule:
    names = dim_names(x)
    kept = " ".join("1" if d in dims else n for d, n in enumerate(names) if keepdim or d not in dims)
    free = linear or over or form
    left = operand_text(names, () if free else dims) + ("" if linear else ",")
    text = f"{left} -> {' ; '.join([kept] * results)}"
    return Rule(text, over, forms={names[d]: form for d in dims} if form else {})


def arg_reduction(form: LocalForm | None) -> Entry:
    """Return the rule of `argmax(x, dim)`; without `dim`, the index is in the flattened whole tensor."""

    def entry(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
        return reduced(x, dims_of(x, dim), keepdim, False, None, None if dim is None else form)

    return entry


def max_entry(full: LocalForm, along: LocalForm) -> Entry:
    """Return the rule of `max(x)`, `max(x, dim)` with indices, and elementwise `max(x, other)`."""

    def entry(x: Tensor, dim: Dims | Tensor = None, keepdim: bool = False) -> Rule | str:
        if isinstance(dim, Tensor):
            return "..., ... -> ..."
        dims = dims_of(x, dim)
        return reduced(x, dims, keepdim, False, None, full if dim is None else along, 1 if dim is None else 2)

    return entry


def along_dim_rule(linear: bool, form: LocalForm | None = None, results: int = 1) -> Entry:
    """Return the rule of `op(x, dim)` with a result that has the dims of x."""

    def entry(
        x: Tensor, dim: Dims = -1, *args: TorchValue, dtype: torch.dtype | None = None, **kwargs: TorchValue
    ) -> Rule:
        names, dims = names_and_dims(x, dim)
        comma = "" if linear and is_exact_cast(x.dtype, dtype or sum_dtype(x.dtype)) else ","
        text = f"{operand_text(names, () if form else dims)}{comma} -> {' ; '.join([operand_text(names)] * results)}"
        return Rule(text, forms={names[d]: form for d in dims} if form else {})

    return entry


def layer_norm_rule(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: TorchValue,
    **kw: TorchValue,
) -> Rule:
    """Return the rule of layer norm; weight and bias have the layout of the last dims."""
    names = dim_names(x)
    last = names[x.dim() - len(normalized_shape) :]
    form = forms.layer_norm
    return Rule(
        f"{operand_text(names)}, {operand_text(last)}, {operand_text(last)} -> {operand_text(names)}",
        forms=dict.fromkeys(last, form),
    )


def native_layer_norm_rule(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> str:
    """Return the rule of native layer norm, which also returns mean and reciprocal standard deviation."""
    names = dim_names(x)
    first = x.dim() - len(normalized_shape)
    last, kept = names[first:], " ".join([*names[:first], *["1"] * len(normalized_shape)])
    sides = [operand_text(names, range(first, x.dim())), *[operand_text(last)] * 2]
    return f"{', '.join(sides)} -> {operand_text(names)} ; {kept} ; {kept}"


def passed_back_rule(grad: Tensor, out: Tensor, dim: int, *rest: TorchValue) -> str:
    """Return the rule of a softmax's backward: linear in the gradient, given the result."""
    names = operand_text(dim_names(grad), dims_of(grad, dim))
    return f"{names} | {names} -> {operand_text(dim_names(grad))}"


def rms_norm_rule(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Rule:
    names = dim_names(x)
    last = names[x.dim() - len(normalized_shape) :]
    return Rule(
        f"{operand_text(names)}, {operand_text(last)} -> {operand_text(names)}",
        forms=dict.fromkeys(last, forms.rms_norm),
    )


def variance_rule(over: str | None, form: LocalForm, results: int = 1) -> Entry:
    """Return the rule of `var` and related operators.

    Arguments: `(x, unbiased)`, `(x, dim, unbiased, keepdim)` or `(x, dim, correction=, keepdim=)`.
    """

    def entry(
        x: Tensor, dim: Dims = None, unbiased: bool | None = None, keepdim: bool = False, **kwargs: TorchValue
    ) -> Rule:
        dims = dims_of(x, None if isinstance(dim, bool) else dim)
        return reduced(x, dims, keepdim, False, over, form, results)

    return entry


def vector_norm_rule(
    x: Tensor, ord: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Rule:
    over = "sum" if ord == 0 else None
    return reduced(x, dims_of(x, dim), keepdim, False, over, None if ord == 0 else forms.vector_norm)


def norm_rule(
    x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Rule | None:
    """Return the rule of a vector norm; None for complex dtypes, some of which torch refuses for some `p`."""
    return None if dtype is not None and dtype.is_complex else vector_norm_rule(x, p, dim, keepdim)


def mode_rule(x: Tensor, dim: int = -1, keepdim: bool = False) -> Rule:
    return selection(x, dim, keepdim)


def selection(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
    """Return the rule of values and indices along a whole dim; without `dim`, of one value of the whole tensor."""
    return reduced(x, dims_of(x, dim), keepdim, False, None, None, 1 if dim is None else 2)


def kthvalue_rule(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return selection(x, dim, keepdim)


def stable_sort_rule(x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Rule | str | None:
    names = dim_names(x)
    return f"{operand_text(names, dims_of(x, dim))}, -> {operand_text(names)} ; {operand_text(names)}"


def stable_argsort_rule(x: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> str:
    return f"{operand_text(*names_and_dims(x, dim))}, -> {operand_text(dim_names(x))}"


def dist_rule(x: Tensor, y: Tensor, p: float = 2) -> Rule | str:
    """Return the rule of `dist`, the norm of the difference."""
    if x.shape != y.shape or p == 0:
        return (
            f"{operand_text(dim_names(x, 'a'), range(x.dim()))}, {operand_text(dim_names(y, 'b'), range(y.dim()))} ->"
        )
    names = dim_names(x)
    return Rule(f"{operand_text(names)}, {operand_text(names)} ->", forms=dict.fromkeys(names, forms.dist))


def topk_rule(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> str:
    names, dims = names_and_dims(x, dim)
    kept = " ".join("new" if d in dims else n for d, n in enumerate(names))
    return f"{operand_text(names, dims)}, -> {kept} ; {kept}"


def renorm_rule(x: Tensor, p: float, dim: int, maxnorm: float) -> str:
    """Return the rule of `renorm`: every slice along `dim` is scaled by its own norm."""
    names, kept = names_and_dims(x, dim)
    return f"{operand_text(names, [d for d in range(x.dim()) if d not in kept])}, -> {operand_text(names)}"


def glu_rule(x: Tensor, dim: int = -1) -> str:
    """Return the rule of `glu`: the dim is a product of two halves, and the inner factor may be sharded."""
    names, (at,) = names_and_dims(x, dim)
    half = sized_name("h", x.shape[at] // 2)
    before = [f"(two_2! {half})" if d == at else n for d, n in enumerate(names)]
    return f"{' '.join(before)}, -> {' '.join(half if d == at else n for d, n in enumerate(names))}"


def histc_rule(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Rule | None:
    """Return the rule of `histc`, a sum of counts; None if the minimum and maximum of all elements set the bins."""
    return None if min == max else Rule(f"{operand_text(dim_names(x))}, -> new", over="sum")


REDUCE: dict[str, Entry] = {
    "aten.sum": reduction(True, "sum"),
    "aten.nansum": reduction(False, "sum"),
    "aten.count_nonzero": reduction(False, "sum"),
    "aten.mean": reduction(True, "sum", forms.mean),
    "aten.prod": reduction(False, form=forms.product),
    "aten.logsumexp": reduction(False, form=forms.logsumexp),
    "aten.linalg_vector_norm": vector_norm_rule,
    "aten.norm": norm_rule,
    "aten.var": variance_rule("sum", forms.var),
    "aten.std": variance_rule(None, forms.std),
    "aten.var_mean": variance_rule("sum", forms.var_mean, 2),
    "aten.std_mean": variance_rule(None, forms.std_mean, 2),
    "aten.amax": reduction(False, form=forms.amax),
    "aten.amin": reduction(False, form=forms.amin),
    "aten.any": reduction(False, "any"),
    "aten.all": reduction(False, "all"),
    "aten._is_any_true": reduction(False, "any"),
    "aten._is_all_true": reduction(False, "all"),
    "aten.max": max_entry(forms.amax_or_nan, forms.max_along),
    "aten.min": max_entry(forms.amin_or_nan, forms.min_along),
    "aten.argmax": arg_reduction(forms.argmax),
    "aten.argmin": arg_reduction(forms.argmin),
    **dict.fromkeys(("aten.median", "aten.nanmedian", "aten.aminmax"), selection),
    "aten.mode": mode_rule,
    **dict.fromkeys(("aten.kthvalue",), kthvalue_rule),
    **dict.fromkeys(("aten.sort.default", "aten.cummax", "aten.cummin"), along_dim_rule(False, results=2)),
    "aten.sort.stable": stable_sort_rule,
    "aten.argsort.default": along_dim_rule(False),
    "aten.argsort.stable": stable_argsort_rule,
    "aten.nanmean": reduction(False, "sum", forms.nanmean),
    "aten.dist": dist_rule,
    "aten._safe_softmax": along_dim_rule(False),
    "aten.topk": topk_rule,
    "aten.logcumsumexp": along_dim_rule(False),
    "aten.renorm": renorm_rule,
    "aten.trace": "m! n! ->",
    "aten.histc": histc_rule,
    "aten.glu": glu_rule,
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.special_softmax"), along_dim_rule(False, forms.softmax)),
    **dict.fromkeys(("aten.log_softmax", "aten._log_softmax"), along_dim_rule(False, forms.log_softmax)),
    "aten.special_log_softmax": along_dim_rule(False, forms.log_softmax),
    "aten.cumsum": along_dim_rule(True, forms.cumsum),
    "aten.cumprod": along_dim_rule(False, forms.cumprod),
    "aten.layer_norm": layer_norm_rule,
    "aten.native_layer_norm": native_layer_norm_rule,
    **dict.fromkeys(("aten._softmax_backward_data", "aten._log_softmax_backward_data"), passed_back_rule),
    "aten.rms_norm": rms_norm_rule,
}
