"""Every step's text parses back to the step, for all names of axes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshwright.layout import PARTIAL_OPS, ProcessMesh
from meshwright.reshard import (
    AllGather,
    AllReduce,
    AllToAll,
    ConversionStep,
    Exchange,
    Fill,
    Pad,
    ReduceScatter,
    Relabel,
    ReshardError,
    Scale,
    Slice,
    View,
    parse_step,
)

from .oracle import conversions

NAMES = ("x", "dp", "over", "to", "dim", "max", "sum", "on", "of_2")
AXES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(tuple)
PLACES = AXES.flatmap(lambda axes: st.tuples(*[st.tuples(st.just(a), st.integers(0, 3)) for a in axes]))
OP = st.sampled_from(PARTIAL_OPS)

KINDS: dict[type[ConversionStep], Callable[[Any], Any]] = {
    Slice: lambda spec: st.builds(Slice, PLACES),
    AllGather: lambda spec: st.builds(AllGather, PLACES),
    ReduceScatter: lambda spec: st.builds(ReduceScatter, AXES, PLACES, OP),
    AllReduce: lambda spec: st.builds(AllReduce, AXES, OP),
    AllToAll: lambda spec: st.builds(
        AllToAll, AXES.flatmap(lambda axes: st.permutations([axes, (), ()]).map(lambda dims: tuple(map(tuple, dims))))
    ),
    Fill: lambda spec: st.builds(Fill, AXES, OP),
    Pad: lambda spec: st.builds(Pad, PLACES),
    Scale: lambda spec: st.builds(Scale, AXES, OP),
    Relabel: lambda spec: st.just(Relabel(spec.layout)),
    View: lambda spec: st.just(View(spec)),
    Exchange: lambda spec: st.just(Exchange(spec)),
}


def test_all_kinds_of_steps_are_tested() -> None:
    package = import_module("meshwright.reshard")
    public = [getattr(package, name) for name in package.__all__]
    steps = {x for x in public if isinstance(x, type) and issubclass(x, ConversionStep)}
    assert steps == {ConversionStep, *KINDS}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_text_of_a_step_parses_back(data: st.DataObject) -> None:
    _, spec = data.draw(conversions(across=True))
    step = data.draw(KINDS[data.draw(st.sampled_from(list(KINDS)))](spec))
    assert parse_step(repr(step), spec.mesh) == step


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_other_text_is_refused_or_is_a_step(data: st.DataObject) -> None:
    _, spec = data.draw(conversions(across=True))
    step = data.draw(KINDS[data.draw(st.sampled_from(list(KINDS)))](spec))
    text = list(repr(step))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.text(alphabet="()[],;:@+~ x1odim\n", max_size=3))
    try:
        found = parse_step("".join(text), spec.mesh)
    except ReshardError:
        return
    assert parse_step(repr(found), spec.mesh) == found


MESH = ProcessMesh([2, 3], ["x"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("AllReduce", "steps are Slice"),
        ("Teleport(x)", "steps are Slice"),
        ("AllReduce()", "no axis"),
        ("AllReduce(x, y)", "'x,' is not the name"),
        ("AllGather(x, dim 0 max)", "'max'"),
        ("ReduceScatter(x, dim 0 fast)", "'fast' is not a reduction"),
        ("AllToAll([@x] +y)", "sharded dims only"),
        ("Relabel([@x@x])", "one role"),
        ("Scale(x)", "not a reduction"),
        ("View(f32[8@x])", "parse_step(text, mesh)"),
    ],
)
def test_invalid_step_text_is_reported(text: str, why: str) -> None:
    with pytest.raises(ReshardError) as caught:
        parse_step(text)
    assert why in caught.value.why


def test_an_exchange_names_its_mesh() -> None:
    with pytest.raises(ReshardError, match="the given mesh is"):
        parse_step("Exchange(f32[8@x] on ProcessMesh([x=2]))", MESH)
    text = "Exchange(f32[8@x] on ProcessMesh([x=2], ranks=[2, 3]))"
    assert repr(parse_step(text, MESH)) == text


def test_a_lone_name_is_an_axis_even_if_it_is_an_operation() -> None:
    assert parse_step("AllReduce(max)") == AllReduce(("max",))
    assert parse_step("AllReduce(max max)") == AllReduce(("max",), "max")
    assert repr(AllReduce(("max",))) == "AllReduce(max sum)"
