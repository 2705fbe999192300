"""The text of a layout, spec or dtype parses back to the same object."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from meshwright.layout import (
    Layout,
    LayoutError,
    ProcessMesh,
    Product,
    dense_strides,
    parse_layout,
    parse_spec,
    read_dtype,
    write_dtype,
)

from .strategies import specs

MESH = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]


@given(specs())
def test_a_spec_parses_back(spec):
    assert parse_spec(repr(spec), spec.mesh) is spec
    assert parse_spec(f"  {repr(spec).replace(', ', ' ,  ')} ", spec.mesh) is spec


@given(specs())
def test_a_layout_parses_back(spec):
    assert parse_layout(repr(spec.layout)) == spec.layout
    assert parse_layout(repr(spec)) == spec.layout


@given(specs(), st.data())
@settings(max_examples=100)
def test_other_text_is_refused_or_is_a_layout(spec, data):
    text = list(repr(spec))
    at = data.draw(st.integers(0, len(text)))
    text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.text(alphabet="[]@,:+~* xy13f\n", max_size=3))
    try:
        found = parse_layout("".join(text))
    except LayoutError:
        return
    assert parse_layout(repr(found)) == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_parses_back(dtype):
    assert read_dtype(write_dtype(dtype)) is dtype
    assert read_dtype(str(dtype).removeprefix("torch.")) is dtype


def test_short_names():
    text = "f64 f32 f16 bf16 i64 i32 i16 i8 u8 b c64 c128"
    assert " ".join(write_dtype(read_dtype(name)) for name in text.split()) == text
    assert read_dtype("i8") is torch.int8
    for name in ("f31", "tensor", ""):
        with pytest.raises(LayoutError, match="no such dtype"):
            read_dtype(name)


def test_the_form():
    spec = parse_spec("f32[8@x@y, 12, 2 * 3] ", MESH)
    assert repr(spec) == "f32[8@x@y, 12, 2 * 3]"
    assert spec.layout == Layout((("x", "y"), (), Product(((2, ()), (3, ())))))
    assert tuple(spec.shape) == (8, 12, 6)
    assert repr(parse_layout("[:, @x, 3 * 4@y]")) == "[:, @x, 3 * 4@y]"
    assert parse_layout("[] +x:max +y ~z") == Layout((), (("x", "max"), ("y", "sum")), ("z",))
    assert repr(parse_spec("i64[]", MESH)) == "i64[]"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8@x", "a layout is"),
        ("f32[8@x", "a layout is"),
        ("f32[8@x] x", "a layout is"),
        ("f32[8@x,]", "this is not a dim"),
        ("f32[eight]", "this is not a dim"),
        ("f32[3 *]", "this is not a dim"),
        ("f32[3 * @x]", "every factor of a product needs its size"),
        ("f32[@x, 4]", "the global size of every dim"),
        ("f32[:, 4]", "the global size of every dim"),
        ("[4]", "no such dtype"),
        ("f32[4@x] +x", "one role"),
        ("f32[4@z]", "no axis 'z'"),
    ],
)
def test_invalid_spec_text_is_refused(text, why):
    with pytest.raises(LayoutError, match=why.replace("(", r"\(")):
        parse_spec(text, MESH)


@given(specs(), st.randoms(use_true_random=False))
def test_a_spec_with_strides_parses_back(spec, random):
    order = list(range(spec.ndim))
    random.shuffle(order)
    strided = spec.with_strides(dense_strides(spec.shape, order))
    assert parse_spec(repr(strided), spec.mesh) is strided


def test_strides_are_written_after_the_layout():
    spec = parse_spec("f32[8@x, 4] strides (1, 8)", MESH)
    assert spec.strides == (1, 8)
    assert spec.order == (1, 0)
    assert repr(spec) == "f32[8@x, 4] strides (1, 8)"
    assert parse_spec("f32[8@x, 4] strides (4, 1)", MESH).strides is None
