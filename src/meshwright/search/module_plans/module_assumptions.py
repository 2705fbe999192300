"""Assumptions of the prices of a module's plans: rates of operators, overlap, and memory that is left free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from meshwright.cost import DATA_SHEET, Cluster
from meshwright.graph import Program, tensor_dtype
from meshwright.layout import write_dtype

from ..sharding.conversion_prices import EXPOSED
from ..transformer_accounts.assumptions import memory_left

TERA = 1e12
aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.matmul.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
        aten.scaled_dot_product_attention.default,
    }
)  # fmt: skip
"""Operators whose time is that of matrix products."""


def module_assumptions(program: Program, cluster: Cluster) -> tuple[str, ...]:
    """Return the assumptions of the prices of a module's plans, as sentences."""
    return tuple(_sentences(program, cluster))


def _sentences(program: Program, cluster: Cluster) -> Iterator[str]:
    device, dtype = cluster.device, _product_dtype(program)
    yield (
        f"operators: products of {write_dtype(dtype)} at {100 * device.share(dtype):.3g} % of the"
        f" {device.peak(dtype) / TERA:,.4g} TFLOP/s of {device.name}, all others at the bandwidth of its memory;"
        " each operator is a kernel of its own"
    )
    if device.peak(torch.bfloat16) > 2 * device.peak(dtype):
        yield (
            f"precision: products of bf16 would run at {device.peak(torch.bfloat16) / TERA:,.4g} TFLOP/s;"
            " plan model.to(torch.bfloat16) for that"
        )
    if device.source.startswith(DATA_SHEET):
        yield f"devices: these fractions of {device.name} are usual ones; no measured run was compared"
    yield f"overlap: conversions of values wait; {100 * EXPOSED:.3g} % of those of parameters and gradients are exposed"
    yield memory_left(cluster)


def _product_dtype(program: Program) -> torch.dtype:
    """Return the dtype of most matrix products of a program; bfloat16 if it has none."""
    dtypes = Counter(tensor_dtype(node.outs[0]) for node in program.nodes if node.op in PRODUCTS)
    return dtypes.most_common(1)[0][0] if dtypes else torch.bfloat16
