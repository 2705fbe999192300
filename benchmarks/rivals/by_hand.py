"""One rank's training step of a Llama-style model, written by hand with torch.distributed and torch.compile.

The shardings are Megatron's (Shoeybi et al. 2019). Over the mesh axis "tp", matrices into a branch are sharded by
columns, matrices out of it by rows, embedding and loss by vocabulary. Over "dp" the batch is sharded. Forward pass,
backward pass, sums of gradients and AdamW are one compiled graph. q, k and v are one matrix, gate and up another.

Shapes: b batch, s sequence, d hidden, h heads, k key-value heads, e head size, o any output, v the rank's vocabulary,
n = b s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh

from meshwright.models import Llama, LlamaConfig

EPS = 1e-5
SMALL = 2**16
"""Gradients of fewer elements share one all-reduce; larger ones have their own, which starts in the backward pass."""

Step = Callable[[Tensor, Tensor], float]
"""This rank's part of tokens and targets [b, s] -> the mean loss over all parts."""

carry = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class AdamW:
    """Parameters of the optimizer, with the names of torch.optim.AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def update(self, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor) -> None:
        """Update the weight in place by one step (Loshchilov and Hutter 2019); `step` counts from 1."""
        one, two = self.betas
        mean.lerp_(grad, 1 - one)
        square.mul_(two).addcmul_(grad, grad, value=1 - two)
        spread = (square / (1 - two**step)).sqrt().add_(self.eps)
        weight.mul_(1 - self.lr * self.weight_decay).addcdiv_(mean / (1 - one**step), spread, value=-self.lr)


def one_graph(step: Callable[..., Tensor], cpp_wrapper: bool) -> Callable[..., Tensor]:
    """Return `step`, with the backward pass inside it, as one graph without guards and without checks of sizes.

    With `cpp_wrapper` it is called from C++; Inductor can do so where all-reduce is the only collective (torch 2.13).
    """
    torch._dynamo.config.trace_autograd_ops = True
    options = {
        "cpp_wrapper": cpp_wrapper,
        "size_asserts": False,
        "alignment_asserts": False,
        "guard_filter_fn": lambda guards: [False] * len(guards),
    }
    whole = not torch._dynamo.config.disable  # False if nothing is compiled
    return torch.compile(step, fullgraph=whole, dynamic=False, options=options)


# --- collectives in the graph ------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """One mesh axis from the view of this rank."""

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> Axis:
        return cls(mesh[name].get_group().group_name, mesh[name].size(), mesh[name].get_local_rank())

    def part(self, x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(self.size, dim)[self.rank]


def start_sum(x: Tensor, group: str) -> Tensor:
    """Start the sum over the group; `carry.wait_tensor` must come before any other use of the result."""
    return carry.all_reduce(x.contiguous(), "sum", group)


def sum_over_group(x: Tensor, group: str) -> Tensor:
    return carry.wait_tensor(start_sum(x, group))


class Leave(torch.autograd.Function):
    """The end of a sharded branch: forward the sum over the ranks, backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return sum_over_group(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class ColumnLinear(torch.autograd.Function):
    """The start of a sharded branch: in backward, the input's gradient is sent while the weight's is computed."""

    @staticmethod
    def forward(ctx: Any, x_bsd: Tensor, w_od: Tensor, group: str) -> Tensor:
        ctx.save_for_backward(x_bsd, w_od)
        ctx.group = group
        return F.linear(x_bsd, w_od)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> Any:
        x_bsd, w_od = ctx.saved_tensors
        travelling = start_sum(grad_bso @ w_od, ctx.group)
        grad_od = grad_bso.flatten(0, 1).t() @ x_bsd.flatten(0, 1)
        return carry.wait_tensor(travelling), grad_od, None


class StartSum(torch.autograd.Function):
    """Forward the identity, backward the sum over the ranks, started and not awaited."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return start_sum(grad, ctx.group), None


class VocabularyLoss(torch.autograd.Function):
    """Mean cross entropy of logits that are sharded by vocabulary, with one exchange of three numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor, group: str, size: int, rank: int) -> Tensor:
        width = logits_nv.shape[1]
        here_n = targets_n - rank * width
        inside_n = (here_n >= 0) & (here_n < width)
        here_n = here_n.clamp(0, width - 1)
        top_n = logits_nv.amax(1)
        power_nv = (logits_nv - top_n[:, None]).exp()
        aim_n = torch.where(inside_n, logits_nv.gather(1, here_n[:, None])[:, 0], 0.0)
        own = (torch.arange(size) == rank)[:, None, None]
        every = sum_over_group(torch.where(own, torch.stack([top_n, power_nv.sum(1), aim_n]), 0.0), group)
        peak_n = every[:, 0].amax(0)
        total_n = (every[:, 1] * (every[:, 0] - peak_n).exp()).sum(0)
        ctx.save_for_backward(power_nv * ((top_n - peak_n).exp() / total_n)[:, None], here_n, inside_n)
        return (total_n.log() + peak_n - every[:, 2].sum(0)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share_nv, here_n, inside_n = ctx.saved_tensors
        aim_nv = (torch.arange(share_nv.shape[1]) == here_n[:, None]) & inside_n[:, None]
        return (share_nv - aim_nv.to(share_nv.dtype)) * (grad / share_nv.shape[0]), None, None, None, None


# --- the model ---------------------------------------------------------------------------------------------------


class BlockWeights(NamedTuple):
    """A rank's part of one layer; the norms are replicated."""

    norm1: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """A rank's part of the model."""

    embed: Tensor
    blocks: tuple[BlockWeights, ...]
    norm: Tensor
    head: Tensor

    def flat(self) -> list[Tensor]:
        return [self.embed, *(weight for block in self.blocks for weight in block), self.norm, self.head]


def cut(model: Llama, tp: Axis) -> Weights:
    """Return this rank's part of the weights of a whole model."""

    def columns(*linears: Any) -> Tensor:
        return _parameter(torch.cat([tp.part(linear.weight) for linear in linears]))

    def rows(linear: Any) -> Tensor:
        return _parameter(tp.part(linear.weight, 1))

    blocks = tuple(
        BlockWeights(
            _parameter(block.attention_norm.weight),
            columns(block.attention.q, block.attention.k, block.attention.v),
            rows(block.attention.o),
            _parameter(block.feed_forward_norm.weight),
            columns(block.feed_forward.gate, block.feed_forward.up),
            rows(block.feed_forward.down),
        )
        for block in model.blocks
    )
    head = model.exit.head
    return Weights(columns(model.entry.embed), blocks, _parameter(model.exit.norm.weight), columns(head))


def _parameter(weight: Tensor) -> Tensor:
    return weight.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


@dataclass(frozen=True, slots=True)
class RankLlama:
    """The forward pass of one rank, from its part of the batch to the mean loss of that part."""

    config: LlamaConfig
    dp: Axis
    tp: Axis
    cos_se: Tensor
    sin_se: Tensor

    def loss(self, weights: Weights, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        x_bsd = self.embed(tokens_bs, weights.embed)
        for block in weights.blocks:
            x_bsd = x_bsd + self.leave(self.attention(norm(x_bsd, self.use(block.norm1)), block), block.out)
            x_bsd = x_bsd + self.leave(self.gated(norm(x_bsd, self.use(block.norm2)), block), block.down)
        logits_nv = self.column(norm(x_bsd, self.use(weights.norm)), weights.head).flatten(0, 1)
        if self.tp.size == 1:
            return F.cross_entropy(logits_nv, targets_bs.flatten())
        return VocabularyLoss.apply(logits_nv, targets_bs.flatten(), *self.tp)

    def embed(self, tokens_bs: Tensor, w_vd: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_bs, self.use(w_vd))
        here_bs = tokens_bs - self.tp.rank * len(w_vd)
        outside_bs = (here_bs < 0) | (here_bs >= len(w_vd))
        found_bsd = F.embedding(here_bs.clamp(0, len(w_vd) - 1), self.use(w_vd))
        return Leave.apply(found_bsd.masked_fill(outside_bs[..., None], 0.0), self.tp.group)

    def attention(self, x_bsd: Tensor, block: BlockWeights) -> Tensor:
        heads, kv_heads = self.config.heads // self.tp.size, self.config.kv_heads // self.tp.size
        qkv_bhse = self.column(x_bsd, block.qkv).unflatten(2, (-1, self.config.head_size)).transpose(1, 2)
        q_bhse, k_bkse, v_bkse = qkv_bhse.split([heads, kv_heads, kv_heads], 1)
        q_bhse, k_bkse = (rotate(x, self.cos_se, self.sin_se) for x in (q_bhse, k_bkse))
        out_bhse = F.scaled_dot_product_attention(q_bhse, k_bkse, v_bkse, is_causal=True, enable_gqa=True)
        return out_bhse.transpose(1, 2).flatten(2)

    def gated(self, x_bsd: Tensor, block: BlockWeights) -> Tensor:
        gate, up = self.column(x_bsd, block.gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def column(self, x_bsd: Tensor, w_od: Tensor) -> Tensor:
        w_od = self.use(w_od)
        return F.linear(x_bsd, w_od) if self.tp.size == 1 else ColumnLinear.apply(x_bsd, w_od, self.tp.group)

    def leave(self, x_bso: Tensor, w_do: Tensor) -> Tensor:
        x_bsd = F.linear(x_bso, self.use(w_do))
        return x_bsd if self.tp.size == 1 else Leave.apply(x_bsd, self.tp.group)

    def use(self, weight: Tensor) -> Tensor:
        """Return the weight; the sum of a large weight's gradient over "dp" starts as soon as the gradient exists."""
        return StartSum.apply(weight, self.dp.group) if travels_alone(weight, self.dp) else weight


def norm(x_bsd: Tensor, weight_d: Tensor) -> Tensor:
    return F.rms_norm(x_bsd, weight_d.shape, weight_d, EPS)


def rotate(x_bhse: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
    left, right = x_bhse.chunk(2, dim=-1)
    return torch.cat([left * cos_se - right * sin_se, right * cos_se + left * sin_se], dim=-1)


# --- the step ----------------------------------------------------------------------------------------------------


def travels_alone(weight: Tensor, dp: Axis) -> bool:
    return dp.size > 1 and weight.numel() >= SMALL


def averaged(loss: Tensor, grads: Sequence[Tensor], dp: Axis) -> tuple[Tensor, list[Tensor]]:
    """Return loss and gradients over all parts of the batch; the sums of large gradients have started already."""
    if dp.size == 1:
        return loss, list(grads)
    small = [loss, *(grad for grad in grads if not travels_alone(grad, dp))]
    bucket = start_sum(torch.cat([x.reshape(-1) for x in small]), dp.group)
    large = [carry.wait_tensor(grad) / dp.size if travels_alone(grad, dp) else None for grad in grads]
    parts = (carry.wait_tensor(bucket) / dp.size).split([x.numel() for x in small])
    rest = iter([part.view_as(x) for part, x in zip(parts, small, strict=True)])
    return next(rest), [next(rest) if grad is None else grad for grad in large]


def training_step(
    whole: Llama, config: LlamaConfig, rope: tuple[Tensor, Tensor], adamw: AdamW, mesh: DeviceMesh
) -> Step:
    """Return a step of the model that starts with the weights of `whole`; `rope` is cosine and sine [s, e / 2]."""
    rank = RankLlama(config, Axis.of(mesh, "dp"), Axis.of(mesh, "tp"), *rope)
    weights = cut(whole, rank.tp)
    flat = weights.flat()
    means, squares = ([torch.zeros_like(weight) for weight in flat] for _ in range(2))
    count = torch.zeros(())

    def step(tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        loss = rank.loss(weights, tokens_bs, targets_bs)
        grads = torch.autograd.grad(loss, flat)
        with torch.no_grad():
            loss, grads = averaged(loss.detach(), grads, rank.dp)
            count.add_(1)
            for weight, grad, mean, square in zip(flat, grads, means, squares, strict=True):
                adamw.update(weight, grad, mean, square, count)
        return loss

    compiled = one_graph(step, cpp_wrapper=True)
    return lambda tokens_bs, targets_bs: compiled(tokens_bs, targets_bs).item()
