"""Attention in packed sequences, on one device and on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.spmd import document_attention_of_one_device
from meshwright.tensor import OperationError

from ..torch_hooks import is_transforming


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
    _check_shapes(query, key, value, documents, enable_gqa)
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # torch has no autocast on meta
        lower = torch.get_autocast_dtype(device)
        query, key, value = (x.to(lower) if x.dtype != torch.float64 else x for x in (query, key, value))
    # torch.func sees the autograd function of the operator only if Python calls it
    op = document_attention_of_one_device if is_transforming() else torch.ops.meshwright.document_attention.default
    return op(query, key, value, documents, documents, is_causal, scale=scale, enable_gqa=enable_gqa)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, enable_gqa: bool) -> None:
    """Raise OperationError unless queries, keys, values and documents fit."""
    shapes = [tuple(x.shape) for x in (query, key, value, documents)]
    found = "queries {}, keys {}, values {}, documents {}".format(*shapes)
    if query.dim() != 4 or key.dim() != 4 or documents.shape != (query.shape[0], query.shape[2]):
        raise _unfit(found, "each position needs the number of its document")
    batch, heads, length, channels = query.shape
    shared = key.shape[1]
    if key.shape != (batch, shared, length, channels) or value.shape[:-1] != key.shape[:-1]:
        why = "keys have the batch, length and channels of queries; values have the batch, heads and length of keys"
        raise _unfit(found, why)
    if shared not in (1, heads) and not (enable_gqa and shared and heads % shared == 0):
        raise _unfit(found, f"{heads} heads of queries cannot share {shared} heads of keys, enable_gqa={enable_gqa}")


def _unfit(found: str, why: str) -> OperationError:
    fix = "pass queries, keys and values (batch, heads, length, channels), and documents (batch, length)"
    return OperationError("document_attention", found, why, fix)
