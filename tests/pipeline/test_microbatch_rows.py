"""Batches that cannot be split into microbatches are refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch

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
