"""Inputs of `benchmarks.rewrites`: norms in five styles, blocks written by hand, a hundred rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright.passes  # noqa: F401 - their rules
from meshwright.graph import AnyRewrite, Program, Rewrite, capture, registered_rewrites

EPS = 1e-6


def llama(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm of Meta's Llama: in float32, cast back, times the weight."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def llama_in_transformers(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm of Hugging Face's Llama and Mistral: the variance has a name, the weight comes first."""
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + EPS)
    return w * h.to(x.dtype)


def t5(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm of T5: only the variance is in float32; the product promotes."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + EPS)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, torch.bfloat16) else h)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm of Gemma: the stored weight is less by one, and the result is cast back at the end."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + w.float())).type_as(x)


def textbook(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm as in its paper: a quotient by the root of the mean of squares."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS) * w


STYLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Llama": llama,
    "Llama in transformers": llama_in_transformers,
    "T5": t5,
    "Gemma": gemma,
    "textbook": textbook,
}


def program_of(fn: Callable[..., Any], *given: Tensor) -> Program:
    """Return the program of a function of tensors."""
    return capture(torch.nn.Identity(), fn, given).program


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def block(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return the output of a block whose parts are all written by hand."""
    h = textbook(x, g)
    q, k, v = (h @ w.t() + b for _ in range(3))
    x = x + (attention(q, k, v) @ w.t() + b)
    h = llama_in_transformers(x, g)
    h = gelu(h @ w.t() + b) * torch.sigmoid(h @ w.t())
    return x + (h @ w.t() + b)


def model(blocks: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function with so many blocks and shared weights."""

    def run(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for _ in range(blocks):
            x = block(x, g, w, b)
        return x

    return run


def model_inputs() -> tuple[Tensor, ...]:
    return torch.randn(2, 16, 32), torch.randn(32), torch.randn(32, 32), torch.randn(32)


UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac lgamma log log10 log1p log2 "
    "neg relu round sigmoid sign sin sinh sqrt tan tanh trunc rsqrt square deg2rad rad2deg sinc digamma logit"
).split()


def hundred_rules() -> tuple[AnyRewrite, ...]:
    """Return the rules of the passes, and more of the same kind: products, sums and functions of one operand."""
    sets = ("fuse_norm", "fuse_activation", "fuse_attention", "fuse_loss")
    found = [rule for name in sets for rule in registered_rewrites(name)]
    makers = (_squared, _doubled)
    more = [make(getattr(torch, name), name) for make in makers for name in UNARY]
    return (*found, *more)[:100]


def _squared(fn: Callable[[Tensor], Tensor], name: str) -> Rewrite:
    return Rewrite(f"{name} squared", lambda x: x * fn(x) * fn(x), lambda x: x * fn(x).square())


def _doubled(fn: Callable[[Tensor], Tensor], name: str) -> Rewrite:
    return Rewrite(f"{name} doubled", lambda x, y: (y + fn(x)) + fn(x), lambda x, y: y + 2 * fn(x))
