"""GPTQ: round a weight column by column, and let the columns that follow make up for the error.

Frantar et al. 2022. For a layer with inputs x, the error of the outputs is (w - q) H (w - q)ᵀ with H = Σ xᵀx. Once
column i is rounded, the best change of all later columns is -(w - q)_i / U_ii · U_i, where U is the upper Cholesky
factor of the inverse of H. Rows are independent. Cost: k³ for the factor, n k² for the rows.

Shapes: n rows (output features), k columns (input features).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from .._errors import CalibrationError
from .._rounding import FLOAT8, FLOAT8_LARGEST, code_dtype, code_range, float4_codes, float4_values
from .._scheme import NumberFormat, Scheme
from .round_kernel import fits_kernel, round_kernel, run_block

PANEL = 32
"""Rows of a matrix product. A row's result may depend on the number of rows, so it is the same on every mesh."""
BLOCK = 128
"""Columns that are rounded before the columns behind them are changed."""
TRIES = 4
"""Attempts to factor a Hessian, each with ten times the damping of the one before."""


def order_of(diagonal: Tensor, scheme: Scheme) -> Tensor:
    """Return the order in which columns are rounded, from the diagonal of the Hessian."""
    if not scheme.act_order:
        return torch.arange(len(diagonal), device=diagonal.device)
    return diagonal.argsort(descending=True, stable=True)


def factor(hessian: Tensor, scheme: Scheme, names: str) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian [k, k], whose columns are in the order of rounding.

    Inputs that are always zero get the diagonal 1. Raises CalibrationError if no damping makes it positive definite.
    """
    if not bool(hessian.isfinite().all()):
        raise CalibrationError(
            f"quantize {names} by gptq",
            "inputs with NaN or infinity",
            "the sums over the calibration data are not finite",
            "repair the calibration data, or run the model in float32 to see which layer overflows",
        )
    diagonal = hessian.diagonal()
    order = order_of(diagonal, scheme)
    damping = scheme.damping * float(diagonal.mean()) or 1.0
    for attempt in range(TRIES):
        changed = hessian.clone()
        changed.diagonal().copy_(torch.where(diagonal == 0, 1.0, diagonal) + damping * 10**attempt)
        upper = _inverse_factor(changed[order][:, order])
        if upper is not None:
            return upper
    raise CalibrationError(
        f"quantize {names} by gptq",
        "a Hessian that is not positive definite",
        f"its damping was raised to {scheme.damping * 10 ** (TRIES - 1):g} of the mean diagonal without effect",
        "use more calibration data, or a Scheme with a larger damping",
    )


def _inverse_factor(hessian: Tensor) -> Tensor | None:
    """Return the upper Cholesky factor of the inverse; None if the Hessian is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(failed) else upper


def round_rows(
    rows: Tensor, scale: Tensor, zero: Tensor | None, upper: Tensor, diagonal: Tensor, scheme: Scheme
) -> Tensor:
    """Return the codes of rows [n, k] of a weight, given their scales and the factor [k, k] of `factor`.

    Rows are a multiple of `PANEL`, but for the last ones of a weight.
    """
    numbers, order = scheme.weights, order_of(diagonal, scheme)
    by_column = _per_column(scale.float(), rows.shape, numbers)[:, order].t().contiguous()
    zeros = None if zero is None else _per_column(zero.float(), rows.shape, numbers)[:, order].t().contiguous()
    left = torch.where(diagonal == 0, 0.0, rows.float())[:, order].t().contiguous()
    codes = torch.empty_like(left)
    for start in range(0, len(left), BLOCK):
        stop = min(start + BLOCK, len(left))
        errors = _round_block(left, codes, by_column, zeros, upper, range(start, stop), numbers)
        if stop < len(left):
            _subtract_product(left[stop:], upper[start:stop, stop:].t().contiguous(), errors)
    found = torch.empty_like(codes)
    found[order] = codes
    return found.t().contiguous().to(code_dtype(numbers))


def _per_column(scale: Tensor, shape: torch.Size, numbers: NumberFormat) -> Tensor:
    """Return one scale for each number of a weight: [n, g] -> [n, k]."""
    if numbers.group_size is not None:
        return scale.repeat_interleave(numbers.group_size, dim=-1)
    return scale.expand(shape)


def _round_block(
    left: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    upper: Tensor,
    columns: range,
    numbers: NumberFormat,
) -> Tensor:
    """Round a block of columns, which are the rows of `left` [k, n]; return their errors [block, n]."""
    each = slice(columns.start, columns.stop)
    offset = None if zero is None else zero[each]
    kernel = _exact_kernel() if fits_kernel(left, numbers) else None
    if kernel is not None:
        return run_block(kernel, left[each], codes[each], scale[each], offset, upper[each, each], numbers)
    return _round_by_torch(left[each], codes[each], scale[each], offset, upper[each, each], numbers)


@cache
def _exact_kernel() -> Callable[..., None] | None:
    """Return the kernel if it has the bits of torch's operators; None if not, or if there is none."""
    kernel = round_kernel()
    if kernel is None:
        return None
    generator = torch.Generator(device="cpu").manual_seed(0)
    left, scale = (torch.rand(40, 70, generator=generator, device="cpu") + 0.01 for _ in range(2))
    zero, upper = (3 * left).round(), left[:, :40].contiguous()
    both: list[tuple[Tensor, ...]] = []
    for act in (partial(run_block, kernel), _round_by_torch):
        own, codes = left.clone(), torch.empty_like(left)
        both.append((act(own, codes, scale, zero, upper, NumberFormat(3)), own, codes))
    return kernel if all(map(torch.equal, *both)) else None


def _round_by_torch(
    block: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, upper: Tensor, numbers: NumberFormat
) -> Tensor:
    """Round a block of columns by operators of torch; return their errors.

    Multiplication and subtraction are separate operations: a fused one could round differently for other sizes.
    """
    errors, factors = torch.empty_like(block), upper.unsqueeze(-1)
    scales = scale.unbind()  # one call makes all views of rows
    zeros = [None] * len(block) if zero is None else zero.unbind()
    rows = zip(block.unbind(), codes.unbind(), errors.unbind(), factors.unbind(), scales, zeros, strict=True)
    for i, (x, code, error, factor, step, offset) in enumerate(rows):
        found, value = _rounded(x, step, offset, numbers)
        code.copy_(found)
        torch.div(x - value, factor[i], out=error)
        block[i + 1 :].sub_(factor[i + 1 :] * error)
    return errors


def _rounded(x: Tensor, scale: Tensor, zero: Tensor | None, numbers: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the codes of one column as floats, and their values."""
    ratio = x / scale
    if numbers.is_float4:
        code = float4_codes(ratio)
        return code.float(), float4_values(code) * scale
    if numbers.type == "float":
        code = ratio.clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(FLOAT8).float()
        return code, code * scale
    if zero is None:
        code = ratio.round_().clamp_(*code_range(numbers))
        return code, code * scale
    code = ratio.add_(zero).round_().clamp_(*code_range(numbers))
    return code, (code - zero) * scale


def _subtract_product(left: Tensor, upper: Tensor, errors: Tensor) -> None:
    """Subtract `upper @ errors` from `left` [k, n], in panels of n."""
    for start in range(0, left.shape[1], PANEL):
        panel = slice(start, start + PANEL)
        left[:, panel] -= upper @ errors[:, panel].contiguous()
