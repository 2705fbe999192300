"""The mesh for a captured model: how many replicas, how many ranks share one, and how each operator is cut then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from meshwright.cost import Cluster
from meshwright.graph import Input, Program, tensor_dtype
from meshwright.layout import Layout, ProcessMesh, Spec, hint, write_dtype

from ._choose import USABLE
from ._cuts import EXPOSED, WHOLE, Cuts, Form, Prices, cut
from ._errors import SearchError

REPLICAS, SHARES = "dp", "tp"


@dataclass(frozen=True)
class MeshPlan:
    """`dp` replicas of `tp` ranks each: seconds of a step, bytes of a rank, and the cuts along the latter."""

    dp: int
    tp: int
    seconds: float
    nbytes: float
    cuts: Cuts = field(repr=False)

    @property
    def mesh(self) -> ProcessMesh:
        return ProcessMesh(np.arange(self.dp * self.tp).reshape(self.dp, self.tp), [REPLICAS, SHARES])

    def specs(self) -> dict[str, Spec]:
        """How parameters, buffers and the batch lie, by name: all that a layout's completion has to be told."""
        mesh = self.mesh
        return {
            i.value.name: Spec(mesh, self._layout(i), i.value.shape, tensor_dtype(i.value))
            for i in self.cuts.program.inputs
            if i.role in ("parameter", "buffer", "batch") and i.value.is_tensor
        }

    def _layout(self, given: Input) -> Layout:
        v = given.value
        dims: list[tuple[str, ...]] = [()] * len(v.shape)
        form = self.cuts.of(v) if v in self.cuts.forms else WHOLE
        if given.role == "batch" and dims and self.dp > 1:
            dims[0] = (REPLICAS,)
        if _is_plain(form):
            dims[form.dim] = (*dims[form.dim], SHARES)
        return Layout(tuple(dims))

    def __str__(self) -> str:
        rows = [
            f"{self.dp} replicas of {self.tp} ranks: {self.seconds:.4g} s a step, {self.nbytes / 1e9:.3g} GB a rank"
        ]
        for given in self.cuts.program.inputs:
            if given.role == "parameter":
                v = given.value
                shape = ", ".join(f"{hint(n)}" for n in v.shape)
                rows.append(f"  {given.name:<40} {write_dtype(tensor_dtype(v))}[{shape}] {self._layout(given)}")
        return "\n".join(rows)

    def explain(self, others: Sequence[MeshPlan] = (), most: int = 12) -> str:
        """Why it takes so long: what computes, what meets and where, what the next plans would take."""
        met = sum(m.seconds for m in self.cuts.meetings)
        longest = sorted(self.cuts.meetings, key=lambda m: -m.seconds)
        rows = [
            f"{self.dp} replicas of {self.tp} ranks: {self.seconds:.4g} s a step, {self.nbytes / 1e9:.3g} GB a rank",
            f"  operators {self.cuts.seconds - met:.4g} s, {len(longest)} conversions {met:.4g} s, "
            f"gradients of replicas {self.seconds - self.cuts.seconds:.4g} s",
            *(f"  {m}" for m in longest[:most]),
            *([f"  and {len(longest) - most} shorter ones"] if len(longest) > most else []),
            *(
                f"instead {p.dp} replicas of {p.tp}: {p.seconds / self.seconds:.3f} times as long, "
                f"{p.nbytes / 1e9:.3g} GB a rank"
                for p in others
            ),
        ]
        return "\n".join(rows)


def _is_plain(form: Form) -> bool:
    """Whether a form cuts a whole dim, not a factor of one."""
    return form.kind == "cut" and isinstance(form.cut, tuple)


def plan_mesh(program: Program, cluster: Cluster, ranks: int) -> tuple[MeshPlan, ...]:
    """The plans for a captured forward pass, one per number of ranks that share a replica, fastest first.

    Raises SearchError where none fits into the memory of the cluster's devices.
    """
    room, found = cluster.device.memory * USABLE, list[MeshPlan]()
    errors: list[SearchError] = []
    rows = _rows(program)
    for tp in (t for t in range(1, ranks + 1) if ranks % t == 0):
        dp = ranks // tp
        if rows % dp:
            continue
        try:
            found.append(_planned(program, cluster, dp, tp, room))
        except SearchError as error:
            errors.append(error)
    if not found:
        raise errors[-1] if errors else SearchError(
            f"a plan for {ranks} ranks", f"a batch of {rows}", "replicas take equal parts of a batch",
            f"a batch that {ranks} divides",
        )  # fmt: skip
    return tuple(sorted(found, key=lambda plan: plan.seconds))


def _rows(program: Program) -> int:
    sizes = [
        hint(i.value.shape[0]) for i in program.inputs if i.role == "batch" and i.value.is_tensor and i.value.shape
    ]
    return sizes[0] if sizes and len(set(sizes)) == 1 else 1


def _planned(program: Program, cluster: Cluster, dp: int, tp: int, room: float) -> MeshPlan:
    together = min(tp, cluster.per_node)
    cuts = cut(program, Prices(cluster, tp, together, 1 / dp), room if room else inf)
    own = sum(
        i.value.nbytes / (tp if cuts.of(i.value).kind == "cut" else 1)
        for i in program.inputs
        if i.role == "parameter" and i.value in cuts.forms
    )
    replicas = max(1, min(dp, cluster.per_node // tp))
    sync = float(cluster.meeting("all-reduce", own, dp, replicas)) * EXPOSED
    return MeshPlan(dp, tp, cuts.seconds + sync, cuts.nbytes, cuts)
