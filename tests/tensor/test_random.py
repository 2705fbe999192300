"""Counter-based random numbers: known values, the same global numbers on every mesh, and the right distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright import tensor
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.layout import Layout, parse_spec
from meshwright.tensor.conversion.whole_call import RAN_WHOLE
from meshwright.tensor.handlers.counter_draws import _DIGITS, DISTRIBUTIONS, MASK, counted, is_counted, philox

CPU = torch.device("cpu")
KEY = (0x12345678, 0x9ABCDEF0)
ARGUMENTS: dict[str, tuple[float, ...]] = {
    "uniform_": (-1.0, 3.0), "normal_": (1.0, 2.0), "log_normal_": (0.0, 0.5), "exponential_": (2.0,),
    "cauchy_": (1.0, 0.5), "geometric_": (0.3,), "bernoulli_": (0.3,), "dropout": (0.3,),
}  # fmt: skip
SHAPES = {(5, 6): ["[@x, :]", "[:, @x]", "[@x, @y]", "[@x@y, :]", "[@y@x, :]", "[:, @x@y]"],
          (7, 3): ["[@x, :]", "[:, @x]", "[@x, @y]", "[:, @x@y]"],
          (12, 5): ["[3 * 4@x, :]", "[2@y * 2 * 3@x, :]", "[4@x * 3, @y]"],
          (3, 18): ["[:, 2 * 9@x]", "[@y, 3 * 2@x * 3]"],
          (9,): ["[@x]", "[@x@y]"], (): ["[]"], (0, 4): ["[@x, :]"], (2, 3, 1): ["[:, @x, @y]"]}  # fmt: skip
MESHES = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 3)]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((MASK,) * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_values_of_philox(counter: Any, key: Any, words: str) -> None:
    found: Any = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert " ".join(f"{w.item():08x}" for w in found) == words


# --- one tensor, whatever the layout -----------------------------------------------------------------------------


def parts_of(whole: Tensor, text: str, mesh: mw.ProcessMesh, rank: int) -> Tensor:
    """Return the part of `whole` on `rank`, found by numbering the elements."""
    spec = parse_spec(_sized(text, whole.shape), mesh)
    at = torch.arange(whole.numel()).reshape(whole.shape)
    for dim, ranges in enumerate(_ranges_per_dim(spec, rank)):
        index = np.zeros(1, dtype=np.int64)
        for size, (start, many) in ranges:
            index = (index[:, None] * size + np.arange(start, start + many)).reshape(-1)
        at = at.index_select(dim, torch.from_numpy(index))
    return whole.flatten()[at]


def _ranges_per_dim(spec: Any, rank: int) -> list[list[Any]]:
    ranges = iter(spec.local_ranges(rank))
    factors = [getattr(d, "factors", ((n, d),)) for n, d in zip(spec.shape, spec.layout.dims, strict=True)]
    return [[(n, next(ranges)) for n, _ in fs] for fs in factors]


def _sized(text: str, shape: Any) -> str:
    """Return the text of a spec, `[@x, :]` with a shape."""
    dims = [d for d in text.strip("[]").split(", ") if d]
    sized = [d if d[0].isdigit() else f"{n}{d.replace(':', '')}" for n, d in zip(shape, dims, strict=True)]
    return "f32[" + ", ".join(sized) + "]"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_part_is_a_part_of_one_tensor(name: str, shape: tuple[int, ...]) -> None:
    for dtype in _DIGITS:
        alone = parse_spec("f32[" + ", ".join(map(str, shape)) + "]", mw.ProcessMesh([0], ["x"])).with_dtype(dtype)
        whole = counted(name, ARGUMENTS[name], KEY, alone, 0, CPU)
        assert whole.shape == shape
        assert whole.dtype is dtype
        for sizes in MESHES:
            mesh = mw.ProcessMesh(np.arange(math.prod(sizes)).reshape(sizes), ["x", "y"])
            for text in SHAPES[shape]:
                spec = parse_spec(_sized(text, shape), mesh).with_dtype(dtype)
                for rank in range(math.prod(sizes)):
                    part = counted(name, ARGUMENTS[name], KEY, spec, rank, CPU)
                    assert torch.equal(part, parts_of(whole, text, mesh, rank)), (sizes, text, rank)


def test_large_parts_are_filled_in_pieces() -> None:
    mesh = mw.ProcessMesh([0, 1, 2], ["x"])
    whole = counted("normal_", (0.0, 1.0), KEY, parse_spec("f32[250, 301]", mesh), 0, CPU)
    for text, dim in (("f32[250@x, 301]", 0), ("f32[250, 301@x]", 1)):
        parts = [counted("normal_", (0.0, 1.0), KEY, parse_spec(text, mesh), rank, CPU) for rank in range(3)]
        assert torch.equal(torch.cat(parts, dim), whole)


def test_counters_beyond_32_bits() -> None:
    mesh = mw.ProcessMesh(range(1 << 13), ["x"])
    spec = parse_spec(f"f64[{1 << 13}@x, {1 << 20}]", mesh)
    first, later = (counted("normal_", (0.0, 1.0), KEY, spec, rank, CPU) for rank in (0, 1 << 12))
    assert first.shape == later.shape == (1, 1 << 20)
    assert not torch.equal(first, later)


# --- the distributions -------------------------------------------------------------------------------------------

N = 20_000


def sample(name: str, dtype: torch.dtype, *values: float) -> Tensor:
    spec = parse_spec(f"f32[{N // 8}, 8]", mw.ProcessMesh([0], ["x"])).with_dtype(dtype)
    return counted(name, values or ARGUMENTS[name], KEY, spec, 0, CPU).flatten()


CDFS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda x: (x + 1) / 4,
    "normal_": lambda x: torch.special.ndtr((x - 1) / 2),
    "log_normal_": lambda x: torch.special.ndtr(x.log() / 0.5),
    "exponential_": lambda x: 1 - torch.exp(-2 * x),
    "cauchy_": lambda x: torch.atan((x - 1) / 0.5) / math.pi + 0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CDFS)
def test_distributions_pass_the_kolmogorov_smirnov_test(name: str, dtype: torch.dtype) -> None:
    expected = CDFS[name](sample(name, dtype).double().sort().values)
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    distance = torch.maximum((expected - steps[:-1]).abs().max(), (expected - steps[1:]).abs().max())
    assert distance < 1.63 / N**0.5  # 1 % of good generators' samples are farther; the key is fixed


MOMENTS: dict[str, tuple[float, float]] = {
    "uniform_": (1.0, 16 / 12), "normal_": (1.0, 4.0), "exponential_": (0.5, 0.25), "geometric_": (1 / 0.3, 0.7 / 0.09),
    "bernoulli_": (0.3, 0.21), "dropout": (1.0, 0.3 / 0.7), "log_normal_": (1.1331, 0.3647),
}  # fmt: skip


@pytest.mark.parametrize("dtype", _DIGITS, ids=str)
@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(name: str, dtype: torch.dtype) -> None:
    x = sample(name, dtype).double()
    mean, variance = MOMENTS[name]
    assert x.mean().item() == pytest.approx(mean, abs=4 * (variance / N) ** 0.5 + 2e-3)
    assert x.var().item() == pytest.approx(variance, rel=0.1)


def test_words_of_a_counter_are_uncorrelated() -> None:
    for dtype in _DIGITS:
        columns = sample("normal_", dtype, 0.0, 1.0).double().reshape(-1, 8)
        off = torch.corrcoef(columns.T) - torch.eye(8)
        assert off.abs().max() < 5 / (N // 8) ** 0.5


@pytest.mark.parametrize("dtype", _DIGITS, ids=str)
def test_bounds(dtype: torch.dtype) -> None:
    uniform = sample("uniform_", dtype, 0.0, 1.0)
    assert 0 <= uniform.min()
    assert uniform.max() < 1
    assert sample("exponential_", dtype).min() > 0
    assert sample("geometric_", dtype, 1.0).unique().tolist() == [1]
    for p in (0.0, 1.0):
        assert sample("bernoulli_", dtype, p).unique().tolist() == [p]


def test_the_counter_advances_per_call() -> None:
    assert is_counted("bernoulli_", torch.bool)
    assert is_counted("geometric_", torch.int64)
    assert not is_counted("normal_", torch.complex64)
    assert not is_counted("normal_", torch.int64)
    assert not is_counted("random_", torch.float32)


# --- through the door --------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[tuple[int, ...], list[mw.Placement]]] = [
    ((1,), [mw.Replicate()]),
    ((2,), [mw.Shard(0)]),
    ((2,), [mw.Replicate()]),
    ((2,), [mw.Partial()]),
    ((3,), [mw.Shard(1)]),
    ((4,), [mw.Shard(0)]),
    ((2, 2), [mw.Shard(0), mw.Shard(1)]),
    ((2, 2), [mw.Shard(0), mw.Partial()]),
]

Place = Callable[..., Any]


def everywhere(program: Callable[[Place], Any]) -> list[list[Tensor]]:
    """Return whole results of `program(place)` on every rank of every layout, with the source "counter"."""
    found: list[list[Tensor]] = []
    for sizes, placements in LAYOUTS:
        ranks = math.prod(sizes)
        mesh = mw.ProcessMesh(np.arange(ranks).reshape(sizes), ["x", "y"][: len(sizes)])

        def go(mesh: Any = mesh, placements: Any = placements) -> list[Tensor]:
            torch.manual_seed(3)
            with mw.random_source("counter"):
                out = program(lambda x, **kw: mw.shard_tensor(x, mesh, placements, **kw))
            return [mw.unshard_dtensor(t).detach() if isinstance(t, mw.DistTensor) else t for t in out]

        found += mw.simulate(go, ranks)
    return found


def same_everywhere(program: Callable[[Place], Any], exact: bool = True) -> list[Tensor]:
    first, *others = everywhere(program)
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))
    return first


def fills(place: Place) -> list[Tensor]:
    x = place(torch.zeros(5, 6))
    return [
        x.clone().uniform_(),
        x.clone().uniform_(-1, 1),
        x.clone().normal_(std=2),
        x.clone().exponential_(),
        x.clone().bernoulli_(0.3),
        x.clone().geometric_(0.5),
        x.clone().cauchy_(),
        x.clone().log_normal_(),
        x.double().uniform_(),
        x.half().normal_(),
        x.clone().random_(7),
        torch.rand(3),
    ]


def likes(place: Place) -> list[Tensor]:
    x = place(torch.zeros(5, 6))
    return [
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randn_like(x, dtype=torch.bfloat16),
        torch.randint_like(x, 9),
        torch.rand_like(place(torch.zeros(5, 6, dtype=torch.int64)), dtype=torch.float64),
        torch.randint_like(x, low=3, high=5, dtype=torch.int32),
        torch.rand_like(x.t()),
        torch.rand(3),
    ]


def views(place: Place) -> list[Tensor]:
    x = place(torch.zeros(5, 6))
    x[1:4].uniform_()
    return [x, F.dropout(x[::2], 0.5), torch.rand_like(x[:, 1::2])]


def initial_values(place: Place) -> list[Tensor]:
    w = place(torch.zeros(5, 6, requires_grad=True))
    values: list[Tensor] = []
    for init in (nn.init.normal_, nn.init.uniform_, nn.init.xavier_uniform_, nn.init.kaiming_normal_):
        init(w)
        values.append(w.detach().clone())
    return values


@pytest.mark.parametrize("program", [fills, likes, views, initial_values])
def test_the_same_numbers_on_every_mesh(program: Callable[[Place], Any]) -> None:
    for x in same_everywhere(program):
        assert x.float().var() > 0


def test_gradients_through_dropout() -> None:
    def go(place: Place) -> list[Tensor]:
        x = place(torch.arange(1.0, 31).reshape(5, 6)).detach().requires_grad_()
        y = F.dropout(x, 0.4)
        y.sum().backward()
        return [y, x.grad, F.dropout(x, 0.4, training=False), F.dropout(x.detach().clone(), 0.4, inplace=True)]

    y, grad, plain, again = same_everywhere(go)
    torch.testing.assert_close(y, grad * plain)
    assert grad.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert not torch.equal(y, again)  # every call has its own key


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_gives_the_same_mask(reentrant: bool) -> None:
    def go(place: Place) -> list[Tensor]:
        x = place(torch.arange(1.0, 31).reshape(5, 6)).detach().requires_grad_()
        y: Any = checkpoint(lambda a: F.dropout(a, 0.5) * a, x, use_reentrant=reentrant)
        y.sum().backward()
        return [y, x.grad]

    y, grad = same_everywhere(go)
    torch.testing.assert_close(grad * torch.arange(1.0, 31).reshape(5, 6), 2 * y)


def test_generators_stay_in_step_outside_a_mesh() -> None:
    def go() -> Tensor:
        torch.manual_seed(0)
        with mw.random_source("counter"):
            x = mw.shard_tensor(torch.ones(4, 6), mw.ProcessMesh([1, 2], ["x"]), [mw.Shard(0)])
            F.dropout(torch.randn_like(x).uniform_(), 0.5)
        return torch.rand(3)

    first, *others = mw.simulate(go, 4)
    assert all(torch.equal(first, other) for other in others)


def test_a_user_defined_generator() -> None:
    def go() -> tuple[Tensor, Tensor, bool]:
        x = mw.shard_tensor(torch.zeros(4, 6), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        before = torch.get_rng_state()
        with mw.random_source("counter"):
            a, b = (mw.unshard_dtensor(x.clone().uniform_(generator=torch.Generator().manual_seed(s))) for s in (1, 1))
        return a, b, torch.equal(before, torch.get_rng_state())

    a, b, untouched = mw.simulate(go, 2)[0]
    assert torch.equal(a, b)
    assert untouched


def test_refusals_equal_those_of_torch() -> None:
    def go() -> None:
        with mw.random_source("counter"):
            mw.shard_tensor(torch.zeros(4), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)]).bernoulli_(1.5)

    with pytest.raises(RuntimeError, match=r"in \[0, 1\]"):
        mw.simulate(go, 2)


def test_torchs_source_gives_the_numbers_of_one_device_for_masks() -> None:
    def go() -> Tensor:
        x = mw.shard_tensor(torch.zeros(5, 6), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(1)])
        torch.manual_seed(0)
        return mw.unshard_dtensor(x.bernoulli_(0.3))

    found = mw.simulate(go, 2)[0]
    torch.manual_seed(0)
    assert torch.equal(found, torch.empty(5, 6).bernoulli_(0.3))


def test_a_source_ends_with_its_block() -> None:
    def go() -> Tensor:
        x = mw.shard_tensor(torch.zeros(5, 6), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        with mw.random_source("counter"), mw.random_source("torch"):
            torch.manual_seed(0)
            return mw.unshard_dtensor(torch.rand_like(x))

    found = mw.simulate(go, 2)[0]
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(5, 6))


def test_a_source_belongs_to_the_rank_and_not_to_the_thread() -> None:
    """On an accelerator, torch recomputes checkpointed calls in a thread of its own."""
    rank = PeerlessCommunicator(0, 2)
    with using_communicator(rank):
        x = mw.shard_tensor(torch.zeros(4, 6), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])

    def draw() -> Tensor:
        with using_communicator(rank):
            torch.manual_seed(0)
            return torch.rand_like(x).to_local()

    with ThreadPoolExecutor(1) as pool:
        with using_communicator(rank), mw.random_source("counter"):
            inside = draw()
            elsewhere = pool.submit(draw).result()
        after = pool.submit(draw).result()
    assert torch.equal(inside, elsewhere)
    assert not torch.equal(inside, after)


def test_other_sources_are_refused_at_once() -> None:
    with pytest.raises(tensor.RandomSourceError, match="counter"):
        mw.random_source("philox")


def test_pending_terms_and_varying_axes_do_not_matter() -> None:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    plain = parse_spec("f32[5, 6]", mesh)
    varying = plain.with_layout(Layout(plain.layout.dims, (), ("x",)))
    a, b = (counted("normal_", (0.0, 1.0), KEY, spec, 1, CPU) for spec in (plain, varying))
    assert torch.equal(a, b)


def numbers_by_values(x: Tensor) -> list[Tensor]:
    """Return numbers whose distributions `x` decides, and a differentiable function of random numbers."""
    p = x.sigmoid()
    return [
        torch.bernoulli(p),
        p.bernoulli(),
        torch.bernoulli(x, 0.3),
        torch.zeros_like(x).bernoulli_(p),
        torch.poisson(p * 3),
        torch.normal(x, 1.0),
        torch.normal(0.0, p),
        torch.normal(x, p),
        torch.multinomial(p, 3),
        p.multinomial(9, replacement=True),
        torch._standard_gamma(p),
        F.rrelu(x, training=True),
        F.rrelu(x),
        torch.native_dropout(x, 0.5, True)[0],
        torch.rand(2),
    ]


@pytest.mark.parametrize("place", [[mw.Shard(0)], [mw.Shard(1)], [mw.Partial()], [mw.Replicate()]])
def test_numbers_drawn_by_values_are_those_of_one_device(place: list[Any]) -> None:
    """They have the layout of the values, and no rank gets more than its part."""
    torch.manual_seed(1)
    start = torch.randn(5, 4)

    def go(x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        x = x.requires_grad_()
        found = numbers_by_values(x)
        found[-4].square().sum().backward()
        assert x.grad is not None
        return [*found, x.grad]

    def rank() -> tuple[list[Tensor], bool]:
        RAN_WHOLE.clear()
        x = mw.shard_tensor(start.clone(), mw.init_mesh(x=3), place)
        found = go(x)
        cut = found[0].placements == x.sigmoid().placements
        return [mw.unshard_dtensor(t).detach() if isinstance(t, mw.DistTensor) else t.detach() for t in found], cut

    wanted = [t.detach() for t in go(start.clone())]
    for found, as_laid in mw.simulate(rank, 3):
        torch.testing.assert_close(found, wanted)
        assert as_laid
    assert not RAN_WHOLE


@pytest.mark.parametrize("name", [n for n in DISTRIBUTIONS if n.endswith("_")])
def test_parameters_have_torchs_names_and_defaults(name: str) -> None:
    """Of the overloads of `geometric_` and `bernoulli_`, the test takes the one with a number."""
    packet = getattr(torch.ops.aten, name)
    schema = getattr(packet, "float" if "float" in packet.overloads() else "default")._schema
    wanted = {a.name.removesuffix("_"): a.default_value for a in schema.arguments[1:] if a.name != "generator"}
    ours = DISTRIBUTIONS[name].parameters
    assert list(ours) == list(wanted)
    assert all(ours[n] == value for n, value in wanted.items() if value is not None)
