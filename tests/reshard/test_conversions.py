"""A conversion changes the layout of a tensor, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings

from meshwright.layout import Layout, ProcessMesh, Spec, parse_spec
from meshwright.reshard import ConversionPlan, ReshardError, execute, plan, transposed

from .oracle import carry_out, conversions, glue, take_apart, whole

LINE = ProcessMesh([0, 1, 2], ["x"])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
TYPES = ("[5@x, 4]", "[5, 4@x]", "[5, 4] +x", "[5, 4]", "[5, 4] ~x")


def check(made: ConversionPlan) -> None:
    """Check that the whole is unchanged, parts have their shapes, inputs are not written, and bytes are as planned."""
    x = whole(tuple(made.src.shape), made.src.dtype)
    parts = take_apart(made.src, x)
    before = {rank: part.clone() for rank, part in parts.items()}
    out, seen = carry_out(made, parts)
    for rank, result in out.items():
        assert tuple(result.shape) == made.dst.local_shape(rank)
        assert result.dtype == made.dst.dtype
        assert seen[rank].total_received == made.received(rank), f"rank {rank} of {made}"
        assert seen[rank].total_calls <= made.rounds
        own = parts.get(rank)
        if own is not None:
            assert torch.equal(own, before[rank])
            assert result is own or not result.numel() or result.data_ptr() != own.data_ptr()
        assert result is own or result.is_contiguous()
    torch.testing.assert_close(glue(made.dst, out), x)


@settings(max_examples=150)
@given(conversions())
def test_the_whole_tensor_stays_the_same(pair):
    check(plan(*pair))


@settings(max_examples=100)
@given(conversions(across=True))
def test_the_whole_tensor_stays_the_same_on_another_mesh(pair):
    check(plan(*pair))


@settings(max_examples=30)
@given(conversions())
def test_a_price_changes_the_path_and_not_the_result(pair):
    check(plan(*pair, price=lambda step, x: -step.rounds(x)))


@pytest.mark.parametrize("mesh", [LINE, SQUARE], ids=str)
@pytest.mark.parametrize("dst", TYPES)
@pytest.mark.parametrize("src", TYPES)
def test_every_type_converts_to_every_other(src, dst, mesh):
    check(plan(parse_spec("f64" + src, mesh), parse_spec("f64" + dst, mesh)))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize(
    "other", ["[5@x, 4]", "[5, 4]", "[5, 4] +x", "[5, 4] +x:max", "[5, 4] +x:avg", "[5, 4] +x:prod"]
)
def test_every_operation(op, other):
    here, there = parse_spec(f"f64[5, 4] +x:{op}", LINE), parse_spec("f64" + other, LINE)
    check(plan(here, there))
    check(plan(there, here))


ROLES = ("R", "S0", "S1", "sum", "avg", "max", "min", "prod")


def laid(mesh: ProcessMesh, *roles: str) -> Layout:
    """Return the layout in which each axis of the mesh has the given role."""
    cuts: list[tuple[str, ...]] = [(), ()]
    partial: list[tuple[str, str]] = []
    for axis, role in zip(mesh.dim_names, roles, strict=True):
        if role.startswith("S"):
            cuts[int(role[1])] += (axis,)
        elif role != "R":
            partial.append((axis, role))
    return Layout(tuple(cuts), tuple(partial))


@pytest.mark.parametrize("first", ROLES)
def test_two_axes_of_any_types(first):
    """Every pair of axis types converts to every other pair; each test takes an eighth of all cases.

    Some operations do not commute: the terms of the axis that comes first in the layout are reduced first.
    """
    layouts = [laid(SQUARE, *roles) for roles in product(ROLES, ROLES)]
    specs = [Spec(SQUARE, layout, (5, 4), torch.float64) for layout in layouts]
    for at, (src, dst) in enumerate(product(specs, specs)):
        mixed = len({op for spec in (src, dst) for _, op in spec.layout.partial}) > 1
        if src.layout == laid(SQUARE, first, "R") or (mixed and (at * 7) % 64 == ROLES.index(first)):
            check(plan(src, dst))


@pytest.mark.parametrize(("x", "y"), [p for p in product(ROLES[3:], ROLES[3:]) if p[0] != p[1]])
def test_terms_of_two_operations_keep_the_value(x, y):
    """The neutral terms of a product are ones, which must be neither summed nor scaled."""
    dst = Spec(SQUARE, laid(SQUARE, x, y), (5, 4), torch.float64)
    for src in ("[5, 4]", "[5@y, 4]", "[5@x, 4@y]"):
        check(plan(parse_spec("f64" + src, SQUARE), dst))
        check(plan(dst, parse_spec("f64" + src, SQUARE)))


CUBE = ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["x", "y", "z"])


def test_any_shardings_of_three_axes():
    """The boxes of a conversion begin and end anywhere in the part of a rank."""
    cuts = [laid(CUBE, *roles) for roles in product(("R", "S0", "S1"), repeat=3)]
    for at, (src, dst) in enumerate(product(cuts, cuts)):
        if at % 5 == 0:
            check(plan(*(Spec(CUBE, layout, (9, 8), torch.int64) for layout in (src, dst))))


def inner(spec: Spec, x: dict[int, torch.Tensor], y: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return <x, y> over the ranks; a replicated value with its gradient counts once."""
    known = set(spec.layout.axes)
    copies = 1
    for axis, n in spec.mesh.sizes.items():
        copies *= 1 if axis in known else n
    return sum(((x[r] * y[r]).sum() for r in spec.mesh.process_ids), torch.zeros(())) / copies


@settings(max_examples=100)
@given(conversions(linear=True))
def test_the_transpose_is_the_conversion_of_the_duals(pair):
    src, dst = pair
    back = transposed(src, dst)
    assert back == (dst.dual(), src.dual())
    x, y = take_apart(src, whole(tuple(src.shape), src.dtype)), take_apart(back[0], whole(tuple(src.shape), src.dtype))
    forward, backward = carry_out(plan(src, dst), x)[0], carry_out(plan(*back), y)[0]
    torch.testing.assert_close(inner(dst, forward, y), inner(src, x, backward))


def test_a_relabel_returns_the_tensor_itself():
    made = plan(parse_spec("f32[4] ~x", LINE), parse_spec("f32[4]", LINE))
    x = torch.ones(4)
    assert all(out is x for out in carry_out(made, dict.fromkeys(range(3), x))[0].values() if out.numel())
    assert made.rounds == 0


@pytest.mark.parametrize("src", ["[6@x, 4]", "[6, 4] +x", "[6, 4]"])
@pytest.mark.parametrize("dst", ["[6, 4@x]", "[6, 4] +x", "[6, 4]"])
def test_meta_tensors_are_converted(src, dst):
    here, there = parse_spec("f32" + src, LINE), parse_spec("f32" + dst, LINE)
    parts = {r: torch.empty(here.local_shape(r), device="meta") for r in range(3)}
    out = carry_out(plan(here, there), parts)[0]
    assert all(out[r].is_meta and tuple(out[r].shape) == there.local_shape(r) for r in range(3))


def test_other_shapes_and_dtypes_are_refused():
    here = parse_spec("f32[4@x]", LINE)
    with pytest.raises(ReshardError, match="keeps every element"):
        plan(here, parse_spec("f32[5]", LINE))
    with pytest.raises(ReshardError, match="does not change values"):
        plan(here, parse_spec("f64[4]", LINE))


def test_a_part_that_does_not_fit_the_spec_is_refused():
    class Rank0:
        rank = 0

    made = plan(parse_spec("f32[4@x]", LINE), Spec(LINE, Layout(((),)), (4,), torch.float32))
    with pytest.raises(ReshardError, match=r"shape \(3,\).*\n.*shape \(2,\)"):
        execute(made, torch.ones(3), Rank0())
    with pytest.raises(ReshardError, match="float64"):
        execute(made, torch.ones(2, dtype=torch.float64), Rank0())
