"""Microbatches are pieces of the rows of a batch; batches that cannot be split into them are refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.graph import Input, Value
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.pipeline import StageError
from meshwright.pipeline.partition.microbatch_inputs import _check_rows

MESH = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
SPECS = ["f32[8@x, 4]", "f32[8@y, 4]", "f32[8, 4]", None]


@pytest.mark.parametrize(("one", "other"), list(product(SPECS, SPECS)))
def test_rows_in_different_layouts_are_refused(one, other):
    given = [
        Input(Value("x", (8, 4), torch.float32), "batch", "x", text and parse_spec(text, MESH), at)
        for at, text in enumerate((one, other))
    ]
    lies = [i.spec.layout.dims[0] if i.spec else () for i in given]
    if lies[0] == lies[1]:
        _check_rows(given)
        return
    with pytest.raises(StageError, match="along the same axes"):
        _check_rows(given)


def train(rows: int, pieces: int, mesh: mw.ProcessMesh | None = None) -> list[float]:
    """Return the losses of two steps whose numbers depend on the rows of each piece, by dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, labels = torch.randn(rows, 4), torch.arange(rows) % 3
    if mesh is not None:
        in_stages = "pp" in mesh.dim_names
        mw.parallelize(model, optimizer, mesh, mw.Parallelism(split=("2",)))
        option = {"accumulate_steps" if in_stages else "k_steps": pieces, "enable": True}
        strategy = mw.Strategy.of(**{"pipeline" if in_stages else "gradient_merge": option})
        step = mw.to_static(model, None, nn.functional.cross_entropy, optimizer, strategy)
        return [step(x, labels).item() for _ in range(2)]
    losses: list[float] = []
    for _ in range(2):
        parts = zip(x.chunk(pieces), labels.chunk(pieces), strict=True)
        for loss in (terms := [nn.functional.cross_entropy(model(a), b) / pieces for a, b in parts]):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(terms).item())
    return losses


@pytest.mark.parametrize(("rows", "pieces"), [(8, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("mesh", [mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])])
def test_the_pieces_of_a_plain_batch_are_its_rows_in_order(mesh, rows, pieces):
    one = train(rows, pieces)
    for losses in mw.simulate(lambda: train(rows, pieces, mesh), mesh.size):
        assert losses == pytest.approx(one, rel=1e-5)
