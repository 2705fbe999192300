"""Fusing passes: every rule is right, known styles are found, and similar patterns are ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._rewrite_samples import STYLES
from meshwright.graph import (
    Pass,
    Program,
    Rewrite,
    apply_passes,
    capture,
    check_rule,
    count_ops,
    registered_rewrites,
    runner,
)
from meshwright.passes import FuseActivation, FuseAttention, FuseLoss, FuseNorm, OneRowProducts, Tidy
from meshwright.passes.operators.fuse_activation import MERGE

SETS = ("fuse_activation", "fuse_attention", "fuse_loss", "fuse_norm")
RULES = [rule for name in SETS for rule in registered_rewrites(name) if isinstance(rule, Rewrite)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rule", [*RULES, MERGE], ids=lambda rule: rule.name)
def test_a_rule_is_right(rule: Rewrite) -> None:
    assert check_rule(rule)


def fused(fn: Callable[..., Any], given: tuple[Tensor, ...], *passes: Pass) -> dict[str, int]:
    """Return the calls of each operator after the passes; check that the numbers are about the same."""
    before = capture(nn.Identity(), fn, given).program
    after = apply_passes(before, [Tidy(), *passes, Tidy()], deep=True)
    close(after, before, given)
    return {name.removeprefix("aten.").split(".")[0]: n for name, n in count_ops(after.nodes).items()}


def close(after: Program, before: Program, given: tuple[Tensor, ...]) -> None:
    got, wanted = (runner(p)(*given)[0] for p in (after, before))
    coarse = {"rtol": 2e-2, "atol": 2e-2} if given[0].dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, wanted, **coarse)


def random_tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


# norms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_rms_norm_is_found_in_each_style(style: str, dtype: torch.dtype) -> None:
    found = fused(STYLES[style], random_tensors((2, 3, 8), (8,), dtype=dtype), FuseNorm())
    assert found["rms_norm"] == 1
    assert not {"mean", "rsqrt", "sqrt", "pow"} & set(found)
    assert dtype != torch.float32 or style == "Gemma" or set(found) == {"rms_norm"}


def test_intermediate_rounding_is_kept() -> None:
    """In 16 bits the weight stays outside: it multiplies a rounded number, to the bit as before."""
    x, w = random_tensors((64, 32), (32,), dtype=torch.bfloat16)
    before = capture(nn.Identity(), STYLES["Llama in transformers"], (x, w)).program
    after = apply_passes(before, [FuseNorm(), Tidy()])
    assert torch.equal(runner(after)(x, w)[0], runner(before)(x, w)[0])
    assert [str(n.op) for n in after.nodes] == ["aten.rms_norm.default", "aten.mul.Tensor"]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


LAYER_NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "var": lambda x, w, b: centred(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b,
    "correction": lambda x, w, b: b + w * (centred(x) * (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()),
    "pow": lambda x, w, b: w * (centred(x) / (centred(x).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()) + b,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", LAYER_NORMS)
def test_layer_norm_is_found(style: str, dtype: torch.dtype) -> None:
    found = fused(LAYER_NORMS[style], random_tensors((2, 3, 8), (8,), (8,), dtype=dtype), FuseNorm())
    assert found == ({"layer_norm": 1} if dtype == torch.float32 else {"layer_norm": 1, "mul": 1, "add": 1})


NO_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "epsilon beside the root": lambda x, w: x / (x.norm(2, -1, keepdim=True) * x.shape[-1] ** -0.5 + 1e-6) * w,
    "unbiased deviation": lambda x, w: w * centred(x) / (x.std(-1, keepdim=True) + 1e-6),
    "another dim": lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w,
    "other squares": lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "no mean": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w,
}


@pytest.mark.parametrize("style", NO_NORMS)
def test_other_patterns_than_norms_stay(style: str) -> None:
    found = fused(NO_NORMS[style], random_tensors((2, 3, 8), (8,)), FuseNorm())
    assert not {"rms_norm", "layer_norm"} & set(found)


def test_a_weight_of_another_shape_stays_outside() -> None:
    norm = STYLES["textbook"]
    assert fused(norm, random_tensors((2, 3, 8), (3, 1)), FuseNorm()) == {"rms_norm": 1, "mul": 1}


# linear layers and activations


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x, w, b: x @ w.t() + b, {"linear": 1}),
        (lambda x, w, b: b + torch.matmul(x, w.transpose(0, 1)), {"linear": 1}),
        (lambda x, w, b: F.linear(x, w) + b, {"linear": 1}),
        (lambda x, w, b: torch.addmm(b, x[0], w.T), {"select": 1, "linear": 1}),
        (lambda x, w, b: x @ w.t(), {"linear": 1}),
        (lambda x, w, b: x @ w.t() + b[:1], {"linear": 1, "slice": 1, "add": 1}),
    ],
)
def test_linear_is_found(fn: Callable[..., Tensor], left: dict[str, int]) -> None:
    assert fused(fn, random_tensors((2, 3, 8), (5, 8), (5,)), FuseActivation()) == left


def test_linear_of_a_weight_that_is_not_transposed() -> None:
    assert fused(lambda x, w, b: x @ w + b, random_tensors((2, 3, 8), (8, 5), (5,)), FuseActivation()) == {
        "mT": 1,
        "linear": 1,
    }


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
        (lambda x: x * (torch.erf(x * 2**-0.5) + 1) * 0.5, "gelu"),
        (lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), "gelu"),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
    ],
)
def test_activations_are_found(fn: Callable[..., Tensor], name: str | None) -> None:
    found = fused(fn, random_tensors((3, 4)), FuseActivation())
    assert (found == {name: 1}) if name else ("gelu" not in found and "silu" not in found)


def swiglu(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    gate = F.linear(x, v)
    return gate * torch.sigmoid(gate) * F.linear(x, w)


def test_swiglu_with_joined_weights() -> None:
    given = random_tensors((2, 3, 8), (5, 8), (5, 8))
    assert fused(swiglu, given, FuseActivation()) == {"linear": 2, "silu": 1, "mul": 1}
    assert fused(swiglu, given, FuseActivation(merge=True))["linear"] == 1


# attention


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool))
    return torch.matmul(F.dropout(s.masked_fill(~mask, float("-inf")).softmax(-1), 0.1, training=False), v)


def triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    s = s + torch.triu(torch.full((1, 1, q.shape[-2], k.shape[-2]), float("-inf")), diagonal=1)
    return F.softmax(s.float(), dim=-1).type_as(q) @ v


def positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    s = torch.where(at[:, None] >= at[None, :], q @ k.mT * 0.5, torch.finfo(q.dtype).min)
    return s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fn", "causal"), [(plain, False), (tril, True), (triu, True), (positions, True)])
def test_attention_is_found(fn: Callable[..., Tensor], causal: bool, dtype: torch.dtype) -> None:
    given = random_tensors(*[(2, 3, 4, 8)] * 3, dtype=dtype)
    assert fused(fn, given, FuseAttention()) == {"scaled_dot_product_attention": 1}
    (node,) = apply_passes(capture(nn.Identity(), fn, given).program, [FuseAttention(), Tidy()]).nodes
    assert (node.args[5:] == (True,)) is causal


def test_a_given_mask_is_passed_on() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.3).masked_fill(mask == 0, float("-inf")).softmax(-1) @ v

    mask = torch.ones(4, 6).tril(2)
    assert fused(masked, (*random_tensors((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)), mask), FuseAttention()) == {
        "eq": 1,
        "bitwise_not": 1,
        "scaled_dot_product_attention": 1,
    }

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.mT + bias, -1) @ v

    assert fused(biased, random_tensors((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 5), (1, 3, 4, 6)), FuseAttention()) == {
        "scaled_dot_product_attention": 1
    }


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: F.softmax(q @ k.mT, -2) @ v,
        lambda q, k, v: F.softmax((q @ k.mT).masked_fill(q @ k.mT > 0, -1.0), -1) @ v,
        lambda q, k, v: (F.softmax(q @ k.mT, -1) @ v, F.softmax(q @ k.mT, -1)),
        lambda q, k, v: F.softmax(q @ k, -1) @ v,
    ],
)
def test_other_patterns_than_attention_stay(fn: Callable[..., Any]) -> None:
    found = fused(fn, random_tensors(*[(2, 3, 8, 8)] * 3), FuseAttention())
    weights = fn(*random_tensors(*[(2, 3, 8, 8)] * 3))
    assert "scaled_dot_product_attention" not in found or isinstance(weights, tuple)


def test_weights_that_are_returned_are_computed() -> None:
    def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.softmax(q @ k.mT, -1)
        return weights @ v, weights

    assert "softmax" in fused(with_weights, random_tensors(*[(2, 3, 4, 8)] * 3), FuseAttention())


# losses

LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, t: -F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1)).mean(),
    lambda x, t: (-F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1)).squeeze(-1)).mean(),
    lambda x, t: -torch.log(F.softmax(x, -1)).gather(-1, t[..., None]).squeeze(-1).sum(),
    lambda x, t: (torch.logsumexp(x, -1) - x.gather(-1, t.unsqueeze(-1)).squeeze(-1)).mean(),
]


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("fn", LOSSES, ids=range(len(LOSSES)))
def test_cross_entropy_is_found(fn: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 8)
    found = fused(fn, (x, torch.randint(0, 8, shape)), FuseLoss())
    assert found["cross_entropy_loss"] == 1
    assert set(found) <= {"cross_entropy_loss", "flatten"}


def test_nll_of_log_softmax() -> None:
    given = (torch.randn(6, 8), torch.randint(0, 8, (6,)))
    assert fused(lambda x, t: F.nll_loss(F.log_softmax(x, -1), t), given, FuseLoss()) == {"cross_entropy_loss": 1}


# gradients


class Block(nn.Module):
    """A block whose parts are all written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.w, self.b = (nn.Parameter(x) for x in random_tensors((8,), (8, 8), (8,)))

    def forward(self, x: Tensor) -> Tensor:
        h = STYLES["Llama in transformers"](x, self.g)
        q, k, v = (h @ self.w.t() + self.b for _ in range(3))
        x = x + plain(q, k, v)
        h = F.linear(x, self.w, self.b)
        return (h * torch.sigmoid(h)).square().mean()


def test_gradients_are_those_of_the_block() -> None:
    block = Block()
    (x,) = random_tensors((2, 4, 8))
    block(x).backward()
    p = apply_passes(capture(block, block, (x,)).program, [FuseNorm(), FuseActivation(), FuseAttention(), Tidy()])
    assert {"rms_norm", "scaled_dot_product_attention", "silu"} <= {str(n.op).split(".")[1] for n in p.nodes}
    known = dict(zip((i.value for i in p.inputs), _given(p, block, x), strict=True))
    for node in p.nodes:
        args = [known.get(a, a) if not isinstance(a, list) else a for a in node.args]
        known[node.out] = node.op(*args, **node.kwargs)
    grads = torch.autograd.grad(known[p.outputs], list(block.parameters()))
    for found, parameter in zip(grads, block.parameters(), strict=True):
        expected = parameter.grad
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def _given(p: Program, block: Block, x: Tensor) -> list[Tensor]:
    named = dict(block.named_parameters())
    return [named.get(i.name, x) for i in p.inputs]


# products


def test_rows_of_one_matrix_are_one_product() -> None:
    """Only single rows: the matrix of several rows is read once anyway, and their product may not be a view."""

    def products(x: Tensor, y: Tensor, w: Tensor, many: Tensor) -> tuple[Tensor, ...]:
        return torch.bmm(x, w.expand(4, -1, -1)), torch.bmm(y, w.expand(4, -1, -1)), torch.bmm(x, many)

    given = random_tensors((4, 1, 3), (4, 2, 3), (3, 5), (4, 3, 5))
    assert fused(products, given, OneRowProducts()) == {"squeeze": 1, "mm": 1, "unsqueeze": 1, "expand": 1, "bmm": 2}
