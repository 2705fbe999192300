"""Indices out of bounds along a sharded dim are refused, as on one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.spmd.forms.indexing import check_bounds

SIZE = 5
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[i]": lambda x, i: x[i],
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding with padding": lambda x, i: F.embedding(i, x, padding_idx=1),
    "nll_loss": lambda x, i: F.nll_loss(x.t()[:2], i, reduction="sum"),
    "cross_entropy": lambda x, i: F.cross_entropy(x.t()[:2], i),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(2, 4)),
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 0),
    "index_add": lambda x, i: x.index_add(0, i, x[:2] * 2),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2] * 2),
    "index_fill": lambda x, i: x.index_fill(0, i, 7),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 7.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], x[:2] * 2),
    "x[i] = number": lambda x, i: torch.ops.aten.index_put(x, [i], torch.tensor(7.0)),
}
INDICES = ([1, SIZE], [0, 99], [-SIZE - 1, 2], [-1, 3], [4, 0])


def _outcome(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, index: Tensor) -> list[float] | str | None:
    """Return the values of the result; None for an error about the indices, and the text of any other error."""
    try:
        return call(x, index).tolist()
    except (IndexError, RuntimeError) as error:
        return None if re.search("bounds|range", str(error)) else f"another error: {error}"


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", CALLS)
def test_an_index_is_refused_exactly_if_one_device_refuses_it(name: str, ranks: int) -> None:
    table, call = torch.arange(SIZE * 4.0).view(SIZE, 4), CALLS[name]

    def on_rank(index: Tensor) -> list[float] | str | None:
        x = mw.shard_tensor(table, mw.ProcessMesh(range(ranks), ["x"]), [mw.Shard(0)])
        return _outcome(call, x, index)

    for index in map(torch.tensor, INDICES):
        wanted = _outcome(call, table.clone(), index)
        for found in mw.simulate(on_rank, ranks, index):
            assert found == wanted, index


class Operators(TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "is_checked"), [("cpu", True), ("cuda", True), ("mtia", False)])
def test_only_devices_with_a_kernel_for_assertions_check_indices(device: str, is_checked: bool) -> None:
    with FakeTensorMode(), Operators() as called:
        check_bounds(torch.empty(2, dtype=torch.int64, device=device), SIZE, 0)
    assert ("aten::_assert_async.msg" in called.names) == is_checked
