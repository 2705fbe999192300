"""Attention in packed sequences gives the values and gradients of one device with a mask, also across ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.nn import functional as F

import meshwright as mw
from meshwright.spmd.forms import block_tiles

from .test_attention_tiles import Largest

LENGTH = 24
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [3] * 11 + [1] * 2 + [3] * 11])
"""Documents that cross the borders of ranks, and one with a gap."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tiles, "ROWS_AT_ONCE", 4)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def operands(heads: int, shared: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys, values, and the factors of the result in the loss."""
    sizes = ((heads, 4), (shared, 4), (shared, 5), (heads, 5))
    return [random_tensor(2, n, length, e, dtype=dtype) for n, e in sizes]


def by_mask(qkv: Sequence[Tensor], documents: Tensor, is_causal: bool) -> Tensor:
    """Return the attention of one device, with the mask of all rows and keys."""
    q, k, v = qkv
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    if is_causal:
        seen = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


def packed(qkv: Sequence[Tensor], documents: Tensor, is_causal: bool = True) -> Tensor:
    q, k, v = qkv
    return mw.document_attention(q, k, v, documents, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def with_gradients(given: Sequence[Tensor], attend: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
    """Return the result, and the gradients of queries, keys and values."""
    *leaves, weight = (x.detach().requires_grad_() for x in given)
    out = attend(leaves)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shared", [4, 2])
def test_one_device(causal: bool, shared: int) -> None:
    given = operands(4, shared)
    goal = with_gradients(given, lambda qkv: by_mask(qkv, DOCUMENTS, causal))
    found = with_gradients(given, lambda qkv: packed(qkv, DOCUMENTS, causal))
    torch.testing.assert_close(found, goal)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("name", "length"), [("ring", 24), ("gather", 24), ("ring", 22)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sharded_sequences(ranks: int, name: Any, length: int, causal: bool) -> None:
    """By a ring if it fits, otherwise by gathering; documents may be sharded or not."""
    mesh, documents = mw.ProcessMesh(range(ranks), ["cp"]), DOCUMENTS[:, :length]
    for shared in (4, 2):
        given = operands(4, shared, length)
        goal = with_gradients(given, lambda qkv: by_mask(qkv, documents, causal))

        def go(given: list[Tensor] = given, shared: int = shared) -> list[Tensor]:
            parts = [mw.shard_tensor(x, mesh, [mw.Shard(2)]) for x in given]
            of_rows = mw.shard_tensor(documents, mesh, [mw.Shard(1) if shared == 4 else mw.Replicate()])
            with mw.context_parallel(name):
                told = mw.explain(lambda: with_gradients(parts, lambda qkv: packed(qkv, of_rows, causal)))
            fits = length % (ranks * (2 if causal else 1)) == 0
            hows = [call.how for call in told.calls if "attention" in call.name]
            assert hows == [name if name == "ring" and fits else "local"]
            return [mw.unshard_dtensor(x) for x in told.result]

        for found in mw.simulate(go, ranks):
            torch.testing.assert_close(found, goal)


@pytest.mark.parametrize("placements", [[mw.Shard(0)], [mw.Shard(1)]])
def test_sharded_batches_and_heads(placements: list[mw.Shard]) -> None:
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    given = operands(4, 2)
    goal = with_gradients(given, lambda qkv: by_mask(qkv, DOCUMENTS, True))

    def go() -> list[Tensor]:
        parts = [mw.shard_tensor(x, mesh, placements) for x in given]
        with mw.trace_comm() as trace:
            found = with_gradients(parts, lambda qkv: packed(qkv, DOCUMENTS))
        assert not trace.calls
        return [mw.unshard_dtensor(x) for x in found]

    for found in mw.simulate(go, 2):
        torch.testing.assert_close(found, goal)


class Packed(nn.Module):
    """Attention of packed sequences with a trained gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        heads = (x * self.gain).unflatten(-1, (2, 2)).transpose(1, 2)
        return mw.document_attention(heads, heads, heads, documents).square().mean()


@pytest.mark.parametrize("name", ["ring", "gather"])
@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_training_has_the_losses_of_one_device(name: Any, static: bool) -> None:
    x = random_tensor(2, LENGTH, 4, dtype=torch.float32)

    def losses(config: mw.Parallelism | None = None) -> list[float]:
        net = Packed()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        if config is not None:
            mw.parallelize(net, optimizer, mw.ProcessMesh([0, 1], ["cp"]), config)
        step = mw.to_static(net, None, None, optimizer) if config is not None and static else None
        found: list[float] = []
        for _ in range(3):
            if step is not None:
                found.append(step(x, DOCUMENTS).item())
                continue
            loss = net(x, DOCUMENTS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    goal = losses()
    assert goal[-1] < goal[0]
    for found in mw.simulate(lambda: losses(mw.Parallelism(context=name)), 2):
        assert found == pytest.approx(goal, rel=1e-5)


def test_only_masks_of_some_rows_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor grows with the length, not with its square."""
    monkeypatch.setattr(block_tiles, "ROWS_AT_ONCE", 32)

    def largest(length: int) -> int:
        x = random_tensor(1, 1, length, 4).requires_grad_()
        with Largest() as found:
            mw.document_attention(x, x, x, torch.arange(length)[None] // 100).sum().backward()
        return found.elements

    assert largest(512) <= 2 * largest(256) <= 32 * 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    mesh = mw.ProcessMesh([0, 1], ["cp"])
    goal = with_gradients(operands(4, 2), lambda qkv: by_mask(qkv, DOCUMENTS, True))

    def go() -> list[Tensor]:
        parts = [mw.shard_tensor(x, mesh, [mw.Shard(2)]) for x in operands(4, 2, dtype=dtype)]
        with mw.context_parallel("ring"):
            found = with_gradients(parts, lambda qkv: packed(qkv, DOCUMENTS))
        return [mw.unshard_dtensor(x) for x in found]

    for x, wanted in zip(mw.simulate(go, 2)[0], goal, strict=True):
        assert x.dtype == dtype
        limit = 0.05 if dtype == torch.bfloat16 else 1e-5
        assert (x.double() - wanted).abs().max() <= limit * wanted.abs().max()


@pytest.mark.parametrize("way", ["grad", "vmap of grad", "grad of vmap", "jacrev", "grad of grad"])
def test_reverse_mode_of_torch_func(way: str) -> None:
    """On one device, and on a mesh, where the arguments are gathered."""
    ways: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
        "grad": grad,
        "vmap of grad": lambda f: lambda x: vmap(grad(f))(torch.stack([x, x + 1])),
        "grad of vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x + 1])).sum()),
        "jacrev": jacrev,
        "grad of grad": lambda f: grad(lambda x: grad(f)(x).square().sum()),
    }
    x, documents = random_tensor(2, 1, 6, 2), torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])

    def by_operators(x: Tensor) -> Tensor:
        seen = documents[:, None, :, None] == documents[:, None, None, :]
        scores = (x @ x.mT * 2**-0.5).masked_fill(~(seen & torch.ones(6, 6, dtype=torch.bool).tril()), float("-inf"))
        return (scores.softmax(-1) @ x).square().sum()

    def attend(x: Tensor) -> Tensor:
        return mw.document_attention(x, x, x, documents).square().sum()

    def go() -> Tensor:
        part = mw.shard_tensor(x, mw.ProcessMesh([0, 1], ["cp"]), [mw.Shard(2)])
        with mw.context_parallel("ring"):
            return ways[way](attend)(part)

    goal = ways[way](by_operators)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of slow batching rules
        for found in (ways[way](attend)(x), *mw.simulate(go, 2)):
            torch.testing.assert_close(found, goal)


def test_tensors_without_memory() -> None:
    x = torch.empty(1, 2, 6, 3, device="meta")
    assert mw.document_attention(x, x, x, torch.empty(1, 6, device="meta")).shape == x.shape


@pytest.mark.parametrize(
    ("key", "value", "documents", "gqa"),
    [
        ((2, 4, 6, 3), (2, 4, 6, 3), (1, 6), False),
        ((2, 4, 6, 2), (2, 4, 6, 3), (2, 6), False),
        ((2, 4, 6, 3), (2, 4, 5, 3), (2, 6), False),
        ((4, 6, 3), (4, 6, 3), (2, 6), False),
        ((6, 3), (6, 3), (2, 6), False),
        ((2, 2, 6, 3), (2, 2, 6, 3), (2, 6), False),
        ((2, 3, 6, 3), (2, 3, 6, 3), (2, 6), True),
        ((2, 2, 6, 3), (2, 1, 6, 3), (2, 6), True),
    ],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused(
    key: tuple[int, ...], value: tuple[int, ...], documents: tuple[int, ...], gqa: bool
) -> None:
    x = torch.ones(2, 4, 6, 3)
    with pytest.raises(mw.tensor.OperationError, match="documents"):
        mw.document_attention(x, torch.ones(key), torch.ones(value), torch.zeros(documents), enable_gqa=gqa)
