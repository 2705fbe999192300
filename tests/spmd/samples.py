"""Sample calls of every operator that has a rule, and which of their operands have gradients.

The calls are in the table of `meshwright conformance`, `src/meshwright/conformance/checks/operator_samples.txt`.
"""

from __future__ import annotations

from meshwright.conformance import GONE_OPERATORS as GONE
from meshwright.conformance import build_call, sample_lines
from meshwright.conformance import operator_named as overload

from .walker import Sample

__all__ = ["GONE", "build", "overload", "samples"]

CONSTANT = """copy detach_copy lift_fresh lift floor_divide heaviside igamma igammac special_gammainc special_gammaincc
    special_zeta linalg_eig _safe_softmax histc
    _weight_int8pack_mm _weight_int4pack_mm_for_cpu _scaled_mm
    hardsigmoid_backward logit_backward mish_backward silu_backward""".split()
"""Operators without a derivative in torch."""
FIXED = {
    "cross_entropy_loss": (2,),
    "nll_loss": (2,),
    "nll_loss_nd": (2,),
    "nll_loss2d": (2,),
    "soft_margin_loss": (1,),
    "linalg_pinv": (1, 2),
    "fractional_max_pool2d": (1,),
    "fractional_max_pool3d": (1,),
}
FIXED |= {"batch_norm": (3, 4), "fake_quantize_per_tensor_affine": (1, 2), "fake_quantize_per_channel_affine": (1, 2)}
FIXED |= {"binary_cross_entropy": (2,), "binary_cross_entropy_with_logits": (2, 3)}
FIXED |= {f"{name}_cachemask": FIXED[name] for name in FIXED if name.startswith("fake_quantize_")}
FIXED |= {"_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": (1, 2, 3)}
"""Operands without a derivative in torch."""


def samples() -> list[tuple[str, str]]:
    """Return operator and arguments of the samples of operators that this torch has."""
    return sample_lines()


def build(name: str, arguments: str) -> Sample:
    call = build_call(name, arguments)
    packet = name.partition(".")[0]
    constant = packet in CONSTANT or "int64" in arguments or "reduce=" in arguments
    return Sample(call.op, call.args, call.kwargs, None if constant else FIXED.get(packet, ()))
