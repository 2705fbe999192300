"""Derivation of sharding choices from a rule: factors that may be sharded, required operands, and results.

Each choice is for one mesh axis: an operand is sharded along a factor, a pending sum (a term), or replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as cartesian
from math import prod

from meshwright.layout import Dim, Layout, Product

from .._errors import RuleError
from ..notation.equation import ELLIPSIS, NEW, DimTerm, Operand
from ..notation.rule import Rule
from .pending_sums import PendingOperands

REPLICATED = -1
OTHER_SHARDING = -2

AxisState = int | str
"""State of an operand along one axis: number of the factor that is sharded, REPLICATED, OTHER_SHARDING (sharded, but
along no factor), or the operation that joins its terms."""


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule bound to the shapes of a call: every dim of every operand is a list of numbered factors.

    `ins[i][d]` lists the factors of dim d of operand i, outermost first. It is empty for a dim of size one, unless the
    rule was bound with `ones`. Absent operands and plain numbers have no dims. `products` is empty if a plain number
    is added, since then no term may pass. `pending` operands may be pending sums; `fillable` operands may be a value on
    one rank and zeros on the others (see `pending_sums.py`).
    """

    rule: Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    whole: frozenset[int]
    ins: tuple[tuple[tuple[int, ...], ...], ...]
    outs: tuple[tuple[tuple[int, ...], ...], ...]
    products: tuple[tuple[int, ...], ...]
    pending: frozenset[int]
    fillable: frozenset[int]

    @property
    def flops(self) -> int:
        """Number of operations: two per multiply-add; one per point for an operator that is no contraction."""
        points = prod(self.sizes)
        return 2 * points if any(len(p) > 1 for p in self.products) and self.is_contraction else points

    @property
    def is_contraction(self) -> bool:
        kept = {f for out in self.outs for dim in out for f in dim}
        return any(f not in kept for f in range(len(self.sizes)))


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice for a call along one axis: required states of the operands, and resulting states of the results.

    `factor` is the factor that is sharded, or None.
    """

    ins: tuple[AxisState, ...]
    outs: tuple[AxisState, ...]
    factor: int | None = None


def bind(
    rule: Rule,
    shapes: Sequence[tuple[int, ...] | None],
    numbers: Sequence[int] = (),
    terms: PendingOperands | None = None,
    ones: bool = False,
) -> BoundRule:
    """Return `rule` bound to operands of these shapes; None is an absent operand or a plain number.

    `numbers` are the operands given as plain numbers. `terms` are the operands that may be pending sums; None means
    all. With `ones`, a dim of size one that no operand broadcasts has a factor, so that it may stay sharded.

    Raises:
        RuleError: the shapes do not fit the rule.
    """
    equation = rule.equation
    names: dict[str, int] = {}
    sizes: list[int] = []
    expanded = [_expand(o, s, rule) if s is not None else () for o, s in zip(equation.operands, shapes, strict=True)]
    for dims, shape in zip(expanded, shapes, strict=True):
        for term, size in zip(dims, shape or (), strict=True):
            _measure(term, size, names, sizes, rule)
    _check_products(expanded, shapes, names, sizes, rule)
    ellipsis = sorted((n for n in names if n.startswith(ELLIPSIS)), key=lambda n: -int(n[3:]))
    ins = tuple(
        tuple(_number(term, size, names, sizes, ones) for term, size in zip(dims, shape or (), strict=True))
        for dims, shape in zip(expanded, shapes, strict=True)
    )
    outs = tuple(_result(o, ellipsis, names, sizes, ones) for o in equation.results)
    whole = frozenset(
        at
        for n, at in names.items()
        if n in equation.whole or n[:3] == NEW or (n[:3] == ELLIPSIS and ELLIPSIS in equation.whole)
    )
    products = _present(equation.products, shapes, numbers)
    everything = frozenset(range(len(shapes)))
    pending, fillable = (terms.pending, terms.fillable) if terms is not None else (everything, everything)
    return BoundRule(rule, tuple(names), tuple(sizes), whole, ins, outs, products, pending, fillable)


def _present(
    products: tuple[tuple[int, ...], ...], shapes: Sequence[tuple[int, ...] | None], numbers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the products without absent operands; empty if a plain number is a term of its own."""
    if any(all(i in numbers for i in p) for p in products):
        return ()
    left = (tuple(i for i in p if shapes[i] is not None) for p in products)
    return tuple(p for p in left if p)


def _expand(operand: Operand, shape: tuple[int, ...], rule: Rule) -> tuple[DimTerm, ...]:
    """Return the operand with `...` expanded to `...k`, counted from the right.

    Raises RuleError if the number of dims does not fit.
    """
    named = sum(1 for d in operand if d.names != (ELLIPSIS,))
    free = len(shape) - named
    has = named != len(operand)
    if free < 0 or (free > 0 and not has):
        raise RuleError(
            f"rule {rule.text!r}",
            f"an operand of shape {tuple(shape)} for {operand}",
            "the number of dims differs",
            "pass an operand with the dims that the rule names",
        )
    dims: list[DimTerm] = []
    for term in operand:
        if term.names == (ELLIPSIS,):
            dims += [DimTerm((f"{ELLIPSIS}{k}",)) for k in range(free, 0, -1)]
        else:
            dims.append(term)
    return tuple(dims)


def _measure(term: DimTerm, size: int, names: dict[str, int], sizes: list[int], rule: Rule) -> None:
    for name in term.names:
        if name not in names:
            names[name] = len(sizes)
            sizes.append(0)
    if len(term.names) != 1:
        return
    at = names[term.names[0]]
    if sizes[at] in (0, 1):
        sizes[at] = size if sizes[at] == 0 or size != 0 else sizes[at]
    elif size not in (1, sizes[at]):
        raise RuleError(
            f"rule {rule.text!r}",
            f"factor {term.names[0]} is {sizes[at]} in one operand and {size} in another",
            "a factor has one size",
            "pass operands whose shapes agree, or use a size of 1 to broadcast",
        )


def _check_products(
    expanded: Sequence[tuple[DimTerm, ...]],
    shapes: Sequence[tuple[int, ...] | None],
    names: Mapping[str, int],
    sizes: list[int],
    rule: Rule,
) -> None:
    """Set the sizes of factors in products, which are part of their names (see `_literal`).

    Raises RuleError if the sizes do not multiply to the size of the dim.
    """
    for dims, shape in zip(expanded, shapes, strict=True):
        for term, size in zip(dims, shape or (), strict=True):
            if len(term.names) < 2:
                continue
            parts = [_literal(n) for n in term.names]
            if None in parts or prod(p for p in parts if p is not None) != size:
                raise RuleError(
                    f"rule {rule.text!r}",
                    f"a dim of size {size} for {term}",
                    "the name of a factor in a product ends with the factor's size",
                    "use names such as f0_4 for a factor of size 4",
                )
            for n, p in zip(term.names, parts, strict=True):
                sizes[names[n]] = p or 0


def _literal(name: str) -> int | None:
    """Return the size in a factor's name (16 for `f2_16`), or None."""
    _, found, size = name.rpartition("_")
    return int(size) if found and size.isdigit() else None


def _number(term: DimTerm, size: int, names: Mapping[str, int], sizes: Sequence[int], ones: bool) -> tuple[int, ...]:
    """Return the numbers of the factors of one dim.

    A dim of size one that is broadcast has no factors. Without `ones`, no dim of size one has any.
    """
    numbers = tuple(names[n] for n in term.names)
    if len(numbers) == 1:
        return numbers if sizes[numbers[0]] == size and (ones or size != 1) else ()
    return tuple(n for n in numbers if sizes[n] != 1)


def _result(
    operand: Operand, ellipsis: Sequence[str], names: dict[str, int], sizes: list[int], ones: bool
) -> tuple[tuple[int, ...], ...]:
    dims: list[tuple[int, ...]] = []
    for term in operand:
        if term.names == (ELLIPSIS,):
            dims += [(names[n],) if ones or sizes[names[n]] != 1 else () for n in ellipsis]
        else:
            _appear(term, names, sizes)
            keeps = ones and len(term.names) == 1
            dims.append(tuple(names[n] for n in term.names if n in names and (keeps or sizes[names[n]] != 1)))
    return tuple(dims)


def _appear(term: DimTerm, names: dict[str, int], sizes: list[int]) -> None:
    """Number the factors of a product that no operand has, such as `new0_3` in `(new0_3 a)`; they are whole."""
    for name in term.names:
        if len(term.names) > 1 and name not in names:
            names[name] = len(sizes)
            sizes.append(_literal(name) or 1)


def split_factor(bound: BoundRule, factor: int, sizes: tuple[int, ...]) -> BoundRule:
    """Return the call with `factor` replaced by a product of factors of these sizes, outermost first.

    An operator does not depend on which indices of a shardable factor a rank holds, so any such factor may be split.
    Thus a flattened dim keeps its sharding through all operators that are applied along it.
    """
    new = tuple(range(len(bound.sizes), len(bound.sizes) + len(sizes)))

    def split(operands: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(g for f in dim for g in (new if f == factor else (f,))) for dim in operand)
            for operand in operands
        )

    names = tuple(f"{bound.names[factor]}.{i}" for i in range(len(sizes)))
    kept = tuple(1 if f == factor else n for f, n in enumerate(bound.sizes))
    return replace(bound, names=bound.names + names, sizes=kept + sizes, ins=split(bound.ins), outs=split(bound.outs))


def split_sharded_products(bound: BoundRule, layouts: Sequence[Layout | None]) -> BoundRule:
    """Return `bound` with each shardable factor split if the layout of an operand has a product for it."""
    for at, layout in enumerate(layouts):
        for d, dim in enumerate(layout.dims if layout is not None else ()):
            factors = bound.ins[at][d]
            if not isinstance(dim, Product) or len(factors) != 1:
                continue
            sizes = tuple(n for n, _ in dim.factors if n != 1)
            if factors[0] not in bound.whole and bound.names[factors[0]] not in bound.rule.forms and len(sizes) > 1:
                bound = split_factor(bound, factors[0], sizes)
    return bound


def choices(bound: BoundRule, held: Sequence[AxisState]) -> Iterator[Choice]:
    """Yield the choices for the call along one axis that its operands suggest; the replicated choice is last.

    A factor is offered only if some operand is already sharded along it, terms only if some operand is pending.
    """
    for factor in dict.fromkeys(h for h in held if isinstance(h, int) and h >= 0):
        yield from (c for c in factor_choices(bound, factor) if allows_pending_sums(bound, c, held))
    if any(h == "sum" for h in held):
        yield from (c for c in pending_sum_choices(bound, held) if allows_pending_sums(bound, c, held))
    yield Choice((REPLICATED,) * len(bound.ins), (REPLICATED,) * len(bound.outs))


def allows_pending_sums(bound: BoundRule, choice: Choice, held: Sequence[AxisState]) -> bool:
    """True if the operands that are terms in `choice` may be terms, given their states before the call."""
    wanted = [i for i, need in enumerate(choice.ins) if need == "sum"]
    return all(i in (bound.pending if held[i] == "sum" else bound.fillable) for i in wanted)


def factor_choices(bound: BoundRule, factor: int) -> Iterator[Choice]:
    """Yield the choices that shard `factor`: operands and results with it are sharded; terms without it are pending."""
    form = bound.names[factor] in bound.rule.forms
    if factor in bound.whole and not form:
        return
    has = [any(factor in dim for dim in operand) for operand in bound.ins]
    outs = [any(factor in dim for dim in out) for out in bound.outs]
    if not any(has):
        return
    joins = bound.rule.joins()
    if not all(outs) and not form and (joins is None or (bound.rule.over is None and not bound.products)):
        return
    out = tuple(factor if o else (joins or REPLICATED) for o in outs)
    base: list[AxisState] = [factor if h else REPLICATED for h in has]
    if all(outs) or not bound.products:
        yield Choice(tuple(base), out, factor)
        return
    lacking = [p for p in bound.products if not any(has[i] for i in p)]
    for picks in cartesian(*lacking):
        ins = list(base)
        for i in picks:
            ins[i] = "sum"
        yield Choice(tuple(ins), out, factor)


def pending_sum_choices(bound: BoundRule, held: Sequence[AxisState]) -> Iterator[Choice]:
    """Yield the choices with pending sums: one operand of every product is pending, all others are replicated."""
    if not bound.products:
        return
    options = [[i for i in p if held[i] == "sum"] or list(p) for p in bound.products]
    for picks in cartesian(*options):
        ins: list[AxisState] = [REPLICATED] * len(bound.ins)
        for i in picks:
            ins[i] = "sum"
        yield Choice(tuple(ins), ("sum",) * len(bound.outs))


def factor_axes(
    dims: tuple[tuple[int, ...], ...], layout: Layout, bound: BoundRule, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return the axes that shard each factor of an operand; axes that fit no factor are under OTHER_SHARDING."""
    found: dict[int, tuple[str, ...]] = {}
    for factors, dim in zip(dims, layout.dims, strict=True):
        for factor, axes in _dim_axes(factors, dim, bound, sizes):
            found[factor] = (*found.get(factor, ()), *axes)
    return found


def _dim_axes(
    factors: tuple[int, ...], dim: Dim, bound: BoundRule, sizes: Mapping[str, int]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    if isinstance(dim, Product):
        mine = tuple(bound.sizes[f] for f in factors)
        theirs = tuple(n for n, _ in dim.factors if n != 1)
        if mine == theirs:
            yield from zip(factors, (a for n, a in dim.factors if n != 1), strict=True)
        else:
            yield OTHER_SHARDING, dim.axes
    elif dim and factors and (len(factors) == 1 or bound.sizes[factors[0]] % prod(sizes[a] for a in dim) == 0):
        yield factors[0], dim
    elif dim:
        yield OTHER_SHARDING, dim


def layout_dim(
    factors: tuple[int, ...], cuts: Mapping[int, tuple[str, ...]], bound: BoundRule, sizes: Mapping[str, int]
) -> Dim:
    """Return the layout dim for `factors` sharded by `cuts`, without a product if a plain tuple of axes is equal."""
    if not any(cuts.get(f) for f in factors):
        return ()
    outer = cuts.get(factors[0], ())
    inner = any(cuts.get(f) for f in factors[1:])
    if len(factors) == 1 or (not inner and bound.sizes[factors[0]] % prod(sizes[a] for a in outer) == 0):
        return outer
    return Product(tuple((bound.sizes[f], cuts.get(f, ())) for f in factors))
