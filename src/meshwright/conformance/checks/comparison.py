"""Comparison of the results of a device with the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.engine import unshard_dtensor
from meshwright.tensor import DistTensor

from ..results.check import WrongResult

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference by dtype, relative to the largest number."""
_MORE_THAN_CPU = 8
"""Largest error, relative to the error of the CPU in the same dtype."""


def expect(is_right: bool, text: str) -> None:
    """Raise WrongResult with this text unless `is_right`."""
    if not is_right:
        raise WrongResult(text)


def on_cpu(x: Tensor) -> Tensor:
    """Return the whole tensor on the CPU."""
    whole = unshard_dtensor(x) if isinstance(x, DistTensor) else x
    return whole.detach().cpu().resolve_conj().resolve_neg()


def expect_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise WrongResult unless shape, dtype and all bits are equal; NaN equals NaN."""
    x, goal = on_cpu(found), on_cpu(expected)
    if x.dtype != goal.dtype or x.shape != goal.shape:
        raise WrongResult(f"{what}: {described(x)} instead of {described(goal)}")
    if not torch.equal(_bits(x), _bits(goal)):
        raise WrongResult(f"{what}: {_some(x)} instead of {_some(goal)}")


def expect_close(
    found: Tensor,
    expected: Tensor,
    what: str,
    exact: Tensor | None = None,
    tolerance: float = 0.0,
) -> None:
    """Raise WrongResult unless the numbers are close to those expected, or about as close to the exact ones.

    `expected` are the numbers of the CPU in the same dtype, and `exact` those of the CPU in double precision. A
    `tolerance` above that of the dtype replaces it, for numbers that were computed in a narrower dtype.
    """
    x, goal = on_cpu(found), on_cpu(expected)
    if x.dtype != goal.dtype or x.shape != goal.shape:
        raise WrongResult(f"{what}: {described(x)} instead of {described(goal)}")
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        expect_equal(x, goal, what)
        return
    limit = max(TOLERANCE.get(_real(x.dtype), 2e-5), tolerance)
    error = _error(x, goal)
    if error <= limit:
        return
    if exact is not None:
        true = on_cpu(exact)
        if _error(x, true) <= limit + _MORE_THAN_CPU * _error(goal, true):
            return
    raise WrongResult(f"{what}: {_some(x)} instead of {_some(goal)}, relative error {error:.2g} in {x.dtype}")


def expect_all_close(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Compare two sequences of tensors by `expect_close`."""
    expect(len(found) == len(expected), f"{what}: {len(found)} tensors instead of {len(expected)}")
    for at, (x, goal) in enumerate(zip(found, expected, strict=True)):
        expect_close(x, goal, f"{what}, tensor {at}")


def expect_all_equal(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Compare two sequences of tensors by `expect_equal`."""
    expect(len(found) == len(expected), f"{what}: {len(found)} tensors instead of {len(expected)}")
    for at, (x, goal) in enumerate(zip(found, expected, strict=True)):
        expect_equal(x, goal, f"{what}, tensor {at}")


def described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a tensor, or in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        items: Sequence[Any] = value
        return [x for item in items for x in tensors_in(item)]
    return []


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex128: torch.float64, torch.complex64: torch.float32}.get(dtype, dtype)


def _bits(x: Tensor) -> Tensor:
    """Return the tensor in a form in which NaN equals NaN."""
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    return x.double().nan_to_num(nan=7.25e300) if x.dtype.is_floating_point else x


def _wide(x: Tensor) -> Tensor:
    return torch.view_as_real(x.to(torch.complex128)) if x.dtype.is_complex else x.double()


def _error(x: Tensor, goal: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinite if other numbers are not finite."""
    if not goal.numel():
        return 0.0
    if x.dtype.is_complex != goal.dtype.is_complex:
        return float("inf")
    a, b = _wide(x), _wide(goal)
    is_finite = b.isfinite()
    same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[b.isinf()], b[b.isinf()])
    if not same or not a[is_finite].isfinite().all():
        return float("inf")
    if not is_finite.any():
        return 0.0
    a, b = a[is_finite], b[is_finite]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


def _some(x: Tensor) -> str:
    """Return the first numbers of a tensor, as text."""
    values: list[Any] = x.flatten()[:4].tolist()
    return f"[{', '.join(f'{v:.5g}' if isinstance(v, float) else str(v) for v in values)}{', …' * (x.numel() > 4)}]"
