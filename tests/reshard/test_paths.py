"""Conversion paths: readable texts, minimal costs, and no more bytes or steps than DTensor."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks import reshard as figure
from benchmarks._reshard_bound import lower_bound
from meshwright.comm import current_communicator, simulate
from meshwright.layout import ProcessMesh, Spec, parse_layout, parse_spec
from meshwright.reshard import (
    AllGather,
    ConversionPlan,
    Exchange,
    ReshardError,
    collective_between,
    execute,
    plan,
    received_share,
)

from .oracle import conversions

LINE = ProcessMesh([0, 1, 2, 3], ["x"])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
CUBE = ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["x", "y", "z"])

GOLDEN = """
    8@x, 4              -> 8, 4                   AllGather(x, dim 0)
    8, 4                -> 8@x, 4                 Slice(x, dim 0)
    8@x, 4              -> 8, 4@x                 AllToAll([:, @x])
    8@x@y, 4            -> 8, 4                   AllGather(x y, dim 0)
    8@x, 4@y            -> 8, 4                   AllGather(x, dim 0; y, dim 1)
    8@x, 4@y            -> 8@y, 4@x               AllToAll([@y, @x])
    8@x@y, 4            -> 8@y@x, 4               AllToAll([@y@x, :])
    8@x, 4              -> 8, 4@y                 Slice(y, dim 1) · AllGather(x, dim 0)
    8, 4 +x +y          -> 8, 4                   AllReduce(x y)
    8, 4 +x +y          -> 8@y@x, 4               ReduceScatter(y x, dim 0)
    8, 4 +x             -> 8@x@y, 4               ReduceScatter(x y, dim 0 over x)
    8, 4 +x             -> 8@y, 4                 Slice(y, dim 0) · AllReduce(x)
    8, 4 +x +y          -> 8@x, 4                 ReduceScatter(x, dim 0) · AllReduce(y)
    8@x, 4 +y           -> 8, 4                   AllReduce(y) · AllGather(x, dim 0)
    8@x, 4 +y           -> 8, 4@x                 ReduceScatter(y, dim 0) · AllToAll([:, @x])
    8, 4                -> 8, 4 +x                Fill(x)
    8@x, 4              -> 8, 4 +x                Pad(x, dim 0)
    8, 4 +x             -> 8, 4 +y                Slice(y, dim 0) · AllReduce(x) · Pad(y, dim 0)
    8, 4 +x:avg         -> 8, 4 +x                Scale(x to sum)
    8@x, 4              -> 8, 4 +x:avg            Pad(x, dim 0) · Scale(x to avg)
    8, 4 +x:max         -> 8@x, 4                 ReduceScatter(x, dim 0 max)
    8, 4 ~x             -> 8, 4                   Relabel([:, :])
    2 * 4@x, 4          -> 8, 4                   View(f32[2, 4@x, 4]) · AllGather(x, dim 1) · View(f32[8, 4])
    2@x * 4, 4          -> 8@x, 4                 Relabel([@x, :])
    2@x * 4, 4          -> 8@x@y, 4               View(f32[2@x, 4, 4]) · Slice(y, dim 1) · View(f32[8@x@y, 4])
"""
"""Conversions on a 2 × 2 mesh, and their paths."""

ROLES = {"8, 4": "whole", "8@x, 4": "cut", "8, 4@x": "cut", "8, 4 +x": "terms"}


@pytest.mark.parametrize(("src", "dst"), [(a, b) for a in ROLES for b in ROLES if a != b and ROLES[b] != "terms"])
def test_the_table_of_one_axis_has_the_bytes_of_the_steps(src, dst):
    have, need = (parse_spec(_spec(side), LINE) for side in (src, dst))
    kind = collective_between(ROLES[src], ROLES[dst])
    assert plan(have, need).busiest == (received_share(kind, LINE.size) * have.nbytes if kind else 0)


@pytest.mark.parametrize("line", GOLDEN.strip().splitlines(), ids=lambda line: " ".join(line.split()))
def test_golden_paths(line):
    src, rest = line.split("->")
    dst, path = rest.strip().split("   ", 1)
    assert repr(plan(*(parse_spec(_spec(side), SQUARE) for side in (src, dst)))) == path.strip()


def _spec(side: str) -> str:
    dims, sign, marks = side.strip().partition(" +") if "+" in side else side.strip().partition(" ~")
    return f"f32[{dims}]{sign}{marks}"


def test_the_figure_keeps_its_goal():
    found = figure.run(quick=True)
    assert found["ok"], found["details"]
    assert found["details"]["transitions"] >= 40


@settings(max_examples=80)
@given(conversions())
def test_conversions_without_terms_reach_the_bound_in_one_round(pair):
    src, dst = (x.with_layout(type(x.layout)(x.layout.dims)) for x in pair)
    made = plan(src, dst)
    if not any("View" in repr(step) for step in made.steps):
        assert made.rounds <= 1
        assert [made.received(r) for r in made.ranks] == [lower_bound(src, dst, r) for r in made.ranks]


@settings(max_examples=80)
@given(conversions())
def test_steps_lead_from_the_source_to_the_target(pair):
    made = plan(*pair)
    assert made.specs[0] is made.src
    assert made.specs[-1] is made.dst
    assert plan(*pair) is made
    assert hash(made.steps) == hash(tuple(made.steps))


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64"])
@pytest.mark.parametrize("mesh", [LINE, SQUARE, CUBE], ids=str)
def test_bounds_of_reductions(mesh, dtype):
    """On n ranks, a reduce-scatter of N bytes moves (n - 1) N / n bytes, and an all-reduce twice as many."""
    axes = mesh.dim_names
    pending, n = parse_spec(f"{dtype}[8, 4] " + " ".join(f"+{a}" for a in axes), mesh), mesh.size
    scattered, whole = (parse_spec(f"{dtype}{text}", mesh) for text in (f"[8@{'@'.join(axes)}, 4]", "[8, 4]"))
    for dst, times in ((scattered, 1), (whole, 2)):
        made = plan(pending, dst)
        assert [lower_bound(pending, dst, r) for r in made.ranks] == [times * (n - 1) * pending.nbytes // n] * n
        assert lower_bound(pending, dst) == made.busiest


@settings(max_examples=60)
@given(conversions())
def test_no_plan_receives_less_than_the_bound(pair):
    made = plan(*pair)
    assert lower_bound(*pair) <= made.busiest


def test_a_price_decides():
    src, dst = parse_spec("f32[8@x@y@z]", CUBE), parse_spec("f32[8]", CUBE)

    def dear_together(step, x):
        return len(step.group(x, 0)) ** 2

    assert repr(plan(src, dst)) == "AllGather(x y z, dim 0)"
    assert repr(plan(src, dst, dear_together)) == "AllGather(z, dim 0) · AllGather(y, dim 0) · AllGather(x, dim 0)"


def test_a_reversed_sharding_still_gathers_in_one_step():
    made = plan(parse_spec("f32[8@z@x, 3]", CUBE), parse_spec("f32[8, 3]", CUBE))
    assert made.steps == (AllGather((("z", 0), ("x", 0))),)
    assert made.steps[0].group(made.src, 0) == (0, 4, 1, 5)


def sent(made: ConversionPlan) -> tuple[Counter[int], int]:
    """Return the elements that each rank sends in exchanges, and the bytes that cross."""

    class Spy:
        def __init__(self, communicator):
            self.communicator, self.rank = communicator, communicator.rank
            self.elements = 0

        def exchange(self, sends, receives, group):
            self.elements += sum(x.numel() for _, x in sends)
            return self.communicator.exchange(sends, receives, group)

        def __getattr__(self, name):
            return getattr(self.communicator, name)

    def program():
        spy = Spy(current_communicator())
        execute(made, torch.zeros(made.src.local_shape(spy.rank)), spy)
        return spy.elements

    found = simulate(program, max(made.ranks) + 1)
    crossing = sum(
        step.received(x, rank) for step, x in made.walk() if isinstance(step, Exchange) for rank in made.ranks
    )
    return Counter({rank: n for rank, n in enumerate(found) if n}), crossing


RIGHT = ProcessMesh([[4, 5], [6, 7]], ["a", "b"])
ACROSS = [
    ("8@x, 6", SQUARE, "8@a, 6", RIGHT),
    ("8@x, 6@y", SQUARE, "8, 6", RIGHT),
    ("8, 6", SQUARE, "8, 6", RIGHT),
    ("8, 6 +x", SQUARE, "8, 6@b", RIGHT),
    ("8@x@y, 6", SQUARE, "8@a, 6 +b", RIGHT),
    ("8@x, 6", LINE, "8@a, 6", ProcessMesh([4, 5, 6], ["a"])),
    ("7, 5@x", ProcessMesh([0, 1, 2], ["x"]), "7@a, 5", RIGHT),
]


@pytest.mark.parametrize(("src", "here", "dst", "there"), ACROSS, ids=str)
def test_every_element_crosses_once(src, here, dst, there):
    made = plan(parse_spec(_spec(src), here), parse_spec(_spec(dst), there))
    elements, crossing = sent(made)
    assert sum(elements.values()) == made.src.shape.numel()
    assert crossing == made.src.nbytes


def test_replicas_share_the_sending():
    made = plan(parse_spec("f32[8, 6]", SQUARE), parse_spec("f32[8@a@b, 6]", RIGHT))
    assert sent(made)[0] == {0: 12, 1: 12, 2: 12, 3: 12}


def test_elements_that_a_rank_has_are_not_sent():
    wide, narrow = ProcessMesh([0, 1, 2, 3], ["x"]), ProcessMesh([[0, 1], [2, 3]], ["a", "b"])
    made = plan(parse_spec("f32[8@x]", wide), parse_spec("f32[8@a@b]", narrow))
    assert made.rounds == 0
    assert sent(made)[1] == 0
    back = plan(parse_spec("f32[8]", ProcessMesh([0, 1], ["x"])), parse_spec("f32[8]", ProcessMesh([1, 2], ["x"])))
    assert {rank: back.received(rank) for rank in back.ranks} == {0: 0, 1: 0, 2: 32}


def test_large_meshes_are_planned_quickly():
    mesh = ProcessMesh(torch.arange(16384).reshape(64, 16, 16).numpy(), ["x", "y", "z"])
    made = plan(parse_spec("f32[4096@x, 4096@y] +z", mesh), parse_spec("f32[4096@z, 4096@x]", mesh))
    assert made.rounds == 2
    assert made.received(5) > 0


WIDE = ProcessMesh(torch.arange(132).reshape(3, 11, 4).numpy(), ["x", "y", "z"])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("40@y, 6", "40, 6"),
        ("40@y, 6", "40@z, 6@x"),
        ("40, 6 +y", "40@x, 6"),
        ("40, 6 +y +x", "40, 6@z"),
        ("40@z@y, 6", "40, 6 +x"),
        ("40@x, 6 +z", "40@z, 6@x"),
    ],
)
def test_a_few_ranks_of_a_large_mesh_decide_the_plan(monkeypatch, src, dst):
    """The plan chosen from a few ranks is the plan chosen from all ranks."""
    module = import_module("meshwright.reshard._plan")
    specs = [parse_spec(_spec(side), WIDE) for side in (src, dst)]
    few = module._plan.__wrapped__(*specs, None)
    assert max(few.received(r) for r in module._compared_ranks(few)) == few.busiest
    monkeypatch.setattr(module, "SMALL_MESH", 1000)
    assert module._plan.__wrapped__(*specs, None).steps == few.steps


def symbolic(hinted: int) -> torch.SymInt:
    shapes = ShapeEnv()
    return shapes.create_symintnode(shapes.create_symbol(hinted, source=ConstantSource("n")), hint=hinted)


@pytest.mark.parametrize(
    ("src", "dst"),
    [("[@x, :]", "[:, :]"), ("[:, @x]", "[:, :]"), ("[:, :] +x", "[@x, :]"), ("[:, :]", "[@x, :]")],
)
def test_a_plan_of_a_symbolic_size_is_that_of_its_hint(src, dst):
    n = symbolic(8)
    specs = [Spec(LINE, parse_layout(text), (n, 4), torch.float32) for text in (src, dst)]
    made = plan(*specs)
    assert made.steps == plan(*(spec.concrete for spec in specs)).steps
    assert made.src is specs[0]
    assert made.dst is specs[1]
    assert made.specs[-1] is specs[1]


def test_a_step_that_names_sizes_is_refused_for_a_symbolic_one():
    n = symbolic(8)
    src = Spec(LINE, parse_layout("[:, 2 * 4@x]"), (n, 8), torch.float32)
    with pytest.raises(ReshardError, match="depends on sizes"):
        plan(src, src.with_layout(parse_layout("[:, @x]")))


def test_a_symbolic_tensor_is_moved_to_another_mesh():
    n, there = symbolic(8), ProcessMesh([4, 5], ["a"])
    src = Spec(LINE, parse_layout("[@x, :]"), (n, 4), torch.float32)
    dst = Spec(there, parse_layout("[@a, :]"), (n, 4), torch.float32)
    assert plan(src, dst).steps == (Exchange(dst),)


@pytest.mark.parametrize("shape", ["f64[2 * {0}@x] -> f64[3 * {1}@x]", "f64[0 * 2@x] -> f64[3 * 0@x]"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bound_without_common_factors_is_at_most_the_received_bytes(shape, ranks):
    mesh = ProcessMesh(range(ranks), ["x"])
    src, dst = (parse_spec(side, mesh) for side in shape.format(6, 4).split(" -> "))
    made = plan(src, dst)
    assert all(0 <= lower_bound(src, dst, r) <= made.received(r) for r in made.ranks)


def test_a_rank_without_messages_names_the_device_of_an_exchange():
    """Processes choose the transport by the device; the rank that does not must not open another one."""
    here, there = ProcessMesh([0, 1, 2], ["x"]), ProcessMesh([1, 0, 2], ["x"])
    made = plan(parse_spec("f32[3@x]", here), parse_spec("f32[3@x]", there))
    devices = {}

    class Spy:
        def __init__(self, communicator):
            self.communicator, self.rank = communicator, communicator.rank

        def exchange(self, sends, receives, group):
            devices[self.rank] = [x.device for _, x in sends] + [device for *_, device in receives]
            return self.communicator.exchange(sends, receives, group)

        def __getattr__(self, name):
            return getattr(self.communicator, name)

    def program():
        rank = current_communicator().rank
        return execute(made, torch.tensor([float(rank)]), Spy(current_communicator())).item()

    assert simulate(program, 3) == [1.0, 0.0, 2.0]
    assert devices == {rank: [torch.device("cpu")] * 2 for rank in range(3)}
