"""Rules of operators that read only the dtype and device of a tensor, such as `new_zeros`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import dim_names, operand_text
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, Rule


def new_tensor_rule(name: str) -> Entry:
    """Return the rule: the operand's elements are not read, so it may have any layout; the result is whole."""
    op = getattr(torch.ops.aten, name)

    def as_it_is(call: LocalCall, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
        return op(*args, **kwargs)

    def entry(x: Tensor, size: TorchValue, *args: TorchValue, **kwargs: TorchValue) -> Rule:
        names = dim_names(x)
        text = f"{operand_text(names)}, -> {' '.join(f'new{d}' for d in range(len(size)))}"
        return Rule(text, forms=dict.fromkeys(names, as_it_is))

    return entry


FRESH: dict[str, Entry] = {
    f"aten.{name}": new_tensor_rule(name) for name in ("new_zeros", "new_ones", "new_full", "new_empty")
}
