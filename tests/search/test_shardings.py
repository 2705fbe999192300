"""Shardings of operators: the best of all combinations; memory has a price; Megatron's shardings are found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.cost import cluster_of
from meshwright.graph import capture
from meshwright.models import Llama, LlamaConfig
from meshwright.search import AxisForm, Prices, SearchError, Shardings, best_shardings, least_by_enumeration
from meshwright.search.sharding.program_facts import ProgramFacts
from meshwright.search.sharding.sharding_search import ShardingProblem
from meshwright.search.sharding.variable_elimination import _Part

CLUSTERS = ("V100", "A100", "H100", "cpu core")


class Random(nn.Module):
    """A few operators on a batch and on parameters, in random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = draw.choice([8, 64, 512])
        self.rows = draw.choice([4, 256])
        self.kinds = [draw.choice(["linear", "relu", "bias", "gate", "norm"]) for _ in range(draw.randint(1, 2))]
        self.parts = nn.ParameterList(
            torch.empty((self.width, self.width) if kind == "linear" else (self.width,), device="meta")
            for kind in self.kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for kind, w in zip(self.kinds, self.parts, strict=True):
            match kind:
                case "linear":
                    h = h @ w
                case "relu":
                    h = h.relu()
                case "bias":
                    h = h + w
                case "gate":
                    h = h * w
                case _:
                    h = torch.nn.functional.rms_norm(h, (self.width,), w)
        return h.sum()


def captured(seed: int) -> Any:
    model = Random(seed)
    return capture(model, model, [torch.empty(model.rows, model.width, device="meta")]).program


@pytest.mark.parametrize("seed", range(60))
def test_the_best_choice_equals_that_of_exhaustive_search(seed: int) -> None:
    program = captured(seed)
    for name in CLUSTERS:
        prices = Prices(cluster_of(name), random.Random(seed).choice([2, 4]), 8)
        for byte in (0.0, 1e-10):
            priced = replace(prices, byte=byte)
            found = best_shardings(program, priced)
            assert found.worth(byte) == pytest.approx(least_by_enumeration(program, priced), abs=1e-12)


def llama(layers: int = 2) -> Any:
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=32000, hidden=4096, layers=layers, heads=32, kv_heads=8, feed_forward=14336))
        batch = [torch.empty(1, 4096, dtype=torch.long) for _ in range(2)]
    return capture(model, model, batch).program


def dims(cuts: Shardings) -> dict[str, int | None]:
    """Return the last word of a parameter's layer → the dim that is sharded."""
    found = cuts.placements()
    return {name.split(".")[-2]: None if place is None else place.dim for name, place in found.items()}


BLACKWELL = replace(Prices(cluster_of("B200"), 8, 8), byte=1e-18)
"""Prices on B200 with a very low price of memory, which only decides between plans that take equally long.

With a sharded sequence, replicated attention weights take as long as sharded ones, and more memory. On H100 the times
agree within a thousandth.
"""


def test_the_search_finds_megatrons_sharding() -> None:
    found = best_shardings(llama(), BLACKWELL)
    rows, columns = dict.fromkeys(["embed", "q", "k", "v", "gate", "up", "head"], 0), dict.fromkeys(["o", "down"], 1)
    assert (rows | columns | {"embed": 1}).items() <= dims(found).items()


def test_the_reported_conversions_are_those_of_megatron() -> None:
    found = best_shardings(llama(), BLACKWELL)
    large = [m for m in found.meetings if m.nbytes > 1e6]
    for block in ("blocks.0", "blocks.1"):
        sums = [m for m in large if m.layer == block and m.have.kind == "sum"]
        gathers = [m for m in large if m.layer.startswith(block) and m.have.kind == "cut"]
        assert (len(sums), len(gathers)) == (2, 2)
    assert len(large) == 9  # the last gather is the head's
    assert 0 < sum(m.seconds for m in found.meetings) < found.seconds
    assert "ms" in str(large[0])


def test_less_memory_never_takes_less_time() -> None:
    program, prices = llama(), Prices(cluster_of("H100"), 8, 8)
    free = best_shardings(program, prices)
    memory_limits = [free.nbytes * part for part in (1.0, 0.96, 0.93, 0.9, 0.89)]
    found = [best_shardings(program, prices, memory_limit) for memory_limit in memory_limits]
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in pairwise(found))
    assert all(c.nbytes <= memory_limit for c, memory_limit in zip(found, memory_limits, strict=True))
    with pytest.raises(SearchError, match="GB are missing"):
        best_shardings(program, prices, free.nbytes / 100)


def test_a_slow_network_is_used_less() -> None:
    program, fast = llama(1), cluster_of("H100")
    slow = replace(fast, inside=replace(fast.inside, bandwidth=1e6, latency=1.0))
    whole = best_shardings(program, Prices(slow, 8, 8))
    assert set(dims(whole).values()) == {None}
    assert all(form.kind == "repeated" for form in whole.forms.values())


WHOLE, VARYING, PENDING, CUT = AxisForm("repeated"), AxisForm("varying"), AxisForm("sum"), AxisForm("cut", 0, ("axis",))


@pytest.mark.parametrize(
    ("have", "need", "forward", "backward"),
    [
        (WHOLE, VARYING, None, "all-reduce"),
        (WHOLE, CUT, "its own part", "all-gather"),
        (CUT, VARYING, "all-gather", "reduce-scatter"),
        (CUT, WHOLE, "all-gather", "its own part"),
        (PENDING, WHOLE, "all-reduce", None),
        (PENDING, CUT, "reduce-scatter", "all-gather"),
        (PENDING, VARYING, "all-reduce", "all-reduce"),
        (CUT, replace(CUT, dim=1), "all-to-all", "all-to-all"),
        (CUT, CUT, None, None),
    ],
)
def test_a_conversion_pays_for_its_transpose(have: AxisForm, need: AxisForm, forward: Any, backward: Any) -> None:
    cluster = cluster_of("A100")
    prices = Prices(cluster, 4, 4)
    own = cluster.device.overhead + 2 * 0.25e6 / cluster.device.bandwidth

    def seconds(kind: Any) -> float:
        return {None: 0.0, "its own part": own}.get(kind) or float(cluster.meeting(kind, 1e6, 4, 4) if kind else 0.0)

    there, back = seconds(forward), seconds(backward)
    assert prices.convert(have, need, 1e6, trains=False) == pytest.approx(there)
    assert prices.convert(have, need, 1e6, trains=True) == pytest.approx(there + back)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def sums_of(layers: int, seen: pytest.MonkeyPatch) -> int:
    """Return the number of sums of tables for a model of so many equal layers."""
    with torch.device("meta"):
        model = nn.Sequential(*(Residual() for _ in range(layers)))
    program = capture(model, lambda x: model(x).sum(), [torch.empty(8, 64, device="meta")]).program
    count, plain = 0, _Part.added

    def added(part: _Part, costs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(part, costs)

    with seen.context() as changed:
        changed.setattr(_Part, "added", added)
        best_shardings(program, Prices(cluster_of("H100"), 4, 4))
    return count


def test_equal_layers_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = sums_of(6, monkeypatch), sums_of(26, monkeypatch)
    assert many - few <= 4 * 20, "a layer has sixteen choices"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "mask", "dropout", "count"),
    [
        (8, 8, 16, None, 0.0, 1),
        (8, 4, 16, None, 0.0, 1),
        (8, 2, 16, None, 0.0, 0),  # half a head of keys per rank
        (8, 8, 18, None, 0.0, 0),  # a sequence that four ranks do not divide
        (8, 8, 16, (16, 16), 0.0, 1),
        (8, 8, 16, (1, 8, 16, 16), 0.0, 0),  # a mask with heads of its own
        (8, 8, 16, None, 0.1, 0),
    ],
)
def test_sharding_by_heads_is_an_option_if_they_divide(
    heads: int, kv_heads: int, length: int, mask: tuple[int, ...] | None, dropout: float, count: int
) -> None:
    given = [torch.empty(1, n, length, 4, device="meta") for n in (heads, kv_heads, kv_heads)]
    given += [torch.empty(mask, device="meta")] if mask else []

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None = None) -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, m, dropout_p=dropout, enable_gqa=heads != kv_heads
        )
        return found.sum()

    program = capture(nn.Module(), attend, given).program
    prices = Prices(cluster_of("A100"), 4, 4)
    problem = ShardingProblem(ProgramFacts(program), prices)
    (ways,) = (ways for node, ways in problem.options.items() if "attention" in str(node.op))
    along = [way for way in ways if all(form.kind == "cut" and form.dim == 2 for form in way.needs[:3])]
    assert len(along) == count
    for way in along:
        by_heads = min(o.seconds for o in ways if all(form.kind == "cut" and form.dim == 1 for form in o.needs[:3]))
        sizes = [x.nbytes for x in given[:3]] + [given[0].nbytes]
        sent = sum(float(prices.cluster.meeting("all-to-all", n / 4, 4, 4)) for n in sizes)
        assert way.seconds == pytest.approx(by_heads + sent)


def attention(kv_heads: int, causal: bool = True) -> ShardingProblem:
    """Return the problem of attention for one sequence, whose queries, keys and values have a gradient."""
    model = nn.ParameterDict(
        {name: torch.empty(1, n, 16, 8, device="meta") for name, n in (("q", 8), ("k", kv_heads), ("v", kv_heads))}
    )

    def attend(x: Tensor) -> Tensor:
        q, k, v = (w * x for w in (model["q"], model["k"], model["v"]))
        shared = kv_heads != 8
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared).sum()

    program = capture(model, attend, [torch.empty(1, device="meta")]).program
    return ShardingProblem(ProgramFacts(program), Prices(cluster_of("A100"), 4, 4))


def of_queries(problem: ShardingProblem) -> tuple[Any, Any]:
    """Return the attention, and its option in which queries alone are sharded along the sequence."""
    ((node, ways),) = ((n, w) for n, w in problem.options.items() if "attention" in str(n.op))
    (way,) = (w for w in ways if w.needs[0].kind == "cut" and w.needs[0].dim == 2 and w.needs[1].kind != "cut")
    return node, way


@pytest.mark.parametrize(("kv_heads", "causal"), [(8, True), (8, False), (2, False), (2, True)])
def test_keys_and_values_that_are_gathered_are_kept(kv_heads: int, causal: bool) -> None:
    problem = attention(kv_heads, causal)
    node, way = of_queries(problem)
    along = way.needs[0]
    lying = {v: along if v.dtype == torch.float32 and v.shape else WHOLE for v in problem.forms}
    gathered = sum(v.nbytes for v in node.ins[1:3])
    result = node.ins[0].nbytes / 4
    (row,) = (row for row in problem.facts.rows if row.node is node)
    assert problem.kept.made_at(row, way, lying) == gathered + result
    together = {v: way.needs[node.ins.index(v)] if v in node.ins else form for v, form in lying.items()}
    assert problem.kept.made_at(row, way, together) == result


def test_values_without_a_backward_read_are_not_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        program = capture(model, lambda x: (model(x) + 1.0).sum(), [torch.empty(4, 8)]).program
    kept = ShardingProblem(ProgramFacts(program), Prices(cluster_of("A100"), 2, 2)).kept
    names = {node.outs[0]: node.op.name().partition(".")[0] for node in program.nodes}
    assert sorted(names[v] for v in kept.dropped.late) == ["aten::gelu", "aten::linear"]


def test_sharding_saves_no_launch_overhead() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        program = capture(model, lambda x: model(x).sum(), [torch.empty(4, 8)]).program
    cluster = cluster_of("A100")
    seconds = best_shardings(program, Prices(cluster, 4, 4)).seconds
    assert seconds >= 3 * 5 * cluster.device.overhead  # forward and backward of five operators
