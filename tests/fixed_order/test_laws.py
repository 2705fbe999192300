"""The law of `same_numbers`: results and gradients have the same bits on every mesh, for random shapes and layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.fixed_order.functions import REPLACED
from meshwright.fixed_order.kernels import pieces_of
from meshwright.fixed_order.piece_sums import sum_of_pieces

Call = Callable[..., Tensor]
Shapes = tuple[str, ...]

CALLS: dict[str, tuple[Call, Shapes]] = {
    "linear": (F.linear, ("bsk", "nk", "n")),
    "matmul": (torch.matmul, ("bsk", "kn")),
    "batched matmul": (torch.matmul, ("bsk", "bkn")),
    "matmul of vectors": (lambda x, y, z: (x @ y).sum() * (z @ x.mT), ("sk", "k", "nk")),
    "addmm": (torch.addmm, ("n", "sk", "kn")),
    "sum": (lambda x: x.sum(1) * x.sum(), ("bsk",)),
    "mean": (lambda x: x.mean((0, 2), True) * x.mean(), ("bsk",)),
    "var": (lambda x: x.var(1, keepdim=True) * x.std((0, 2), keepdim=True) * torch.var(x, correction=0), ("bsk",)),
    "softmax": (lambda x: x.softmax(-1) * x.softmax(0), ("bsk",)),
    "log_softmax": (lambda x: x.log_softmax(-1) * torch.logsumexp(x, 1, True), ("bsk",)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(len(x)) % x.shape[1]), ("sk",)),
    "nll_loss": (lambda x: F.nll_loss(x, torch.arange(len(x)) % x.shape[1], reduction="sum"), ("sk",)),
    "mse_loss": (F.mse_loss, ("bsk", "bsk")),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w), ("bsk", "k")),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), ("bsk", "k", "k")),
    "embedding": (lambda w: F.embedding(torch.arange(24).view(8, 3) % len(w), w, 0), ("nk",)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ("bhsk", "bhsk", "bhsn")),
    "grouped attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True), ("bhsk", "b2sk"),
    ),
    "broadcast": (lambda x, w, y: torch.where(x > 0, x * w, x - y).expand(2, *x.shape), ("bsk", "k", "s1")),
    "elementwise": (lambda x: F.silu(x) * F.gelu(x) + torch.rsqrt(x.sigmoid()), ("bsk",)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), ("bsk",)),
    "softplus": (lambda x: F.softplus(x) * torch.linalg.vector_norm(x), ("bsk",)),
    "bounds": (lambda x, low, high: x.clamp(low, high).clamp_min(low), ("bsk", "k", "s1")),
    "square root": (lambda x: (x.abs() + 1) ** 0.5, ("bsk",)),
    "axis": (lambda x: x.sum(axis=1) * x.mean(axis=1), ("bsk",)),
    "expand_as": (lambda x, w: w.expand_as(x) * w.broadcast_to(x.shape), ("bsk", "k")),
}  # fmt: skip
"""Name → a function, and the letters of the dims of its operands."""
MESHES = {2: [2], 4: [4], 8: [2, 4]}


def values(shapes: Shapes, sizes: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn([sizes.get(letter, 1) for letter in letters]).to(dtype) for letters in shapes]


def outcome(call: Call, operands: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients, whole."""
    with mw.same_numbers():
        out = call(*operands)
        (out * out.detach().cos()).sum().backward()
    found = [out.detach(), *(x.grad for x in operands if x.grad is not None)]
    return [mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x for x in found]


def on_mesh(call: Call, whole: list[Tensor], ranks: int, cuts: list[list[int | None]]) -> list[list[Tensor]]:
    """Return the outcome on each rank; `cuts` has a dim or None for each operand and each axis of the mesh."""
    shape = MESHES[ranks]
    mesh = mw.ProcessMesh(torch.arange(ranks).view(shape).tolist(), ["a", "b"][: len(shape)])

    def rank() -> list[Tensor]:
        marks = [[mw.Replicate() if d is None else mw.Shard(d) for d in each[: len(shape)]] for each in cuts]
        pairs = zip(whole, marks, strict=True)
        return outcome(call, [mw.shard_tensor(x.clone(), mesh, m).requires_grad_() for x, m in pairs])

    return mw.simulate(rank, ranks)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=4)
@given(data=st.data())
def test_results_and_gradients_have_the_same_bits_on_every_mesh(name: str, data: st.DataObject) -> None:
    call, shapes = CALLS[name]
    lengths = st.sampled_from([2, 3, 4, 6, 8, 16, 40])
    sizes = {letter: data.draw(lengths, letter) for letter in "sknb"} | {"h": 4, "2": 2}
    whole = values(shapes, sizes, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    wanted = outcome(call, [x.clone().requires_grad_() for x in whole])
    dims = [st.sampled_from([None, *range(x.dim())]) for x in whole]
    cuts = [[data.draw(dim), data.draw(dim)] for dim in dims]
    for found in on_mesh(call, whole, data.draw(st.sampled_from(list(MESHES)), "ranks"), cuts):
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_each_replacement_is_of_a_function_of_torch(name: str) -> None:
    homes = (torch, torch.Tensor, F, torch.linalg)
    assert any(hasattr(home, name) or hasattr(home, f"__{name}__") for home in homes) or name == "linalg_vector_norm"


@given(st.integers(1, 70), st.integers(0, 40))
def test_zeros_at_the_end_do_not_change_a_sum(n: int, zeros: int) -> None:
    x = torch.randn(n, 3)
    assert torch.equal(sum_of_pieces(x, 0, 1), sum_of_pieces(F.pad(x, (0, 0, 0, zeros)), 0, 1))
    pieces = pieces_of(n)
    assert torch.allclose(sum_of_pieces(x, 0, pieces), x.sum(0), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, n = torch.randn(40, 48).to(dtype), torch.randn(24, 48).to(dtype), torch.randn(24).to(dtype)

    def layer(x: Tensor) -> Tensor:
        return F.silu(F.rms_norm(F.linear(x, w), (24,), n)).log_softmax(-1)

    with mw.same_numbers():
        assert torch.equal(layer(x)[5 : 5 + rows], layer(x[5 : 5 + rows]))


def test_columns_in_float16_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(80, 1024).half(), torch.randn(130, 1024).half()
    with mw.same_numbers():
        assert torch.equal(F.linear(x, w[2:]), F.linear(x, w)[:, 2:])


def test_a_decode_step_has_the_bits_of_the_whole_pass() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 70, 8), torch.randn(2, 2, 70, 8)
    with mw.same_numbers():
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for at in (0, 31, 32, 40, 69):
            seen = k[:, :, : at + 1], v[:, :, : at + 1]
            step = F.scaled_dot_product_attention(q[:, :, at : at + 1], *seen, enable_gqa=True)
            assert torch.equal(step, whole[:, :, at : at + 1])
        assert torch.equal(F.scaled_dot_product_attention(q[1, 2], k[1, 1], v[1, 1], is_causal=True), whole[1, 2])


def test_a_row_that_attends_to_nothing_is_zero_and_numbers_that_are_none_stay() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    with mw.same_numbers():
        out = F.scaled_dot_product_attention(q, k, v, mask)
        out.sum().backward()
        lost = F.scaled_dot_product_attention(q.detach() * torch.nan, k.detach(), v.detach(), mask)
    assert not out[:, 1].any()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert lost[:, 2].isnan().all()


def parameters_after_training(mesh: mw.ProcessMesh | None, batch: list[mw.Placement], cuts: list[Any]) -> list[Tensor]:
    """Return the parameters after steps of AdamW with clipping and dropout; `cuts` are the placements of weights."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)
    owned = [up.weight, up.bias, down.weight]
    if mesh is not None:
        owned = [torch.nn.Parameter(mw.shard_tensor(p.detach(), mesh, c)) for p, c in zip(owned, cuts, strict=True)]
    optimizer = torch.optim.AdamW(owned, lr=0.1)
    for step in range(3):
        x = torch.randn(8, 5, 12, generator=torch.Generator(device="cpu").manual_seed(step))
        x = x if mesh is None else mw.shard_tensor(x, mesh, batch)
        with mw.same_numbers():
            hidden = F.dropout(F.silu(F.linear(x, owned[0], owned[1])), 0.2)
            F.mse_loss(F.linear(hidden, owned[2]), x).backward()
            torch.nn.utils.clip_grad_norm_(owned, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [mw.unshard_dtensor(p).detach() if mesh is not None else p.detach() for p in owned]


WHOLE, ROWS, COLUMNS = mw.Replicate(), mw.Shard(0), mw.Shard(1)
TRAININGS: dict[str, tuple[list[int], list[mw.Placement], list[list[mw.Placement]]]] = {
    "dp 4": ([4], [ROWS], [[WHOLE]] * 3),
    "tp 2": ([2], [WHOLE], [[ROWS], [ROWS], [COLUMNS]]),
    "dp 2 × tp 2": ([2, 2], [ROWS, WHOLE], [[WHOLE, ROWS], [WHOLE, ROWS], [WHOLE, COLUMNS]]),
    "ZeRO-3": ([2], [ROWS], [[ROWS]] * 3),
    "three ranks": ([3], [ROWS], [[WHOLE], [WHOLE], [ROWS]]),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_trained_parameters_have_the_same_bits_on_every_mesh(name: str) -> None:
    shape, batch, cuts = TRAININGS[name]
    ranks = torch.arange(torch.Size(shape).numel())
    mesh = mw.ProcessMesh(ranks.view(shape).tolist(), ["a", "b"][: len(shape)])
    wanted = parameters_after_training(None, [], [])
    for found in mw.simulate(lambda: parameters_after_training(mesh, batch, cuts), len(ranks)):
        assert all(map(torch.equal, found, wanted))


SPECIAL = [0.0, -0.0, 2.0, -40.0, float("inf")]
VALUES: dict[str, Call] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "norm": lambda x: torch.linalg.vector_norm(x * 0),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(-x.unsqueeze(0), 0),
    "last row": lambda x: F.embedding(torch.tensor([0, 4]), x.unsqueeze(1), -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VALUES)
def test_special_values_have_the_results_and_gradients_of_torch(name: str, dtype: torch.dtype) -> None:
    found: list[list[Tensor]] = []
    for context in (contextlib.nullcontext, mw.same_numbers):
        x = torch.tensor(SPECIAL if "norm" not in name else SPECIAL[:-1], dtype=dtype, requires_grad=True)
        with context():
            out = VALUES[name](x)
            (gradient,) = torch.autograd.grad(out.sum(), x)
        found.append([out.detach(), gradient])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("call", [torch.sigmoid, torch.rsqrt])
def test_functions_of_integers_return_floating_point(call: Call) -> None:
    x = torch.tensor([1, 2, 30])
    with mw.same_numbers():
        found = call(x)
    torch.testing.assert_close(found, call(x))


def test_numbers_that_are_not_floating_point_have_no_mean() -> None:
    with mw.same_numbers(), pytest.raises(RuntimeError, match="dtype"):
        torch.ones(3, dtype=torch.long).mean()


REFUSED: dict[str, Call] = {
    "einsum": lambda x: torch.einsum("ab,ab->a", x, x),
    "cumsum": lambda x: x.cumsum(0),
    "power": lambda x: x**1.7,
    "power of a number": lambda x: 2**x,
    "float64": lambda x: x.double() @ x.double(),
    "norm": lambda x: torch.linalg.vector_norm(x, 3),
    "rows twice": lambda x: x[torch.tensor([0, 0])],
    "reflection": lambda x: F.pad(x, (1, 1), "reflect"),
    "list of rows": lambda x: x[[0, 0]],
    "write": lambda x: (x * 1).add_(x[:1]),
    "copy": lambda x: (x * 1).copy_(x[:1]),
    "fill": lambda x: (x * 1).fill_(x[0, 0]),
    "item": lambda x: (x * 1).__setitem__(slice(2), x[0]),
    "masked fill": lambda x: x.masked_fill(x > 0, x[0, 0]),
    "amax": lambda x: x.amax(0),
    "max": lambda x: torch.max(input=x),
    "alpha of a number": lambda x: x.add(0.3, alpha=0.7),
    "gradient of a gradient": lambda x: torch.autograd.grad((x * x).sum(), x, create_graph=True)[0],
    "loss of different shapes": lambda x: F.mse_loss(x, x[0]),
    "two masks": lambda x: F.scaled_dot_product_attention(x, x, x, x > 0, is_causal=True),
    "alpha": lambda x: x.bfloat16().add(x.bfloat16(), alpha=0.3),
    "smoothing": lambda x: F.cross_entropy(x, x.argmax(-1), label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x, x.detach().abs()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_without_a_fixed_order_are_refused(name: str) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with mw.same_numbers(), pytest.raises(mw.errors.SameNumbersError, match="fix: "):
        REFUSED[name](x)


def test_autocast_is_refused() -> None:
    x: Any = torch.ones(4, 4)
    with mw.same_numbers(), torch.autocast("cpu"), pytest.raises(mw.errors.SameNumbersError, match="autocast"):
        torch.matmul(x, x)
