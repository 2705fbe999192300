"""Which rule a call takes: the one that is asked for where it fits, and the cheaper one otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw

LINE = mw.ProcessMesh([0, 1], ["cp"])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "heads"), [("ring", 8, 3), ("ulysses", 7, 4), ("ring", 7, 3), ("gather", 8, 4)]
)
def test_attention_takes_the_named_form_where_it_fits(name: str, length: int, heads: int, causal: bool) -> None:
    q, k, v, weight = (drawn(2, heads, length, 4) for _ in range(4))
    fits = {"ring": length % 4 == 0, "ulysses": heads % 2 == 0, "gather": False}[name]

    def attended(given: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        (out * (weight if type(out) is Tensor else mw.shard_tensor(weight, LINE, [mw.Shard(2)]))).sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def work() -> list[Tensor]:
        with mw.context_parallel(name):
            told = mw.explain(lambda: attended([mw.shard_tensor(x, LINE, [mw.Shard(2)]) for x in (q, k, v)]))
        (how,) = [call.how for call in told.calls if "attention" in call.name]
        assert how == (name if fits else "local")
        return [mw.unshard_dtensor(x) for x in told.result]

    goal = attended([q, k, v])
    for found in mw.simulate(work, 2):
        for x, wanted in zip(found, goal, strict=True):
            torch.testing.assert_close(x, wanted)


def layouts(call: Callable[[], Tensor], ranks: int = 2) -> set[str]:
    return set(mw.simulate(lambda: repr(call().spec), ranks))


def test_a_result_that_is_written_has_the_layout_of_its_place() -> None:
    """`out=` and in-place operators keep what they write to as it is sharded."""
    x, y = drawn(4, 4), drawn(4, 4)

    def written(out: mw.Shard | mw.Replicate) -> Tensor:
        place = mw.shard_tensor(torch.zeros(4, 4), LINE, [out])
        place.add_(mw.shard_tensor(x, LINE, [mw.Shard(1)])).mul_(mw.shard_tensor(y, LINE, [mw.Shard(0)]))
        torch.testing.assert_close(mw.unshard_dtensor(place), x * y)
        return place

    assert layouts(lambda: written(mw.Shard(0))) == {"f32[4@cp, 4]"}
    assert layouts(lambda: written(mw.Shard(1))) == {"f32[4, 4@cp]"}
    assert layouts(lambda: written(mw.Replicate())) == {"f32[4, 4]"}
