"""Rules of elementwise operators, grouped by linearity."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.rule import Entry, Rule

LINEAR = """
    neg negative positive clone contiguous detach alias alias_copy detach_copy conj conj_physical _conj _conj_physical
    resolve_conj resolve_neg _neg_view real imag deg2rad zero lift_fresh lift
"""
"""`... -> ...`: operators that are linear in their operand."""

CURVED = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid
    hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2
    log_sigmoid logical_not logit mish mvlgamma nan_to_num ones_like polygamma reciprocal relu relu6 round rsqrt selu
    sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf special_erfc special_erfcx
    special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1
    special_i1e special_log1p special_log_ndtr special_logit special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri
    special_polygamma special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_sinc special_spherical_bessel_j0 sqrt square tan tanh threshold trunc empty_like full_like
    rad2deg
"""
"""`..., -> ...`: operators of one operand without known linearity."""

BINARY = """
    arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign eq float_power
    floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot igamma igammac isclose lcm ldexp le less
    less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum ne nextafter not_equal polar
    pow remainder special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_gammainc special_gammaincc
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_xlog1py special_xlogy
    special_zeta xlogy fill __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__
"""
"""`..., ... -> ...`: operators of two operands without known linearity."""


GRADIENT = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward logit_backward mish_backward native_dropout_backward sigmoid_backward silu_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward
"""
"""`... | ... -> ...`: elementwise backward operators, linear in the gradient, given the saved values."""


def entries_for(words: str, entry: Entry) -> dict[str, Entry]:
    """Return the entry under each operator name in `words`."""
    return {f"aten.{word}": entry for word in words.split()}


def is_exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """True if the cast of a sum is the sum of the casts, without more rounding.

    A sum of integers wraps around at the width of its dtype, so only the same dtype keeps it.
    """
    if source == target:
        return True
    if not all(d.is_floating_point or d.is_complex for d in (source, target)) or source.is_complex > target.is_complex:
        return False
    have, need = torch.finfo(source), torch.finfo(target)
    return need.max >= have.max and need.eps <= have.eps


def sum_dtype(source: torch.dtype) -> torch.dtype:
    """Return the default dtype of the result of `sum` and `cumsum`."""
    return source if source.is_floating_point or source.is_complex else torch.int64


def cast_rule(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> Rule | str:
    """Return the rule of all overloads of `to`; the target is a dtype, a tensor's dtype, or the dtype of `x`."""
    given = [a.dtype if isinstance(a, Tensor) else a for a in (*args, *kwargs.values())]
    target = next((a for a in given if isinstance(a, torch.dtype)), x.dtype)
    return "... -> ..." if is_exact_cast(x.dtype, target) else "..., -> ..."


def zeros_rule(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
    """Return the rule of `zeros_like`: zeros of every dtype but bool are a sum of zeros."""
    return "..., -> ..." if torch.bool in (*args, *kwargs.values()) else "... -> ..."


def div_rule(x: TorchValue, y: TorchValue, *, rounding_mode: str | None = None) -> str:
    """Return the rule of a division. Pending sums do not pass a division by a tensor, which may contain zeros."""
    return "..., ... -> ..." if rounding_mode is not None or isinstance(y, Tensor) else "... | ... -> ..."


def clamp_rule(x: Tensor, *bounds: TorchValue, **named_bounds: TorchValue) -> str:
    tensors = sum(isinstance(b, Tensor) for b in (*bounds, *named_bounds.values()))
    return "..., ..., ... -> ..." if tensors else "..., -> ..."


def masked_fill_rule(x: Tensor, mask: Tensor, value: TorchValue) -> str:
    if isinstance(value, Tensor):
        return "..., ..., ... -> ..."
    return "... | ... -> ..." if value == 0 else "..., ... -> ..."


def prelu_rule(x: Tensor, weight: Tensor) -> str:
    """Return the rule of `prelu`; the weight has one element, or one per channel (dim 1)."""
    names = [f"a{d}" for d in range(x.dim())]
    channels = "..." if weight.numel() == 1 or x.dim() < 2 else names[1]
    return f"{' '.join(names)}, {channels} -> {' '.join(names)}"


def isin_rule(x: Tensor, among: Tensor, **kwargs: TorchValue) -> str:
    """Return the rule of `isin`; the test elements are whole."""
    return f"..., {' '.join(f'v{d}!' for d in range(among.dim()))} -> ..."


def where_rule(condition: Tensor, *values: TorchValue) -> str | None:
    """Return the rule of `where`; None for `where(condition)`, whose result size depends on the values."""
    return "... ? ... + ... -> ..." if values else None


POINTWISE: dict[str, Entry] = {
    **entries_for(LINEAR, "... -> ..."),
    **entries_for(CURVED, "..., -> ..."),
    **entries_for(BINARY, "..., ... -> ..."),
    **entries_for(GRADIENT, "... | ... -> ..."),
    **entries_for("add sub subtract rsub complex", "... + ... -> ..."),
    **entries_for("mul multiply", "... * ... -> ..."),
    **entries_for("div divide true_divide", div_rule),
    **entries_for("clamp clip clamp_min clamp_max", clamp_rule),
    **entries_for("to _to_copy type_as", cast_rule),
    "aten.zeros_like": zeros_rule,
    "aten.where": where_rule,
    "aten.masked_fill": masked_fill_rule,
    "aten.prelu": prelu_rule,
    "aten._prelu_kernel": "..., ... -> ...",
    "aten.addcmul": "... + ... * ... -> ...",
    "aten.addcdiv": "..., ..., ... -> ...",
    "aten.lerp.Scalar": "... + ... -> ...",
    "aten.lerp.Tensor": "... + ... | ... -> ...",
    "aten.copy": "... + ... -> ...",
    "aten.frexp": "..., -> ...; ...",
    "aten.bucketize.Tensor": "..., v! -> ...",
    "aten.isin.Tensor_Tensor": isin_rule,
    "aten.isin.Tensor_Scalar": "..., -> ...",
    "aten.view_as_real": "... -> ... new",
    "aten.view_as_complex": "... c! -> ...",
}
