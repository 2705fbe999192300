"""Models in plain PyTorch, each with a table of the dims that are sharded, and the meshes to try.

Shapes: b batch, s sequence, d hidden, f feed-forward, e experts, v vocabulary, c channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import Llama, LlamaConfig

ROWS, COLUMNS = 0, 1
LENGTH = 7


class Residual(nn.Module):
    """x + dropout(inner(norm(x)))."""

    def __init__(self, norm: nn.Module, inner: nn.Module, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = norm, inner, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(self.norm(x)))


class Experts(nn.Module):
    """A mixture of experts: each position goes to the two experts with the highest scores."""

    def __init__(self, hidden: int, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, count, bias=False)
        self.up_edf = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)
        self.down_efd = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)

    def forward(self, x_bsd: Tensor) -> Tensor:
        score_bse = self.gate(x_bsd).softmax(-1)
        best, chosen = score_bse.topk(2, dim=-1)
        weight_bse = torch.zeros_like(score_bse).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        inner_ebsf = F.silu(torch.einsum("bsd,edf->ebsf", x_bsd, self.up_edf))
        return torch.einsum("ebsf,efd,bse->bsd", inner_ebsf, self.down_efd, weight_bse)


class Bert(nn.Module):
    """An encoder that predicts masked words; its output embedding is its input embedding."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(LENGTH, hidden)
        make = partial(nn.TransformerEncoderLayer, hidden, 4, 2 * hidden, 0.1, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab)
        self.head.weight = self.words.weight

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_bsd = self.words(tokens_bs) + self.places(torch.arange(tokens_bs.shape[1]))
        padding_bs = tokens_bs == 0
        for layer in self.layers:
            x_bsd = layer(x_bsd, src_key_padding_mask=padding_bs)
        return self.head(self.norm(x_bsd))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 6)
    )


def llama() -> nn.Module:
    model = Llama(LlamaConfig(vocab=32, hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=40))
    for block in model.blocks:
        block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(0.1))
    return model


def moe() -> nn.Module:
    parts = [Residual(nn.RMSNorm(16), Experts(16, 20, 4)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(24, 16), *parts, nn.RMSNorm(16), nn.Linear(16, 24, bias=False))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 6),
    )


def bert() -> nn.Module:
    return Bert(24, 16, 2)


def classes(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Return eight samples of numbers, and their classes, one of six."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, *shape, generator=g), torch.randint(6, (8,), generator=g)


def words(seed: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return eight texts, and the words to predict; a third of the positions has no word."""
    g = torch.Generator().manual_seed(seed)
    tokens, wanted = torch.randint(vocab, (8, LENGTH), generator=g), torch.randint(vocab, (8, LENGTH), generator=g)
    return tokens, wanted.masked_fill(torch.rand(wanted.shape, generator=g) < 1 / 3, -100)


def of_words(logits_bsv: Tensor, wanted_bs: Tensor) -> Tensor:
    return F.cross_entropy(logits_bsv.flatten(0, 1), wanted_bs.flatten())


@dataclass(frozen=True)
class Subject:
    """A model with its data, its loss (None: the model returns it), and the dims that are sharded.

    `cuts` maps the last word of a layer's name, or of a parameter's, to the sharded dim. `blocks` are the layers whose
    inputs are sharded along their dim `along` in sequence parallelism.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] | None
    cuts: Mapping[str, int]
    blocks: tuple[str, ...] = ()
    along: int = 1


SUBJECTS = {
    "mlp": Subject(mlp, lambda seed: classes(seed, 12), F.cross_entropy, {"0": ROWS, "3": COLUMNS}, ("6",), 1),
    "llama": Subject(
        llama, lambda seed: words(seed, 32), None,
        dict.fromkeys(["embed", "q", "k", "v", "gate", "up", "head"], ROWS) | {"o": COLUMNS, "down": COLUMNS},
        ("blocks.0", "blocks.1", "exit"),
    ),
    "moe": Subject(
        moe, lambda seed: words(seed, 24), of_words, {"up_edf": 0, "down_efd": 0, "0": ROWS, "4": ROWS}, ("1", "2", "3")
    ),
    "cnn": Subject(
        cnn, lambda seed: classes(seed, 3, 6, 6), F.cross_entropy, {"0": ROWS, "5": COLUMNS, "10": ROWS}, ("1", "5"), 2
    ),
    "bert": Subject(
        bert, lambda seed: words(seed, 24), of_words,
        {"words": ROWS, "head": ROWS, "linear1": ROWS, "linear2": COLUMNS, "in_proj_weight": 0, "out_proj": COLUMNS},
        ("layers.0", "layers.1", "norm"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """A mesh, and the use of its axes.

    "dp" shards the batch. "zero" shards the batch, and every parameter along its first dim. "tp" shards parameters by
    the model's table, and with `sequence` also activations between blocks.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    sequence: bool = False

    @property
    def ranks(self) -> int:
        return int(torch.tensor(self.sizes).prod())

    @property
    def mesh(self) -> mw.ProcessMesh:
        return mw.ProcessMesh(torch.arange(self.ranks).reshape(self.sizes).tolist(), list(self.axes))

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes, strict=True))
        return axes + (" sequence" if self.sequence else "")

    def places(self, **cuts: int) -> list[mw.Placement]:
        """Return one placement per axis: sharded along the dim that `cuts` has for the axis, else replicated."""
        return [mw.Shard(cuts[a]) if a in cuts else mw.Replicate() for a in self.axes]


STYLES = [
    *[Style(("dp",), (n,)) for n in (2, 4, 3)],
    *[Style(("tp",), (n,)) for n in (2, 4, 3)],
    *[Style(("zero",), (n,)) for n in (2, 4, 3)],
    *[Style(("tp",), (n,), sequence=True) for n in (2, 3)],
    Style(("dp", "tp"), (2, 2)),
    Style(("dp", "tp"), (2, 2), sequence=True),
    Style(("dp", "tp"), (3, 2)),
    Style(("zero", "tp"), (2, 2)),
    Style(("dp", "zero"), (2, 2)),
    Style(("dp", "zero", "tp"), (2, 2, 2)),
    Style(("dp", "zero", "tp"), (2, 1, 2), sequence=True),
]


def mark(model: nn.Module, subject: Subject, style: Style) -> nn.Module:
    """Shard the model over the mesh, and its batch with a hook."""
    mesh, batch = style.mesh, {"dp": 0, "zero": 0}

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        for key, value in list(layer.named_parameters(recurse=False)):
            dim = subject.cuts.get(key, subject.cuts.get(name.split(".")[-1]))
            dim = None if dim is not None and dim >= value.dim() else dim
            places = style.places(**({"zero": 0} if value.dim() else {}), **({} if dim is None else {"tp": dim}))
            setattr(layer, key, mw.shard_tensor(value, mesh, places))

    def enter(inputs: Any, places: list[mw.Placement]) -> Any:
        return tuple(mw.reshard(x, mesh, places) if x.is_floating_point() else x for x in inputs)

    mw.shard_layer(
        model, mesh, cut, lambda inputs, mesh: tuple(mw.reshard(x, mesh, style.places(**batch)) for x in inputs)
    )
    if style.sequence:
        places = style.places(**batch, tp=subject.along)
        for name in subject.blocks:
            model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: enter(inputs, places))
    return model


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, amsgrad=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01, eps=(1e-2, 1e-3)),
}
"""Optimizers with an epsilon far above rounding errors.

Steps must not divide by numbers that are only the rounding error of a sum, such as the gradient of the keys' bias,
which does not affect a softmax.
"""
