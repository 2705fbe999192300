"""Generation inside `same_numbers`: the same bits on every mesh, with and without slots and programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests.generate.test_decode_step import llama, on_mesh


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_log_probabilities_have_the_bits_of_one_device(axis: str) -> None:
    def call(model: Any) -> list[Tensor]:
        sampler = mw.sampler(model, static_after=0)
        with mw.same_numbers():
            found = sampler.generate([[1, 2], [3, 4], [5, 6], [7, 8]], 4, n=2, batch_size=3, seed=3)
        return [found.tokens, found.log_probs]

    assert all(map(torch.equal, on_mesh(axis, call), call(llama())))
