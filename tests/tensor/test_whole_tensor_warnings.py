"""The warning that a call runs on whole tensors gives the reason in the user's terms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import RAN_WHOLE, RanWholeWarning

MESH = mw.ProcessMesh([0, 1], ["x"])
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda x: x[x > 0],
    "mask of a row": lambda x: x[:, x[0] > 0],
    "where": lambda x: torch.where(x > 0),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long().abs()),
    "histogramdd": lambda x: torch.histogramdd(x, [2, 2]),
    "tensor_split": lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
    "to_sparse": lambda x: x.to_sparse(),
}
GIVEN: dict[str, Any] = {"dim": 0, "mask": torch.ones(4, 2, dtype=torch.bool)}
OTHER = ("_ctc_loss", "linalg_lstsq", "index", "one_hot")
"""Operators with other arguments, and those whose shape depends on values for some arguments only."""


def shaped_by_values() -> Iterator[Any]:
    """Return the operators with torch's tag for results whose shape depends on values."""
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        packet = getattr(torch.ops.aten, name, None) if schema.name.startswith("aten::") else None
        overload = schema.overload_name or "default"
        if packet is None or overload not in packet.overloads() or any(a.is_out for a in schema.arguments):
            continue
        if torch.Tag.dynamic_output_shape in getattr(packet, overload).tags and name not in OTHER:
            yield getattr(packet, overload)


def warned(call: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """Return the warnings of a call of `x`, which is sharded."""
    RAN_WHOLE.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mw.simulate(lambda: call(mw.shard_tensor(x, MESH, [mw.Shard(0)])), 2)
    return [str(w.message) for w in found if w.category is RanWholeWarning]


@pytest.mark.parametrize("op", list(shaped_by_values()), ids=lambda op: op.name())
def test_the_warning_names_value_dependent_shapes(op: Any) -> None:
    arguments = list(op._schema.arguments)[1:]
    x = torch.tensor([3, 1, 1, 0])
    x = x if any(word in op.name() for word in ("bincount", "repeat")) else x.unsqueeze(1).repeat(1, 2)
    given = {a.name: GIVEN[a.name] for a in arguments if a.name in GIVEN and not a.has_default_value()}
    (message,) = warned(lambda x: op(x, **given), x)
    assert message.endswith(
        "runs on whole tensors: the values of a tensor decide the shape of the result, so every rank gathers the tensor"
    )


@pytest.mark.parametrize("name", CALLS)
def test_the_warning_does_not_quote_torch(name: str) -> None:
    (message,) = warned(CALLS[name], torch.tensor([[1.0, -2.0], [3.0, 0.0], [2.0, 1.0], [1.0, 1.0]]))
    assert not [word for word in ("meta", "Meta", "register", "unimplemented", "torch.fx") if word in message]
