"""Search for the mesh of a captured model: the number of replicas, the ranks of each, and the cuts of its operators."""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np

from meshwright.cost import Cluster
from meshwright.graph import Input, Program, tensor_dtype
from meshwright.layout import Layout, ProcessMesh, Spec
from meshwright.tensor import Context

from .._errors import SearchError
from ..plan_data.progress_bar import OnProgress
from ..sharding.attention_options import attention_sentences, count_attention_methods
from ..sharding.forms import WHOLE, AxisForm
from ..sharding.sharding_search import Shardings
from .mesh_plan import REPLICAS, SHARES, STAGES, MeshPlan, named_inputs
from .pipeline_search import FoundPipeline, Pipelines
from .replicas import PlanRequest, Replicas

PROVED = 1e-9
"""Largest gap at which cuts count as proved to be the best."""


@contextmanager
def _without_cycle_collection() -> Generator[None]:
    """Pause Python's cycle collector inside the context.

    The search keeps millions of tuples and makes no cycles. The collector would visit all of them again and again, in a
    quarter of the time of a large model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_cycle_collection()
def plan_mesh(
    program: Program,
    cluster: Cluster,
    ranks: int,
    on_step: OnProgress | None = None,
    saving: bool = True,
    batch: Sequence[Any] = (),
    states: float = 2.0,
    stages: int | None = None,
) -> tuple[MeshPlan, ...]:
    """Return the plans for a captured forward pass, one per number of ranks that share a replica, fastest first.

    If the fastest cuts do not fit into the memory of the devices, the plan uses the fastest of these: cuts that take
    less, ZeRO, recomputed layers, or a batch in pieces. Without `saving`, it uses other cuts only. A pipeline is among
    the plans if the fastest one takes less time than all others. With `stages`, all plans have that many stages.
    `batch` are the leaves of a batch, whose numbers may show that pieces would change the loss. The optimizer has
    `states` states, each as large as its parameter.

    Raises:
        SearchError: nothing fits, or no number of replicas divides both the ranks and the batch.
    """
    asked = PlanRequest(program, cluster, saving, batch, states)
    replicas = _divisions(asked, ranks)
    pipelines = Pipelines(replicas, stages) if saving and stages != 1 and ranks > 1 else None
    found = list[MeshPlan]()
    plans_of = _plans_without_pipeline if stages in (None, 1) else _plans_with_stages
    tell = on_step or (lambda done, of: None)
    for n, own in enumerate(replicas):
        tell(n, len(replicas) + 1)
        found += plans_of(own, pipelines)
        if pipelines is None or pipelines.why_not:
            own.forget()
    tell(len(replicas), len(replicas) + 1)
    if pipelines is not None and stages is None:
        piped = pipelines.best(replicas, min((plan.seconds for plan in found), default=inf))
        found += [] if piped is None else [_pipeline_plan(asked, piped)]
    if not found:
        raise _no_plan(replicas, pipelines, stages)
    return tuple(sorted(found, key=lambda plan: plan.seconds))


def _divisions(asked: PlanRequest, ranks: int) -> list[Replicas]:
    """Return the divisions of ranks into replicas that get equal parts of the batch.

    Raises:
        SearchError: there is none.
    """
    shares = [t for t in range(1, ranks + 1) if ranks % t == 0 and asked.rows % (ranks // t) == 0]
    if not shares:
        raise SearchError(
            f"a plan for {ranks} ranks",
            f"a batch of {asked.rows} rows",
            "all replicas must get equal parts of the batch",
            f"use a batch size that {ranks} divides",
        )
    return [Replicas(asked, ranks // t, t) for t in shares]


def _smallest_replicas(replicas: Sequence[Replicas]) -> Replicas:
    """Return the replicas that need the fewest bytes per rank."""
    first, *others = sorted(replicas, key=lambda own: own.at_least)
    for own in others:
        if own.at_least < first.fewest and own.fewest < first.fewest:
            first = own
    return first


def _no_plan(replicas: Sequence[Replicas], pipelines: Pipelines | None, stages: int | None) -> SearchError:
    """Return the error for a search without a result; it has the first condition that no candidate meets."""
    if stages in (None, 1):
        return _smallest_replicas(replicas).nothing()
    asked, ranks = replicas[0].of, replicas[0].dp * replicas[0].tp
    alone = "stages need several ranks" if ranks == 1 else "without memory-saving options, the search makes no stages"
    return SearchError(
        f"a plan with {stages} stages on {ranks} ranks",
        f"a batch of {asked.rows} rows, and {' or '.join(str(own.dp) for own in replicas)} replicas of the model",
        alone if pipelines is None else pipelines.why_none(),
        "request another number of stages, or let the search choose: stages=None",
    )


def _plans_without_pipeline(own: Replicas, pipelines: Pipelines | None) -> list[MeshPlan]:
    """Return the fastest plan without a pipeline, for this number of replicas and ranks, if any fits."""
    if own.found is None:
        return []
    cuts, saving = own.found
    mesh = ProcessMesh(np.arange(own.dp * own.tp).reshape(own.dp, own.tp), [REPLICAS, SHARES])
    layouts = _layouts(own.of.program, cuts, mesh, saving.accumulate)
    notes = _notes(own.of, cuts, saving.accumulate)
    if pipelines is not None and pipelines.why_not and len(own.of.blocks) > 1:
        notes.append(f"no pipeline: {pipelines.why_not}")
    seconds = cuts.seconds + own.sync(cuts, saving)
    plan = MeshPlan(
        mesh,
        layouts,
        seconds,
        cuts.nbytes,
        saving,
        context=_context(cuts),
        notes=tuple(notes),
        states=own.of.states,
        cuts=cuts,
        cluster=own.of.cluster,
    )
    return [plan]


def _plans_with_stages(own: Replicas, pipelines: Pipelines | None) -> list[MeshPlan]:
    """Return the fastest plan with stages on these replicas, if there is one."""
    piped = pipelines.best([own]) if pipelines is not None else None
    return [] if piped is None else [_pipeline_plan(own.of, piped)]


def _pipeline_plan(asked: PlanRequest, piped: FoundPipeline) -> MeshPlan:
    sizes = piped.how.stages, piped.dp, piped.tp
    mesh = ProcessMesh(np.arange(np.prod(sizes)).reshape(sizes), [STAGES, REPLICAS, SHARES])
    layouts = _layouts(asked.program, piped.cuts, mesh[STAGES, 0], piped.how.microbatches, staged=True)
    notes = tuple(_notes(asked, piped.cuts, piped.how.microbatches))
    return MeshPlan(
        mesh,
        layouts,
        piped.seconds,
        piped.nbytes,
        piped.saving,
        piped.how,
        _context(piped.cuts),
        notes,
        asked.states,
        piped.cuts,
        asked.cluster,
        piped.stages,
    )


def _notes(asked: PlanRequest, cuts: Shardings, pieces: int) -> list[str]:
    notes = [f"provided that {what}" for what in asked.evenly.provided if pieces > 1]
    if cuts.gap > PROVED:
        notes.append(f"not proved to be the fastest shardings: at most {100 * cuts.gap:.2g} % above a lower bound")
    return notes + attention_sentences(count_attention_methods(cuts.options))


def _context(cuts: Shardings) -> Context:
    return "ulysses" if count_attention_methods(cuts.options)["ulysses"] else "gather"


def _layouts(
    program: Program, cuts: Shardings, mesh: ProcessMesh, pieces: int, staged: bool = False
) -> dict[str, Spec]:
    """Return the layouts of the inputs on the mesh of replicas and shares.

    If the batch is taken in pieces, all its tensors keep the rows of the replica. With stages, the batch is sharded in
    rows only.
    """

    def lies(given: Input) -> Layout:
        v = given.value
        dims: list[tuple[str, ...]] = [()] * len(v.shape)
        form, of_batch = cuts.of(v) if v in cuts.forms else WHOLE, given.role == "batch"
        if of_batch and dims and mesh.sizes[REPLICAS] > 1:
            dims[0] = (REPLICAS,)
        if _is_plain(form) and not (of_batch and (staged or (pieces > 1 and form.dim == 0))):
            dims[form.dim] = (*dims[form.dim], SHARES)
        return Layout(tuple(dims))

    inputs = named_inputs(program).items()
    return {name: Spec(mesh, lies(i), i.value.shape, tensor_dtype(i.value)) for name, i in inputs}


def _is_plain(form: AxisForm) -> bool:
    """True if a form shards a whole dim, and not a factor of one."""
    return form.kind == "cut" and isinstance(form.cut, tuple)
