"""Trees through programs: batches and results of any structure, in one program and piece by piece."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.tensor import leaves_in, tensors_in

MESH = mw.ProcessMesh([0, 1], ["dp"])
ROWS = [mw.Shard(0)]


class Pair(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


class Layer(nn.Module):
    """A layer that takes any batch of two tensors and a number, and returns a tree."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(2, 2)

    def forward(self, batch: Any) -> Any:
        x, n, y = leaves_in(batch)
        return {"out": (self.inner(x) * n, [y]), "more": Pair(x + y, None)}


BATCHES: dict[str, Any] = {
    "tuple": lambda x, y: (x, 3, y),
    "dict": lambda x, y: {"z": x, "n": 3, "a": y},
    "mapping": lambda x, y: UserDict({"z": x, "n": 3, "a": y}),
    "named": lambda x, y: Pair(x, (3, y)),
}


def rows(n: int = 4) -> Tensor:
    return torch.arange(2.0 * n).reshape(n, 2)


@pytest.mark.parametrize("form", BATCHES)
def test_programs_number_the_leaves_of_a_batch_in_order(form: str) -> None:
    x, y = rows(), -rows()
    wanted = [t.detach() for t in tensors_in(Layer()((x, 3, y)))]

    def go() -> Any:
        batch = BATCHES[form](*(mw.shard_tensor(t, MESH, ROWS) for t in (x, y)))
        found = mw.to_static(mw.shard_layer(Layer(), MESH))(batch)
        assert (type(found["out"]), type(found["out"][1]), type(found["more"])) == (tuple, list, tuple)
        return list(tensors_in(found))

    for found in mw.simulate(go, 2):
        torch.testing.assert_close(found, wanted)


class InPieces(nn.Module):
    """A model that reads a tensor in Python between programs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer((x, 2, x))
        assert found["out"][0].sum().item() != 0
        return found["out"][0].sum() + found["more"][0].sum()


def test_a_piece_returns_a_tree_with_gradients() -> None:
    def go(static: bool) -> Any:
        model = mw.shard_layer(InPieces(), MESH)
        x = mw.shard_tensor(rows(), MESH, ROWS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if static:
            dist_model = mw.to_static(model, None, None, optimizer, mw.Strategy(full_graph=False))
            dist_model(x)
            assert dist_model.pieces is not None
            assert dist_model.pieces.compiled == ("layer",)
        else:
            model(x).backward()
            optimizer.step()
        return [mw.unshard_dtensor(p.detach()) for p in model.parameters()]

    torch.testing.assert_close(mw.simulate(lambda: go(True), 2), mw.simulate(lambda: go(False), 2))


class Named(nn.Module):
    """A function of local parts that returns a dict, which stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, found = mw.local_map(lambda x: (x * 2, {"n": x.size(0)}), [ROWS, None], process_mesh=MESH)(self.inner(x))
        return first.sum() * found["n"]


def test_a_function_of_local_parts_returns_a_mapping() -> None:
    def go() -> Any:
        torch.manual_seed(0)
        model = mw.shard_layer(Named(), MESH)
        x = mw.shard_tensor(rows(), MESH, ROWS)
        return model(x).item(), mw.to_static(model)(x).item()

    for eager, static in mw.simulate(go, 2):
        assert eager == pytest.approx(static)
