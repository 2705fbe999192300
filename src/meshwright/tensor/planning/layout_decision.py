"""Choice of the layouts of a call: no traffic first, then the fewest changed operands, then the fewest bytes.

An operand is only sliced on request, and sums stay pending while that costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from math import prod

from meshwright.layout import Dim, Layout, ProcessMesh, Spec, hint
from meshwright.reshard import AxisRole, collective_between, received_share
from meshwright.spmd import (
    OTHER_SHARDING,
    REPLICATED,
    AxisState,
    BoundRule,
    Choice,
    OperatorCall,
    allows_pending_sums,
    choices,
    factor_axes,
    factor_choices,
    layout_dim,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Required layouts of the operands and layouts of the results; `form` is the factor whose local form runs.

    `gathers` is True if a sharded operand has to be gathered.
    """

    ins: tuple[Spec | None, ...]
    outs: tuple[Layout, ...]
    form: str | None
    gathers: bool


@dataclass(frozen=True, slots=True)
class _AxisProblem:
    """Inputs of the decision for an axis: the operands' states along it, and the wanted one of the first result."""

    call: OperatorCall
    specs: Sequence[Spec | None]
    free: Set[int]
    axis: str
    ranks: int
    held: tuple[AxisState, ...]
    want: AxisState | None


@dataclass(slots=True)
class _ChoicesSoFar:
    cuts: dict[int, list[str]]
    ins: list[list[tuple[str, str]]]
    outs: list[list[tuple[str, str]]]
    varies: list[str]
    invariant: list[str]
    form: str | None = None
    gathers: bool = False


def decide(
    call: OperatorCall, specs: Sequence[Spec | None], free: Set[int] = frozenset(), wish: Layout | None = None
) -> Decision | None:
    """Return the layouts of `call` on the mesh of its operands.

    None if an operand that is written to would have to move.

    Operands in `free` take any layout at no cost. `wish` is the wanted layout of the first result.
    """
    bound, mesh = call.bound, _mesh(specs)
    wanted = factor_axes(bound.outs[0], wish, bound, mesh.sizes) if wish is not None else {}
    axes = _axes_by_factor(bound, specs)
    picked = _nothing_picked(bound)
    for axis, ranks in mesh.sizes.items():
        held = tuple(_state_of_operand(axis, a, s) for a, s in zip(axes, specs, strict=True))
        want = _state_in_layout(axis, wanted, wish) if wish is not None else None
        here = _AxisProblem(call, specs, free, axis, ranks, held, want)
        choice = _cheapest_choice(here, picked.form)
        if choice is None:
            return None
        _add_choice(picked, choice, here)
    decision = _decision(bound, specs, axes, picked)
    return decision if all(decision.ins[i] is specs[i] for i in call.mutated) else None


def _axes_by_factor(bound: BoundRule, specs: Sequence[Spec | None]) -> list[Mapping[int, tuple[str, ...]]]:
    """Return for each operand the axes that shard it, by the factor of the rule that they shard."""
    sizes = _mesh(specs).sizes
    return [factor_axes(d, s.layout, bound, sizes) if s else {} for d, s in zip(bound.ins, specs, strict=True)]


def _nothing_picked(bound: BoundRule) -> _ChoicesSoFar:
    return _ChoicesSoFar({}, [[] for _ in bound.ins], [[] for _ in bound.outs], [], [])


def _mesh(specs: Sequence[Spec | None]) -> ProcessMesh:
    return next(s.mesh for s in specs if s is not None)


def _state_of_operand(axis: str, axes: Mapping[int, tuple[str, ...]], spec: Spec | None) -> AxisState:
    return REPLICATED if spec is None else _state_in_layout(axis, axes, spec.layout)


def _state_in_layout(axis: str, axes: Mapping[int, tuple[str, ...]], layout: Layout) -> AxisState:
    for factor, names in axes.items():
        if axis in names:
            return factor
    for name, op in layout.partial:
        if name == axis:
            return op
    return REPLICATED


def _cheapest_choice(here: _AxisProblem, form: str | None) -> Choice | None:
    """Return the cheapest choice for one axis; `form` is the one that other axes need."""
    bound, held, want = here.call.bound, here.held, here.want
    wished = factor_choices(bound, want) if isinstance(want, int) and want >= 0 and want not in held else ()
    if all(h == REPLICATED for h in held) and not wished:
        return Choice((REPLICATED,) * len(held), (REPLICATED,) * len(bound.outs))
    allowed = [
        choice
        for choice in chain((c for c in wished if allows_pending_sums(bound, c, held)), choices(bound, held))
        if _keeps_written(here.call, choice, held)
        and _keeps_cut(bound, choice, held)
        and _one_form(bound, choice, form)
    ]
    return min(allowed, key=lambda choice: _price(here, choice), default=None)


def _keeps_written(call: OperatorCall, choice: Choice, held: Sequence[AxisState]) -> bool:
    return all(choice.ins[i] == held[i] and choice.outs[0] == held[i] for i in call.mutated)


def _keeps_cut(bound: BoundRule, choice: Choice, held: Sequence[AxisState]) -> bool:
    """False if an operand would lose a sharding that the rule keeps."""
    stays = bound.rule.stays
    return not stays or all(
        not isinstance(h, int) or h < 0 or bound.names[h] not in stays or h == choice.factor for h in held
    )


def _one_form(bound: BoundRule, choice: Choice, form: str | None) -> bool:
    if choice.factor is None or form is None:
        return True
    name = bound.names[choice.factor]
    return name not in bound.rule.forms or bound.rule.forms[name] is bound.rule.forms[form]


def _price(here: _AxisProblem, choice: Choice) -> tuple[float, int, float]:
    """Return (bytes moved, operands changed, bytes changed); pending sums that grow count as moved."""
    moved, changed, touched, pending = 0.0, 0, 0.0, 0.0
    for at, (spec, have, need) in enumerate(zip(here.specs, here.held, choice.ins, strict=True)):
        if spec is None or at in here.free:
            continue
        size = _bytes_here(spec, here.axis)
        pending += size if have == "sum" else 0.0
        if have != need:
            moved += size * traffic(have, need, here.ranks)
            changed += 1
            touched += size
    if here.want is not None and choice.outs and choice.outs[0] != here.want:
        moved += _result_bytes(here) * traffic(choice.outs[0], here.want, here.ranks)
        changed += 1
    if choice.factor is None and pending and choice.outs and choice.outs[0] == "sum":
        moved += max(0.0, _result_bytes(here) - pending) * traffic("sum", REPLICATED, here.ranks)
    return moved, changed, touched


def traffic(have: AxisState, need: AxisState, ranks: int) -> float:
    """Return the bytes that a rank receives for a change of state.

    The unit is the bytes of the operand that all ranks of the axis hold together.
    """
    kind = None if have == need else collective_between(_role(have), _role(need))
    if kind is None:
        return 0.0
    if isinstance(need, str) or (isinstance(have, str) and need == OTHER_SHARDING):
        kind = "all-reduce"  # only a wish asks for these; a choice that gives them at once is better
    return received_share(kind, ranks)


def _role(state: AxisState) -> AxisRole:
    if isinstance(state, str):
        return "terms"
    return "whole" if state == REPLICATED else "cut"


def _bytes_here(spec: Spec, axis: str) -> float:
    return spec.nbytes / _cut_beside(spec, axis)


def _result_bytes(here: _AxisProblem) -> float:
    """Return the approximate bytes of the results that the ranks of the axis hold together."""
    bound = here.call.bound
    elements = sum(prod(hint(bound.sizes[f]) for dim in out for f in dim) for out in bound.outs)
    spec = next(s for s in here.specs if s is not None)
    return elements * spec.dtype.itemsize / _cut_beside(spec, here.axis)


def _cut_beside(spec: Spec, axis: str) -> int:
    """Return the number of pieces into which the other axes shard the tensor."""
    return prod(spec.mesh.sizes[a] for a in spec.layout.cut_axes if a != axis)


def _add_choice(picked: _ChoicesSoFar, choice: Choice, here: _AxisProblem) -> None:
    bound, axis = here.call.bound, here.axis
    if choice.factor is not None:
        picked.cuts.setdefault(choice.factor, []).append(axis)
        if bound.names[choice.factor] in bound.rule.forms:
            picked.form = bound.names[choice.factor]
    for i, need in enumerate(choice.ins):
        if isinstance(need, str):
            picked.ins[i].append((axis, need))
        have = here.held[i]
        picked.gathers |= have != need and isinstance(have, int) and have != REPLICATED
    for i, gives in enumerate(choice.outs):
        if isinstance(gives, str):
            picked.outs[i].append((axis, gives))
    if _varies(choice, here):
        picked.varies.append(axis)
    if choice.invariant:
        picked.invariant.append(axis)


def _varies(choice: Choice, here: _AxisProblem) -> bool:
    """True if the results of ranks along the axis may differ by rounding."""
    if any(need != REPLICATED for need in choice.ins):
        return True
    deciding = [here.specs[i] for i in here.call.mutated] or here.specs
    return all(here.axis in s.layout.varying for s in deciding if s is not None)


def _decision(
    bound: BoundRule, specs: Sequence[Spec | None], axes: Sequence[Mapping[int, tuple[str, ...]]], picked: _ChoicesSoFar
) -> Decision:
    mesh = _mesh(specs)
    cuts = {f: _axis_order(f, names, specs, axes) for f, names in picked.cuts.items()}
    ins = tuple(
        _operand_spec(bound, i, spec, cuts, picked, mesh.sizes) if spec is not None else None
        for i, spec in enumerate(specs)
    )
    varies = [axis for axis in picked.varies if axis not in picked.invariant]
    outs: list[Layout] = []
    for dims, partial in zip(bound.outs, picked.outs, strict=True):
        found = tuple(layout_dim(d, cuts, bound, mesh.sizes) for d in dims)
        outs.append(_layout(found, partial, varies))
    return Decision(ins, tuple(outs), picked.form, picked.gathers)


def _axis_order(
    factor: int, names: list[str], specs: Sequence[Spec | None], axes: Sequence[Mapping[int, tuple[str, ...]]]
) -> tuple[str, ...]:
    """Return the axes that shard `factor`, in their order on the largest operand."""
    if len(names) == 1:
        return (names[0],)
    order: list[str] = []
    for spec, mine in sorted(zip(specs, axes, strict=True), key=lambda p: -p[0].nbytes if p[0] else 0):
        if spec is not None:
            order += [a for a in mine.get(factor, ()) if a in names and a not in order]
    return tuple(order + [a for a in names if a not in order])


def _operand_spec(
    bound: BoundRule,
    at: int,
    spec: Spec,
    cuts: Mapping[int, tuple[str, ...]],
    picked: _ChoicesSoFar,
    sizes: Mapping[str, int],
) -> Spec:
    dims = tuple(layout_dim(d, cuts, bound, sizes) for d in bound.ins[at])
    layout = _layout(dims, picked.ins[at], picked.varies)
    return spec if layout == spec.layout else spec.with_layout(layout)


def _layout(dims: tuple[Dim, ...], partial: Sequence[tuple[str, str]], varies: Sequence[str]) -> Layout:
    used = Layout(dims, tuple(partial))
    return Layout(dims, tuple(partial), tuple(a for a in varies if a not in used.axes))
