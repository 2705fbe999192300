"""The kernel of GPTQ has the bits of torch's operators."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.quantize import NumberFormat, Scheme
from meshwright.quantize.calibration import gptq
from meshwright.quantize.calibration.round_kernel import round_kernel, run_block

from .models import batches, perceptron


@pytest.mark.skipif(round_kernel() is None, reason="the machine has no compiler")
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize(("rows", "columns", "bits"), [(32, 128, 4), (96, 100, 8), (193, 64, 2), (5, 7, 3), (1, 1, 4)])
def test_a_block_is_rounded_as_by_torch(rows: int, columns: int, bits: int, has_zero: bool) -> None:
    torch.manual_seed(0)
    kernel, numbers = round_kernel(), NumberFormat(bits)
    assert kernel is not None
    left, scale = torch.randn(columns, rows), torch.rand(columns, rows) + 0.01
    left[0] = 0.5 * scale[0]  # ties
    zero = torch.randint(-2, 2, (columns, rows)).float() if has_zero else None
    upper = 0.3 * torch.randn(columns, columns) + torch.eye(columns)
    upper = upper.t() if has_zero else upper
    ours, theirs = left.clone(), left.clone()
    codes, wanted_codes = torch.empty_like(left), torch.empty_like(left)
    errors = run_block(kernel, ours, codes, scale, zero, upper, numbers)
    wanted = gptq._round_by_torch(theirs, wanted_codes, scale, zero, upper, numbers)
    assert torch.equal(errors, wanted)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(ours, theirs)


def test_codes_do_not_depend_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Scheme(NumberFormat(4, strategy="group", group_size=8), method="gptq", act_order=True)
    found = mw.quantize(perceptron(), scheme, batches()).state_dict()
    monkeypatch.setattr(gptq, "round_kernel", lambda: None)
    gptq._exact_kernel.cache_clear()
    wanted = mw.quantize(perceptron(), scheme, batches()).state_dict()
    gptq._exact_kernel.cache_clear()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
