"""Eager mode on the CPU: time of a small block divided by that of plain tensors, with torch's DTensor beside.

Nothing is sent: Meshwright runs one rank of four under its peerless communicator, DTensor under torch's fake process
group. The transformer block is so small that only the cost of calls counts. Forward and backward run in turns. The
figure is the median of the ratios of each turn. `first` is the first call of a signature that was not seen before.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, HIDDEN, HEADS, TOKENS = 4, 64, 4, (2, 16)
BLOCK_GOAL, ADD_GOAL, FIRST_GOAL_US = 1.29, 3.5, 1000.0
QUESTION_GOALS = {"x.dtype": 2.0, "x.size(0)": 2.0}
QUESTIONS = (
    *QUESTION_GOALS, "x.shape", "x.ndim", "x.dim()", "x.numel()", "x.nbytes", "x.itemsize", "x.element_size()",
    "x.device", "x.layout", "x.requires_grad", "x.is_leaf", "x.is_cuda", "x.grad_fn", "x.is_floating_point()",
    "x.detach()", "x.requires_grad_()",
)  # fmt: skip
"""Attributes and methods that need no rule; the ones with a goal come first."""
AXES = (1, 2, 3, 4)
WORLD = 2 ** max(AXES)


class Block(nn.Module):
    """A pre-norm transformer block; `share` scales its heads and its inner width to the size of one rank."""

    def __init__(self, share: int = 1, fused: bool = True) -> None:
        super().__init__()
        inner = HIDDEN // share
        self.heads, self.fused = HEADS // share, fused
        self.q, self.k, self.v = (nn.Linear(HIDDEN, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * inner, bias=False), nn.Linear(4 * inner, HIDDEN, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self._split(linear(h)) for linear in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention if self.fused else _attention
        x = x + self.o(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention from separate operators, for a library without a rule for the fused one on the CPU."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def weight_cuts(block: Block) -> dict[str, int]:
    """Return the sharded dim of each weight: columns into the block's inner width, rows out of it."""
    return {"q": 0, "k": 0, "v": 0, "up": 0, "o": 1, "down": 1}


# --- the candidates ----------------------------------------------------------------------------------------------


Candidate = tuple[Block, Tensor]


def ours_block(device: str = "cpu") -> Candidate:
    import meshwright as mw

    mesh = mw.ProcessMesh(np.arange(RANKS), dim_names=["tp"])
    block = Block().to(device)
    for name, dim in weight_cuts(block).items():
        linear = getattr(block, name)
        linear.weight = mw.shard_tensor(linear.weight, mesh, [mw.Shard(dim)])
    for norm in (block.norm1, block.norm2):
        norm.weight, norm.bias = (mw.shard_tensor(p, mesh, [mw.Replicate()]) for p in (norm.weight, norm.bias))
    return block, mw.shard_tensor(torch.randn(*TOKENS, HIDDEN, device=device), mesh, [mw.Replicate()])


def dtensor_block(fused: bool, device: str = "cpu") -> Candidate:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = device_mesh((RANKS,), device)
    block = Block(fused=fused).to(device)
    for name, dim in weight_cuts(block).items():
        linear = getattr(block, name)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(dim)]))
    for norm in (block.norm1, block.norm2):
        for name in ("weight", "bias"):
            whole = getattr(norm, name).detach()
            setattr(norm, name, nn.Parameter(distribute_tensor(whole, mesh, [Replicate()])))
    return block, distribute_tensor(torch.randn(*TOKENS, HIDDEN, device=device), mesh, [Replicate()])


def plain_block(share: int = 1, fused: bool = True, device: str = "cpu") -> Candidate:
    return Block(share, fused).to(device), torch.randn(*TOKENS, HIDDEN, device=device)


def step(made: Candidate) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass."""
    block, x = made
    parameters = list(block.parameters())

    def once() -> None:
        block(x).sum().backward()
        for p in parameters:
            p.grad = None

    return once


def device_mesh(shape: Sequence[int], device: str = "cpu") -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device, torch.arange(int(np.prod(shape))).reshape(tuple(shape)))


@contextmanager
def libraries() -> Iterator[None]:
    """Set both libraries up as rank 0 of a world in which nothing is sent, inside the context."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshwright.comm import PeerlessCommunicator, using_communicator

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        with using_communicator(PeerlessCommunicator(0, WORLD)):
            yield
    finally:
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


# --- measuring ---------------------------------------------------------------------------------------------------


@contextmanager
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(candidates: dict[str, Callable[[], Any]], turns: int, calls: int) -> dict[str, list[float]]:
    """Return seconds per call of each candidate in each turn; every turn tries all of them."""
    for fn in candidates.values():
        for _ in range(3):
            fn()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    with _no_gc():
        for _ in range(turns):
            for name, fn in candidates.items():
                times[name].append(_seconds(fn, calls))
            gc.collect(0)
    return times


def _seconds(fn: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Return the median over turns of a's time divided by b's."""
    return round(statistics.median(x / y for x, y in zip(times[a], times[b], strict=True)), 3)


def block_times(quick: bool) -> tuple[dict[str, list[float]], bool]:
    """Return times of the block, and whether DTensor can run it with fused attention."""
    fused = _works(step(dtensor_block(fused=True)))
    candidates = {
        "plain": step(plain_block()),
        "ours": step(ours_block()),
        "plain local": step(plain_block(RANKS)),
        "dtensor": step(dtensor_block(fused)),
        "plain as dtensor": step(plain_block(fused=fused)),
    }
    return in_turns(candidates, *((10, 5) if quick else (60, 10))), fused


def _works(fn: Callable[[], Any]) -> bool:
    try:
        fn()
    except Exception:
        return False
    return True


def add_times(quick: bool) -> dict[str, list[float]]:
    from torch.distributed import tensor

    import meshwright as mw

    whole = torch.randn(4 * RANKS, 4)
    mesh = mw.ProcessMesh(np.arange(RANKS), dim_names=["tp"])
    ours = mw.shard_tensor(whole, mesh, [mw.Shard(0)])
    theirs = tensor.distribute_tensor(whole, device_mesh((RANKS,)), [tensor.Shard(0)])
    local = whole[:4].clone()
    candidates = {"plain": lambda: local + local, "ours": lambda: ours + ours, "dtensor": lambda: theirs + theirs}
    return in_turns(candidates, *((10, 500) if quick else (60, 2000)))


def question_ratios(quick: bool) -> dict[str, dict[str, float]]:
    """Return the time of each attribute of our tensors and of DTensors, over that of a plain tensor."""
    from torch.distributed import tensor

    import meshwright as mw

    whole = torch.randn(4 * RANKS, 4)
    mesh = mw.ProcessMesh(np.arange(RANKS), dim_names=["tp"])
    tensors = {
        "plain": whole[:4].clone(),
        "ours": mw.shard_tensor(whole, mesh, [mw.Shard(0)]),
        "dtensor": tensor.distribute_tensor(whole, device_mesh((RANKS,)), [tensor.Shard(0)]),
    }
    found: dict[str, dict[str, float]] = {"ours": {}, "dtensor": {}}
    for question in QUESTIONS:
        ask = {name: timeit.Timer(question, globals={"x": x}) for name, x in tensors.items()}
        times: dict[str, list[float]] = {name: [] for name in ask}
        with _no_gc():
            for _ in range(10 if quick else 40):
                for name, timer in ask.items():
                    times[name].append(timer.timeit(1000 if quick else 4000))
        for name, ratios in found.items():
            ratios[question] = ratio(times, name, "plain")
    return found


# --- first calls -------------------------------------------------------------------------------------------------


def signatures(axes: int, count: int) -> Iterator[tuple[Callable[[Any, Any], Any], list[Any], list[Any]]]:
    """Yield calls with new shapes and random layouts; a layout is a dim, or None for replicated."""
    rng = random.Random(axes)
    calls = [torch.add, torch.mul, F.linear]
    for k in range(count):
        fn, rows = calls[k % 3], WORLD * (k + 2)
        cuts = [rng.choice([0, 1, None]) for _ in range(axes)]
        others = cuts if fn is not F.linear else [cut if cut == 1 else None for cut in cuts]
        yield fn, [(rows, 32), cuts], [(rows, 32) if fn is not F.linear else (WORLD * 3, 32), others]


def first_calls(axes: int, count: int, place: Callable[[Tensor, Any, list[Any]], Any], mesh: Any) -> float:
    """Return median microseconds of the first call of a signature."""
    times: list[float] = []
    with _no_gc(), torch.no_grad():
        for fn, (shape_a, cuts_a), (shape_b, cuts_b) in signatures(axes, count):
            a, b = place(torch.ones(shape_a), mesh, cuts_a), place(torch.ones(shape_b), mesh, cuts_b)
            start = time.perf_counter()
            fn(a, b)
            times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def first_by_axes(quick: bool) -> dict[str, dict[int, float]]:
    from torch.distributed import tensor

    import meshwright as mw

    def ours(x: Tensor, mesh: Any, cuts: list[Any]) -> Any:
        return mw.shard_tensor(x, mesh, [mw.Replicate() if c is None else mw.Shard(c) for c in cuts])

    def theirs(x: Tensor, mesh: Any, cuts: list[Any]) -> Any:
        return tensor.distribute_tensor(x, mesh, [tensor.Replicate() if c is None else tensor.Shard(c) for c in cuts])

    count = 30 if quick else 150
    found: dict[str, dict[int, float]] = {"ours": {}, "dtensor": {}}
    for axes in AXES:
        shape = (2,) * axes
        mesh = mw.ProcessMesh(np.arange(2**axes).reshape(shape), dim_names=["a", "b", "c", "d"][:axes])
        first_calls(axes, 3, ours, mesh)
        found["ours"][axes] = first_calls(axes, count, ours, mesh)
        few = min(count, {1: 60, 2: 30, 3: 12, 4: 4}[axes])
        found["dtensor"][axes] = first_calls(axes, few, theirs, device_mesh(shape))
    return found


def is_linear(by_axes: dict[int, float], slack: float = 1.3) -> bool:
    """True if every further axis costs about as much as the first, not a multiple of all before."""
    steps = [b - a for a, b in itertools.pairwise(by_axes.values())]
    return all(cost <= slack * by_axes[1] * axes for axes, cost in by_axes.items()) and max(steps) <= by_axes[1] * 2


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the block's time over the plain block's."""
    with libraries():
        first = first_by_axes(quick)
        block, fused = block_times(quick)
        add = add_times(quick)
        questions = question_ratios(quick)
    value, added = ratio(block, "ours", "plain"), ratio(add, "ours", "plain")
    cheap = all(questions["ours"][name] <= goal for name, goal in QUESTION_GOALS.items())
    quick_enough = max(first["ours"].values()) <= FIRST_GOAL_US and is_linear(first["ours"])
    return {
        "name": "overhead",
        "value": value,
        "goal": BLOCK_GOAL,
        "ok": value <= BLOCK_GOAL and added <= ADD_GOAL and quick_enough and cheap,
        "rival": {
            "DTensor, block / plain": ratio(block, "dtensor", "plain as dtensor"),
            "DTensor, one addition / plain": ratio(add, "dtensor", "plain"),
            "DTensor, µs of a first call on 1 to 4 mesh axes": " / ".join(
                f"{t:.0f}" for t in first["dtensor"].values()
            ),
        },
        "details": {
            "dtensor_fused_attention": fused,
            "block_over_local_size_plain": ratio(block, "ours", "plain local"),
            "block_us": {name: round(statistics.median(t) * 1e6, 1) for name, t in block.items()},
            "add": added,
            "add_goal": ADD_GOAL,
            "add_us": {name: round(statistics.median(t) * 1e6, 2) for name, t in add.items()},
            "questions": questions["ours"],
            "dtensor_questions": questions["dtensor"],
            "question_goals": QUESTION_GOALS,
            "first_us": first["ours"],
            "first_goal_us": FIRST_GOAL_US,
            "first_linear": is_linear(first["ours"]),
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
