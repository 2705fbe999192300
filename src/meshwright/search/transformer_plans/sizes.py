"""Sizes of a transformer, from which the sizes of its operators follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost import Numbers

from .._errors import SearchError, check_sizes


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts of width `ffn` in every layer after the first `dense` ones; each token goes to `chosen`.

    Raises:
        SearchError: `imbalance` is below 1 or not finite.
    """

    count: int
    chosen: int
    ffn: int
    shared: int = 0
    """Width of the expert that all tokens go to."""
    dense: int = 0
    imbalance: float = 1.0
    """Tokens of the fullest rank relative to the average, if experts are divided over ranks."""
    biased: bool = False
    """True if the linear maps of experts have biases."""
    nodes: int | None = None
    """Largest number of nodes that the experts of a token are on; None if the router has no such limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < float("inf"):
            raise SearchError(
                "experts",
                f"imbalance={self.imbalance}",
                "the fullest rank has at least as many tokens as the average",
                "write Experts(..., imbalance=1.2)",
            )

    def fullest(self, ranks: Numbers) -> Numbers:
        """Return the tokens of the fullest of `ranks` ranks, relative to the average; at most all tokens.

        >>> [float(Experts(8, 2, 64, imbalance=3.0).fullest(ranks)) for ranks in (1, 2, 8)]
        [1.0, 2.0, 3.0]
        """
        return np.minimum(self.imbalance, ranks)


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose queries, keys and values are computed from narrow projections (arXiv 2405.04434)."""

    query: int
    """Width of the projection before queries; 0 if there is none (DeepSeek-V2-Lite)."""
    key: int
    plain: int
    """Part of a head's width that is not rotated."""
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding windows: one of `every` layers attends to the nearest `size` tokens only; 1.2 means five of six layers.

    Raises:
        SearchError: `every` is below 1, or `size` is.
    """

    size: int
    every: float = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not self.every >= 1:
            raise SearchError(
                "windows",
                f"size={self.size}, every={self.every}",
                "a window has at least one token, and at most all layers have one",
                "write Window(4096, every=2), if every second layer has one",
            )


@dataclass(frozen=True, slots=True)
class Transformer:
    """A transformer of equal layers between an embedding and a head.

    >>> f"{Transformer(32, 4096, 32, 8, 128, 14336, 128256).parameters:.3g}"
    '8.03e+09'

    Raises:
        SearchError: a size is below 1 or too large.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    window: Window | None = None
    ahead: int = 0
    """Number of tokens that are predicted besides the next one; each takes a layer and the head (arXiv 2404.19737)."""
    causal: bool = True
    """True if a token attends only to the tokens before it."""

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab) < 1:
            raise SearchError(
                "a transformer",
                f"{self}",
                "layers, widths and heads must be at least 1",
                "write Transformer(layers, hidden, heads, kv_heads, head_dim, ffn, vocab)",
            )
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        check_sizes("a transformer", **{name: getattr(self, name) for name in sizes})

    @property
    def dense_layers(self) -> int:
        """Number of layers whose feed-forward part has no experts."""
        return self.layers if self.experts is None else min(self.experts.dense, self.layers)

    @property
    def layer_counts(self) -> tuple[int, int]:
        """Number of layers without and with experts, including those that predict further tokens."""
        dense = self.dense_layers
        if self.experts is None:
            return dense + self.ahead, 0
        return dense, self.layers - dense + self.ahead

    def seen(self, sequence: Numbers, whole: Numbers | None = None) -> Numbers:
        """Return the number of keys that a query attends to, averaged over queries and layers.

        `whole` is the number in a layer without a window, if it is not that of all queries of a sequence.
        """
        if whole is None:
            whole = sequence * (0.5 if self.causal else 1.0)
        if self.window is None:
            return whole
        return whole + (np.minimum(whole, self.window.size) - whole) / self.window.every

    @property
    def key_width(self) -> int:
        """Width of a query or a key of one head."""
        return self.head_dim if self.latent is None else self.latent.plain + self.latent.rotary

    @property
    def value_width(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer."""
        h, a, x = self.hidden, self.heads, self.latent
        if x is None:
            return h * (2 * a + 2 * self.kv_heads) * self.head_dim
        up = (x.query or h) * a * self.key_width + x.key * a * (x.plain + x.value)
        return h * x.query + h * (x.key + x.rotary) + up + a * x.value * h

    def kv_heads_of(self, tp: Numbers) -> Numbers:
        """Return the key and value heads on one of `tp` ranks; ranks beyond the number of heads repeat them."""
        return np.maximum(self.kv_heads / np.asarray(tp), 1.0)

    def attention_of(self, tp: Numbers) -> Numbers:
        """Return the parameters of one layer's attention on one of `tp` ranks.

        Every rank has whole narrow projections. Each key head is on at least one rank, and on several if `tp` is
        larger than the number of key heads.
        """
        h, t, x = self.hidden, np.asarray(tp, dtype=float), self.latent
        if x is None:
            return h * self.head_dim * (2 * self.heads / t + 2 * self.kv_heads_of(t))
        narrow = h * (x.query + x.key + x.rotary)
        return narrow + (self.attention_parameters - narrow) / t

    def shared_of(self, tp: Numbers) -> Numbers:
        """Return the parameters on one of `tp` ranks of a layer with experts: the whole router, and the shared part."""
        x = self.experts
        return 0.0 if x is None else self.hidden * (x.count + 3 * x.shared / np.asarray(tp, dtype=float))

    @property
    def head_layers(self) -> float:
        """Products of the head per token, relative to those of a layer; the scores of attention do not count."""
        x, inner = self.experts, self.mlp_parameters
        if x is not None and self.dense_layers < self.layers:
            inner = self.shared_parameters + self.expert_parameters * x.chosen // x.count
        layer = self.attention_parameters + inner
        return (self.embedding_parameters * (1 + self.ahead) + self.joined_parameters) / layer + self.ahead

    @property
    def joined_parameters(self) -> int:
        """Parameters that join a token's residual with the next token, for all tokens that are predicted ahead."""
        return self.ahead * 2 * self.hidden * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Feed-forward parameters of one layer without experts."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def shared_parameters(self) -> int:
        """Parameters of one layer with experts that every rank has: the router and the shared expert."""
        x = self.experts
        return 0 if x is None else self.hidden * (x.count + 3 * x.shared)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return 0 if self.experts is None else 3 * self.experts.count * self.hidden * self.experts.ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding table; the head has as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without norms and biases."""
        dense, sparse = self.layer_counts
        inner = self.attention_parameters * (dense + sparse) + self.mlp_parameters * dense + self.joined_parameters
        inner += (self.shared_parameters + self.expert_parameters) * sparse
        return inner + self.embedding_parameters * (1 if self.tied else 2)
