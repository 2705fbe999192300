"""Seconds of one layer of a transformer on one rank, for any number of plans at once.

A layer is a list of linear maps, an attention, and operators that stream their operands through memory. Tensor
parallelism divides all operators except those on the residual, which sequence parallelism divides (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.cost import DEVICES, NARROWEST, Cluster, Device, KernelTimes, Numbers
from meshwright.layout import write_dtype

from .._errors import SearchError
from .degrees import Degrees, residual_tokens, tokens
from .sizes import Transformer
from .software import Software

BESIDE = 0.2
"""Slowdown of computation by communication that overlaps with it, as a fraction of the shorter of the two.

A collective takes units of the device from the computation, such as 20 of the 132 of an H800 (arXiv 2412.19437), and
a part of the bandwidth of the memory.
"""
HALF = 2
"""Bytes of one number of the activations."""
NARROW = {"fp8": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn, "nvfp4": NARROWEST}
"""Precision → dtype of matrix products, if it is narrower than the 16 bits of all else."""
PRECISIONS = ("bf16", "fp16", *NARROW)


def check_precision(precision: str, device: Device) -> None:
    """Raise SearchError if the precision is unknown, or if the device has no fast products of such numbers."""
    if precision not in PRECISIONS:
        raise SearchError(
            f"a plan with the precision {precision!r}",
            "a precision without a price",
            f"the known ones are {', '.join(PRECISIONS)}",
            'write precision = "bf16"',
        )
    dtype = NARROW.get(precision)
    if dtype is None or (dtype in device.flops and device.peak(dtype) > device.peak(torch.bfloat16)):
        return
    able = ", ".join(name for name, known in DEVICES.items() if dtype in known.flops)
    rate = f"flops = {{ {write_dtype(dtype)} = 400 }}"
    raise SearchError(
        f"a plan in {precision} on {device.name}",
        f"{device!r}",
        f"the device has no faster products in {precision} than in 16 bits",
        f"use bf16 or fp16, or one of {able}; or give the rate in a cluster file, as {rate}",
    )


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a forward pass, of a backward pass, and of the weight gradients within the backward pass."""

    forward: Numbers = 0.0
    backward: Numbers = 0.0
    weights: Numbers = 0.0

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
        )

    def __mul__(self, times: Numbers) -> PassSeconds:
        return PassSeconds(self.forward * times, self.backward * times, self.weights * times)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a model's layers under plans, on a cluster, with the properties of a software."""

    model: Transformer
    plan: Degrees
    cluster: Cluster
    kernels: KernelTimes
    software: Software

    @property
    def rows(self) -> Numbers:
        """Number of tokens whose residual a rank holds."""
        return residual_tokens(self.plan)

    @property
    def node(self) -> int:
        return self.cluster.per_node

    def dense(self) -> PassSeconds:
        """Return the seconds of a layer without experts, without communication."""
        return self.attention() + self.mlp(self.model.ffn)

    # --- parts

    def linear(self, n: Numbers, k: Numbers, dtype: torch.dtype | None = None) -> PassSeconds:
        """Return the seconds of `t k * k n -> t n` for the t tokens of this rank, in the precision of the plan."""
        t, dtype = tokens(self.plan), dtype or self.dtype
        inputs, weights = self.kernels.matmul(t, k, n, dtype=dtype), self.kernels.matmul(n, k, t, dtype=dtype)
        return PassSeconds(self.kernels.matmul(t, n, k, dtype=dtype), inputs + weights, weights)

    def stream(self, forward: Numbers, backward: Numbers) -> PassSeconds:
        """Return the seconds of operators that read and write so many bytes if they are fused."""
        times = self.software.streams
        return PassSeconds(self.kernels.stream(forward * times), self.kernels.stream(backward * times))

    def attention(self) -> PassSeconds:
        """Return the seconds of all that comes before the feed-forward part, and of both residual sums and norms."""
        h, m, spent = self.model.hidden, self.model, PassSeconds()
        for n, k in self._projections():
            spent += self.linear(n, k)
        spent += self.core() + self.norms()
        spent += self.stream(self.rows * (6.0 if m.gated else 7.0) * h, self.rows * 4.0 * h) * 2.0
        if m.gated:
            heads = m.heads / self.plan.tp + m.kv_heads_of(self.plan.tp)
            turned = tokens(self.plan) * (4 * heads * m.head_dim)
            spent += self.stream(turned, turned)
        return spent + (
            self.casts(m.heads * m.head_dim) + self._gathered_casts(2 * h) if self.is_narrow else PassSeconds()
        )

    def norms(self) -> PassSeconds:
        """Return the seconds of the norms before attention and before the feed-forward part."""
        nbytes = self.rows * self.model.hidden
        return self.stream(4.0 * nbytes, 6.0 * nbytes) * 2.0

    def mlp(self, width: Numbers) -> PassSeconds:
        """Return the seconds of the feed-forward part: up, the activation, and down; 0 for a width of 0."""
        if not np.any(width):
            return PassSeconds()
        h, f, two = self.model.hidden, width / self.plan.tp, 2 if self.model.gated else 1
        spent = self.linear(two * f, h) + self.linear(h, f) + self.activation(width)
        return spent + (self.casts(width) if self.is_narrow else PassSeconds())

    def activation(self, width: Numbers) -> PassSeconds:
        """Return the seconds of the activation between the linear maps of a feed-forward part."""
        numbers, two = tokens(self.plan) * (width / self.plan.tp), 2 if self.model.gated else 1
        return self.stream(numbers * (2 + 2 * two), numbers * (2 + 4 * two))

    def core(self) -> PassSeconds:
        """Return the seconds of the scores, their softmax, and the weighted sum of the values."""
        m, p = self.model, self.plan
        s, heads = p.sequence, p.microbatch * (m.heads / p.tp)
        queries = s / p.cp
        if not self.software.fused_attention:
            return self._written(queries, s, heads)
        share = m.seen(s) / s
        if m.causal and not self.software.even_context:
            share = np.where(p.cp > 1, m.seen(s, s * (1 - 0.5 / p.cp)) / s, share)
        forward, backward = self.kernels.attention(queries, s, m.key_width + m.value_width, heads)
        share = share / self.software.attention
        return PassSeconds(forward * share, backward * share)

    def meetings(self) -> PassSeconds:
        """Return the seconds of collectives of tensor parallelism, two per pass, and of rings of keys and values."""
        seconds = 2 * self.joining() * self.software.tensor
        ring = self.ring()
        return PassSeconds(seconds + ring, seconds + 2 * ring)

    def joining(self) -> Numbers:
        """Return the seconds of a sum over a tensor-parallel group.

        This is an all-reduce or, with sequence parallelism, a reduce-scatter and an all-gather.
        """
        whole, parts, gathered = (
            self.cluster.meeting(kind, self.joined(), self.plan.tp, np.minimum(self.plan.tp, self.node))
            for kind in ("all-reduce", "reduce-scatter", "all-gather")
        )
        return np.where(self.plan.sequence_parallel, parts + gathered, whole)

    def joined(self) -> Numbers:
        """Return the bytes of a sum over a tensor-parallel group.

        If ranks cast before they gather, the gathered half has one byte per number.
        """
        narrow = np.asarray(self.plan.sequence_parallel, dtype=bool) & (self.is_narrow and self.software.casts_first)
        return tokens(self.plan) * (HALF * self.model.hidden) * np.where(narrow, 0.75, 1.0)

    def ring(self) -> Numbers:
        """Return the seconds of passing on keys and values that attention does not hide."""
        m, p = self.model, self.plan
        if np.all(p.cp == 1):
            return 0.0
        nbytes = tokens(p) * (HALF * 2 * m.kv_heads_of(p.tp) * m.head_dim)
        together = np.clip(self.node / p.tp, 1, p.cp)
        ring = (p.cp - 1) * nbytes / self.cluster.bandwidth(p.cp, together)
        return np.where(p.cp > 1, np.maximum(0.0, ring - 0.8 * self.core().forward), 0.0)

    def _projections(self) -> Iterator[tuple[Numbers, Numbers]]:
        m, t, x = self.model, self.plan.tp, self.model.latent
        if x is None:
            yield (m.heads / t + 2 * m.kv_heads_of(t)) * m.head_dim, m.hidden
        else:
            yield from ((x.query, m.hidden),) if x.query else ()
            yield m.heads * m.key_width / t, x.query or m.hidden
            yield from ((x.key + x.rotary, m.hidden), (m.heads * (x.plain + x.value) / t, x.key))
        yield m.hidden, m.heads * m.value_width / t

    def up_projections(self) -> PassSeconds:
        """Return the seconds of the linear maps from narrow projections to the heads; 0 without narrow projections."""
        m, t, x = self.model, self.plan.tp, self.model.latent
        if x is None:
            return PassSeconds()
        queries = self.linear(m.heads * m.key_width / t, x.query) if x.query else PassSeconds()
        return queries + self.linear(m.heads * (x.plain + x.value) / t, x.key)

    def _written(self, queries: Numbers, keys: Numbers, heads: Numbers) -> PassSeconds:
        """Return the seconds of attention by single operators: scores, softmax and dropout go through memory."""
        scores = queries * keys * heads
        looks = self.kernels.matmul(queries, keys, self.model.key_width, heads)
        weighs = self.kernels.matmul(queries, self.model.value_width, keys, heads)
        products = looks + weighs
        streams = PassSeconds(self.kernels.stream(9 * scores), self.kernels.stream(11 * scores))
        return PassSeconds(products, 2 * products) + streams

    def casts(self, width: Numbers) -> PassSeconds:
        """Return the seconds of casts to eight bits and back, for a width that a tensor-parallel group divides."""
        nbytes = tokens(self.plan) * (self.software.casts * (width / self.plan.tp))
        seconds = self.kernels.stream(nbytes)
        return PassSeconds(seconds, seconds)

    def _gathered_casts(self, width: Numbers) -> PassSeconds:
        """Return the seconds of casts of a gathered width: every rank casts all of it, unless it was cast before."""
        return self.casts(width if self.software.casts_first else width * self.plan.tp)

    @property
    def is_narrow(self) -> bool:
        return self.plan.precision in NARROW

    @property
    def dtype(self) -> torch.dtype:
        return NARROW.get(self.plan.precision, torch.bfloat16)
