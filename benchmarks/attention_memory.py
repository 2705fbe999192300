"""Peak memory and products of ring attention over four ranks, at growing lengths of the sequence.

Each simulated rank computes one causal attention, forward and backward, and counts the bytes of the tensors that it
holds at once: without a mask, in a sequence of packed documents, and with dropout. The peak includes queries, keys,
values and their gradients. The workspace of kernels does not count: a fused kernel holds a few rows of scores. Products
are those of the kernels without a mask: half of the pairs of rows and keys if a call is causal, all of them otherwise.
The seconds are processor time, of all simulated ranks one after the other.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANKS, HEADS, KEY_HEADS, CHANNELS = 4, 2, 1, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LINEAR, PRODUCTS = 1.05, 1.15
"""Limits: growth of the peak relative to that of the length, and the products of a rank relative to an equal share."""

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
MATRIX_PRODUCTS = {KERNEL: 2, f"{KERNEL}_backward": 5}
"""Kernel → the products of a row, a key and the channels of a head."""


@dataclass
class Meter(TorchDispatchMode):
    """Mode that counts the bytes of live tensors, the products of attention, and other products."""

    held: dict[int, int] = field(default_factory=dict[int, int])
    peak: int = 0
    products: int = 0
    other_products: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(*args, out)
        self.peak = max(self.peak, sum(self.held.values()))
        name = func.__name__.split(".")[0]
        if name in MATRIX_PRODUCTS:
            self.products += MATRIX_PRODUCTS[name] * pairs(name, args)
        elif name in ("mm", "bmm", "addmm", "baddbmm"):
            self.other_products += 1
        return out

    def hold(self, *values: object) -> None:
        """Count the memory of these tensors until it is freed."""
        for x in tree_leaves(values):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage.data_ptr() not in self.held:
                self.held[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage.data_ptr(), 0)


def pairs(name: str, args: tuple[Any, ...]) -> int:
    """Return the multiply-adds of one matrix product of a kernel."""
    query, key = args[1:3] if name.endswith("_backward") else args[:2]
    batch, heads, rows, channels = query.shape
    is_causal = any(args[7:8] if name.endswith("_backward") else args[4:5])
    keys = key.shape[2]
    return batch * heads * channels * (rows * (rows + 1) // 2 if is_causal else rows * keys)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def in_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of documents of a thousand positions each."""
    import meshwright as mw

    return mw.document_attention(q, k, v, torch.arange(q.shape[2])[None] // 1000, enable_gqa=True)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import meshwright as mw

    with mw.random_source("counter"):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)


KINDS: dict[str, Attend] = {"plain": plain, "documents": in_documents, "dropout": dropped}


def attended(parts: list[Tensor], attend: Attend) -> Meter:
    """Return the counts of one attention of these tensors, forward and backward."""
    with Meter() as meter:
        meter.hold(*parts)
        q, k, v = (x.requires_grad_() for x in parts)
        attend(q, k, v).sum().backward()
    return meter


def qkv(length: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, CHANNELS, generator=g) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def ring(length: int, attend: Attend) -> list[Meter]:
    """Return the counts of each rank."""
    import meshwright as mw

    whole = qkv(length)

    def go() -> Meter:
        mesh = mw.ProcessMesh(range(RANKS), ["cp"])
        parts = [mw.shard_tensor(x, mesh, [mw.Shard(2)]).clone() for x in whole]
        with mw.context_parallel("ring"):
            return attended(parts, attend)

    return mw.simulate(go, RANKS)


def measured(length: int) -> dict[str, Any]:
    """Return the peaks of the largest rank, its products beside an equal share, and seconds."""
    start = time.process_time()
    alone = attended(qkv(length), plain)
    between = time.process_time()
    ranks = ring(length, plain)
    end = time.process_time()
    if any(x.other_products for x in (alone, *ranks)):
        raise RuntimeError("attention ran by single operators, not by its fused kernel")
    others = {name: ring(length, attend) for name, attend in KINDS.items() if attend is not plain}
    return {
        "peak": {name: max(x.peak for x in found) for name, found in {"plain": ranks, **others}.items()},
        "peak of one device": alone.peak,
        "products": max(x.products for x in ranks) * RANKS / alone.products,
        "seconds": {"one device": between - start, "all ranks": end - between},
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: growth of the peak relative to the length, and products relative to an equal share."""
    lengths = (4096, 8192) if quick else (4096, 8192, 16384)
    measured(256)  # the first calls load kernels
    found = {length: measured(length) for length in lengths}
    first, last = lengths[0], lengths[-1]
    growth = {name: found[last]["peak"][name] / found[first]["peak"][name] / (last / first) for name in KINDS}
    products = max(each["products"] for each in found.values())
    return {
        "name": "attention_memory",
        "value": {
            **{f"growth, {name}": round(each, 3) for name, each in growth.items()},
            "products": round(products, 3),
        },
        "goal": f"growth of the peak by the growth of the length <= {LINEAR}; "
        f"products of a rank by an equal share <= {PRODUCTS}",
        "ok": max(growth.values()) <= LINEAR and products <= PRODUCTS,
        "details": {"ranks": RANKS, "heads": HEADS, "key heads": KEY_HEADS, "channels": CHANNELS, "by length": found},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
