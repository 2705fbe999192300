"""The training step of a Llama-style model over torch's DTensor, compiled.

Over the mesh axis "tp" weights are DTensors (`parallelize_module`). Forward pass, backward pass and AdamW are one
graph, in which gradients are summed over "dp" as in the program by hand. Over "dp" alone there is no weight to shard:
the module is compiled under `replicate`, with the fused AdamW. These were the fastest variants that work (torch 2.13,
CPU). DTensors for every tensor on the axis "dp" sum each gradient alone.

Shapes: b batch, s sequence, d hidden, h heads, e head size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.rivals.by_hand import AdamW, Axis, Step, averaged, one_graph, rotate, start_sum, travels_alone
from meshwright.models import Llama


class Attention(nn.Module):
    """Causal attention with its table of positions as an input: torch.compile would compute a cached one per call."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.heads = whole.q, whole.k, whole.v, whole.o, whole.heads

    def forward(self, x_bsd: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
        q_bhse, k_bkse, v_bkse = (self.heads(linear(x_bsd)) for linear in (self.q, self.k, self.v))
        q_bhse, k_bkse = (rotate(x, cos_se, sin_se) for x in (q_bhse, k_bkse))
        out_bhse = F.scaled_dot_product_attention(q_bhse, k_bkse, v_bkse, is_causal=True, enable_gqa=True)
        return self.o(out_bhse.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer of a whole model, with that attention."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.norm1, self.attention = whole.attention_norm, Attention(whole.attention)
        self.norm2, self.feed_forward = whole.feed_forward_norm, whole.feed_forward

    def forward(self, x_bsd: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attention(self.norm1(x_bsd), cos_se, sin_se)
        return x_bsd + self.feed_forward(self.norm2(x_bsd))


class Model(nn.Module):
    """The parts of a whole model; `forward` returns the mean loss of `targets` given `tokens`, both [b, s]."""

    def __init__(self, whole: Llama, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = whole.entry.embed, whole.exit.norm, whole.exit.head
        self.blocks = nn.ModuleList(Block(block) for block in whole.blocks)
        self.register_buffer("cos_se", rope[0].clone())
        self.register_buffer("sin_se", rope[1].clone())

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        x_bsd = self.embed(tokens_bs)
        for block in self.blocks:
            x_bsd = block(x_bsd, self.cos_se, self.sin_se)
        return F.cross_entropy(self.head(self.norm(x_bsd)).flatten(0, 1), targets_bs.flatten())


def plan(layers: int) -> dict[str, Any]:
    """Return Megatron's shardings. Each branch takes its input once, so that its gradient is summed once."""
    same = Replicate()
    found: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=same),
        "head": ColwiseParallel(output_layouts=same),
    }
    for block in (f"blocks.{layer}" for layer in range(layers)):
        found[f"{block}.attention"] = PrepareModuleInput(
            input_layouts=(same, None, None), desired_input_layouts=(same, None, None)
        )
        found[f"{block}.feed_forward"] = PrepareModuleInput(input_layouts=(same,), desired_input_layouts=(same,))
        for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
            found[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "feed_forward.down"):
            found[f"{block}.{name}"] = RowwiseParallel()
    return found


def training_step(whole: Llama, rope: tuple[Tensor, Tensor], adamw: AdamW, mesh: DeviceMesh) -> Step:
    """Return a step of the model that starts with the weights of `whole`, and takes them over."""
    model = Model(whole, rope)
    if mesh["tp"].size() == 1:
        return _replicated(model, adamw, mesh["dp"])
    parallelize_module(model, mesh["tp"], plan(len(model.blocks)))
    return _cut(model, adamw, Axis.of(mesh, "dp"))


def _cut(model: Model, adamw: AdamW, dp: Axis) -> Step:
    weights = list(model.parameters())
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    count = torch.zeros(())

    def step(tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        loss = model(tokens_bs, targets_bs)
        grads = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            loss, grads = _averaged(loss.detach(), grads, dp)
            count.add_(1)
            for weight, grad, mean, square in zip(weights, grads, means, squares, strict=True):
                adamw.update(weight, grad, mean, square, count)
        return loss

    compiled = one_graph(step, cpp_wrapper=False)  # C++ calls support all-reduce only, and this step gathers the logits
    return lambda tokens_bs, targets_bs: compiled(tokens_bs, targets_bs).item()


def _averaged(loss: Tensor, grads: Sequence[Tensor], dp: Axis) -> tuple[Tensor, list[Tensor]]:
    """Return the local parts of gradients over all parts of the batch, as DTensors again."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in grads]
    loss, local = averaged(loss, [start_sum(x, dp.group) if travels_alone(x, dp) else x for x in local], dp)
    return loss, [
        DTensor.from_local(part, grad.device_mesh, grad.placements, run_check=False)
        if isinstance(grad, DTensor)
        else part
        for part, grad in zip(local, grads, strict=True)
    ]


def _replicated(model: Model, adamw: AdamW, dp: DeviceMesh) -> Step:
    forward: Callable[..., Tensor] = torch.compile(replicate(model, device_mesh=dp), dynamic=False)
    options = {"lr": adamw.lr, "betas": adamw.betas, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    group = dp.get_group()

    def step(tokens_bs: Tensor, targets_bs: Tensor) -> float:
        loss = forward(tokens_bs, targets_bs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.item() / dp.size()

    return step
