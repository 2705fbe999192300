"""Live memory: counted by hand on small programs, and compared with real tensors on a training step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.graph import (
    Conversion,
    Input,
    Node,
    Origin,
    Program,
    ProgramError,
    Value,
    live_memory,
    map_values,
    runner,
    strides_of,
    verify,
    work_of,
)
from meshwright.graph.analysis.live_memory import alias_pairs, read_last
from meshwright.graph.execution.fx_runner import step_function
from meshwright.passes import InPlace
from meshwright.tensor import local_parts, map_tensors, operators_recorded, tensors_in
from tests.passes.random_programs import program
from tests.passes.steps import copied, llama_step

aten = torch.ops.aten


def test_a_value_lives_until_its_last_read() -> None:
    def build(add: Any, x: Value) -> Any:
        a = add(aten.exp.default, x)  # 16
        b = add(aten.exp.default, a)  # 16 + 16
        c = add(aten.sum.default, b)  # a is gone: 16 + 4
        return c, ()

    live = live_memory(program(build, (4,)))
    assert (live.held, live.live) == (16, (32, 48, 36))
    assert live.at == 1
    assert [v.name for v in live.alive()] == ["exp", "exp_1"]
    assert str(live) == "48 bytes at aten.exp.default (forward), node 1 of 3: 16 of inputs, 32 of values"


def test_views_share_memory_and_keep_it_alive() -> None:
    def build(add: Any, x: Value) -> Any:
        a = add(aten.exp.default, x)
        head = add(aten.slice.Tensor, a, 0, 0, 1)
        flat = add(aten._unsafe_view.default, head, [1])
        b = add(aten.exp.default, x)
        return (add(aten.add.Tensor, flat, flat), b), ()

    live = live_memory(program(build, (4,)))
    assert live.live == (32, 32, 32, 48, 52)


def test_memory_lives_until_the_last_read_of_any_view() -> None:
    def build(add: Any, x: Value) -> Any:
        a = add(aten.exp.default, x)  # of an input
        b = add(aten.sin.default, a)  # the view of `a` is read after it
        c = add(aten.slice.Tensor, a, 0, 0, 1)
        d = add(aten.cos.default, c)
        e = add(aten.tan.default, d)  # `d` is a result
        return (add(aten.neg.default, b), d, e), ()

    found = read_last(program(build, (4,)))
    assert sorted(str(n.op) for n in found) == ["aten.cos.default", "aten.neg.default"]


def test_released_inputs_are_freed() -> None:
    def build(add: Any, x: Value, y: Value) -> Any:
        return add(aten.exp.default, add(aten.mul.Tensor, x, y)), ()

    made = program(build, (4,), (4,))
    assert live_memory(made).live == (48, 64)
    assert live_memory(made, released=[made.inputs[0].value]).live == (48, 48)


def test_overwriting_takes_no_memory() -> None:
    def build(add: Any, x: Value) -> Any:
        y = add(aten.add_.Tensor, x, 1)
        return (), [(x, y)]

    assert live_memory(verify(program(build, (4,)))).live == (16,)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda add, x: (add(aten.exp.default, x) and add(aten.add_.Tensor, x, 1) and x, ()), "does not write it back"),
        (lambda add, x: (_late(add, x), [(x, x)]), "read after its memory was overwritten"),
        (lambda add, x: ((), [(x, add(aten.add_.Tensor, x, add(aten.neg.default, add(aten.t.default, x))))]), None),
        (lambda add, x: ((), [(x, add(aten.add_.Tensor, x, add(aten.t.default, x)))]), "may share the memory of"),
    ],
)
def test_overwritten_values_are_not_read_again(build: Any, why: str | None) -> None:
    made = program(build, (2, 2))
    if why is None:
        verify(made)
        return
    with pytest.raises(ProgramError, match=why):
        verify(made)


def _late(add: Any, x: Value) -> Value:
    view = add(aten.t.default, x)
    add(aten.add_.Tensor, x, 1)
    return add(aten.exp.default, view)


class Meter(TorchDispatchMode):
    """A counter of the bytes of living storages after each operator, and of their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out

    def see(self, out: Any) -> None:
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self._add(t)

    def _add(self, t: Tensor) -> None:
        key, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        self.live += size if not self.held.get(key) else 0
        self.held[key] = self.held.get(key, 0) + 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(t, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.held[key] -= 1
        self.live -= size if not self.held[key] else 0


def test_the_count_equals_the_memory_of_a_run() -> None:
    step = llama_step((1, 1, 1))
    one, inputs = step.programs[0], step.inputs[0]

    def measure() -> tuple[int, int]:
        given, meter = [copied(x) for x in inputs], Meter()
        with local_parts(), torch.no_grad(), meter:
            meter.see(given)
            before = meter.live
            out = runner(one)(*given)
        del out
        return before, meter.peak

    live = live_memory(one)
    assert (live.held, live.peak) == mw.simulate(measure, 1)[0]


def test_the_sums_of_a_step_are_those_of_its_matrices() -> None:
    step = llama_step((1, 1, 1))
    found = sum(work_of(n).flops for n in step.programs[0].nodes if "mm" in str(n.op))
    weights = sum(
        i.value.nbytes // 4 for i in step.programs[0].inputs if i.role == "parameter" and len(i.value.shape) == 2
    )
    embedding = 32 * 32
    assert found == 6 * 16 * 8 * (weights - embedding)


def test_predicted_strides_are_those_of_real_tensors() -> None:
    step = llama_step((1, 1, 1))
    one, inputs = step.programs[0], step.inputs[0]
    expected = strides_of(one)

    def measure() -> dict[Value, Any]:
        known = {i.value: x for i, x in zip(one.inputs, map(copied, inputs), strict=True)}
        with local_parts(), torch.no_grad():
            for node in one.nodes:
                args, kwargs = map_values(known.__getitem__, (node.args, dict(node.kwargs)))
                op = step_function(node.op) if isinstance(node.op, Conversion) else node.op
                out = op(*args, **kwargs)
                known.update(zip(node.outs, out if isinstance(out, (list, tuple)) else [out], strict=True))
        return {v: x.stride() for v, x in known.items() if isinstance(x, Tensor)}

    def told(v: Value, strides: Any) -> list[int]:
        return [step for n, step in zip(v.shape, strides, strict=True) if n != 1]

    found = mw.simulate(measure, 1)[0]
    assert {v: told(v, s) for v, s in found.items()} == {v: told(v, s) for v, s in expected.items()}


def test_an_impossible_view_of_contiguous_inputs_has_unknown_strides() -> None:
    """A part of a pipeline gets values in the memory order of another part, such as transposed ones."""
    x, t, v, w = (
        Value(name, shape, torch.float32, "cpu")
        for name, shape in (("x", (4, 3, 2)), ("t", (4, 2, 3)), ("v", (8, 3)), ("w", (8, 3)))
    )
    nodes = (
        Node(torch.ops.aten.transpose.int, (x, 1, 2), {}, t, Origin("forward")),
        Node(torch.ops.aten.view.default, (t, [8, 3]), {}, v, Origin("forward")),
        Node(torch.ops.aten.neg.default, (v,), {}, w, Origin("forward")),
    )
    program = Program((Input(x, "saved", "x", None, x),), nodes, w)
    assert strides_of(program) == {x: (6, 2, 1), t: (6, 1, 2)}
    assert InPlace()(program).text() == program.text()


_X = torch.randn(3, 4)
LOOKS = [
    lambda: aten.unbind.int(_X),
    lambda: aten.split.Tensor(_X, 2),
    lambda: aten.unsafe_chunk.default(_X, 2),
    lambda: aten.tensor_split.sections(_X, 2, 1),
    lambda: aten.atleast_3d.default(_X),
    lambda: aten.broadcast_tensors.default([_X, _X[:, :1]]),
    lambda: aten.meshgrid.indexing([_X[0], _X[1]], indexing="ij"),
    lambda: aten.sum_to_size.default(_X, [3, 4]),
    lambda: aten.conj_physical.default(_X),
    lambda: aten.type_as.default(_X, _X),
    lambda: aten.einsum.default("ij->ji", [_X]),
    lambda: aten.dropout.default(_X.view(4, 3), 0.5, False),
    lambda: aten.feature_dropout.default(_X, 0.0, True),
    lambda: aten.as_strided.default(_X, [2], [1]),
    lambda: aten.detach.default(_X),
]  # fmt: skip


@pytest.mark.parametrize("call", LOOKS)
def test_results_in_the_memory_of_an_argument_are_known(call: Any) -> None:
    shared: list[bool] = []

    def note(op: Any, args: Any, kwargs: Any, out: Any) -> None:
        names: dict[Value, Tensor] = {}

        def named(x: Tensor) -> Value:
            v = Value(f"v{len(names)}", tuple(x.shape), x.dtype)
            names[v] = x
            return v

        told = list(alias_pairs(Node(op, map_tensors(named, args), kwargs, map_tensors(named, out), Origin())))
        there = {(id(names[v]), id(names[x])) for v, x in told}
        pairs = [(y, x) for y in tensors_in(out) for x in tensors_in(args)]
        shared.extend((id(y), id(x)) in there for y, x in pairs if same_memory(y, x))

    with operators_recorded(note):
        call()
    assert shared
    assert all(shared)


def same_memory(y: Tensor, x: Tensor) -> bool:
    return y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_dropout_and_einsum_have_memory_of_their_own() -> None:
    x, y = (Value(n, (4,), torch.float32) for n in "xy")
    assert not list(alias_pairs(Node(aten.dropout.default, (x, 0.5, True), {}, y, Origin())))
    assert not list(alias_pairs(Node(aten.einsum.default, ("i,i->i", [x, x]), {}, y, Origin())))
