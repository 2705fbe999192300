"""The mesh for a captured model: how many replicas, how many ranks share one, and how each operator is cut then."""

from __future__ import annotations

from math import inf

import numpy as np

from meshwright.cost import Cluster
from meshwright.graph import Input, Program, tensor_dtype
from meshwright.layout import Layout, ProcessMesh, Spec, hint

from ._choose import USABLE
from ._cuts import EXPOSED, WHOLE, Cuts, Form, Prices, cut
from ._errors import SearchError
from ._mesh_plan import REPLICAS, SHARES, MeshPlan, named_inputs
from ._shown import OnStep


def plan_mesh(program: Program, cluster: Cluster, ranks: int, on_step: OnStep | None = None) -> tuple[MeshPlan, ...]:
    """The plans for a captured forward pass, one per number of ranks that share a replica, fastest first.

    Raises SearchError where none fits into the memory of the cluster's devices.
    """
    room, found = cluster.device.memory * USABLE, list[MeshPlan]()
    errors: list[SearchError] = []
    rows = _rows(program)
    divisors = [t for t in range(1, ranks + 1) if ranks % t == 0]
    for n, tp in enumerate(divisors):
        if on_step:
            on_step(n, len(divisors))
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
    mesh = ProcessMesh(np.arange(dp * tp).reshape(dp, tp), [REPLICAS, SHARES])
    layouts = {
        name: Spec(mesh, _layout(given, cuts, dp), given.value.shape, tensor_dtype(given.value))
        for name, given in named_inputs(program).items()
    }
    return MeshPlan(mesh, layouts, cuts.seconds + sync, cuts.nbytes, cuts, cluster)


def _layout(given: Input, cuts: Cuts, replicas: int) -> Layout:
    v = given.value
    dims: list[tuple[str, ...]] = [()] * len(v.shape)
    form = cuts.of(v) if v in cuts.forms else WHOLE
    if given.role == "batch" and dims and replicas > 1:
        dims[0] = (REPLICAS,)
    if _is_plain(form):
        dims[form.dim] = (*dims[form.dim], SHARES)
    return Layout(tuple(dims))


def _is_plain(form: Form) -> bool:
    """Whether a form cuts a whole dim, not a factor of one."""
    return form.kind == "cut" and isinstance(form.cut, tuple)
