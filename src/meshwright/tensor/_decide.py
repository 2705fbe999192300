"""Choosing how a call lies on the mesh: zero traffic first, then least change, then fewest bytes.

Nothing is sliced that nobody asked to slice, and terms stay pending while that costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from math import prod

from meshwright.layout import Dim, Layout, ProcessMesh, Spec, hint
from meshwright.spmd import (
    REPEATED,
    Bound,
    Call,
    Choice,
    Held,
    choices,
    cut_choices,
    dim_of,
    factor_axes,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What operands must be and what results are; `form` names the factor whose second form is to be run.

    `gathers` tells that some operand that was cut has to be brought together.
    """

    ins: tuple[Spec | None, ...]
    outs: tuple[Layout, ...]
    form: str | None
    gathers: bool


@dataclass(slots=True)
class _Picked:
    cuts: dict[int, list[str]]
    ins: list[list[tuple[str, str]]]
    outs: list[list[tuple[str, str]]]
    varies: list[str]
    form: str | None = None
    gathers: bool = False


def decide(
    call: Call, specs: Sequence[Spec | None], free: Set[int] = frozenset(), wish: Layout | None = None
) -> Decision | None:
    """How `call` lies on the mesh of its operands; None when an operand that is written to would have to move.

    Operands in `free` take any layout at no cost; `wish` is how the first result is wanted.
    """
    bound = call.bound
    wanted = factor_axes(bound.outs[0], wish, bound, _mesh(specs).sizes) if wish is not None else {}
    mesh = _mesh(specs)
    axes = [factor_axes(d, s.layout, bound, mesh.sizes) if s else {} for d, s in zip(bound.ins, specs, strict=True)]
    picked = _Picked({}, [[] for _ in specs], [[] for _ in bound.outs], [])
    for axis, ranks in mesh.sizes.items():
        held = [_held(axis, a, s) for a, s in zip(axes, specs, strict=True)]
        want = _held_by(axis, wanted, wish) if wish is not None else None
        choice = _pick(call, specs, held, ranks, axis, picked.form, free, want)
        if choice is None:
            return None
        _note(picked, choice, held, axis, specs, call)
    decision = _decision(bound, specs, axes, picked)
    return decision if all(decision.ins[i] is specs[i] for i in call.mutated) else None


def _mesh(specs: Sequence[Spec | None]) -> ProcessMesh:
    return next(s.mesh for s in specs if s is not None)


def _held(axis: str, axes: Mapping[int, tuple[str, ...]], spec: Spec | None) -> Held:
    return REPEATED if spec is None else _held_by(axis, axes, spec.layout)


def _held_by(axis: str, axes: Mapping[int, tuple[str, ...]], layout: Layout) -> Held:
    for factor, names in axes.items():
        if axis in names:
            return factor
    for name, op in layout.partial:
        if name == axis:
            return op
    return REPEATED


def _pick(
    call: Call,
    specs: Sequence[Spec | None],
    held: Sequence[Held],
    ranks: int,
    axis: str,
    form: str | None,
    free: Set[int],
    want: Held | None,
) -> Choice | None:
    """The cheapest choice for one axis."""
    bound = call.bound
    wished = cut_choices(bound, want) if isinstance(want, int) and want >= 0 and want not in held else ()
    if all(h == REPEATED for h in held) and not wished:
        return Choice((REPEATED,) * len(held), (REPEATED,) * len(bound.outs))
    best: tuple[float, int, float] | None = None
    found = None
    for choice in chain(wished, choices(bound, held)):
        if not _keeps_written(call, choice, held) or not _one_form(bound, choice, form):
            continue
        price = _price(bound, choice, specs, held, ranks, axis, free, want)
        if best is None or price < best:
            best, found = price, choice
    return found


def _keeps_written(call: Call, choice: Choice, held: Sequence[Held]) -> bool:
    return all(choice.ins[i] == held[i] and choice.outs[0] == held[i] for i in call.mutated)


def _one_form(bound: Bound, choice: Choice, form: str | None) -> bool:
    if choice.factor is None or form is None:
        return True
    name = bound.names[choice.factor]
    return name not in bound.rule.forms or bound.rule.forms[name] is bound.rule.forms[form]


def _price(
    bound: Bound,
    choice: Choice,
    specs: Sequence[Spec | None],
    held: Sequence[Held],
    ranks: int,
    axis: str,
    free: Set[int],
    want: Held | None,
) -> tuple[float, int, float]:
    """Bytes that move, operands that change, bytes that change; pending sums that grow count as moved."""
    moved, changed, touched, pending = 0.0, 0, 0.0, 0.0
    for at, (spec, have, need) in enumerate(zip(specs, held, choice.ins, strict=True)):
        if spec is None or at in free:
            continue
        size = _bytes_here(spec, axis)
        pending += size if have == "sum" else 0.0
        if have != need:
            moved += size * traffic(have, need, ranks)
            changed += 1
            touched += size
    if want is not None and choice.outs and choice.outs[0] != want:
        moved += _result_bytes(bound, specs, axis) * traffic(choice.outs[0], want, ranks)
        changed += 1
    if choice.factor is None and pending and choice.outs and choice.outs[0] == "sum":
        moved += max(0.0, _result_bytes(bound, specs, axis) - pending) * traffic("sum", REPEATED, ranks)
    return moved, changed, touched


def traffic(have: Held, need: Held, ranks: int) -> float:
    """Bytes that a rank receives to hold an operand otherwise, per byte of what the ranks of the axis hold together."""
    share = (ranks - 1) / ranks
    if have == need or have == REPEATED:
        return 0.0
    if isinstance(have, str):
        return share if isinstance(need, int) and need >= 0 else 2 * share
    if isinstance(need, str):
        return 2 * share
    return share if need == REPEATED else share / ranks


def _bytes_here(spec: Spec, axis: str) -> float:
    others = prod(spec.mesh.sizes[a] for a in spec.layout.cut_axes if a != axis)
    return spec.nbytes / others


def _result_bytes(bound: Bound, specs: Sequence[Spec | None], axis: str) -> float:
    """About how many bytes the ranks of `axis` hold of the results together."""
    elements = sum(prod(hint(bound.sizes[f]) for dim in out for f in dim) for out in bound.outs)
    spec = next(s for s in specs if s is not None)
    others = prod(spec.mesh.sizes[a] for a in spec.layout.cut_axes if a != axis)
    return elements * spec.dtype.itemsize / others


def _note(
    picked: _Picked, choice: Choice, held: Sequence[Held], axis: str, specs: Sequence[Spec | None], call: Call
) -> None:
    bound = call.bound
    if choice.factor is not None:
        picked.cuts.setdefault(choice.factor, []).append(axis)
        if bound.names[choice.factor] in bound.rule.forms:
            picked.form = bound.names[choice.factor]
    for i, need in enumerate(choice.ins):
        if isinstance(need, str):
            picked.ins[i].append((axis, need))
        picked.gathers |= held[i] != need and isinstance(held[i], int) and held[i] != REPEATED
    for i, gives in enumerate(choice.outs):
        if isinstance(gives, str):
            picked.outs[i].append((axis, gives))
    deciding = [specs[i] for i in call.mutated] or specs
    if any(need != REPEATED for need in choice.ins) or _all_vary(axis, deciding):
        picked.varies.append(axis)


def _all_vary(axis: str, specs: Sequence[Spec | None]) -> bool:
    return all(axis in s.layout.varying for s in specs if s is not None)


def _decision(
    bound: Bound, specs: Sequence[Spec | None], axes: Sequence[Mapping[int, tuple[str, ...]]], picked: _Picked
) -> Decision:
    mesh = next(s.mesh for s in specs if s is not None)
    cuts = {f: _order(f, names, specs, axes) for f, names in picked.cuts.items()}
    ins = tuple(
        _operand_spec(bound, i, spec, cuts, picked, mesh.sizes) if spec is not None else None
        for i, spec in enumerate(specs)
    )
    outs: list[Layout] = []
    for dims, partial in zip(bound.outs, picked.outs, strict=True):
        found = tuple(dim_of(d, cuts, bound, mesh.sizes) for d in dims)
        outs.append(_layout(found, partial, picked.varies))
    return Decision(ins, tuple(outs), picked.form, picked.gathers)


def _order(
    factor: int, names: list[str], specs: Sequence[Spec | None], axes: Sequence[Mapping[int, tuple[str, ...]]]
) -> tuple[str, ...]:
    """The axes that cut `factor`, in the order in which the largest operand has them."""
    if len(names) == 1:
        return (names[0],)
    order: list[str] = []
    for spec, mine in sorted(zip(specs, axes, strict=True), key=lambda p: -p[0].nbytes if p[0] else 0):
        if spec is not None:
            order += [a for a in mine.get(factor, ()) if a in names and a not in order]
    return tuple(order + [a for a in names if a not in order])


def _operand_spec(
    bound: Bound,
    at: int,
    spec: Spec,
    cuts: Mapping[int, tuple[str, ...]],
    picked: _Picked,
    sizes: Mapping[str, int],
) -> Spec:
    dims = tuple(dim_of(d, cuts, bound, sizes) for d in bound.ins[at])
    layout = _layout(dims, picked.ins[at], picked.varies)
    return spec if layout == spec.layout else spec.with_layout(layout)


def _layout(dims: tuple[Dim, ...], partial: Sequence[tuple[str, str]], varies: Sequence[str]) -> Layout:
    used = Layout(dims, tuple(partial))
    return Layout(dims, tuple(partial), tuple(a for a in varies if a not in used.axes))
