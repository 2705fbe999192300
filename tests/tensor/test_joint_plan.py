"""A joint plan gathers and reduces several tensors as conversions of each tensor do, for any shapes and axes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.layout import Layout, Spec
from meshwright.tensor.conversion.joint_plan import gathered_axes, joint_plan

MESH = mw.ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["node", "dp", "tp"])
AXES = st.sampled_from([("dp",), ("node", "dp"), ("dp", "node"), ("node", "dp", "tp")])


@st.composite
def tensors(draw: st.DrawFn, axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Return the specs of the part and of the whole tensor; an axis that is not gathered may shard any dim."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dims: list[tuple[str, ...]] = [()] * len(shape)
    if "tp" not in axes and draw(st.booleans()):
        dims[draw(st.integers(0, len(shape) - 1))] = ("tp",)
    whole = Layout(tuple(dims), varying=axes)
    at = draw(st.integers(0, len(shape) - 1))
    dims[at] = (*dims[at], *axes)
    return Spec(MESH, Layout(tuple(dims)), shape, torch.float64), Spec(MESH, whole, shape, torch.float64)


CASES = AXES.flatmap(lambda axes: st.tuples(st.just(axes), st.lists(tensors(axes), min_size=1, max_size=4)))


def part_of(x: Tensor, spec: Spec, rank: int) -> Tensor:
    for dim, (start, length) in enumerate(spec.local_ranges(rank)):
        x = x.narrow(dim, start, length)
    return x


@settings(max_examples=60, deadline=None)
@given(CASES, st.integers(0, 7))
def test_all_tensors_are_gathered_and_reduced(case: tuple[tuple[str, ...], list[tuple[Spec, Spec]]], rank: int) -> None:
    axes, specs = case
    parts, wholes = tuple(part for part, _ in specs), tuple(whole for _, whole in specs)
    assert all(gathered_axes(part, whole) == axes for part, whole in specs)
    generator, group = torch.Generator().manual_seed(0), MESH.group(rank, axes)
    full = [torch.randn(spec.shape, generator=generator, dtype=torch.float64) for spec in parts]
    plans = {r: joint_plan(parts, wholes, r) for r in group}
    buffers = [plans[r].pack([part_of(x, spec, r) for x, spec in zip(full, parts, strict=True)]) for r in group]
    assert len({buffer.shape for buffer in buffers}) == 1

    gathered = plans[rank].unpack(torch.cat(buffers))
    for x, spec, found in zip(full, wholes, gathered, strict=True):
        assert torch.equal(found, part_of(x, spec, rank))

    sums = sum(
        plans[r].pack_terms([part_of(x * r, spec, r) for x, spec in zip(full, wholes, strict=True)]) for r in group
    )
    assert isinstance(sums, Tensor)
    own = sums.view(len(group), -1)[group.index(rank)]
    for x, spec, found in zip(full, parts, plans[rank].unpack_sums(own), strict=True):
        torch.testing.assert_close(found, part_of(x * sum(group), spec, rank))


def test_the_steps_are_one_call_each() -> None:
    specs = [Spec(MESH, Layout((("node", "dp"), ("tp",))), (5, 6), torch.float32)]
    wholes = [Spec(MESH, Layout(((), ("tp",)), varying=("node", "dp")), (5, 6), torch.float32)]
    plan = joint_plan(tuple(specs), tuple(wholes), 3)
    assert repr(plan.gather) == "AllGather(node dp, dim 0)"
    assert repr(plan.reduce) == "ReduceScatter(node dp, dim 0)"


def test_other_conversions_are_not_plain_gathers() -> None:
    def spec(*dims: tuple[str, ...], strides: tuple[int, ...] | None = None) -> Spec:
        return Spec(MESH, Layout(dims), (4, 6), torch.float32, strides)

    whole = spec((), ())
    assert gathered_axes(spec(("dp",), ()), whole) == ("dp",)
    assert not gathered_axes(whole, whole)
    assert not gathered_axes(spec(("dp",), ("tp",)), whole)
    assert not gathered_axes(spec(("dp", "tp"), ()), spec(("tp",), ()))
    assert not gathered_axes(spec(("dp",), (), strides=(1, 4)), whole)
