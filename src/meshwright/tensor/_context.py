"""How attention goes where queries, keys and values are cut along one sequence.

"gather"   queries stay cut, keys and values are gathered: every rank holds all of them.
"ring"     keys and values travel round the ring of the ranks, partial results are joined: no rank holds all of them.
"ulysses"  heads are cut in the place of the sequence, all to all, and back.

A call that a choice does not fit goes by "gather", which fits all.
"""

from __future__ import annotations

from typing import Literal

from ._per_rank import PerRank

Context = Literal["gather", "ring", "ulysses"]

_contexts: PerRank[Context] = PerRank("gather")

context = _contexts.get
attending_by = _contexts.holding
