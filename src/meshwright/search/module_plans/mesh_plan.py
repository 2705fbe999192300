"""Plan for a module: a mesh with the layouts of parameters, buffers and the batch, as data and as a text to edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from math import prod

from meshwright.cost import Cluster
from meshwright.graph import Input, Program, tensor_dtype, type_text
from meshwright.layout import ProcessMesh, Spec, hint, write_toml
from meshwright.tensor import Context

from .._errors import SearchError
from ..plan_data.account import (
    Account,
    Communication,
    MemoryCurve,
    OtherPlan,
    TensorLayout,
    pipeline_memory_curve,
    slower_parts,
)
from ..plan_data.account_text import account_text
from ..plan_data.units import parameters
from ..sharding.conversion_prices import Prices
from ..sharding.memory_model import per_byte
from ..sharding.memory_saving import NOTHING, MemorySaving
from ..sharding.sharding_search import PricedConversion, Shardings
from ..stages.balance import Balanced
from ..transformer_plans.choose import usable_memory
from ..transformer_plans.communication import link_name
from .memory_curve import memory_curve
from .module_assumptions import module_assumptions
from .pipeline_plan import Pipelining

REPLICAS = "dp"
SHARES = "tp"
STAGES = "pp"
ROLES = "parameter", "buffer", "batch"


@dataclass(frozen=True)
class MeshPlan:
    """A plan for a module: `layouts` of parameters, buffers and the batch on `mesh`, by name.

    Layouts that are left out follow from the others. With a `pipeline`, each tensor has its layout on the mesh of its
    own stage, written as on that of the first stage (`stage_mesh`). `saving` are the options that save memory, and
    `context` is the method of attention along a sharded sequence. `notes` are the conditions of the plan and what is
    not known. The optimizer has `states` states, each as large as its parameter. `seconds` of a step and `nbytes` of a
    rank are predictions. `cuts`, `stages` and `cluster` explain them if a search found the plan.
    """

    mesh: ProcessMesh
    layouts: Mapping[str, Spec] = field(repr=False)
    seconds: float = 0.0
    nbytes: float = 0.0
    saving: MemorySaving = NOTHING
    pipeline: Pipelining | None = None
    context: Context = "gather"
    notes: tuple[str, ...] = field(default=(), compare=False)
    states: float = field(default=2.0, repr=False, compare=False)
    cuts: Shardings | None = field(default=None, repr=False, compare=False)
    cluster: Cluster | None = field(default=None, repr=False, compare=False)
    stages: Balanced | None = field(default=None, repr=False, compare=False)

    @property
    def stage_mesh(self) -> ProcessMesh:
        """Mesh on which the layouts of a stage are written; the whole mesh if there is no pipeline."""
        return self.mesh[STAGES, 0] if self.pipeline is not None else self.mesh

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.mesh.sizes.get(REPLICAS, 1)

    @property
    def tp(self) -> int:
        """Number of ranks that share a replica."""
        return self.mesh.sizes.get(SHARES, 1)

    @property
    def pieces(self) -> int:
        """Number of pieces of a batch: microbatches of a pipeline, or those that one rank accumulates."""
        return self.pipeline.microbatches if self.pipeline is not None else self.saving.accumulate

    @property
    def how(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.sizes.items())
        if set(self.stage_mesh.dim_names) == {REPLICAS, SHARES}:
            mesh = f"{self.dp} replica{'s' * (self.dp > 1)} of {self.tp} rank{'s' * (self.tp > 1)}"
            mesh = mesh if self.pipeline is None else f"{self.pipeline.stages} stages of {mesh}"
        along = "" if self.context == "gather" else f"context parallel by {self.context}"
        return ", ".join(filter(None, [mesh, str(self.pipeline or ""), str(self.saving), along]))

    def specs(self, program: Program) -> dict[str, Spec]:
        """Return the layouts by the names of a captured program's values, as its completion needs them.

        Raises:
            SearchError: the model does not have a name (the message suggests the nearest), or has it with another
                shape or dtype.
        """
        known = named_inputs(program)
        return {_found(name, spec, known).value.name: spec for name, spec in self.layouts.items()}

    def text(self) -> str:
        """Return the plan as lines of TOML that `parse_mesh_plan` reads."""
        settings = {
            "seconds": self.seconds,
            "bytes": self.nbytes,
            **(self.pipeline.settings() if self.pipeline else {}),
            **self.saving.settings(),
            **({} if self.context == "gather" else {"context": self.context}),
            "mesh": dict(self.mesh.sizes),
            "layouts": {name: repr(spec) for name, spec in self.layouts.items()},
        }
        return write_toml(settings, [str(self).split("\n", 1)[0], *self.notes])

    def __str__(self) -> str:
        head = f"{self.how}: {self.seconds:.4g} s per step, {self.nbytes / 1e9:.3g} GB per rank"
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([head, *notes, *(f"  {name:<40} {spec!r}" for name, spec in self.layouts.items())])

    def explain(self, others: Sequence[MeshPlan] = ()) -> str:
        """Return the account of the plan as text, with the reasons why `others` are slower.

        Raises:
            SearchError: the plan was written and not searched, so its costs are not known.
        """
        return account_text(self.account(others))

    def _stage_lines(self) -> Iterator[str]:
        """Yield a line on the time and memory of each stage."""
        if self.stages is None or self.pipeline is None:
            return
        how = self.pipeline
        for n, (busy, held) in enumerate(zip(self.stages.timeline.busy, self.stages.held, strict=True)):
            where = ", ".join(how.begins(chunk) or "the beginning" for chunk in how.chunks_of(n))
            each = f"{busy / how.microbatches:.4g} s per microbatch, {held / 1e9:.3g} GB per rank"
            yield f"stage {n} from {where}: {each}"

    def account(self, others: Sequence[MeshPlan] = ()) -> Account:
        """Return the costs of the plan as data: tensors with layouts, conversions, and why `others` are slower.

        Raises:
            SearchError: the plan was written and not searched.
        """
        cuts, cluster = self._searched()
        spent, memory_limit = self._spent(), usable_memory(cluster)
        rivals = [OtherPlan(p.how, p.seconds, p.nbytes, slower_parts(spent, p._spent())) for p in others]
        elements = sum(prod(map(hint, i.value.shape)) for i in _own(cuts))
        return Account(
            f"a module of {parameters(float(elements))}",
            self.how,
            f"{self.mesh.size} ranks of {cluster!r}",
            self.seconds,
            self.nbytes,
            memory_limit,
            (*_why(self.seconds, spent, self._meetings), *self.notes, *self._stage_lines()),
            spent,
            self._held(cuts),
            tuple(self._laid()),
            tuple(self._sent(cluster)),
            tuple(rivals),
            self._decided(),
            self.stages.timeline if self.stages else None,
            tuple(self._curves(cuts, cluster)),
            assumed=module_assumptions(cuts.program, cluster),
        )

    def _decided(self) -> dict[str, object]:
        saving = {name: value for name, value in asdict(self.saving).items() if value != getattr(NOTHING, name)}
        along = {} if self.context == "gather" else {"context": self.context}
        return {**self.mesh.sizes, **(asdict(self.pipeline) if self.pipeline else {}), **saving, **along}

    def _curves(self, cuts: Shardings, cluster: Cluster) -> Iterator[MemoryCurve]:
        if self.stages is not None:
            found = self.stages
            for stage, (static, brief) in enumerate(zip(found.static, found.brief, strict=True)):
                yield pipeline_memory_curve(f"stage {stage}", found.timeline, stage, static + brief, found.costs.held)
            return
        together = min(self.tp, cluster.per_node)
        prices = Prices(cluster, self.tp, together, 1 / self.dp, 0.0, self.dp, self.saving, self.states)
        yield memory_curve(cuts, prices, self.seconds / self.saving.accumulate)

    def _searched(self) -> tuple[Shardings, Cluster]:
        """Return the cuts and the cluster of the search.

        Raises:
            SearchError: the plan was read from a text.
        """
        if self.cuts is None or self.cluster is None:
            raise SearchError(
                f"the account of a plan of {self.how}",
                "a plan that was read from a text",
                "a text has layouts, but not their costs",
                "call mw.plan(model, batch, cluster=...)[0]",
            )
        return self.cuts, self.cluster

    @property
    def _meetings(self) -> tuple[PricedConversion, ...]:
        return self.cuts.meetings if self.cuts else ()

    def _spent(self) -> dict[str, float]:
        """Return the seconds of a step by part; for a pipeline, the average of its ranks."""
        met, own = sum(m.seconds for m in self._meetings), self.cuts.seconds if self.cuts else self.seconds
        if self.stages is None:
            return {"computation": own - met, "conversions": met, "gradients of replicas": self.seconds - own}
        line = self.stages.timeline
        busy = sum(line.busy) / len(line.busy)
        return {
            "computation": min(own - met, busy),
            "conversions": max(busy - (own - met), 0.0),
            "bubble and messages": line.makespan - busy,
            "gradients of replicas": self.seconds - line.makespan,
        }

    def _held(self, cuts: Shardings) -> dict[str, dict[str, float]]:
        """Return the bytes by kind, for every rank or for those of each stage."""
        if self.stages is not None:
            rows = zip(self.stages.held, self.stages.static, strict=True)
            return {f"stage {n}": _kinds(state, held - state) for n, (held, state) in enumerate(rows)}
        each = per_byte(self.saving, self.dp, self.states)
        held = sum(self._part(cuts, i) * (1.0 if i.frozen else each) for i in _own(cuts))
        state = min(self.nbytes, held)
        return {"every rank": _kinds(state, self.nbytes - state)}

    def _part(self, cuts: Shardings, given: Input) -> float:
        """Return the bytes of a rank's part of a parameter."""
        return given.value.nbytes / (self.tp if cuts.of(given.value).kind == "cut" else 1)

    def _laid(self) -> Iterator[TensorLayout]:
        for name, spec in self.layouts.items():
            layer, _, own = name.rpartition(".")
            part = prod(spec.local_shape(self.mesh.process_ids[0])) * spec.dtype.itemsize
            yield TensorLayout(layer, own, repr(spec), float(part))

    def _sent(self, cluster: Cluster) -> Iterator[Communication]:
        link = link_name(cluster, self.tp, min(self.tp, cluster.per_node))
        for m in self._meetings:
            what = f"{m.value!r} from {m.have!r} to {m.need!r}"
            yield Communication(m.kind, what, m.layer or "the model", link, 1, m.nbytes, m.seconds, m.seconds, m.source)
        if self.stages is not None:
            yield self._messages(cluster, self.stages)
        if self.dp > 1:
            link = link_name(cluster, self.dp, max(1, min(self.dp, cluster.per_node // self.tp)))
            seconds = self._spent()["gradients of replicas"]
            cuts, _ = self._searched()
            nbytes = sum(self._part(cuts, i) for i in _own(cuts) if not i.frozen)
            kind = "reduce-scatter and all-gather" if self.saving.zero else "all-reduce"
            yield Communication(kind, "gradients over dp", "after the backward pass", link, 1, nbytes, seconds, seconds)

    def _messages(self, cluster: Cluster, stages: Balanced) -> Communication:
        """Return the row of the messages between stages and of their gradients, for the largest boundary."""
        times, count = stages.timeline.times, 2 * stages.schedule.microbatches
        link = link_name(cluster, self.mesh.size, min(self.mesh.size, cluster.per_node))
        boundaries = [n for n, (a, b) in enumerate(pairwise(stages.schedule.ways[0])) if a != b]
        nbytes = max(stages.costs.sent[n] for n in boundaries)
        seconds = count * max(times.message(n, n + 1) for n in boundaries)
        return Communication(
            "message", "activations, and their gradients", "between stages", link, count, nbytes, seconds
        )


def _own(cuts: Shardings) -> list[Input]:
    """Return the parameters that an operator reads."""
    return [i for i in cuts.program.inputs if i.role == "parameter" and i.value in cuts.forms]


def _kinds(state: float, others: float) -> dict[str, float]:
    return {"parameters, gradients, optimizer": state, "activations and batch": others}


def _why(seconds: float, spent: Mapping[str, float], meetings: Sequence[PricedConversion]) -> Iterator[str]:
    name = max(spent, key=lambda n: spent[n])
    yield f"{name}: {100 * spent[name] / (seconds or 1.0):.1f} % of the step"
    if meetings:
        yield f"the longest conversion: {max(meetings, key=lambda m: m.seconds)}".replace("  ", " ")


def named_inputs(program: Program) -> dict[str, Input]:
    """Return the parameters, buffers and batch tensors of a program by their external names."""
    found: dict[str, Input] = {}
    for given in program.inputs:
        if given.role in ROLES and given.value.is_tensor:
            found[given.name if given.name not in found else given.value.name] = given
    return found


def _found(name: str, spec: Spec, known: Mapping[str, Input]) -> Input:
    """Return the input of this name.

    Raises:
        SearchError: no input has the name, or it has another shape or dtype.
    """
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.0)
        raise SearchError(
            f"a plan for {name!r}",
            f"a model with {', '.join([*known][:6])}{' ...' if len(known) > 6 else ''}",
            "the model has no parameter, buffer or input of that name",
            f"write {near[0]}" if near else "use a plan without layouts",
        )
    v = known[name].value
    if tuple(spec.shape) != tuple(map(hint, v.shape)) or spec.dtype != tensor_dtype(v):
        raise SearchError(
            f"a plan with {name!r} as {spec!r}",
            f"{name} is {type_text(v)}",
            "a layout must have the shape and dtype of the whole tensor",
            f"write {type_text(v)}, with @ and an axis after each sharded size",
        )
    return known[name]
