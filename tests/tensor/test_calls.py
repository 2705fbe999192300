"""Costs of a call beside its operator, counted: operators on a rank's part, and Python's calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.tensor import local_parts
from meshwright.tensor.core.capture_marks import capturing
from meshwright.tensor.core.dist_tensor import DistTensor, change_class
from meshwright.tensor.handlers.direct_attributes import FREQUENT, OPERATORS
from meshwright.tensor.planning.call_plan import _hinted

MESH = mw.ProcessMesh([[0], [1]], ["dp", "tp"])
"""The axis tp has one rank, so tensors sharded along it are whole."""


class Operators(TorchDispatchMode):
    """A mode that collects the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of_known_call(fn: Callable[[], Tensor]) -> list[str]:
    """Return the operators of a call whose plan is known."""
    fn()
    with Operators() as seen:
        fn()
    return seen.names


def attention() -> Tensor:
    q, kv = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    q, k, v = (mw.shard_tensor(x, MESH, [mw.Shard(0), mw.Shard(1)]) for x in (q, kv, kv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def loss() -> Tensor:
    x = mw.shard_tensor(torch.randn(8, 5), MESH, [mw.Shard(0), mw.Shard(1)])
    target = mw.shard_tensor(torch.tensor([0, 1, 2, 3] * 2), MESH, [mw.Shard(0)])
    return F.cross_entropy(x, target)


def lookup() -> Tensor:
    table = mw.shard_tensor(torch.randn(5, 3), MESH, [mw.Replicate(), mw.Shard(0)])
    return F.embedding(mw.shard_tensor(torch.tensor([[0, 1], [4, 2]]), MESH, [mw.Shard(0)]), table)


@pytest.mark.parametrize(
    ("fn", "needless"),
    [(attention, {"arange", "ge", "where"}), (loss, {"gather", "exp", "amax", "log"}), (lookup, {"where", "ge", "lt"})],
    ids=["attention", "loss", "lookup"],
)
def test_whole_tensors_call_the_operator_itself(fn: Callable[[], Tensor], needless: set[str]) -> None:
    """Causal attention builds no mask if sequences are whole; an axis of one rank has no part in anything."""
    for names in mw.simulate(operators_of_known_call, 2, fn):
        assert not needless & set(names), names


def count(fn: Callable[[], Any]) -> int:
    """Return the number of calls that Python makes in a call whose plan is known."""
    fn()
    calls = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    fn()
    sys.setprofile(None)
    return calls


def test_an_operand_that_is_plain_or_named_is_found_at_once() -> None:
    """Half of these calls are torch's own; a search of the arguments for tensors would take as many again."""

    def go() -> tuple[int, int]:
        x = mw.shard_tensor(torch.randn(4, 6), MESH, [mw.Shard(0)])
        table, weight = torch.randn(6), mw.shard_tensor(torch.ones(6), MESH, [])
        return count(lambda: x * table), count(lambda: F.rms_norm(x, (6,), weight))

    for times, norm in mw.simulate(go, 2):
        assert times <= 30
        assert norm <= 60


DIRECT = (
    *("x.backward()", "x.chunk(2)", "x.contiguous()", "x.cumsum(0)", "x.expand(2, 3)", "x.flatten()", "x.mean()"),
    *("x.permute(1, 0)", "x.repeat(2, 1)", "x.reshape(3, 2)", "x.softmax(-1)", "x.split(1)", "x.squeeze()", "x.sum()"),
    *("x.transpose(0, 1)", "x.unflatten(0, (1, 2))", "x.unsqueeze(0)", "x.view(6)"),
    *("x + x", "x - 1", "x * 2.0", "x @ x"),
)


class Recorded(Tensor):
    """A tensor of a class that torch finds by its own search for overrides."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)


def test_a_call_without_torchs_search_for_overrides_passes_the_function_that_torch_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans and handlers are found by this function, and some methods and operators name it themselves."""
    names = {call[2:].split("(")[0] for call in DIRECT if call.endswith(")")}
    assert names == set(FREQUENT)
    assert len(DIRECT) == len(FREQUENT) + len(OPERATORS)
    part = mw.simulate(lambda: mw.shard_tensor(torch.randn(2, 3), MESH, []), 2)[0]
    found: list[Any] = []
    monkeypatch.setattr(DistTensor, "__torch_function__", lambda func, *rest: found.append(func))
    other = change_class(torch.randn(2, 3), Recorded)
    for call in DIRECT:
        eval(call, {"x": part})
        eval(call, {"x": other})
        assert found[-1] is Recorded.functions[-1], call
    assert len(found) == len(DIRECT)


def test_a_known_call_makes_few_calls() -> None:
    """The bounds are the numbers of this version; more calls make the eager mode slower."""

    def go() -> tuple[int, int]:
        x = mw.shard_tensor(torch.randn(4, 6), MESH, [])
        w = mw.shard_tensor(torch.randn(6, 6, requires_grad=True), MESH, [mw.Shard(1)])
        return count(lambda: x + F.linear(x, w)), count(lambda: x.unflatten(-1, (2, -1)))

    for reduced, unflattened in mw.simulate(go, 2):
        assert reduced <= 110
        assert unflattened <= 23


def test_a_call_with_floats_among_its_arguments_is_known_too() -> None:
    """Their values choose the plan without the dispatcher; torch's own calls are half of these."""

    def go() -> int:
        table = mw.shard_tensor(torch.randn(5, 3), MESH, [mw.Replicate(), mw.Shard(0)])
        ids = mw.shard_tensor(torch.tensor([[0, 1], [4, 2]]), MESH, [mw.Shard(0)])
        return count(lambda: F.embedding(ids, table))

    assert max(mw.simulate(go, 2)) <= 160


def test_a_result_that_is_an_operand_leaves_the_operand_unchanged() -> None:
    """If a plain operand is returned unchanged, a view of it is marked."""

    def go() -> bool:
        x = mw.shard_tensor(torch.ones(4), MESH, [mw.Replicate()])
        plain = torch.zeros(4)
        plain.add_(x)
        return type(plain) is Tensor

    assert all(mw.simulate(go, 2))


def test_a_step_on_parts_reads_no_gradient() -> None:
    """A gradient that was not read stays this rank's part; after the step it is a distributed tensor."""

    def go() -> tuple[bool, bool]:
        net = mw.shard_layer(nn.Linear(4, 4), MESH)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(mw.shard_tensor(torch.ones(2, 4), MESH, [mw.Shard(0)])).sum().backward()
        optimizer.step()
        with local_parts():
            kept = type(net.weight.grad) is Tensor
        return kept, isinstance(net.weight.grad, mw.DistTensor)

    assert mw.simulate(go, 2) == [(True, True)] * 2


def test_a_mark_on_a_whole_tensor_is_recorded_in_a_capture() -> None:
    """The mark looks like a view of the tensor in the capture."""
    x = torch.ones(4)

    def go() -> Any:
        with capturing(lambda op, args, shown: (op, args, shown())):
            return mw.shard_tensor(x, MESH, [mw.Shard(0)])

    for op, args, shown in mw.simulate(go, 2):
        assert op.mesh is MESH
        assert args[0] is x
        assert shown.data_ptr() == x.data_ptr()
        assert shown.shape == x.shape


def test_rules_get_symbolic_sizes_as_their_hints() -> None:
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(4, 3, dtype=torch.bfloat16), symbolic_context=dims)
    assert isinstance(x.shape[0], torch.SymInt)
    found = _hinted(x)
    assert [type(n) for n in found.shape] == [int, int]
    assert (tuple(found.shape), found.dtype, found.device.type) == ((4, 3), torch.bfloat16, "meta")
