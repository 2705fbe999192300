"""Small collectives whose data travels in the frames that compare the call: one round trip in all.

A rank sends its whole tensor to every other rank, and each rank combines the tensors in the order of the group. So all
ranks get the same bits, which are those of simulated ranks and of a direct exchange, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at

import torch
from torch import Tensor

from meshwright.layout import CPU

from ..communicators.call import CommCall
from ..communicators.reductions import reduce_terms
from ..transport.shared_memory import contiguous_values

MOST_BYTES = 2**14
"""Upper bound on the bytes of one rank's tensor.

A frame with more might fill a ring (`ring_buffer.py`) or a connection, and two ranks would wait for each other to read.
"""
_KINDS = frozenset({"all_reduce", "all_gather", "barrier"})


def is_small(call: CommCall) -> bool:
    """True if the data of a call travels in frames. All ranks of the call get the same answer."""
    if call.kind not in _KINDS:
        return False
    size = 0 if call.dtype is None else call.dtype.itemsize
    return all(torch.Size(shape).numel() * size <= MOST_BYTES for shape in call.receives)


def data_of(x: Tensor) -> bytes:
    """Return the values of a tensor as bytes."""
    host = contiguous_values(x).cpu()
    return string_at(host.data_ptr(), host.nbytes)


def results_of(call: CommCall, data: Sequence[bytes], device: torch.device) -> list[Tensor]:
    """Return the results of a call in new memory, for the data of every rank in the order of the group."""
    assert call.dtype is not None
    terms = [_flat(each, call.dtype) for each in data]
    if call.kind == "all_gather":
        return [term.clone().view(shape).to(device) for term, shape in zip(terms, call.receives, strict=True)]
    return [reduce_terms(terms, call.op).view(call.receives[0]).to(device)]


def _flat(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor with these bytes, in memory that torch cannot resize."""
    if not data:
        return torch.empty(0, dtype=dtype, device=CPU)
    return torch.frombuffer(bytearray(data), dtype=dtype)
