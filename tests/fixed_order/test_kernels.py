"""The C++ kernels of products and sums in pieces: the bits of the plain form, for every shape and memory order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.fixed_order import piece_products, piece_sums
from meshwright.fixed_order.kernels import padded, plain_product, plain_sum
from meshwright.fixed_order.piece_products import longest_piece, product_of_blocks, product_of_pieces
from meshwright.fixed_order.piece_sums import sum_kernel, sum_of_pieces

needs_kernel = pytest.mark.skipif(not longest_piece(), reason="no compiler, or vectors other than AVX2")
VALUES = torch.tensor([0.0, -0.0, 1e-30, -1e30, torch.inf, -torch.inf, torch.nan])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    """Return the bits of each element; all NaN have the same."""
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.int32)


def operand(lead: tuple[int, ...], rows: int, columns: int, order: str, dtype: torch.dtype) -> Tensor:
    """Return random numbers in a memory order; some of them are special."""
    sizes = {"rows": (rows, columns), "columns": (columns, rows), "parts": (2 * rows + 1, 3 * columns + 2)}
    x = torch.randn(*lead, *sizes.get(order, (rows, columns)))
    x[torch.rand(x.shape) < 0.002] = VALUES[torch.randint(len(VALUES), ())]
    x = x.to(dtype)
    if order == "columns":
        return x.mT
    if order == "parts":
        return x[..., 1::2, 2::3]
    if order == "heads":
        return x.movedim(-2, 0).contiguous().movedim(0, -2)
    return x


ORDERS = st.sampled_from(["rows", "columns", "parts", "heads"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LEADS = st.sampled_from([(), (3,), (2, 2), (2, 1, 3)])
COUNTS = st.sampled_from([0, 1, 2, 5, 16, 17, 47, 130, 137])


@needs_kernel
@settings(max_examples=60, deadline=None)
@example(137, 47, 192, 8, (), ("columns", "columns"), torch.float32)
@example(1, 17, 1, 1, (2, 1, 3), ("parts", "heads"), torch.float32)
@given(COUNTS, COUNTS, st.integers(0, 192), st.integers(1, 8), LEADS, st.tuples(ORDERS, ORDERS), DTYPES)
def test_products_in_pieces_have_the_bits_of_the_plain_form(
    m: int, n: int, size: int, pieces: int, lead: tuple[int, ...], orders: tuple[str, str], dtype: torch.dtype
) -> None:
    torch.manual_seed(m + 7 * n + 31 * size)
    x, w = operand(lead, m, size * pieces, orders[0], dtype), operand(lead, size * pieces, n, orders[1], dtype)
    found = product_of_pieces(x, w, pieces)
    wanted = plain_product(x.float(), w.float(), pieces) if found_by_kernel(dtype) else plain_product(x, w, pieces)
    assert found.shape == wanted.shape
    assert torch.equal(bits(found), bits(wanted))


def found_by_kernel(dtype: torch.dtype) -> bool:
    return not piece_products.is_separable("cpu", dtype)


@needs_kernel
@settings(max_examples=30, deadline=None)
@given(COUNTS, COUNTS, st.integers(1, 170), LEADS, st.tuples(ORDERS, ORDERS))
def test_products_in_blocks_have_the_bits_of_the_padded_form(
    m: int, n: int, k: int, lead: tuple[int, ...], orders: tuple[str, str]
) -> None:
    torch.manual_seed(m + 7 * n + 31 * k)
    x, w = operand(lead, m, k, orders[0], torch.float32), operand(lead, k, n, orders[1], torch.float32)
    blocks, rest = -(-k // 32), -k % 32
    wanted = plain_product(padded(x, rest, 0), padded(w, 0, rest), blocks)
    assert torch.equal(bits(product_of_blocks(x, w)), bits(wanted))


@pytest.mark.skipif(sum_kernel() is None, reason="no compiler")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 45),
    st.sampled_from([1, 2, 3, 8]),
    st.lists(st.sampled_from([0, 1, 3, 70, 130]), max_size=2),
    st.lists(st.sampled_from([1, 2, 5]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_sums_have_the_bits_of_the_plain_form(
    gap: int, size: int, pieces: int, inner: list[int], outer: list[int], random: Random
) -> None:
    shape = (*outer, size * pieces, *inner)
    order = random.sample(range(len(shape)), len(shape))
    torch.manual_seed(size)
    x = operand(tuple(shape[d] for d in order[:-1]), shape[order[-1]], 1 + gap, "rows", torch.float32)[..., gap]
    x = x.permute(*(order.index(d) for d in range(len(shape))))
    found, wanted = sum_of_pieces(x, len(outer), pieces), plain_sum(x, len(outer), pieces)
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.skipif(sum_kernel() is None, reason="no compiler")
@pytest.mark.parametrize("size", [*range(31, 35), *range(63, 67), 100, 128, 129, 172, 256, 257, 700])
def test_sums_of_rows_have_the_bits_of_the_plain_form(size: int) -> None:
    torch.manual_seed(size)
    for rows, pieces in itertools.product((1, 8, 19), (1, 3, 8)):
        x = operand((), rows, size * pieces, "rows", torch.float32)
        assert torch.equal(bits(sum_of_pieces(x, 1, pieces)), bits(plain_sum(x, 1, pieces)))


@needs_kernel
def test_the_kernel_is_used_for_sums_up_to_the_longest_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(piece_products, "_run", lambda kernel, x, w, size: calls.append(size))  # pyright: ignore
    sizes = (2, longest_piece(), longest_piece() + 1, 1)
    for size in sizes:
        product_of_pieces(torch.ones(3, 2 * size), torch.ones(2 * size, 5), 2)
    assert calls == list(sizes[:2])


class Seen(TorchDispatchMode):
    """A mode that notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_torch_see_operators_that_skip_the_dispatcher_without_them() -> None:
    x, w = torch.randn(2, 5, 48), torch.randn(24, 48)
    with mw.same_numbers():
        wanted = F.linear(x, w).sum(1) @ w
        with Seen() as seen:
            found = F.linear(x, w).sum(1) @ w
    assert torch.equal(found, wanted)
    assert {name.split(".")[1] for name in seen.names if "fixed" in name} == {"fixed_product", "fixed_sum"}


@pytest.mark.filterwarnings("ignore")
def test_a_trace_and_a_compiled_function_hold_the_operators() -> None:
    def call(x: Tensor) -> Tensor:
        return F.linear(x, w).sum(1) @ w

    x, w = torch.randn(2, 5, 48), torch.randn(24, 48)
    ways: list[Any] = [
        lambda: torch.jit.trace(call, (x,), check_trace=False),
        lambda: torch.compile(call, backend="eager"),
    ]
    for way in ways:
        with mw.same_numbers():
            made = way()
            made(x)
            assert torch.equal(made(-x), call(-x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_the_same_without_a_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(2, 70, 48).to(dtype).requires_grad_(), torch.randn(24, 48).to(dtype).requires_grad_()
        with mw.same_numbers():
            y = F.linear(x, w).unflatten(-1, (3, 8)).transpose(1, 2)
            out = F.scaled_dot_product_attention(y, y, y, is_causal=True)
            (out * out.detach().cos()).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [out.detach(), x.grad, w.grad]

    first = outcome()
    monkeypatch.setattr(piece_products, "product_kernel", lambda: None)
    monkeypatch.setattr(piece_sums, "sum_kernel", lambda: None)
    assert all(map(torch.equal, first, outcome()))
