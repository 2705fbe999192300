"""Derivation of sharding choices from a rule: factors that may be sharded, required operands, and results.

Each choice is for one mesh axis: an operand is sharded along a factor, a pending sum (a term), or replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from itertools import product as cartesian
from math import prod

from meshwright.layout import Dim, Layout, Product

from .._errors import RuleError
from ..notation.equation import ELLIPSIS, NEW, DimTerm, Equation, Operand, Products
from ..notation.rule import Rule
from .pending_sums import PendingOperands

REPLICATED = -1
OTHER_SHARDING = -2

DimFactors = tuple[tuple[int, ...], ...]
"""The numbers of the factors of each dim of an operand, outermost first."""
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
    ins: tuple[DimFactors, ...]
    outs: tuple[DimFactors, ...]
    products: Products
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

    `factor` is the factor that is sharded, or None. With `invariant`, replicated results are invariant although an
    operand is sharded.
    """

    ins: tuple[AxisState, ...]
    outs: tuple[AxisState, ...]
    factor: int | None = None
    invariant: bool = False


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
    operands = [_sized_terms(o, shape, rule) for o, shape in zip(equation.operands, shapes, strict=True)]
    for term, size in chain(*operands):
        _set_sizes(term, size, names, sizes, rule)
    _check_products(chain(*operands), names, sizes, rule)
    ellipsis = _ellipsis_names(names)
    ins = tuple(tuple(_factor_numbers(term, size, names, sizes, ones) for term, size in dims) for dims in operands)
    outs = tuple(_result_factors(o, ellipsis, names, sizes, ones) for o in equation.results)
    whole = frozenset(at for name, at in names.items() if _is_whole(name, equation))
    products = _present_products(equation.products, shapes, numbers)
    if terms is None:
        everything = frozenset(range(len(shapes)))
        terms = PendingOperands(everything, everything)
    return BoundRule(rule, tuple(names), tuple(sizes), whole, ins, outs, products, terms.pending, terms.fillable)


def _ellipsis_names(names: Iterable[str]) -> list[str]:
    """Return the factors of `...`, in the order of the dims."""
    return sorted((n for n in names if n.startswith(ELLIPSIS)), key=lambda n: -int(n[3:]))


def _is_whole(name: str, equation: Equation) -> bool:
    if name.startswith(ELLIPSIS):
        return ELLIPSIS in equation.whole
    return name in equation.whole or name.startswith(NEW)


def _sized_terms(operand: Operand, shape: tuple[int, ...] | None, rule: Rule) -> list[tuple[DimTerm, int]]:
    """Return the dims of an operand with their sizes, `...` expanded; none for an absent operand."""
    return [] if shape is None else list(zip(_expanded_terms(operand, shape, rule), shape, strict=True))


def _present_products(products: Products, shapes: Sequence[tuple[int, ...] | None], numbers: Sequence[int]) -> Products:
    """Return the products without absent operands; empty if a plain number is a term of its own."""
    if any(all(i in numbers for i in p) for p in products):
        return ()
    left = (tuple(i for i in p if shapes[i] is not None) for p in products)
    return tuple(p for p in left if p)


def _expanded_terms(operand: Operand, shape: tuple[int, ...], rule: Rule) -> tuple[DimTerm, ...]:
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


def _set_sizes(term: DimTerm, size: int, names: dict[str, int], sizes: list[int], rule: Rule) -> None:
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
    dims: Iterable[tuple[DimTerm, int]], names: Mapping[str, int], sizes: list[int], rule: Rule
) -> None:
    """Set the sizes of factors in products, which are part of their names (see `_size_in_name`).

    Raises RuleError if the sizes do not multiply to the size of the dim.
    """
    for term, size in dims:
        if len(term.names) < 2:
            continue
        parts = [_size_in_name(n) for n in term.names]
        if None in parts or prod(p for p in parts if p is not None) != size:
            raise RuleError(
                f"rule {rule.text!r}",
                f"a dim of size {size} for {term}",
                "the name of a factor in a product ends with the factor's size",
                "use names such as f0_4 for a factor of size 4",
            )
        for n, p in zip(term.names, parts, strict=True):
            sizes[names[n]] = p or 0


def _size_in_name(name: str) -> int | None:
    """Return the size in a factor's name (16 for `f2_16`), or None."""
    _, found, size = name.rpartition("_")
    return int(size) if found and size.isdigit() else None


def _factor_numbers(
    term: DimTerm, size: int, names: Mapping[str, int], sizes: Sequence[int], ones: bool
) -> tuple[int, ...]:
    """Return the numbers of the factors of one dim.

    A dim of size one that is broadcast has no factors. Without `ones`, no dim of size one has any.
    """
    numbers = tuple(names[n] for n in term.names)
    if len(numbers) == 1:
        return numbers if sizes[numbers[0]] == size and (ones or size != 1) else ()
    return tuple(n for n in numbers if sizes[n] != 1)


def _result_factors(
    operand: Operand, ellipsis: Sequence[str], names: dict[str, int], sizes: list[int], ones: bool
) -> DimFactors:
    dims: list[tuple[int, ...]] = []
    for term in operand:
        if term.names == (ELLIPSIS,):
            dims += [(names[n],) if ones or sizes[names[n]] != 1 else () for n in ellipsis]
        else:
            _number_new_factors(term, names, sizes)
            keeps = ones and len(term.names) == 1
            dims.append(tuple(names[n] for n in term.names if n in names and (keeps or sizes[names[n]] != 1)))
    return tuple(dims)


def _number_new_factors(term: DimTerm, names: dict[str, int], sizes: list[int]) -> None:
    """Number the factors of a product that no operand has, such as `new0_3` in `(new0_3 a)`; they are whole."""
    for name in term.names:
        if len(term.names) > 1 and name not in names:
            names[name] = len(sizes)
            sizes.append(_size_in_name(name) or 1)


def split_factor(bound: BoundRule, factor: int, sizes: tuple[int, ...]) -> BoundRule:
    """Return the call with `factor` replaced by a product of factors of these sizes, outermost first.

    An operator does not depend on which indices of a shardable factor a rank holds, so any such factor may be split.
    Thus a flattened dim keeps its sharding through all operators that are applied along it.
    """
    new = tuple(range(len(bound.sizes), len(bound.sizes) + len(sizes)))

    def split_dim(factors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chain(*(new if f == factor else (f,) for f in factors)))

    def split(operands: tuple[DimFactors, ...]) -> tuple[DimFactors, ...]:
        return tuple(tuple(map(split_dim, dims)) for dims in operands)

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
    has = [_has_factor(operand, factor) for operand in bound.ins]
    gives = [_has_factor(result, factor) for result in bound.outs]
    if not any(has) or not _may_shard(bound, factor, contracts=not all(gives)):
        return
    ins = _axis_states(has, factor, REPLICATED)
    invariant = bound.names[factor] in bound.rule.invariant
    outs = _axis_states(gives, factor, REPLICATED if invariant else bound.rule.joins() or REPLICATED)
    products = () if all(gives) else bound.products
    for picks in cartesian(*_products_without(products, has)):
        yield Choice(_with_sums(ins, picks), outs, factor, invariant)


def _axis_states(has: Sequence[bool], factor: int, otherwise: AxisState) -> tuple[AxisState, ...]:
    """Return the state of each tensor: sharded along the factor if it has the factor."""
    return tuple(factor if h else otherwise for h in has)


def _products_without(products: Products, has: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return the products none of whose operands has the factor."""
    return [p for p in products if not any(has[i] for i in p)]


def _has_factor(dims: DimFactors, factor: int) -> bool:
    return any(factor in factors for factors in dims)


def _may_shard(bound: BoundRule, factor: int, contracts: bool) -> bool:
    """True if a factor has a local form, or need not be whole and the results of its shards can be joined."""
    if bound.names[factor] in bound.rule.forms:
        return True
    if factor in bound.whole:
        return False
    return not contracts or bound.rule.over is not None or len(bound.products) > 0


def _with_sums(states: tuple[AxisState, ...], picks: Iterable[int]) -> tuple[AxisState, ...]:
    """Return the states with the picked operands as terms of a sum."""
    changed = list(states)
    for i in picks:
        changed[i] = "sum"
    return tuple(changed)


def pending_sum_choices(bound: BoundRule, held: Sequence[AxisState]) -> Iterator[Choice]:
    """Yield the choices with pending sums: one operand of every product is pending, all others are replicated."""
    if not bound.products:
        return
    options = [[i for i in p if held[i] == "sum"] or list(p) for p in bound.products]
    for picks in cartesian(*options):
        yield Choice(_with_sums((REPLICATED,) * len(bound.ins), picks), ("sum",) * len(bound.outs))


def factor_axes(
    dims: DimFactors, layout: Layout, bound: BoundRule, sizes: Mapping[str, int]
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
        parts = [(n, axes) for n, axes in dim.factors if n != 1]
        if [bound.sizes[f] for f in factors] == [n for n, _ in parts]:
            yield from zip(factors, (axes for _, axes in parts), strict=True)
        else:
            yield OTHER_SHARDING, dim.axes
    elif dim and factors and (len(factors) == 1 or _is_even(bound.sizes[factors[0]], dim, sizes)):
        yield factors[0], dim
    elif dim:
        yield OTHER_SHARDING, dim


def _is_even(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """True if axes of these sizes shard a dim of this size into equal parts."""
    return size % prod(sizes[a] for a in axes) == 0


def layout_dim(
    factors: tuple[int, ...], cuts: Mapping[int, tuple[str, ...]], bound: BoundRule, sizes: Mapping[str, int]
) -> Dim:
    """Return the layout dim for `factors` sharded by `cuts`, without a product if a plain tuple of axes is equal."""
    if not any(cuts.get(f) for f in factors):
        return ()
    outer = cuts.get(factors[0], ())
    inner = any(cuts.get(f) for f in factors[1:])
    if len(factors) == 1 or (not inner and _is_even(bound.sizes[factors[0]], outer, sizes)):
        return outer
    return Product(tuple((bound.sizes[f], cuts.get(f, ())) for f in factors))
