"""Products with the codes of a weight: the numbers of the weight itself, on every mesh, for any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import NumberFormat, QuantizedLinear, Scheme
from meshwright.quantize.products import ANY, MostRows, integer_product, measuring, operators
from meshwright.quantize.products.kernels import integer_kernel, packed_kernel
from meshwright.tensor import fast_products

INTEGERS = {
    f"int{bits}, {size}": Scheme(_format)
    for bits in range(2, 9)
    for size in (None, 8, 24, 48)
    for _format in [NumberFormat(bits, strategy="group" if size else "channel", group_size=size)]
}
ONE_INPUT_SCALE = "int8, one scale for all inputs"
SCHEMES = INTEGERS | {
    "int8, one scale": Scheme(NumberFormat(8, strategy="tensor")),
    "int5, asymmetric": Scheme(NumberFormat(5, strategy="group", group_size=16, symmetric=False)),
    "int4, asymmetric rows": Scheme(NumberFormat(4, symmetric=False)),
    "int3, one zero point": Scheme(NumberFormat(3, strategy="tensor", symmetric=False)),
    "nf4": Scheme(NumberFormat(4, "nf", "group", 16)),
    "nf4, rounded inputs": Scheme(NumberFormat(4, "nf", "group", 16), NumberFormat(8, strategy="token", dynamic=True)),
    "mxfp4": Scheme.preset("mxfp4"),
    "nvfp4": Scheme.preset("nvfp4"),
    "fp8-dynamic": Scheme.preset("fp8-dynamic"),
    ONE_INPUT_SCALE: Scheme(NumberFormat(8), NumberFormat(4, strategy="tensor", dynamic=True)),
}  # fmt: skip
PAIR = mw.ProcessMesh([0, 1], ["x"])


def layer(scheme: Scheme, columns: int = 96, rows: int = 13) -> QuantizedLinear:
    torch.manual_seed(0)
    found = mw.quantize(nn.Linear(columns, rows), replace(scheme, ignore=()))
    assert isinstance(found, QuantizedLinear)
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_with_codes_is_that_with_the_numbers_for_any_number_of_rows(name: str) -> None:
    made = layer(SCHEMES[name])
    x = torch.randn(9, 96)
    with torch.no_grad(), fast_products(True):
        found = made(x)
        one_by_one = torch.cat([made(x[i : i + 1]) for i in range(9)])
        by_threes = torch.cat([made(x[i : i + 3]) for i in range(0, 9, 3)])
    assert name == ONE_INPUT_SCALE or torch.equal(found, one_by_one)
    assert name == ONE_INPUT_SCALE or torch.equal(found, by_threes)
    torch.testing.assert_close(found, made(x).detach())


@pytest.mark.parametrize("columns", [1, 7, 9, 17, 31])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_of_any_length(bits: int, columns: int) -> None:
    made = layer(Scheme(NumberFormat(bits)), columns, 5)
    with torch.no_grad():
        for x in (torch.randn(1, columns), torch.randn(2, 3, columns)):
            with fast_products(True):
                found = made(x)
            torch.testing.assert_close(found, made(x))


@pytest.mark.skipif(packed_kernel() is None, reason="the processor or the machine has no kernels")
@pytest.mark.parametrize("name", ["int4, 48", "nf4", "fp8-dynamic"])
def test_the_kernel_runs_and_reads_half_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mw.quantize(nn.Linear(96, 13).bfloat16(), replace(SCHEMES[name], ignore=()))
    x = torch.randn(2, 96).bfloat16()
    wanted = made(x).detach()
    monkeypatch.setattr(operators, "to_values", None)
    with torch.no_grad(), fast_products(True):
        torch.testing.assert_close(made(x), wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_converted_model_keeps_its_numbers(dtype: torch.dtype) -> None:
    made, x = layer(SCHEMES["fp8-dynamic"]).to(dtype), torch.randn(2, 96).to(dtype)
    with torch.no_grad(), fast_products(True):
        found = made(x)
    torch.testing.assert_close(found, made(x).detach(), rtol=0, atol=0.02 if dtype is torch.bfloat16 else 1e-12)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(Scheme.preset("nf4"), 1024, 513), torch.randn(2, 1024)
    codes = torch.randint(-128, 128, (513, 1024), dtype=torch.int8)
    with torch.no_grad(), fast_products(True):
        wanted, sums = made(x), integer_product(codes[:2], codes)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert torch.equal(made(x), wanted)
        assert torch.equal(integer_product(codes[:2], codes), sums)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_rows_have_no_outputs(name: str) -> None:
    made = layer(SCHEMES[name])
    for is_fast in (False, True):
        with torch.no_grad(), fast_products(is_fast):
            assert made(torch.empty(0, 96)).shape == (0, 13)


def test_a_gradient_takes_the_numbers() -> None:
    made, x = layer(Scheme.preset("int8")), torch.randn(2, 96, requires_grad=True)
    with fast_products(True):
        made(x).sum().backward()
    torch.testing.assert_close(x.grad, made.dequantized().sum(0).expand(2, 96))


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 33), (130, 8), (5, 3000), (140, 3000)])
def test_sums_of_integers_are_exact(rows: int, columns: int, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernel:
        monkeypatch.setattr(operators, "integer_kernel", lambda: None)
    x, w = torch.randint(-128, 128, (rows, columns)), torch.randint(-128, 128, (6, columns))
    x[0], w[0] = -128, -128
    assert torch.equal(integer_product(x.to(torch.int8), w.to(torch.int8)), (x @ w.t()).int())
    assert integer_kernel() is None or integer_product(x.to(torch.int8), w.to(torch.int8)).dtype is torch.int32


@pytest.mark.parametrize("name", [*SCHEMES][::4] + ["int3, 48", "nf4", "nvfp4"])
@pytest.mark.parametrize("placement", [mw.Shard(0), mw.Shard(1), mw.Replicate()], ids=str)
def test_products_on_a_mesh_are_those_of_one_device(name: str, placement: mw.Placement) -> None:
    scheme, x = SCHEMES[name], torch.randn(3, 96, generator=torch.Generator().manual_seed(0))

    def product() -> tuple[Tensor, int]:
        made = nn.Linear(96, 13)
        torch.manual_seed(0)
        made.reset_parameters()
        made.weight = mw.shard_tensor(made.weight, PAIR, [placement])
        new = mw.quantize(made, replace(scheme, ignore=()))
        with torch.no_grad(), fast_products(True):
            return mw.unshard_dtensor(new(x)), 0

    with torch.no_grad():
        wanted = layer(scheme)(x)
    for found, _ in mw.simulate(product, 2):
        torch.testing.assert_close(found, wanted)


def test_measuring_finds_the_first_number_of_rows_for_which_torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SIZE", 256)
    if packed_kernel() is not None:
        assert all(most in (0, *measuring.ROWS, ANY) for most in measuring.measure_rows())
    monkeypatch.setattr(measuring, "packed_kernel", lambda: None)
    assert measuring.measure_rows() == MostRows(0, 0, 0)
