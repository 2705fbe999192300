"""Algorithms for attention whose queries, keys and values are sharded along the sequence.

"gather"   queries stay sharded, keys and values are gathered: every rank holds all of them.
"ring"     keys and values pass around the ring of ranks, partial results are joined: no rank holds all of them.
"ulysses"  an all-to-all shards heads in place of the sequence, and another one reverses it.

A call that an algorithm does not fit uses "gather", which fits all calls.
"""

from __future__ import annotations

from typing import Literal

from ..core.rank_setting import PerRank

Context = Literal["gather", "ring", "ulysses"]

_contexts: PerRank[Context] = PerRank("gather")

attention_algorithm = _contexts.get
using_attention = _contexts.holding
