"""A Llama-style language model over bytes, for one device and for any mesh.

The model is plain PyTorch. All of its parallel code is at the end of the file: `mark` gives each module its stage, the
layouts of its weights, and the layout of its inputs. Without that call it is a model for one device.

Shapes: b batch, s sequence, d hidden, h heads, k key-value heads, e head size, f feed-forward, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.layout import MeshwrightError


class ModelError(MeshwrightError, ValueError):
    """A model whose sizes do not fit together."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The sizes of the model. Raises ModelError if the heads do not fit.

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
                f"{self.hidden} / {self.heads} channels per head, {self.heads} / {self.kv_heads} heads per kv head",
                "a head needs an even number of channels, and each key-value head must serve the same number of heads",
                "write LlamaConfig(hidden=256, heads=8, kv_heads=4)",
            )

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def of_width(cls, hidden: int, layers: int) -> LlamaConfig:
        """Return the usual proportions: heads of 32 channels, half as many for keys, feed-forward of 8/3.

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

    def forward(self, x_bsd: Tensor) -> Tensor:
        q_bhse = rotate(self.heads(self.q(x_bsd)))
        k_bkse = rotate(self.heads(self.k(x_bsd)))
        v_bkse = self.heads(self.v(x_bsd))
        out_bhse = F.scaled_dot_product_attention(q_bhse, k_bkse, v_bkse, is_causal=True, enable_gqa=True)
        return self.o(out_bhse.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """Split the heads: b s (h e) -> b h s e."""
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


class Entry(nn.Module):
    """The embedding: bytes to vectors."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        return self.embed(tokens_bs)


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attention(self.attention_norm(x_bsd))
        return x_bsd + self.feed_forward(self.feed_forward_norm(x_bsd))


class Exit(nn.Module):
    """The output layer: vectors to the mean loss of predicting the targets."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x_bsd: Tensor, targets_bs: Tensor) -> Tensor:
        logits_bsv = self.head(self.norm(x_bsd))
        return F.cross_entropy(logits_bsv.flatten(0, 1), targets_bs.flatten())


class Llama(nn.Module):
    """The whole model; `forward` returns the mean loss of predicting `targets` from `tokens`, both [b, s]."""

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.entry = Entry(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.exit = Exit(config)
        initialise(self, config, seed)

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        x_bsd = self.entry(tokens_bs)
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return self.exit(x_bsd, targets_bs)


def rotate(x_bhse: Tensor) -> Tensor:
    """Rotate the pairs (channel i, channel i + e / 2) by an angle that grows with the position."""
    length, head_size = x_bhse.shape[-2:]
    cos_se, sin_se = rope_table(length, head_size, x_bhse.device, x_bhse.dtype)
    left, right = x_bhse.chunk(2, dim=-1)
    return torch.cat([left * cos_se - right * sin_se, right * cos_se + left * sin_se], dim=-1)


@lru_cache(maxsize=64)
def rope_table(length: int, head_size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of position times frequency, both [s, e / 2] (Su et al. 2021, RoFormer)."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, device="cpu") / head_size)
    angle = torch.outer(torch.arange(length, device="cpu"), frequency)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def initialise(model: nn.Module, config: LlamaConfig, seed: int) -> None:
    """Fill the matrices with normal random numbers of the seed; those that end a residual branch are smaller."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            ends_a_branch = name.endswith(("o.weight", "down.weight"))
            std = 0.02 / (2 * config.layers) ** 0.5 if ends_a_branch else 0.02
            nn.init.normal_(weight, std=std, generator=generator)


# The marks, for a mesh with the axes "pp", "dp" and "tp": stages of layers, shards of the batch, shards of the weights.

BATCH = [mw.Shard(0), mw.Replicate()]
COLUMN, ROW = [mw.Replicate(), mw.Shard(0)], [mw.Replicate(), mw.Shard(1)]
CUTS = dict.fromkeys(["embed", "q", "k", "v", "gate", "up", "head"], COLUMN) | dict.fromkeys(["o", "down"], ROW)


def mark(model: Llama, mesh: mw.ProcessMesh) -> None:
    """Put each module on its stage, with its weights sharded as in `CUTS` and its inputs as in `BATCH`."""
    count, depth = mesh.get_dim_size("pp"), len(model.blocks)
    stages = [mesh["pp", i * count // depth] for i in range(depth)]
    parts = [model.entry, *model.blocks, model.exit]
    for part, stage in zip(parts, [stages[0], *stages, stages[-1]], strict=True):
        mw.shard_layer(part, stage, cut, enter)


def cut(name: str, layer: nn.Module, stage: mw.ProcessMesh) -> None:
    placements = CUTS.get(name.split(".")[-1])
    if placements:
        layer.weight = mw.shard_tensor(layer.weight, stage, placements)


def enter(inputs: tuple[Tensor, ...], stage: mw.ProcessMesh) -> tuple[Tensor, ...]:
    return tuple(mw.reshard(x, stage, BATCH) for x in inputs)
