"""A call with several rules takes the requested rule if it fits, else the cheapest one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import meshwright as mw
from meshwright.layout import parse_spec
from meshwright.spmd import describe
from meshwright.tensor.planning.layout_decision import decide

LINE = mw.ProcessMesh([0, 1], ["cp"])


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "heads"), [("ring", 8, 3), ("ulysses", 7, 4), ("ring", 7, 3), ("gather", 8, 4)]
)
def test_attention_takes_the_named_form_if_it_fits(name: str, length: int, heads: int, causal: bool) -> None:
    q, k, v, weight = (random_tensor(2, heads, length, 4) for _ in range(4))
    fits = {"ring": True, "ulysses": heads % 2 == 0, "gather": False}[name]

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


def test_a_written_result_has_the_layout_of_its_target() -> None:
    """A call with `out=` and an in-place operator keep the layout of the tensor that they write to."""
    x, y = random_tensor(4, 4), random_tensor(4, 4)

    def written(out: mw.Shard | mw.Replicate) -> Tensor:
        place = mw.shard_tensor(torch.zeros(4, 4), LINE, [out])
        place.add_(mw.shard_tensor(x, LINE, [mw.Shard(1)])).mul_(mw.shard_tensor(y, LINE, [mw.Shard(0)]))
        torch.testing.assert_close(mw.unshard_dtensor(place), x * y)
        return place

    assert layouts(lambda: written(mw.Shard(0))) == {"f32[4@cp, 4]"}
    assert layouts(lambda: written(mw.Shard(1))) == {"f32[4, 4@cp]"}
    assert layouts(lambda: written(mw.Replicate())) == {"f32[4, 4]"}


def test_attributes_are_recorded_as_calls_with_their_names() -> None:
    def names() -> list[tuple[str, str]]:
        x = mw.shard_tensor(random_tensor(4, 4).to(torch.complex64), LINE, [mw.Shard(0)])
        return [(call.name, call.how) for call in mw.explain(lambda: (x.real, x.mT, x.T, x.imag, x.H)).calls]

    assert mw.simulate(names, 2)[0] == [(name, "local") for name in ("real", "mT", "T", "imag", "H")]


@pytest.mark.parametrize("placement", [mw.Shard(0), mw.Replicate()])
@pytest.mark.parametrize("rows", [mw.Shard(0), mw.Shard(1), mw.Replicate()])
def test_running_statistics_are_written_back(rows: mw.Shard, placement: mw.Shard) -> None:
    """Running statistics may be sharded in any layout, and keep it."""
    x, mean, var = random_tensor(6, 4), random_tensor(4), random_tensor(4).abs()
    means, variances = mean.clone(), var.clone()
    goal = F.batch_norm(x, means, variances, training=True, momentum=0.3)

    def work() -> list[Tensor]:
        given = [mw.shard_tensor(t.clone(), LINE, [placement]) for t in (mean, var)]
        before = [t.spec for t in given]
        out = F.batch_norm(mw.shard_tensor(x, LINE, [rows]), *given, training=True, momentum=0.3)
        assert [t.spec for t in given] == before
        unchanged = [mw.unshard_dtensor(t) for t in given]
        F.batch_norm(mw.shard_tensor(x, LINE, [rows]), *given)
        assert all(torch.equal(a, mw.unshard_dtensor(b)) for a, b in zip(unchanged, given, strict=True))
        return [mw.unshard_dtensor(out), *unchanged]

    for found in mw.simulate(work, 2):
        for value, wanted in zip(found, (goal, means, variances), strict=True):
            torch.testing.assert_close(value, wanted)


def test_experts_stay_on_their_ranks() -> None:
    """Weights sharded by expert are not gathered; each rank adds zeros for the rows of other experts."""
    w, x, ends = (
        random_tensor(2, 8, 8).bfloat16(),
        random_tensor(6, 8).bfloat16(),
        torch.tensor([2, 6], dtype=torch.int32),
    )

    def work() -> tuple[str, int, Tensor]:
        given = [mw.shard_tensor(x, LINE), mw.shard_tensor(w, LINE, [mw.Shard(0)]), mw.shard_tensor(ends, LINE)]
        told = mw.explain(lambda: torch._grouped_mm(*given))
        return repr(told.result.spec), told.received, mw.unshard_dtensor(told.result)

    for layout, received, found in mw.simulate(work, 2):
        assert layout == "bf16[6, 8] +cp"
        assert received == 0
        torch.testing.assert_close(found, torch._grouped_mm(x, w, ends))


def test_hooks_may_be_given_by_keyword() -> None:
    def work() -> tuple[Tensor, Tensor]:
        x = mw.shard_tensor(random_tensor(4), LINE, [mw.Shard(0)]).requires_grad_()
        seen: list[Tensor] = []
        x.register_hook(hook=seen.append)
        x.register_post_accumulate_grad_hook(hook=lambda p: seen.append(p.grad))
        (x * x).sum().backward()
        first, second = map(mw.unshard_dtensor, seen)
        return first, second

    for found in mw.simulate(work, 2):
        for grad in found:
            torch.testing.assert_close(grad, 2 * random_tensor(4))


def test_the_cost_of_a_requested_result_includes_its_conversion() -> None:
    """Between two choices that move as much, the one with the requested result is taken."""
    whole, cut = (parse_spec(text, LINE) for text in ("f32[4, 4]", "f32[4@cp, 4]"))
    call = describe(torch.ops.aten.add.Tensor, (torch.empty(4, 4, device="meta"),) * 2, {})
    assert call is not None
    for wish, layout in ((None, cut.layout), (cut.layout, cut.layout), (whole.layout, whole.layout)):
        decision = decide(call, [whole, cut], frozenset(), wish)
        assert decision is not None
        assert decision.outs[0] == layout
