"""Rules of layers: embedding and attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ..forms import layers as forms
from ..forms.document_attention import document_attention
from ..forms.dropped_attention import dropped_attention
from ..forms.ring_attention import fits_padded_ring, fits_ring, fits_ulysses, ring, ulysses
from ..notation.dim_names import dim_names, operand_text, sized_name
from ..notation.rule import Alternative, Entry, Rule


def embedding_rule(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Rule | None:
    """Return the rule of embedding. Rows of the table may be sharded: ids of other ranks give zero.

    With `scale_grad_by_freq` all ids must be local, to be counted.
    """
    if sparse:
        return None
    names = dim_names(indices, "i")
    ids = operand_text(names, range(len(names)) if scale_grad_by_freq else ())
    if scale_grad_by_freq or weight.dim() != 2:
        return Rule(f"v! d | {ids} -> {operand_text(names)} d") if weight.dim() == 2 else None
    return Rule(f"v d | {ids} -> {ids} d", forms={"v": forms.embedding})


def embedding_back_rule(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> str:
    """Return the rule of an embedding's gradient: a sum over the ids, which are whole with `scale_grad_by_freq`."""
    names = dim_names(indices, "i")
    ids = operand_text(names, range(len(names)) if scale_grad_by_freq else ())
    return f"{' '.join(names)} d | {ids} -> new d"


def attention_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule | None:
    """Return the rule of attention. Key heads, and query heads per key head, may be sharded.

    Sharded sequences use a local form.
    """
    if dropout_p > 0 or query.dim() < 2:
        return None
    text, shared = _attention_text(query, key, attn_mask, enable_gqa)
    needs = ["s", "t"] if is_causal else ["t"]
    others = _along_one_sequence(text, query, key, attn_mask, is_causal) if _is_batch_alike(query, key, value) else {}
    return Rule(text, over="sum", forms=dict.fromkeys((*needs, *shared), forms.attention), alternatives=others)


def dropping_attention_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule | None:
    """Return the rule of attention with dropout, which runs as separate operators: keys are whole."""
    if query.dim() < 2:
        return None
    text, _ = _attention_text(query, key, attn_mask, enable_gqa)
    return Rule(text.replace(" t d!", " t! d!"))


def document_attention_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    keys: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule | None:
    """Return the rule of attention in packed sequences: that of attention, with the documents of rows and of keys."""
    heads, shared = "b h", "b h"
    if enable_gqa and query.shape[-3] != key.shape[-3] and key.shape[-3]:
        outer, inner = sized_name("g", key.shape[-3]), sized_name("r", query.shape[-3] // key.shape[-3])
        heads, shared = f"b ({outer} {inner})", f"b {outer}"
    text = f"{heads} s d!, {shared} t! d!, {shared} t! e, b s, b t! -> {heads} s e"
    forms = {"s": document_attention} if is_causal else {}
    if query.shape[-2] != key.shape[-2]:
        return Rule(text, forms=forms)
    ring_rule = Rule(text.replace(" t!", " s"), forms={"s": document_attention})
    fits = partial(fits_ring, is_causal=is_causal)
    return Rule(text, forms=forms, alternatives={"ring": Alternative(ring_rule, fits)})


def dropped_attention_rule(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bits: Tensor, *rest: object
) -> Rule:
    """Return the rule of attention with dropout in blocks. Each local form draws the factors of its own weights."""
    masked = "" if mask is None else f", {' '.join(('b', 'h', 's', 't!')[4 - mask.dim() :])}"
    text = f"b h s d!, b h t! d!, b h t! e{masked}, ... -> b h s e"
    forms = dict.fromkeys("bhs", dropped_attention)
    if query.shape[-2] != key.shape[-2] or (mask is not None and mask.shape[-1] != key.shape[-2]):
        return Rule(text, forms=forms)
    ring_text = text.replace(" t! d!", " s d!").replace(" t! e", " s e")
    ring_rule = Rule(ring_text, forms=forms)
    fits = partial(fits_ring, is_causal=bool(rest[1]))
    return Rule(text, forms=forms, alternatives={"ring": Alternative(ring_rule, fits)})


def _attention_text(query: Tensor, key: Tensor, mask: Tensor | None, enable_gqa: bool) -> tuple[str, list[str]]:
    """Return the rule as text, and the names of its head factors with grouped queries."""
    heads, shared = "...", "..."
    if enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3] and key.shape[-3]:
        outer, inner = sized_name("g", key.shape[-3]), sized_name("r", query.shape[-3] // key.shape[-3])
        heads, shared = f"... ({outer} {inner})", f"... {outer}"
    masked = ", ... s t" if mask is not None else ""
    if mask is not None and heads != "...":
        masked = f", ... {heads.removeprefix('... ') if mask.dim() > 2 and mask.shape[-3] != 1 else ''} s t"
        masked = masked if mask.dim() < 3 or mask.shape[-3] != 1 else ", ... 1 s t"
    joint = "," if masked else " ?"
    text = f"{heads} s d!, {shared} t d!{joint} {shared} t e{masked} -> {heads} s e"
    return text, [n for n in heads.strip("()").replace("... (", "").split() if n.startswith(("g_", "r_"))]


def _is_batch_alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if values have the dims of keys, and no dim of queries is broadcast to that of the keys."""
    is_wider = any(m not in (n, 1) for n, m in zip(query.shape[:-3], key.shape[:-3], strict=False))
    return query.dim() == key.dim() and key.shape[:-1] == value.shape[:-1] and not is_wider


def _along_one_sequence(
    text: str, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> Mapping[str, Alternative]:
    """Return the alternative rules with one sequence factor for queries and keys, so that both are sharded together."""
    if query.shape[-2] != key.shape[-2] or (mask is not None and mask.shape[-1] != key.shape[-2]):
        return {}
    rows = text.replace(" s t ->", " s t! ->").replace(" t ", " s ")
    heads = text.replace(" s t ->", " u! t! ->").replace(" t ", " s ")
    has_heads = query.dim() > 2 and (mask is None or mask.dim() < 3 or mask.shape[-3] == 1)
    return {
        "ring": Alternative(
            Rule(rows, forms={"s": ring}), partial(fits_padded_ring, is_causal=is_causal, has_mask=mask is not None)
        ),
        "ulysses": Alternative(Rule(heads, forms={"s": ulysses}), partial(fits_ulysses, has_heads=has_heads)),
    }


LAYERS: dict[str, Entry] = {
    "aten.embedding": embedding_rule,
    "aten.embedding_dense_backward": embedding_back_rule,
    "aten.scaled_dot_product_attention": attention_rule,
    "meshwright.document_attention": document_attention_rule,
    "meshwright.attention_with_dropout": dropped_attention_rule,
}

RANDOM_RULES: dict[str, Entry] = {
    "aten.dropout": "... -> ...",
    "aten.feature_dropout": "... -> ...",
    "aten.native_dropout": "..., -> ... ; ...",
    "aten.rrelu_with_noise": "..., ... -> ...",
    "aten.bernoulli": "..., -> ...",
    "aten.bernoulli.Tensor": "..., ... -> ...",
    "aten.normal": "..., ... -> ...",
    "aten.poisson": "..., -> ...",
    "aten._standard_gamma": "..., -> ...",
    "aten.multinomial": "... c!, -> ... new",
    "aten.scaled_dot_product_attention": dropping_attention_rule,
}
"""Rules for layout propagation of random operators, which are replaced by other operators when they run."""
