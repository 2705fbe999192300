"""The oracle of the rules: shard operands by every choice of a rule, run every rank, join, compare with the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import chunk
from meshwright.spmd import REPLICATED, AxisState, BoundRule, Choice, OperatorCall, describe, factor_choices
from meshwright.spmd.derivation.sharding_choices import pending_sum_choices

JOIN: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0, dtype=t.dtype),
    "prod": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "any": lambda t: t.any(0),
    "all": lambda t: t.all(0),
}


def sized_factors(bound: BoundRule, factors: tuple[int, ...], size: int) -> list[int]:
    """Return the sizes that a dim splits into; a dim without factors, or with one, is itself."""
    return [bound.sizes[f] for f in factors] if len(factors) > 1 else [size]


def place(
    bound: BoundRule, dims: Sequence[tuple[int, ...]], shape: Sequence[int], factor: int
) -> tuple[list[int], int]:
    """Return the shape with every product written out, and the place of `factor` in it."""
    out: list[int] = []
    at = -1
    for factors, size in zip(dims, shape, strict=True):
        if factor in factors:
            at = len(out) + (factors.index(factor) if len(factors) > 1 else 0)
        out += sized_factors(bound, factors, size)
    return out, at


def cut(bound: BoundRule, dims: Sequence[tuple[int, ...]], x: Tensor, factor: int, ranks: int, rank: int) -> Tensor:
    wide, at = place(bound, dims, x.shape, factor)
    start, length = chunk(wide[at], ranks, rank)
    return x.reshape(wide).narrow(at, start, length).reshape(local_shape(bound, dims, x.shape, factor, ranks, rank))


def local_shape(
    bound: BoundRule, dims: Sequence[tuple[int, ...]], shape: Sequence[int], held: AxisState, ranks: int, rank: int
) -> tuple[int, ...]:
    """Return the shape of a rank's piece; the whole shape if nothing is sharded."""
    out: list[int] = []
    for factors, size in zip(dims, shape, strict=True):
        is_cut = isinstance(held, int) and held in factors
        n = bound.sizes[held] if is_cut else 1
        out.append(size // max(n, 1) * chunk(n, ranks, rank)[1] if is_cut else size)
    return tuple(out)


def glue(bound: BoundRule, dims: Sequence[tuple[int, ...]], parts: Sequence[Tensor], held: AxisState) -> Tensor:
    """Return the whole value of a result from the parts of all ranks."""
    if isinstance(held, str):
        return JOIN[held](torch.stack(list(parts)))
    shape = list(parts[0].shape)
    n = bound.sizes[held]
    wide: list[Tensor] = []
    at = 0
    for rank, part in enumerate(parts):
        mine = chunk(n, len(parts), rank)[1]
        sizes: list[int] = []
        for factors, size in zip(dims, part.shape, strict=True):
            if held in factors:
                at = len(sizes) + factors.index(held)
                sizes += [mine if f == held else bound.sizes[f] for f in factors]
            else:
                sizes.append(size)
        wide.append(part.reshape(sizes))
    whole = torch.cat(wide, at)
    for d, factors in enumerate(dims):
        if held in factors:
            shape[d] = sum(p.shape[d] for p in parts)
    return whole.reshape(shape)


@dataclass
class Ranks:
    """All ranks of one axis, in lock-step: each is a thread, and all wait for each other at every exchange."""

    count: int
    shelf: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.count)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.shelf[rank] = x
        self.barrier.wait(10)
        found = [self.shelf[r] for r in range(self.count)]
        self.barrier.wait(10)
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error
                self.barrier.abort()

        threads = [Thread(target=one, args=(r,)) for r in range(self.count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        failures = [r for r in results.values() if isinstance(r, Exception)]
        real = [f for f in failures if type(f).__name__ != "BrokenBarrierError"]
        if failures:
            raise (real or failures)[0]
        return [results[r] for r in range(self.count)]


@dataclass
class OneRank:
    """The LocalCall of one rank, with one factor sharded along one axis."""

    ranks_: Ranks
    rank: int
    bound: BoundRule
    choice: Choice
    shapes: list[Any]
    outs: list[tuple[int, ...]]

    def _mine(self, operand: int, dim: int) -> bool:
        held = self.choice.ins[operand]
        return isinstance(held, int) and held >= 0 and held in self.bound.ins[operand][dim]

    def start(self, operand: int, dim: int) -> int:
        if not self._mine(operand, dim):
            return 0
        return chunk(self.shapes[operand][dim], self.ranks_.count, self.rank)[0]

    def total(self, operand: int, dim: int) -> int:
        return self.shapes[operand][dim]

    def out_shape(self, result: int) -> tuple[int, ...]:
        held = self.choice.outs[result]
        return local_shape(self.bound, self.bound.outs[result], self.outs[result], held, self.ranks_.count, self.rank)

    def ranks(self, operand: int, dim: int) -> int:
        return self.ranks_.count if self._mine(operand, dim) else 1

    def index(self, operand: int, dim: int) -> int:
        return self.rank if self._mine(operand, dim) else 0

    def gather(self, x: Tensor, operand: int, dim: int) -> Tensor:
        return torch.stack(self.ranks_.exchange(self.rank, x)) if self._mine(operand, dim) else x.unsqueeze(0)

    def gather_invariant(self, x: Tensor, operand: int, dim: int) -> Tensor:
        found = self.ranks_.exchange(self.rank, x) if self._mine(operand, dim) else [x]
        return torch.stack([y if y is x else y.detach() for y in found])

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor:
        return self.ranks_.exchange(self.rank, x)[sources[self.rank]]

    def recut(self, x: Tensor, operand: int, dim: int, to: int) -> Tensor:
        return self._recut(x, dim, to)

    def recut_result(self, x: Tensor, result: int, dim: int, to: int) -> Tensor:
        return self._recut(x, to, dim)

    def _recut(self, x: Tensor, dim: int, to: int) -> Tensor:
        whole = torch.cat(self.ranks_.exchange(self.rank, x), dim)
        return whole.narrow(to, *chunk(whole.shape[to], self.ranks_.count, self.rank))

    def halo(self, x: Tensor, operand: int, dim: int, before: int, after: int) -> Tensor:
        if not self._mine(operand, dim):
            return x
        whole = torch.cat(self.ranks_.exchange(self.rank, x), dim)
        start, length = chunk(self.shapes[operand][dim], self.ranks_.count, self.rank)
        rows = torch.nn.functional.pad(whole, [0, 0] * (x.dim() - 1 - dim) + [before, after])
        return rows.narrow(dim, start, length + before + after)

    def sum(self, x: Tensor, operand: int, dim: int) -> Tensor:
        return self.gather(x, operand, dim).sum(0)

    def max(self, x: Tensor, operand: int, dim: int) -> Tensor:
        return self.gather(x.detach(), operand, dim).amax(0)


@dataclass
class Sample:
    """A call `op(*args, **kwargs)` with global values; `fixed` operands have no gradient, all of them when None."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fixed: tuple[int, ...] | None = ()

    def wants(self, i: int, x: Tensor | None) -> bool:
        """True if operand i gets a gradient."""
        return self.fixed is not None and i not in self.fixed and differentiable(x)

    def described(self) -> OperatorCall | None:
        def meta(v: Any) -> Any:
            return v.to("meta") if isinstance(v, Tensor) else v

        return describe(self.op, *self.mapped(meta))

    def mapped(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def one(v: Any) -> Any:
            return [change(w) for w in v] if isinstance(v, (list, tuple)) else change(v)

        return tuple(one(a) for a in self.args), {k: one(v) for k, v in self.kwargs.items()}

    def operands(self, call: OperatorCall) -> list[Tensor | None]:
        return call.operands(self.args, self.kwargs)

    def arguments(self, call: OperatorCall, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with the operands replaced."""
        args, kwargs = self.mapped(lambda v: v.clone() if isinstance(v, Tensor) else v)
        args = list(args)
        for at, value in zip(call.places, tensors, strict=True):
            if at is None:
                continue
            holder: Any = args if isinstance(at[0], int) else kwargs
            if at[1] is None:
                holder[at[0]] = value
            else:
                holder[at[0]][at[1]] = value
        return args, kwargs


def differentiable(x: Tensor | None) -> bool:
    return x is not None and (x.dtype.is_floating_point or x.dtype.is_complex)


def results_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def terms(x: Tensor, ranks: int) -> list[Tensor]:
    """Return random terms of `x`."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex) or x.dtype.itemsize < 4:
        rest = [torch.randint(0, 3, x.shape).to(x.dtype) for _ in range(ranks - 1)]
    else:
        rest = [torch.randn_like(x) for _ in range(ranks - 1)]
    return [*rest, x - sum(rest)] if rest else [x]


def every_choice(bound: BoundRule, operands: Sequence[Tensor | None]) -> Iterator[Choice]:
    for factor in range(len(bound.sizes)):
        yield from factor_choices(bound, factor)
    numeric = [i for i, x in enumerate(operands) if x is not None and x.dtype != torch.bool]
    for pending in [{i} for i in numeric] + [set(numeric)]:
        if not pending:
            continue
        found = pending_sum_choices(bound, ["sum" if i in pending else REPLICATED for i in range(len(operands))])
        yield from (c for c in found if all(h != "sum" or i in numeric for i, h in enumerate(c.ins)))


def held_by(bound: BoundRule, i: int, x: Tensor, held: AxisState, ranks: int) -> list[Tensor]:
    """Return the parts of operand i on all ranks."""
    if held == "sum":
        return terms(x, ranks)
    if isinstance(held, int) and held >= 0:
        return [cut(bound, bound.ins[i], x, held, ranks, r) for r in range(ranks)]
    return [x] * ranks


def check(sample: Sample, ranks: int) -> int:
    """Compare every choice with the whole; return the number of choices that were compared."""
    call = sample.described()
    assert call is not None, "no rule"
    operands = sample.operands(call)
    done = 0
    for choice in dict.fromkeys(every_choice(call.bound, operands)):
        try:
            check_choice(sample, call, choice, ranks)
        except Exception as error:
            names = call.bound.names
            raise AssertionError(
                f"{sample.op} {call.rule.text!r} {names} {choice} on {ranks} ranks: {error}"
            ) from error
        done += 1
    return done


def check_choice(sample: Sample, call: OperatorCall, choice: Choice, ranks: int) -> None:
    operands = sample.operands(call)
    whole_in = [
        x.detach().clone().requires_grad_(sample.wants(i, x)) if x is not None else None for i, x in enumerate(operands)
    ]
    args, kwargs = sample.arguments(call, whole_in)
    whole = results_of(sample.op(*args, **kwargs))
    parts_in: list[list[Any]] = [
        [None] * ranks
        if x is None
        else [p.detach().clone().requires_grad_(sample.wants(i, x)) for p in held_by(call.bound, i, x, held, ranks)]
        for i, (x, held) in enumerate(zip(operands, choice.ins, strict=True))
    ]
    outs = run_ranks(sample, call, choice, ranks, parts_in, [tuple(w.shape) for w in whole])
    if sample.op is torch.ops.aten.empty_like.default:
        return
    for i, w in enumerate(whole):
        compare(call.bound, i, choice.outs[i], [o[i] for o in outs], w)
    gradients(call, choice, ranks, whole_in, whole, parts_in, outs)


def run_ranks(
    sample: Sample,
    call: OperatorCall,
    choice: Choice,
    ranks: int,
    parts: list[list[Any]],
    shapes: list[tuple[int, ...]],
) -> list[list[Tensor]]:
    group = Ranks(ranks)
    name = call.bound.names[choice.factor] if choice.factor is not None else ""
    form = call.rule.forms.get(name)
    if form is None and any(p is not None and 0 in p.shape for ps in parts for p in ps):
        form = call.rule.guard
    inputs = [tuple(x.shape) if x is not None else None for x in sample.operands(call)]

    def one(rank: int) -> list[Tensor]:
        here = OneRank(group, rank, call.bound, choice, inputs, shapes)
        args, kwargs = sample.arguments(call, [p[rank] for p in parts])
        if form is not None:
            return results_of(form(here, *args, **kwargs))
        for at in call.rule.sizes:
            (args if isinstance(at, int) else kwargs)[at] = list(here.out_shape(0))
        return results_of(sample.op(*args, **kwargs))

    return group.run(one) if form is not None else [one(r) for r in range(ranks)]


def compare(bound: BoundRule, i: int, held: AxisState, parts: Sequence[Tensor], whole: Tensor) -> None:
    if held == REPLICATED:
        for p in parts:
            torch.testing.assert_close(p, whole, equal_nan=True)
        return
    torch.testing.assert_close(glue(bound, bound.outs[i], parts, held), whole, equal_nan=True)


def cotangents(bound: BoundRule, i: int, held: AxisState, cotangent: Tensor, ranks: int) -> list[Tensor]:
    """Return the gradient in its dual layout: slices for a sharded result, terms for replicated, whole for pending."""
    if held == REPLICATED:
        return terms(cotangent, ranks)
    if isinstance(held, str):
        return [cotangent] * ranks
    return [cut(bound, bound.outs[i], cotangent, held, ranks, r) for r in range(ranks)]


def gradients(
    call: OperatorCall, choice: Choice, ranks: int, whole_in: Any, whole: Any, parts_in: Any, outs: list[list[Tensor]]
) -> None:
    loss: Any = 0
    local: Any = 0
    for i, w in enumerate(whole):
        if not w.requires_grad:
            continue
        c = torch.randn_like(w)
        loss = loss + (w * c).sum()
        whole_on_all = choice.invariant and choice.outs[i] == REPLICATED
        found = [c] * ranks if whole_on_all else cotangents(call.bound, i, choice.outs[i], c, ranks)
        for r, p in enumerate(found):
            local = local + (outs[r][i] * p).sum() if outs[r][i].requires_grad else local
    if not isinstance(loss, Tensor):
        return
    _backward(loss)
    _backward(local)
    for i, (x, held) in enumerate(zip(whole_in, choice.ins, strict=True)):
        if x is not None and x.requires_grad:
            mine = [gradient_of(p) for p in parts_in[i]]
            for m, goal in zip(*expected(call.bound, i, held, mine, gradient_of(x)), strict=True):
                torch.testing.assert_close(m, goal, equal_nan=True)


def expected(
    bound: BoundRule, i: int, held: AxisState, mine: list[Tensor], goal: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return found and expected parts by duality: terms if the operand is replicated, whole if pending, else slices."""
    if held == REPLICATED:
        return [torch.stack(mine).sum(0)], [goal]
    if held == "sum":
        return mine, [goal] * len(mine)
    assert isinstance(held, int)
    return mine, [cut(bound, bound.ins[i], goal, held, len(mine), r) for r in range(len(mine))]


def _backward(loss: Tensor) -> None:
    (loss.real if loss.is_complex() else loss).backward()


def gradient_of(x: Tensor) -> Tensor:
    return x.grad if x.grad is not None else torch.zeros_like(x)
