"""A call that is refused leaves the attributes of layers unchanged, whatever code changed them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.graph.guards import PassComparison, check_repeatable


def test_all_attributes_of_layers_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    layer = vars(model[0])
    layer["state"], layer["gone"] = None, 1
    weight = model[0].weight

    def run() -> None:
        layer.update(state=torch.ones(2), new=2)
        del layer["gone"]
        raise LookupError

    how: PassComparison[None] = PassComparison(lambda a, b: True, lambda found, ran: False, lambda found, kept: None)
    with pytest.raises(LookupError):
        check_repeatable({"model": model}, run, how, "capturing the forward pass")
    assert (layer["state"], layer["gone"]) == (None, 1)
    assert "new" not in layer
    assert model[0].weight is weight
