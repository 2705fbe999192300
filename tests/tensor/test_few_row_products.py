"""Products by the fastest kernel: the numbers of torch, and the same for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.tensor import fast_products, has_fast_products, product, sum_with_product
from meshwright.tensor.execution import few_row_products, row_kernel
from meshwright.tensor.execution.few_row_products import FEW, linear

pytestmark = pytest.mark.skipif(row_kernel.row_kernel() is None, reason="no compiler, or no AVX2")
WIDTHS = [(130, 130), (512, 67), (64, 512), (257, 300)]
"""Sizes (k, n) of matrices, with and without a rest for vectors and for blocks of columns."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def products(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    with torch.no_grad(), fast_products(True):
        return [linear(x, w), linear(x, w, bias), product(x, w.t()), sum_with_product(bias, x, w.t())]


@pytest.mark.parametrize(("k", "n"), WIDTHS)
@pytest.mark.parametrize("rows", sorted({1, 8, 13, FEW}))
def test_a_product_of_few_rows_is_that_of_torch_and_depends_on_no_other_row(rows: int, k: int, n: int) -> None:
    x, w, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    found = products(x, w, bias)
    for mine, theirs in zip(found, [F.linear(x, w), F.linear(x, w, bias)] * 2, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(mine[-1:], alone) for mine, alone in zip(found, products(x[-1:], w, bias), strict=True))


def test_products_take_parts_of_tensors() -> None:
    """The last part is not contiguous: torch's kernel is used for its columns."""
    x, w, bias = torch.randn(4, 3, 256).transpose(0, 1), torch.randn(300, 600), torch.randn(300)
    for part in (w[:, :256], w[7:, 300:556], w[:, ::2][:, :256]):
        with torch.no_grad(), fast_products(True):
            found = linear(x, part, bias[: len(part)])
        torch.testing.assert_close(found, F.linear(x, part, bias[: len(part)]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("is_fast", "is_known"), [(False, False), (True, True)])
def test_other_kernels_than_those_of_torch_are_used_only_where_they_are_chosen(
    is_fast: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(few_row_products, "row_kernel", lambda: lambda *args: calls.append(1))
    x, w = torch.randn(2, 256), torch.randn(256, 256)
    with fast_products(is_fast):
        with torch.no_grad():
            product(x, w.t())
        product(x, w.t())
        product(x.double(), w.double().t())
    assert calls == [1] * is_known


def test_torch_multiplies_where_the_kernel_does_not_fit() -> None:
    x, w = torch.randn(2, 256), torch.randn(256, 256)
    with torch.no_grad(), fast_products(True):
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, w).dtype is product(x, w).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(x[:, 1:], w)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert linear(mode.from_tensor(x), w).shape == (2, 256)


def test_a_process_with_several_threads_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_fast_products()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not has_fast_products()
