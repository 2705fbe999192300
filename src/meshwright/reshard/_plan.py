"""Plans: sequences of steps from one spec to another, and the choice of the cheapest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwright.layout import Dim, Layout, Spec, axes_of

from ._cross import cross_paths
from ._errors import ReshardError
from ._execute import Action, compile_plan
from ._factors import bridge, common_factors
from ._mover import Mover, OutMover
from ._path import plain_paths
from ._split import PreparedConversion, SplitPlan, split_acts
from ._steps import AllToAll, Collective, ConversionStep, Exchange, Relabel, View, made

Price = Callable[[ConversionStep, Spec], float]
"""Function that returns the cost of a step for a tensor with the given spec."""
SMALL_MESH = 64


RankActions: TypeAlias = tuple[tuple[int, ...], torch.dtype, tuple[Action, ...]]
"""Shape and dtype of a rank's part of the source, and the functions of a local tensor and a communicator to apply."""


class Purpose(NamedTuple):
    """Purpose of a conversion in a program: the stage of the step, and the user's line and module that need it."""

    stage: str
    line: str
    module: str


@dataclass(frozen=True)
class ConversionPlan:
    """The steps from `src` to `dst`, in order; `purpose` describes the place in a program that needs them.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    >>> plan(parse_spec("f32[8@dp, 4] +tp", mesh), parse_spec("f32[8, 4]", mesh))
    AllReduce(tp) · AllGather(dp, dim 0)
    """

    src: Spec
    dst: Spec
    steps: tuple[ConversionStep, ...]
    purpose: Purpose | None = field(default=None, compare=False, repr=False)
    _of_rank: dict[int, RankActions] = field(default_factory=dict[int, RankActions], compare=False)
    _split_of_rank: dict[int, SplitPlan | None] = field(default_factory=dict[int, SplitPlan | None], compare=False)

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """All specs of the plan: `specs[i]` is the operand of step i; the last one is the target."""
        found = [self.src]
        for step in self.steps:
            found.append(made(step, found[-1]))
        return tuple(found)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, in ascending order."""
        return tuple(sorted({*self.src.mesh.process_ids, *self.dst.mesh.process_ids}))

    @cached_property
    def rounds(self) -> int:
        """Number of steps in which ranks communicate."""
        return sum(step.rounds(x) for step, x in self.walk())

    @cached_property
    def busiest(self) -> int:
        """Bytes received by the rank that receives most."""
        return max(self.received(rank) for rank in self.ranks)

    def walk(self) -> Iterable[tuple[ConversionStep, Spec]]:
        """Return pairs of each step and the spec that it is applied to."""
        return zip(self.steps, self.specs, strict=False)

    def received(self, rank: int) -> int:
        """Return the bytes that `rank` receives from others."""
        return sum(step.received(x, rank) for step, x in self.walk() if rank in x.mesh or isinstance(step, Exchange))

    def of_rank(self, rank: int) -> RankActions:
        """Return the shape and the dtype of the part of `rank`, and its actions, built once."""
        found = self._of_rank.get(rank)
        if found is None:
            actions = tuple([act.run for act in compile_plan(self.steps, self.specs, rank)])
            found = self._of_rank[rank] = self.src.local_shape(rank), self.src.dtype, actions
        return found

    def split_of_rank(self, rank: int) -> SplitPlan | None:
        """Return the actions of `rank` apart from its collective, built once; None if it makes none."""
        if rank not in self._split_of_rank:
            acts = compile_plan(self.steps, self.specs, rank)
            self._split_of_rank[rank] = split_acts(acts, self.dst.local_shape(rank))
        return self._split_of_rank[rank]

    def __repr__(self) -> str:
        return " · ".join(map(repr, self.steps)) or "nothing to do"


def plan(src: Spec, dst: Spec, price: Price | None = None) -> ConversionPlan:
    """Return the cheapest plan from `src` to `dst`, on one mesh or across two; it is equal on every rank.

    Without a price, plans are compared by the bytes that the busiest rank receives, then by rounds, then by steps.
    Across meshes they are compared by the received bytes of all ranks, then by the bytes between the meshes.

    Raises:
        ReshardError: the shapes or dtypes differ.
    """
    if src.is_symbolic:
        return _symbolic(src, dst, _plan(src.concrete, dst.concrete, price))
    return _plan(src, dst, price)


def _symbolic(src: Spec, dst: Spec, found: ConversionPlan) -> ConversionPlan:
    """Return the plan for symbolic sizes, made from the plan `found` for their hints.

    Raises ReshardError if a step depends on the sizes.
    """
    steps = tuple(Exchange(dst) if isinstance(s, Exchange) and s.to is dst.concrete else s for s in found.steps)
    bad = next((s for s in steps if isinstance(s, (View, Exchange)) and s not in (Exchange(dst),)), None)
    if bad is not None:
        raise ReshardError(
            f"from {src} to {dst}",
            f"the step {bad!r}",
            "the step depends on sizes, which are symbolic",
            "use a batch of fixed sizes, or axes that divide the dim evenly",
        )
    return ConversionPlan(src, dst, steps)


@lru_cache(maxsize=2048)
def _plan(src: Spec, dst: Spec, price: Price | None) -> ConversionPlan:
    _check(src, dst)
    if src is dst:
        return ConversionPlan(src, dst, ())
    if src.mesh is dst.mesh and src.layout.dims == dst.layout.dims and src.layout.partial == dst.layout.partial:
        return ConversionPlan(src, dst, (Relabel(dst.layout),))
    found = {steps: ConversionPlan(src, dst, steps) for steps in _candidates(src, dst, price is not None)}
    plans = list(found.values())
    if len(plans) == 1:
        return plans[0]
    if price is not None:
        return min(plans, key=lambda p: sum(price(step, x) for step, x in p.walk()))
    return min(plans, key=_cost_within_mesh if src.mesh is dst.mesh else _cost_across_meshes)


def _check(src: Spec, dst: Spec) -> None:
    if src.shape != dst.shape:
        raise ReshardError(
            f"from {src} to {dst}",
            f"shapes {tuple(src.shape)} and {tuple(dst.shape)}",
            "a conversion keeps every element of the tensor",
            f"use a target of shape {tuple(src.shape)}, or reshape first",
        )
    if src.dtype != dst.dtype:
        raise ReshardError(
            f"from {src} to {dst}",
            f"dtypes {src.dtype} and {dst.dtype}",
            "a conversion does not change values",
            f"use dst.with_dtype({src.dtype}), and cast before or after",
        )


def _cost_within_mesh(p: ConversionPlan) -> tuple[float, ...]:
    return max(map(p.received, _compared_ranks(p))), sum(_communicates(step) for step in p.steps), len(p.steps)


def _communicates(step: ConversionStep) -> bool:
    return isinstance(step, Collective | AllToAll | Exchange)


def _compared_ranks(p: ConversionPlan) -> tuple[int, ...]:
    """Return the ranks to compare: all of a small mesh; of a large one, ranks at the ends and in the middle of axes."""
    mesh = p.src.mesh
    if mesh.size <= SMALL_MESH:
        return mesh.process_ids
    changed = [a for a in mesh.dim_names if _role(p.src.layout, a) != _role(p.dst.layout, a)]
    spans = [sorted({0, 1, n // 2, n - 1}) if a in changed and n > 1 else [0] for a, n in mesh.sizes.items()]
    return tuple(int(mesh.mesh[at]) for at in product(*spans))


def _role(layout: Layout, axis: str) -> tuple[int, Dim] | str | None:
    """Return the role of an axis in a layout: the dim that it shards, with all axes of that dim, or its operation."""
    cut = next(((at, dim) for at, dim in enumerate(layout.dims) if axis in axes_of(dim)), None)
    return cut or dict(layout.partial).get(axis)


def _cost_across_meshes(p: ConversionPlan) -> tuple[float, ...]:
    crossing = sum(s.received(x, rank) for s, x in p.walk() if isinstance(s, Exchange) for rank in p.ranks)
    return sum(map(p.received, p.ranks)), crossing, sum(_communicates(step) for step in p.steps), len(p.steps)


def _candidates(src: Spec, dst: Spec, all_ways: bool) -> Iterator[tuple[ConversionStep, ...]]:
    """Yield the paths whose prices are compared."""
    both = common_factors(src, dst)
    if both is None:
        middle = bridge(src, dst)
        yield (*_plan(src, middle, None).steps, *_plan(middle, dst, None).steps)
        return
    find = plain_paths if src.mesh is dst.mesh else cross_paths
    for steps in find(*both, all_ways):
        yield _between_views(src, dst, both[0], both[1], steps)


def _between_views(
    src: Spec, dst: Spec, a: Spec, b: Spec, steps: tuple[ConversionStep, ...]
) -> tuple[ConversionStep, ...]:
    """Return the steps over common factors, between views from and to the dims of both specs."""
    if a is src and b is dst:
        return steps
    if all(isinstance(step, Relabel) for step in steps) and src.mesh is dst.mesh:
        return (Relabel(dst.layout),)
    head = () if a is src else (View(a),)
    return (*head, *steps) if b is dst else (*head, *steps, View(dst))


def execute(plan: ConversionPlan, local: Tensor, communicator: Mover) -> Tensor:
    """Return the local tensor of `plan.dst` on `communicator.rank`, for its local tensor of `plan.src`.

    The result is new and contiguous, except that a plan without work returns `local` itself. Grad mode must be off:
    gradients take the transposed conversion (`transposed`).

    Raises:
        ReshardError: `local` does not match the source spec.
    """
    rank = communicator.rank
    shape, dtype, actions = plan.of_rank(rank)
    if local.shape != shape or local.dtype is not dtype:
        raise _wrong_part(plan, local, rank)
    for act in actions:
        local = act(local, communicator)
    return local


def prepare(plan: ConversionPlan, local: Tensor, communicator: OutMover) -> PreparedConversion | None:
    """Return the conversion of `local` before its collective; None if the rank makes no collective.

    The result of `finish` is that of `execute`.

    Raises:
        ReshardError: `local` does not match the source spec.
    """
    rank = communicator.rank
    if local.shape != plan.src.local_shape(rank) or local.dtype is not plan.src.dtype:
        raise _wrong_part(plan, local, rank)
    split = plan.split_of_rank(rank)
    return None if split is None else split.prepared(local, communicator)


def _wrong_part(plan: ConversionPlan, local: Tensor, rank: int) -> ReshardError:
    shape = plan.src.local_shape(rank)
    return ReshardError(
        f"{plan!r} on rank {rank}",
        f"a part of shape {tuple(local.shape)}, {local.dtype}",
        f"rank {rank} holds a part of shape {shape}, {plan.src.dtype}, of {plan.src}",
        "pass the local part that the source spec describes",
    )
