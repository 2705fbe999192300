"""Functions that make a tensor like a distributed one, on a named device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

MAKERS: dict[str, Callable[..., Tensor]] = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **options: torch.full_like(x, 2.0, **options),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x, **options: torch.randint_like(x, 5, **options),
    "new_empty": lambda x, **options: x.new_empty((2, 3), **options),
    "new_empty_strided": lambda x, **options: x.new_empty_strided((2, 3), (1, 2), **options),
    "new_full": lambda x, **options: x.new_full((2, 3), 1.0, **options),
    "new_ones": lambda x, **options: x.new_ones((2, 3), **options),
    "new_tensor": lambda x, **options: x.new_tensor([1.0, 2.0], **options),
    "new_zeros": lambda x, **options: x.new_zeros((2, 3), **options),
}
OPTIONS: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"device": torch.device("cpu"), "dtype": torch.float64}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_tensors_have_the_form_of_one_device(name: str, options: dict[str, Any]) -> None:
    x, make = torch.ones(4, 3), MAKERS[name]
    torch.manual_seed(0)
    expected = make(x, **options)

    def program() -> Tensor:
        torch.manual_seed(0)
        return mw.unshard_dtensor(make(mw.shard_tensor(x, mw.init_mesh(dp=2), [mw.Shard(0)]), **options))

    for found in mw.simulate(program, 2):
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
        if "empty" not in name:
            assert torch.equal(found, expected)
