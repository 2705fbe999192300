"""The mesh for a captured model: how many replicas, how many ranks share one, and how each operator is cut then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from meshwright.cost import Cluster, Meeting
from meshwright.graph import Input, Program, Value, tensor_dtype
from meshwright.layout import Layout, ProcessMesh, Spec, hint

from ._choose import USABLE
from ._cuts import BACKWARD, EXPOSED, CutProblem, Cuts
from ._errors import SearchError
from ._even_pieces import Evenly, evenly
from ._forms import WHOLE, Form
from ._kept import per_byte
from ._mesh_plan import REPLICAS, SHARES, MeshPlan, named_inputs
from ._prices import Prices
from ._saving import NOTHING, Dropped, Saving, blocks_of, patterns_of
from ._shown import OnStep

PIECES = 256
"""So many pieces of a batch are looked at."""
CLOSE = 5e-3
"""What may be faster by this part is not looked at."""
PROVED = 1e-9
"""A gap that is none."""


def plan_mesh(
    program: Program,
    cluster: Cluster,
    ranks: int,
    on_step: OnStep | None = None,
    saving: bool = True,
    batch: Sequence[Any] = (),
    states: float = 2.0,
) -> tuple[MeshPlan, ...]:
    """The plans for a captured forward pass, one per number of ranks that share a replica, fastest first.

    Where the fastest cuts do not fit into the memory of the cluster's devices, they are those that take less, or ZeRO,
    layers that are made again, or a batch in pieces, whatever is fastest; without `saving`, only the cuts. `batch` are
    the leaves of one, whose numbers may tell that pieces would not do. The optimizer has so many `states`, each as
    large as its parameter. Raises SearchError where nothing fits.
    """
    found, errors = list[MeshPlan](), list[SearchError]()
    meshes = _Meshes(program, cluster, saving, batch, states)
    divisors = [t for t in range(1, ranks + 1) if ranks % t == 0]
    for n, tp in enumerate(divisors):
        if on_step:
            on_step(n, len(divisors))
        dp = ranks // tp
        if meshes.rows % dp:
            continue
        try:
            found.append(meshes.planned(dp, tp))
        except SearchError as error:
            errors.append(error)
    if not found:
        raise errors[-1] if errors else SearchError(
            f"a plan for {ranks} ranks", f"a batch of {meshes.rows}", "replicas take equal parts of a batch",
            f"a batch that {ranks} divides",
        )  # fmt: skip
    return tuple(sorted(found, key=lambda plan: plan.seconds))


@dataclass(frozen=True)
class _Meshes:
    program: Program
    cluster: Cluster
    saving: bool
    batch: Sequence[Any]
    states: float

    @cached_property
    def rows(self) -> int:
        batch = (i.value for i in self.program.inputs if i.role == "batch")
        sizes = [hint(v.shape[0]) for v in batch if v.is_tensor and v.shape]
        return sizes[0] if sizes and len(set(sizes)) == 1 else 1

    @cached_property
    def evenly(self) -> Evenly:
        """Whether pieces of a batch give the loss of the whole."""
        found = evenly(self.program)
        return Evenly("labels are ignored, more in some pieces") if self.batch and found.ignores(self.batch) else found

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return blocks_of(self.program)

    def planned(self, dp: int, tp: int) -> MeshPlan:
        """The fastest plan for so many replicas of so many ranks."""
        room = self.cluster.device.memory * USABLE or inf
        own = _Mesh(self, dp, tp)
        cuts, saving = own.found(room)
        mesh = ProcessMesh(np.arange(dp * tp).reshape(dp, tp), [REPLICAS, SHARES])
        layouts = {
            name: Spec(mesh, _layout(given, cuts, dp, saving), given.value.shape, tensor_dtype(given.value))
            for name, given in named_inputs(self.program).items()
        }
        seconds = cuts.seconds + own.sync(cuts, saving)
        notes = [f"provided that {said}" for said in self.evenly.provided if saving.accumulate > 1]
        if cuts.gap > PROVED:
            notes.append(f"not proved to be the fastest cuts: at most {100 * cuts.gap:.2g} % above a bound")
        return MeshPlan(mesh, layouts, seconds, cuts.nbytes, saving, tuple(notes), self.states, cuts, self.cluster)


@dataclass(frozen=True)
class _Mesh:
    """Replicas, each of some ranks: what saves memory there, and what that takes."""

    of: _Meshes
    dp: int
    tp: int

    @property
    def prices(self) -> Prices:
        together = min(self.tp, self.of.cluster.per_node)
        return Prices(self.of.cluster, self.tp, together, 1 / self.dp, replicas=self.dp, states=self.of.states)

    def found(self, room: float) -> tuple[Cuts, Saving]:
        """The fastest of what fits: ways to save memory are looked at in the order of about what they take."""
        plain = CutProblem(self.of.program, self.prices)
        if plain.fastest.nbytes <= room or not self.of.saving:
            return plain.within(room), NOTHING
        best: tuple[float, Cuts, Saving] | None = None
        known, errors = {NOTHING: plain}, list[SearchError]()
        for about, saving in self._in_order(plain, room):
            if best is not None and about * (1 + CLOSE) >= best[0]:
                break
            alike = replace(saving, zero=0)
            known[alike] = known.get(alike) or CutProblem(self.of.program, replace(self.prices, saving=alike))
            try:
                cuts = known[alike].saving(saving).within(room)
            except SearchError as error:
                errors.append(error)
                continue
            seconds = cuts.seconds + self.sync(cuts, saving)
            best = (seconds, cuts, saving) if best is None or seconds < best[0] else best
        if best is None:
            raise self._nothing(_About(plain), room, errors[-1] if errors else None)
        return best[1:]

    def _in_order(self, plain: CutProblem, room: float) -> list[tuple[float, Saving]]:
        """Ways to save memory that may fit, with about the seconds of a step, fastest first."""
        about = _About(plain)
        fitting = [saving for saving in self._savings() if about.nbytes(saving) <= room]
        return sorted(((self._at_least(about, saving), saving) for saving in fitting), key=lambda way: way[0])

    def _at_least(self, about: _About, saving: Saving) -> float:
        return about.seconds(saving) + self.sync(about.plain.fastest, saving)

    def sync(self, cuts: Cuts, saving: Saving) -> float:
        """Seconds in which replicas bring gradients together, and what ZeRO keeps apart."""
        own = sum(
            i.value.nbytes / (self.tp if cuts.of(i.value).kind == "cut" else 1)
            for i in self.of.program.inputs
            if i.role == "parameter" and i.value in cuts.forms
        )
        replicas = max(1, min(self.dp, self.of.cluster.per_node // self.tp))
        kinds: Mapping[Meeting, int] = {"all-reduce": 1}
        if saving.zero:
            kinds = {"reduce-scatter": 1, "all-gather": 2 if saving.zero == 3 else 1}
        seconds = (n * self.of.cluster.meeting(kind, own, self.dp, replicas) for kind, n in kinds.items())
        return float(sum(seconds)) * EXPOSED

    def _savings(self) -> Iterator[Saving]:
        """All ways to save memory; a batch in pieces gathers no parameters anew, so that ZeRO ends at its states."""
        rows, blocks = self.of.rows // self.dp, self.of.blocks
        layers = [
            (),
            *([blocks[: len(blocks) // 2]] if len(blocks) > 1 else []),
            *([patterns_of(blocks)] if blocks else []),
        ]
        powers = [n for n in range(1, min(rows, PIECES) + 1) if rows % n == 0 and n & (n - 1) == 0]
        for pieces in [1] if self.of.evenly.why_not else powers:
            for zero in range((4 if pieces == 1 else 2) if self.dp > 1 else 1):
                yield from (Saving(zero, again, pieces) for again in layers)

    def _nothing(self, about: _About, room: float, nearest: SearchError | None) -> SearchError:
        fewest, why_not = min(map(about.nbytes, self._savings())), self.of.evenly.why_not
        found = nearest.found if nearest else f"it takes {fewest / 1e9:.2f} GB a rank"
        why = nearest.why if nearest else f"{(fewest - room) / 1e9:.2f} GB are missing however it is cut"
        return SearchError(
            f"a model on {self.dp} replicas of {self.tp} ranks of {room / 1e9:.2f} GB", found,
            f"{why}, with ZeRO, with layers made again, "
            + (f"and pieces of the batch will not do: {why_not}" if why_not else "and with the batch in pieces"),
            "more ranks, or a smaller batch",
        )  # fmt: skip


class _About:
    """What ways to save memory take about and at the least, counted from the fastest cuts without any of them."""

    def __init__(self, plain: CutProblem) -> None:
        self.plain = plain
        self._again: dict[tuple[str, ...], tuple[float, float]] = {}
        kept, forms = plain.kept, plain.forms
        parameters = [v for v in forms if v in kept.given & kept.trains]
        self._small, self._large = (
            sum(self._fewest(v) for v in parameters if kept.is_cut_by_zero(v) == large) for large in (False, True)
        )
        self._fixed = sum(self._fewest(v) for v in forms if v in kept.given and v not in kept.trains)
        self._late = sum(self._fewest(v) for v in forms if v in kept.late)

    def _fewest(self, v: Value) -> float:
        """Bytes of a value in that of its forms in which a rank holds least."""
        is_cut = any(form.kind == "cut" for form in self.plain.forms[v])
        return self.plain.kept.nbytes(v) / (self.plain.prices.ranks if is_cut else 1)

    def nbytes(self, saving: Saving) -> float:
        """No more bytes than any cuts take."""
        replicas, late = self.plain.prices.replicas, self._late - self._layers(saving.recompute)[1]
        large, small = (per_byte(how, replicas, self.plain.prices.states) for how in (saving, NOTHING))
        return self._fixed + self._small * small + self._large * large + late / saving.accumulate

    def seconds(self, saving: Saving) -> float:
        """Seconds of the fastest cuts, with operators that run again, and that begin more often."""
        begun = self.plain.prices.cluster.device.overhead * (1 + BACKWARD) * len(self.plain.program.nodes)
        return self.plain.fastest.seconds + self._layers(saving.recompute)[0] + begun * (saving.accumulate - 1)

    def _layers(self, recompute: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of the forward pass of layers, and the least bytes that they do not keep."""
        if recompute not in self._again:
            plain, dropped = self.plain, Dropped(self.plain.program, Saving(recompute=recompute))
            seconds = sum(o.seconds for n, o in plain.fastest.options.items() if dropped.layer(n) is not None)
            freed = sum(self._fewest(v) for v in dropped.values if v in plain.kept.late)
            self._again[recompute] = seconds / (1 + BACKWARD), freed
        return self._again[recompute]


def _layout(given: Input, cuts: Cuts, replicas: int, saving: Saving) -> Layout:
    """How an input lies. A batch that is taken in pieces has the same rows in all its tensors: those of the replica."""
    v = given.value
    dims: list[tuple[str, ...]] = [()] * len(v.shape)
    form = cuts.of(v) if v in cuts.forms else WHOLE
    if given.role == "batch" and dims and replicas > 1:
        dims[0] = (REPLICAS,)
    in_pieces = given.role == "batch" and saving.accumulate > 1
    if _is_plain(form) and not (in_pieces and form.dim == 0):
        dims[form.dim] = (*dims[form.dim], SHARES)
    return Layout(tuple(dims))


def _is_plain(form: Form) -> bool:
    """Whether a form cuts a whole dim, not a factor of one."""
    return form.kind == "cut" and isinstance(form.cut, tuple)
