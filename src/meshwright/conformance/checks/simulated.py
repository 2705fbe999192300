"""Level 2: simulated ranks on the device, with the numbers of one device: layouts, calls, indexing, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.comm import DisagreementError, current_communicator, simulate
from meshwright.engine import dtensor_from_local, reshard, shard_tensor
from meshwright.layout import Partial, Placement, ProcessMesh, Replicate, Shard
from meshwright.tensor import random_source

from ..results.check import Check, Target
from .comparison import expect, expect_all_close, expect_all_equal, expect_equal, on_cpu, tensors_in
from .device import DRAWS
from .transport import PROGRAMS, other_calls, programs

RANKS = (2, 3)
LAYOUTS: dict[str, Placement] = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}
SHAPES = ((4, 6), (5, 7), (1, 2))


def line(ranks: int) -> ProcessMesh:
    return ProcessMesh(list(range(ranks)), ["x"])


def inputs(device: torch.device) -> dict[str, Tensor]:
    """Return the operands of the programs: x and y are (6, 10), w is (10, 7), v is (10,), i are numbers of rows."""
    g = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cpu")

    made = {"x": normal(6, 10), "y": normal(6, 10), "w": normal(10, 7) / 3, "v": normal(10)}
    indices = torch.randint(0, 6, (4,), generator=g, device="cpu")
    return {name: x.to(device) for name, x in {**made, "i": indices}.items()}


Program = Callable[..., Any]

PROGRAMS_OF_TENSORS: dict[str, Program] = {
    "product": lambda x, y, w, v, i: x @ w,
    "product of transposed": lambda x, y, w, v, i: x.t() @ y,
    "batched product": lambda x, y, w, v, i: x.view(2, 3, 10) @ y.view(2, 3, 10).mT,
    "linear": lambda x, y, w, v, i: F.linear(x, w.t(), x.sum() * w[0]),
    "einsum": lambda x, y, w, v, i: torch.einsum("ab,cb,b->ac", x, y, v),
    "pointwise": lambda x, y, w, v, i: F.gelu(x * v + y.exp()).clamp(-2, 2),
    "reductions": lambda x, y, w, v, i: (x.sum(), x.mean(0), y.amax(1), (x * y).var(1)),
    "norms": lambda x, y, w, v, i: (F.layer_norm(x, [10], v), F.rms_norm(y, [10], v), x.norm()),
    "softmax": lambda x, y, w, v, i: x.softmax(1) + y.log_softmax(0),
    "loss of classes": lambda x, y, w, v, i: F.cross_entropy(x, i[:1].expand(6) % 10),
    "attention": lambda x, y, w, v, i: F.scaled_dot_product_attention(
        x.view(1, 6, 2, 5).transpose(1, 2), y.view(1, 6, 2, 5).transpose(1, 2), x.view(1, 6, 2, 5).transpose(1, 2)
    ),
    "causal attention": lambda x, y, w, v, i: F.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
    "convolution": lambda x, y, w, v, i: F.conv1d(x.view(2, 3, 10), y.view(4, 3, 5)[:, :, :3], padding=1),
    "pooling": lambda x, y, w, v, i: F.max_pool1d(x[None], 2),
    "embedding": lambda x, y, w, v, i: F.embedding(i, x),
    "views": lambda x, y, w, v, i: x.view(3, 2, 10).transpose(0, 2).reshape(-1, 6)[1:].flip(0),
    "concatenation": lambda x, y, w, v, i: torch.cat([x, y[:3], x[:0]]) + torch.stack([v, v]).sum(0),
    "split": lambda x, y, w, v, i: x.split([3, 7], 1)[1] * y.chunk(2)[0].sum(),
    "cumulative": lambda x, y, w, v, i: x.cumsum(0) + y.cumprod(1),
    "sorted": lambda x, y, w, v, i: (x.sort(0).values, y.topk(3, 1).values),
    "choice": lambda x, y, w, v, i: torch.where(x > y, x, v).masked_fill(y > 1, 0.5),
    "triangles": lambda x, y, w, v, i: x.tril() + y.triu(1),
    "padding": lambda x, y, w, v, i: F.pad(x, (1, 2)) + F.pad(y, (2, 1)),
    "inverse": lambda x, y, w, v, i: torch.linalg.inv(x @ x.t() + 5 * torch.eye(6, device=x.device)),
    "writes in place": lambda x, y, w, v, i: (x * 1).mul_(2).add_(y).clamp_(min=0),
}
INDEXING: dict[str, Program] = {
    "a row": lambda x, y, w, v, i: x[2],
    "negative index": lambda x, y, w, v, i: x[-1, -2],
    "slices with steps": lambda x, y, w, v, i: x[1::2, ::3],
    "an ellipsis and None": lambda x, y, w, v, i: x[..., None, 3:7],
    "a list": lambda x, y, w, v, i: x[[0, -1, 2]],
    "a tensor": lambda x, y, w, v, i: x[i],
    "a tensor on the CPU": lambda x, y, w, v, i: x[torch.tensor([3, 0, 5], device="cpu")],
    "a tensor of columns": lambda x, y, w, v, i: x[:, i],
    "two tensors": lambda x, y, w, v, i: x[i, i],
    "a mask of rows": lambda x, y, w, v, i: x[torch.tensor([True, False, True, True, False, False], device=x.device)],
    "index_select": lambda x, y, w, v, i: x.index_select(0, i),
    "gather": lambda x, y, w, v, i: x.gather(1, i.view(2, 2)),
    "take_along_dim": lambda x, y, w, v, i: torch.take_along_dim(x, i.view(4, 1), 0),
    "scatter_add": lambda x, y, w, v, i: x.scatter_add(0, i.view(4, 1).expand(4, 10), y[:4]),
    "index_add": lambda x, y, w, v, i: x.index_add(0, i, y[:4]),
    "index_copy": lambda x, y, w, v, i: x.index_copy(0, i.unique()[:2], y[:2]),
    "writes to a row": lambda x, y, w, v, i: _written(x, 2, v),
    "writes to a slice": lambda x, y, w, v, i: _written(x, (slice(1, 4), slice(None, None, 2)), y[:3, :5]),
    "writes by a tensor": lambda x, y, w, v, i: _written(x, i.unique(), 3.0),
    "writes by a mask": lambda x, y, w, v, i: _written(x, x > 0.5, -1.0),
}


def _written(x: Tensor, key: Any, value: Any) -> Tensor:
    copy = x.clone()
    copy[key] = value
    return copy


def _results(program: Program, given: dict[str, Tensor]) -> list[Tensor]:
    """Return the results of a program, and the gradients of x, y, w and v."""
    held = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    found = tensors_in(program(**held))
    losses = [(x * x.detach().cos()).sum() for x in found if x.requires_grad]
    if losses:
        sum(losses[1:], losses[0]).backward()
    gradients = [x.grad for x in held.values() if x.grad is not None]
    return [on_cpu(x) for x in (*found, *gradients)]


def same_as_one_device(program: Program, target: Target) -> None:
    """Run the program on two and three ranks in each layout; compare values and gradients with one device."""
    given = inputs(target.device)
    goal = _results(program, given)

    def go(layout: str) -> list[Tensor]:
        return _results(program, _laid_out(given, layout, current_communicator().size))

    for ranks, layout in product(RANKS, LAYOUTS):
        found = simulate(go, ranks, layout)
        for rank, each in enumerate(found):
            expect_all_close(each, goal, f"rank {rank} of {ranks}, {layout}")


def _laid_out(given: dict[str, Tensor], layout: str, ranks: int) -> dict[str, Tensor]:
    """Return the operands with x in the layout, w the other way round, and the rest replicated."""
    other = {"rows": Shard(1), "columns": Shard(0)}.get(layout, Replicate())
    placements = {"x": LAYOUTS[layout], "y": LAYOUTS[layout], "w": other}
    return {name: shard_tensor(x, line(ranks), [placements.get(name, Replicate())]) for name, x in given.items()}


# ---- layouts ----


def conversion(before: str, after: str, target: Target) -> None:
    """Convert tensors between two layouts, forward and backward: even, uneven and with empty parts."""
    for ranks, shape, dtype in product(RANKS, SHAPES, target.dtypes):
        x = torch.arange(1.0, 1 + torch.Size(shape).numel(), device="cpu").view(shape).to(target.device, dtype)

        def go(x: Tensor = x) -> tuple[Tensor, Tensor]:
            mesh = line(current_communicator().size)
            start = shard_tensor(x, mesh, [LAYOUTS[before]]).requires_grad_()
            end = reshard(start, mesh, [LAYOUTS[after]])
            (end * 2).sum().backward()
            assert start.grad is not None
            return on_cpu(end), on_cpu(start.grad)

        for found, gradient in simulate(go, ranks):
            expect_equal(found, x, f"{shape} in {dtype} on {ranks} ranks")
            expect_equal(gradient, torch.full_like(x, 2), f"gradient of {shape} in {dtype} on {ranks} ranks")


def pending_sums(after: str, target: Target) -> None:
    """Convert pending sums of different terms into a layout."""
    for ranks, shape in product(RANKS, SHAPES):

        def go(shape: tuple[int, ...] = shape) -> Tensor:
            me = current_communicator()
            term = torch.full(shape, float(me.rank + 1), device=target.device)
            pending = dtensor_from_local(term, line(me.size), [Partial()])
            return on_cpu(reshard(pending, line(me.size), [LAYOUTS[after]]))

        for found in simulate(go, ranks):
            expect_equal(
                found, torch.full(shape, float(sum(range(1, ranks + 1))), device="cpu"), f"{shape} on {ranks} ranks"
            )


# ---- random numbers ----


def draws_of_one_device(draw: Callable[[torch.device], Tensor], target: Target) -> None:
    """A draw inside a rank gives the numbers of one device, and leaves the generator in the same state."""
    torch.manual_seed(11)
    goal = [draw(target.device).cpu(), torch.rand(3, device=target.device).cpu()]

    def go() -> list[Tensor]:
        torch.manual_seed(11)
        return [draw(target.device).cpu(), torch.rand(3, device=target.device).cpu()]

    for found in simulate(go, 2):
        expect_all_equal(found, goal, "draws")


SHARDED_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "bernoulli": lambda x: torch.full_like(x, 0.4).bernoulli(),
    "normal_": lambda x: (x * 1).normal_(),
    "uniform_": lambda x: (x * 1).uniform_(),
    "exponential_": lambda x: (x * 1).exponential_(),
}


def sharded_draws(draw: Callable[[Tensor], Tensor], source: Any, target: Target) -> None:
    """Draws of sharded tensors: those of one device by "torch", and the same on every mesh by "counter"."""
    x = torch.ones(6, 10, device=target.device)
    torch.manual_seed(12)
    one_device = [draw(x).cpu(), torch.rand(3, device=target.device).cpu()]

    def go(placement: Placement) -> list[Tensor]:
        torch.manual_seed(12)
        with random_source(source):
            here = shard_tensor(x, line(current_communicator().size), [placement])
            return [on_cpu(draw(here)), torch.rand(3, device=target.device).cpu()]

    goal = one_device if source == "torch" else simulate(go, 2, Replicate())[0]
    for ranks, placement in product(RANKS, LAYOUTS.values()):
        for found in simulate(go, ranks, placement):
            expect_all_equal(found, goal, f"draws on {ranks} ranks as {placement}")


def backward_of_dropout(target: Target) -> None:
    """The backward pass of dropout uses the mask of the forward pass."""

    def go() -> tuple[Tensor, Tensor]:
        x = shard_tensor(torch.ones(8, 8, device=target.device), line(2), [Shard(0)]).requires_grad_()
        y = F.dropout(x, 0.5)
        y.sum().backward()
        assert x.grad is not None
        return on_cpu(y), on_cpu(x.grad)

    for y, gradient in simulate(go, 2):
        expect_equal(gradient, y, "the gradient of dropout")


# ---- errors ----


def errors_of_ranks(target: Target) -> None:
    """Different calls of two ranks stop the simulation with an error."""

    def go() -> Tensor:
        ranks = current_communicator()
        return ranks.all_reduce(torch.ones(4 + ranks.rank, device=target.device), "sum", (0, 1))

    try:
        simulate(go, 2)
    except DisagreementError:
        return
    except Exception as error:
        expect(False, f"{type(error).__name__} instead of DisagreementError")
    expect(False, "no error")


def _on_two_ranks(program: Callable[[Target], None], target: Target) -> None:
    simulate(lambda: program(target), 2)


def _checks() -> Iterator[tuple[str, Callable[[Target], str | None]]]:
    for before, after in product(LAYOUTS, LAYOUTS):
        yield f"conversion from {before} to {after}", partial(conversion, before, after)
    for after in LAYOUTS:
        yield f"conversion from a pending sum to {after}", partial(pending_sums, after)
    for name, program in PROGRAMS_OF_TENSORS.items():
        yield f"calls: {name}", partial(same_as_one_device, program)
    for name, program in INDEXING.items():
        yield f"index: {name}", partial(same_as_one_device, program)
    for name, draw in DRAWS.items():
        yield f"draws on a rank: {name}", partial(draws_of_one_device, draw)
    sources: Sequence[str] = ("torch", "counter")
    for name, source in product(SHARDED_DRAWS, sources):
        yield f'sharded draws by "{source}": {name}', partial(sharded_draws, SHARDED_DRAWS[name], source)
    yield "backward pass of dropout", backward_of_dropout
    yield from _checks_of_ranks()


def _checks_of_ranks() -> Iterator[tuple[str, Callable[[Target], str | None]]]:
    different = {name for name, program in PROGRAMS.items() if program is other_calls}
    for name, program in programs():
        if name not in different:
            yield f"ranks: {name}", partial(_on_two_ranks, program)
    yield "ranks: different calls", errors_of_ranks


SIMULATED = tuple(Check(2, name, run) for name, run in _checks())
