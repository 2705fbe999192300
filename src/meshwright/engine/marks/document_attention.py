"""Attention in packed sequences, on one device and on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.tensor import OperationError


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of packed sequences: each position attends to the positions of its own document.

    It is `scaled_dot_product_attention` with the mask `documents[:, None, :, None] == documents[:, None, None, :]`, but
    holds the mask of at most 512 rows at once. Documents may continue on other ranks of a sharded sequence. With
    `context_parallel("ring")`, keys and values travel around the ring of ranks.

    Args:
        query: (batch, heads, length, channels), on one device or distributed.
        key: (batch, heads, length, channels).
        value: (batch, heads, length, channels of the result).
        documents: (batch, length), the number of the document of each position.
        is_causal: True if a position sees no later position.
        scale: Factor of the scores; the default is 1 / sqrt(channels).
        enable_gqa: True if several heads of queries may share a head of keys and values.

    Raises:
        OperationError: the documents do not fit the queries and keys.

    >>> import torch, meshwright as mw
    >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    >>> mw.document_attention(x * 0, x * 0, x, torch.tensor([[7, 8, 8]])).flatten()
    tensor([1.0000, 2.0000, 2.5000])
    """
    if query.dim() != 4 or documents.shape != (query.shape[0], query.shape[2]) or key.shape[2] != query.shape[2]:
        raise OperationError(
            "document_attention",
            f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, documents {tuple(documents.shape)}",
            "each position of queries and keys needs the number of its document",
            "pass queries and keys (batch, heads, length, channels), and documents (batch, length)",
        )
    lower = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else None
    if lower is not None:
        query, key, value = (x.to(lower) if x.dtype != torch.float64 else x for x in (query, key, value))
    op = torch.ops.meshwright.document_attention.default
    return op(query, key, value, documents, documents, is_causal, scale=scale, enable_gqa=enable_gqa)
