"""A Llama-style language model over bytes, for one device and for any mesh.

The model is plain PyTorch. Its parallel code is marks and nothing else: `CUTS` and `mark` say where the weights live,
and `Llama.forward` says where its two inputs enter and where the pipeline's stages change. Without a mesh
no mark does anything.

Shapes: b batch, s sequence, d hidden, h heads, k key-value heads, e head size, f feed-forward, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.layout import MeshwrightError


class ModelError(MeshwrightError, ValueError):
    """A model whose sizes do not fit together."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model; heads that do not fit are refused.

    >>> LlamaConfig().head_size
    32
    """

    vocab: int = 256
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    feed_forward: int = 688

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ModelError(
                f"a model of hidden {self.hidden} with {self.heads} heads and {self.kv_heads} key-value heads",
                f"{self.hidden} / {self.heads} channels a head, {self.heads} / {self.kv_heads} heads a key-value head",
                "a head has an even number of channels, and each key-value head serves the same number of heads",
                "LlamaConfig(hidden=256, heads=8, kv_heads=4)",
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def of_width(cls, hidden: int, layers: int) -> LlamaConfig:
        """The usual proportions for a hidden size: heads of 32, half as many for keys, feed-forward of 8/3.

        >>> LlamaConfig.of_width(256, 6) == LlamaConfig()
        True
        """
        heads = max(2, hidden // 32)
        return cls(
            hidden=hidden, layers=layers, heads=heads, kv_heads=heads // 2, feed_forward=-(-hidden * 8 // 48) * 16
        )


class Attention(nn.Module):
    """Causal attention with rotary positions; `heads / kv_heads` heads share one key and value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, e = config.hidden, config.head_size
        self.head_size = e
        self.q = nn.Linear(d, config.heads * e, bias=False)
        self.k = nn.Linear(d, config.kv_heads * e, bias=False)
        self.v = nn.Linear(d, config.kv_heads * e, bias=False)
        self.o = nn.Linear(config.heads * e, d, bias=False)

    def forward(self, x_bsd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q_bhse = rotate(self.heads(self.q(x_bsd)), rope)
        k_bkse = rotate(self.heads(self.k(x_bsd)), rope)
        v_bkse = self.heads(self.v(x_bsd))
        out_bhse = F.scaled_dot_product_attention(q_bhse, k_bkse, v_bkse, is_causal=True, enable_gqa=True)
        return self.o(out_bhse.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """b s (h e) -> b h s e"""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x_bsd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x_bsd = x_bsd + self.attention(self.attention_norm(x_bsd), rope)
        return x_bsd + self.feed_forward(self.feed_forward_norm(x_bsd))


class Llama(nn.Module):
    """The whole model; `forward` gives the mean loss of predicting `targets` from `tokens`, both [b, s].

    On a mesh its axes are "pp", "dp" and "tp": stages, parts of the batch, parts of the weights.
    """

    def __init__(self, config: LlamaConfig, mesh: mw.ProcessMesh | None = None, seed: int = 0) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        initialise(self, config, seed)
        self.stages = [] if mesh is None else mark(self, mesh)

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        rope = rope_table(tokens_bs.shape[1], self.head_size)
        if self.stages:
            tokens_bs = mw.shard_tensor(tokens_bs, self.stages[0], BATCH)
            targets_bs = mw.shard_tensor(targets_bs, self.stages[-1], BATCH)
        x_bsd = self.embed(tokens_bs)
        for i, block in enumerate(self.blocks):
            if self.stages and i > 0 and self.stages[i] != self.stages[i - 1]:
                x_bsd = mw.reshard(x_bsd, self.stages[i], BATCH)
            x_bsd = block(x_bsd, rope)
        logits_bsv = self.head(self.norm(x_bsd))
        return F.cross_entropy(logits_bsv.flatten(0, 1), targets_bs.flatten())


BATCH = [mw.Shard(0), mw.Replicate()]
CUTS = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "embed": 0, "head": 0}


def mark(model: Llama, mesh: mw.ProcessMesh) -> list[mw.ProcessMesh]:
    """The mesh of each block, after every weight has gone to its stage, cut on "tp" along the dim that `CUTS` names."""
    count = len(model.blocks)
    stages = [mesh["pp", i * mesh.get_dim_size("pp") // count] for i in range(count)]

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        part, _, rest = name.partition(".")
        stage = stages[int(rest.split(".")[0])] if rest else stages[0 if part == "embed" else -1]
        dim = CUTS.get(name.rpartition(".")[2])
        for key, weight in list(layer.named_parameters(recurse=False)):
            along_tp = mw.Replicate() if dim is None else mw.Shard(dim)
            setattr(layer, key, mw.shard_tensor(weight, stage, [mw.Replicate(), along_tp]))

    mw.shard_layer(model, mesh, cut)
    return stages


def rope_table(length: int, head_size: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, both [s, e / 2] (Su et al. 2021, RoFormer)."""
    frequency = base ** (-torch.arange(0, head_size, 2) / head_size)
    angle = torch.outer(torch.arange(length), frequency)
    return angle.cos(), angle.sin()


def rotate(x_bhse: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (channel i, channel i + e / 2) by the angle of their position."""
    cos, sin = rope
    left, right = x_bhse.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def initialise(model: nn.Module, config: LlamaConfig, seed: int) -> None:
    """Fill the matrices with the same normal numbers for the same seed; those that end a branch are smaller."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            ends_a_branch = name.endswith(("o.weight", "down.weight"))
            std = 0.02 / (2 * config.layers) ** 0.5 if ends_a_branch else 0.02
            nn.init.normal_(weight, std=std, generator=generator)
