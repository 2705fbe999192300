"""The idea of Meshwright from scratch: layouts, one-line rules, conversions with transposes, simulated ranks.

Read it from top to bottom; run it with `python docs/from_scratch.py`. It knows one mesh axis, matrices, and NumPy,
and ends with an MLP whose weights are cut over four ranks and whose gradients equal those of one device.

    layout of a tensor on the axis      each rank holds             its gradient is
    "S0", "S1"                          a slice along dim 0 or 1    cut the same way
    "P"                                 a term of a sum             repeated and varying: "V"
    "R"                                 the whole value             repeated: "R"
    "V"                                 the whole value, used       a term of a sum: "P"
                                        differently on each rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np

RANKS = 4
Array = np.ndarray

# --- 1. Ranks ------------------------------------------------------------------------------------------------------
# A distributed tensor of this file is the list of all ranks' local arrays. A collective is then a function from lists
# to lists, and "communication" is looking at another rank's entry. We count the floats that each rank receives.

TRAFFIC: dict[str, int] = {}


def count(step: str, floats: int) -> None:
    TRAFFIC[step] = TRAFFIC.get(step, 0) + floats


def all_reduce(parts: list[Array]) -> list[Array]:
    count("all_reduce", 2 * (RANKS - 1) * parts[0].size // RANKS)
    return [sum(parts[1:], parts[0])] * RANKS


def all_gather(parts: list[Array], dim: int) -> list[Array]:
    whole = np.concatenate(parts, dim)
    count("all_gather", whole.size * (RANKS - 1) // RANKS)
    return [whole] * RANKS


def reduce_scatter(parts: list[Array], dim: int) -> list[Array]:
    count("reduce_scatter", (RANKS - 1) * parts[0].size // RANKS)
    return pieces(sum(parts[1:], parts[0]), dim)


def all_to_all(parts: list[Array], src: int, dst: int) -> list[Array]:
    count("all_to_all", parts[0].size * (RANKS - 1) // RANKS)
    return pieces(np.concatenate(parts, src), dst)


def pieces(x: Array, dim: int) -> list[Array]:
    """Ceil-sized pieces, the last ones shorter or empty: 5 rows on 4 ranks are 2, 2, 1, 0."""
    size = -(-x.shape[dim] // RANKS)
    return [
        np.take(x, range(min(r * size, x.shape[dim]), min((r + 1) * size, x.shape[dim])), dim) for r in range(RANKS)
    ]


# --- 2. Conversions ------------------------------------------------------------------------------------------------
# One table. V and R hold the same numbers, so that a conversion between them moves nothing; they differ in what
# their gradients are. Hence the law at the end: a gradient needs no table of its own.

DUAL = {"S0": "S0", "S1": "S1", "P": "V", "V": "P", "R": "R"}


def convert(parts: list[Array], src: str, dst: str) -> list[Array]:
    a, b = src.replace("V", "R"), dst.replace("V", "R")
    if a == b:
        return parts
    if a == "P":
        return all_reduce(parts) if b == "R" else reduce_scatter(parts, int(b[1]))
    if b == "R":
        return all_gather(parts, int(a[1]))
    if a == "R" and b == "P":  # the value is one term, beside zeros
        return [parts[0], *(np.zeros_like(p) for p in parts[1:])]
    if a == "R":
        return [pieces(p, int(b[1]))[r] for r, p in enumerate(parts)]
    if b == "P":  # slices padded with zeros are terms
        return padded(parts, int(a[1]))
    return all_to_all(parts, int(a[1]), int(b[1]))


def padded(parts: list[Array], dim: int) -> list[Array]:
    starts = np.cumsum([0] + [p.shape[dim] for p in parts])
    ends = starts[-1] - starts[1:]
    around = [[(0, 0)] * dim + [(starts[r], ends[r])] + [(0, 0)] * (parts[r].ndim - dim - 1) for r in range(RANKS)]
    return [np.pad(p, w) for p, w in zip(parts, around, strict=True)]


def transpose(src: str, dst: str) -> tuple[str, str]:
    """The gradient of src -> dst is the conversion dual(dst) -> dual(src). Nobody writes a backward rule.

    >>> transpose("S0", "V")                                        # the gradient of an all-gather is a reduce-scatter
    ('P', 'S0')
    >>> transpose("R", "V")                                         # a free conversion whose gradient is an all-reduce
    ('P', 'R')
    """
    return DUAL[dst], DUAL[src]


# --- 3. Rules ------------------------------------------------------------------------------------------------------
# An operator is an equation over factors. Cut one factor: every operand that has it is cut there, the others vary,
# and a result that lacks it is a sum of terms. That is all there is to say about how an operator lies on a mesh.

RULES = {
    "matmul": "m k * k n -> m n",
    "add": "m n + m n -> m n",
    "mul": "m n * m n -> m n",
    "relu": "m n, -> m n",  # a comma: not linear, so no term may pass
    "total": "m n -> ",
}
Choice = tuple[tuple[str, ...], str]
"""Layouts of the operands, and of the result."""


def choices(rule: str) -> list[Choice]:
    """Every way to run the operator on local parts, derived from the equation.

    >>> choices("m k * k n -> m n")[:3]
    [(('V', 'S1'), 'S1'), (('S0', 'V'), 'S0'), (('S1', 'S0'), 'P')]
    """
    left, right = rule.split("->")
    operands = [side.split() for side in left.replace("*", "+").replace(",", "+").split("+")]
    operands, result = [o for o in operands if o or "," not in left], right.split()
    linear = "," not in left
    found: list[Choice] = []
    for factor in sorted({f for o in operands for f in o}, key=lambda f: (f not in result, f != result[-1:][:1], f)):
        ins = tuple(f"S{o.index(factor)}" if factor in o else "V" for o in operands)
        if factor in result:
            found.append((ins, f"S{result.index(factor)}"))
        elif linear:
            found.append((ins, "P"))
    found.sort(key=lambda c: (c[1] == "P", c[0][0] != "V"))
    return found + passing_terms(left, operands, linear) + [(("R",) * len(operands), "R")]


def passing_terms(left: str, operands: list[list[str]], linear: bool) -> list[Choice]:
    """`+`: terms of all operands make terms of the result. `*`: terms of one operand do, the others vary."""
    if not linear:
        return []
    if "*" not in left:
        return [(("P",) * len(operands), "P")]
    return [(tuple("P" if i == at else "V" for i in range(len(operands))), "P") for at in range(len(operands))]


def price(src: str, dst: str, size: int) -> tuple[float, int]:
    """Floats that a rank receives, then whether anything changes: least traffic first, then least change."""
    a, b = src.replace("V", "R"), dst.replace("V", "R")
    if a == b or a == "R" or b == "P":
        return 0.0, int(a != b)
    share = size * (RANKS - 1) / RANKS
    return {("P", "R"): 2 * share}.get((a, b), share / RANKS if a[0] == b[0] == "S" else share), 1


# --- 4. The distributed tensor ---------------------------------------------------------------------------------------
# Parts, a layout, and how to send a gradient back. Calling an operator picks the cheapest choice, converts the
# operands, and runs NumPy on every rank. LOG is what `mw.explain` prints.

LOG: list[str] = []


@dataclass
class Tensor:
    """One logical array, lying on the ranks as `layout` says."""

    parts: list[Array]
    layout: str
    shape: tuple[int, ...]
    inputs: list[Tensor] = field(default_factory=list["Tensor"])
    back: Callable[[list[Array]], list[list[Array]]] | None = None
    grad: list[Array] | None = None

    def whole(self) -> Array:
        return convert(self.parts, self.layout, "R")[0]

    def to(self, layout: str) -> Tensor:
        """The conversion, whose gradient is its transpose."""
        if layout == self.layout:
            return self
        src, dst = transpose(self.layout, layout)
        out = convert(self.parts, self.layout, layout)
        return Tensor(out, layout, self.shape, [self], lambda grad: [convert(grad, src, dst)])


def shard(x: Array, layout: str) -> Tensor:
    return Tensor(convert([x] * RANKS, "R", layout), layout, x.shape)


def call(name: str, fn: Callable[..., Array], vjp: Callable[..., tuple[Array, ...]], *xs: Tensor) -> Tensor:
    def total(choice: Choice) -> tuple[float, int]:
        prices = [price(x.layout, need, int(np.prod(x.shape))) for x, need in zip(xs, choice[0], strict=True)]
        return sum(p for p, _ in prices), sum(changed for _, changed in prices)

    ins, out = min(choices(RULES[name]), key=total)
    if all(x.layout in "RV" for x in xs):  # nothing is sliced that nobody asked to slice
        ins, out = ("R",) * len(xs), "R"
    LOG.append(f"{name:7}{', '.join(x.layout for x in xs):8}-> {', '.join(ins):8}gives {out}")
    xs = tuple(x.to(need) for x, need in zip(xs, ins, strict=True))
    parts = [fn(*(x.parts[r] for x in xs)) for r in range(RANKS)]
    shape = np.broadcast_shapes(*(x.shape for x in xs)) if name not in SHAPES else SHAPES[name](*(x.shape for x in xs))

    def back(grad: list[Array]) -> list[list[Array]]:
        """Local gradients of local operands: in the dual layouts, these are the gradients."""
        each = [vjp(grad[r], *(x.parts[r] for x in xs)) for r in range(RANKS)]
        return [[each[r][i] for r in range(RANKS)] for i in range(len(xs))]

    return Tensor(parts, out, shape, list(xs), back)


SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {"matmul": lambda a, b: (a[0], b[1]), "total": lambda a: ()}


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return call("matmul", lambda x, y: x @ y, lambda g, x, y: (g @ y.T, x.T @ g), a, b)


def add(a: Tensor, b: Tensor) -> Tensor:
    return call("add", lambda x, y: x + y, lambda g, x, y: (g, g), a, b)


def mul(a: Tensor, b: Tensor) -> Tensor:
    return call("mul", lambda x, y: x * y, lambda g, x, y: (g * y, g * x), a, b)


def relu(a: Tensor) -> Tensor:
    return call("relu", lambda x: np.maximum(x, 0), lambda g, x: (g * (x > 0),), a)


def total(a: Tensor) -> Tensor:
    return call("total", lambda x: x.sum(), lambda g, x: (np.broadcast_to(g, x.shape),), a)


def backward(out: Tensor) -> None:
    """Gradients of a scalar: each tensor's `grad` lies as the dual of its layout."""
    order: list[Tensor] = []

    def visit(t: Tensor) -> None:
        if not any(t is seen for seen in order):
            for x in t.inputs:
                visit(x)
            order.append(t)

    visit(out)
    out.grad = convert([np.ones(())] * RANKS, "R", DUAL[out.layout])
    for t in reversed(order):
        if t.back is None or t.grad is None:
            continue
        for x, g in zip(t.inputs, t.back(t.grad), strict=True):
            x.grad = g if x.grad is None else [a + b for a, b in zip(x.grad, g, strict=True)]


# --- 5. It is the same program, whatever lies how --------------------------------------------------------------------


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = add(x, matmul(relu(matmul(x, up)), down))
    return total(mul(y, y))


def check(layouts: tuple[str, str, str]) -> float:
    """The largest difference of any gradient from that of one device."""
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal(shape) for shape in [(5, 6), (6, 7), (7, 6)]]
    ours, one = ([shard(w, at) for w, at in zip(whole, cut, strict=True)] for cut in (layouts, "RRR"))
    backward(mlp(*ours))
    backward(mlp(*one))
    return max(
        float(np.abs(convert(t.grad or [], DUAL[t.layout], "R")[0] - (u.grad or [])[0]).max())
        for t, u in zip(ours, one, strict=True)
    )


if __name__ == "__main__":
    worst = max(check(layouts) for layouts in product(["R", "S0", "S1", "P"], repeat=3))
    print(f"64 layouts of one MLP, uneven on {RANKS} ranks: gradients differ by at most {worst:.0e} from one device")
    assert worst < 1e-11
    LOG.clear()
    TRAFFIC.clear()
    loss = mlp(shard(np.ones((8, 16)), "R"), shard(np.ones((16, 64)), "S1"), shard(np.ones((64, 16)), "S0"))
    print("Weights cut by columns and by rows, and nothing else said:", *LOG, sep="\n  ")
    backward(loss)
    print("Floats that each rank receives, forward and backward:", TRAFFIC)
