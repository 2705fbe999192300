"""Results of calls on ranks inside and outside the mesh of the operand: equal numbers of computations and strides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.tensor.core.computation_numbers import follow, values_equal_on_ranks
from meshwright.tensor.core.dist_tensor import DistTensor
from meshwright.tensor.core.function_names import name_of

Call = Callable[[Tensor], Any]

NOT_CALLED = {"backward", "share_memory_"}
PLAIN = re.compile("sparse|mkldnn")
"""Methods whose results are plain tensors."""


@pytest.fixture
def numbering() -> Iterator[None]:
    follow()
    yield
    follow(False)


@pytest.mark.usefixtures("numbering")
def test_a_changed_option_or_setting_changes_the_values_of_a_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    before = values_equal_on_ranks(optimizer)
    assert values_equal_on_ranks(optimizer) == before
    optimizer.param_groups[0]["lr"] = 0.2
    other_rate = values_equal_on_ranks(optimizer)
    torch.set_default_dtype(torch.float64)
    other_dtype = values_equal_on_ranks(optimizer)
    torch.set_default_dtype(torch.float32)
    assert len({before, other_rate, other_dtype}) == 3
    assert values_equal_on_ranks(optimizer) == other_rate


def call_methods() -> dict[str, Call]:
    """Return the methods of a tensor, each called without arguments."""
    names = [name for name in dir(Tensor) if not name.startswith("__") and callable(getattr(Tensor, name))]
    return {name: methodcaller(name) for name in names if name not in NOT_CALLED and not PLAIN.search(name)}


def doubled(x: Tensor) -> Tensor:
    return x * 2


ONE: Any = torch.tensor(1)

FUNCTIONS: dict[str, Call] = {
    "a size that is a tensor": lambda x: x.t().view(2, ONE, 2),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of nothing": lambda x: F.dropout2d(x[None], 0.0),
    "histogramdd": lambda x: [bins := torch.histogramdd(x, [2, 2]), *bins[1]],
    "dropout2d": lambda x: F.dropout2d(x[None], 0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: torch.multinomial(x, 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: x.normal_(),
    "rand_like": torch.rand_like,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "scaled_dot_product_attention without dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


Result = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""The number of a tensor, its dtype, shape and strides."""


def results_of(calls: Mapping[str, Call]) -> dict[str, tuple[list[Result], float]]:
    """Return the results of calls with a tensor on a mesh of rank 0, and the next random number."""
    found: dict[str, tuple[list[Result], float]] = {}
    for name, call in calls.items():
        torch.manual_seed(0)
        x = mw.shard_tensor(torch.ones(2, 2), mw.ProcessMesh([0], ["x"]), [mw.Replicate()])
        try:
            out = call(x)
        except Exception:  # a method that needs arguments
            continue
        outs: Any = out if isinstance(out, (tuple, list)) else [out]
        tensors = [each for each in outs if isinstance(each, DistTensor)]
        found[name] = [(x._number, x.dtype, (*x.shape,), x.stride()) for x in tensors], torch.rand(()).item()
    return found


@pytest.mark.usefixtures("numbering")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("calls", "at_least"), [(call_methods(), 240), (FUNCTIONS, len(FUNCTIONS))])
def test_results_are_alike_on_all_ranks(calls: Mapping[str, Call], at_least: int) -> None:
    member, outside = mw.simulate(lambda: results_of(calls), 2)
    both = member.keys() & outside.keys()
    assert len(both) >= at_least
    assert {name for name in both if member[name] != outside[name]} == set()
    assert {name for name in both if any(number == 0 for number, *_ in member[name][0])} == set()


@pytest.mark.usefixtures("numbering")
def test_the_name_of_a_scripted_function_has_no_address() -> None:
    """An address differs between processes."""

    def name() -> str:
        return name_of(torch.jit.script(doubled))

    assert "0x" not in name()
    assert len(set(mw.simulate(name, 2))) == 1
