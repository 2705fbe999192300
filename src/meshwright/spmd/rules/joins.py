"""Rules of operators that join tensors: `cat` and `stack`.

Torch composes `hstack` and similar operators of these. `broadcast_tensors` and `meshgrid` have no rule: each of their
results is a view of another operand.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..notation.dim_names import dim_names, operand_text
from ..notation.rule import Entry


def cat_rule(tensors: Sequence[Tensor], dim: int = 0) -> str:
    """Return the rule of `cat`: the joined dim is whole. An empty one-dim tensor may be joined with any tensor."""
    full = next((t for t in tensors if t.dim() > 1 or t.numel()), tensors[0])
    at = dim % full.dim()
    names = dim_names(full)
    operands = [
        "e!" if t.dim() != full.dim() else " ".join(f"j{i}!" if d == at else n for d, n in enumerate(names))
        for i, t in enumerate(tensors)
    ]
    return f"{' + '.join(operands)} -> {' '.join('new' if d == at else n for d, n in enumerate(names))}"


def stack_rule(tensors: Sequence[Tensor], dim: int = 0) -> str:
    names = dim_names(tensors[0])
    at = dim % (len(names) + 1)
    return f"{' + '.join([operand_text(names)] * len(tensors))} -> {' '.join([*names[:at], 'new', *names[at:]])}"


JOIN: dict[str, Entry] = {
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.concatenate"), cat_rule),
    "aten.stack": stack_rule,
    "aten.expand_as": "... | ... -> ...",
}
