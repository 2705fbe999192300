"""A plan for a module: a mesh, and how parameters, buffers and the batch lie on it; data, and a text to edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from math import prod

from meshwright.cost import Cluster
from meshwright.graph import Input, Program, tensor_dtype, type_text
from meshwright.layout import ProcessMesh, Spec, hint
from meshwright.tensor import Context

from ._account import Account, Curve, Laid, Rival, Sent, loses, rising
from ._balance import Balanced
from ._choose import USABLE
from ._cuts import Cuts, Meeting
from ._errors import SearchError
from ._kept import per_byte
from ._mesh_curve import memory_curve
from ._pipelining import Pipelining
from ._plan import quoted
from ._prices import Prices
from ._saving import NOTHING, Saving
from ._sent import level
from ._units import parameters

REPLICAS = "dp"
SHARES = "tp"
STAGES = "pp"
ROLES = "parameter", "buffer", "batch"


@dataclass(frozen=True)
class MeshPlan:
    """`layouts` say how parameters, buffers and the batch lie on `mesh`, by name; what is left out follows from them.

    With a `pipeline` each lies on the mesh of its stage, as it would on that of the first: `stage_mesh`. `saving` tells
    what else is done so that it fits into memory, `context` how attention goes along a sequence that is cut, `notes`
    what that takes for granted and what is not known; the
    optimizer has so many `states`, each as large as its parameter. `seconds` of a step and `nbytes` of a rank are
    predictions; `cuts`, `stages` and `cluster` tell why, where a search found it.
    """

    mesh: ProcessMesh
    layouts: Mapping[str, Spec] = field(repr=False)
    seconds: float = 0.0
    nbytes: float = 0.0
    saving: Saving = NOTHING
    pipeline: Pipelining | None = None
    context: Context = "gather"
    notes: tuple[str, ...] = field(default=(), compare=False)
    states: float = field(default=2.0, repr=False, compare=False)
    cuts: Cuts | None = field(default=None, repr=False, compare=False)
    cluster: Cluster | None = field(default=None, repr=False, compare=False)
    stages: Balanced | None = field(default=None, repr=False, compare=False)

    @property
    def stage_mesh(self) -> ProcessMesh:
        """The mesh on which the layouts are those of a stage: all of it where there is no pipeline."""
        return self.mesh[STAGES, 0] if self.pipeline is not None else self.mesh

    @property
    def dp(self) -> int:
        """How many replicas there are."""
        return self.mesh.sizes.get(REPLICAS, 1)

    @property
    def tp(self) -> int:
        """How many ranks share a replica."""
        return self.mesh.sizes.get(SHARES, 1)

    @property
    def pieces(self) -> int:
        """Into how many pieces a batch goes: microbatches of a pipeline, or those of one rank."""
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
        """The layouts by the names of a captured program's values: what its completion has to be told.

        Raises SearchError for a name that the model has not, with the nearest, and for another shape or dtype.
        """
        known = named_inputs(program)
        return {_found(name, spec, known).value.name: spec for name, spec in self.layouts.items()}

    def text(self) -> str:
        """Lines of TOML that `parse_mesh_plan` reads."""
        return "\n".join(
            [
                "# " + "".join(c if c.isprintable() else " " for c in str(self).split("\n", 1)[0]),
                *(f"# {note}" for note in self.notes),
                f"seconds = {self.seconds!r}", f"bytes = {self.nbytes!r}",
                *(self.pipeline.lines() if self.pipeline else []), *self.saving.lines(),
                *([] if self.context == "gather" else [f"context = {quoted(self.context)}"]), "",
                "[mesh]", *(f"{name} = {size}" for name, size in self.mesh.sizes.items()), "",
                "[layouts]", *(f'{quoted(name)} = "{spec!r}"' for name, spec in self.layouts.items()), "",
            ]
        )  # fmt: skip

    def __str__(self) -> str:
        head = f"{self.how}: {self.seconds:.4g} s a step, {self.nbytes / 1e9:.3g} GB a rank"
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([head, *notes, *(f"  {name:<40} {spec!r}" for name, spec in self.layouts.items())])

    def explain(self, others: Sequence[MeshPlan] = (), most: int = 12) -> str:
        """Why it takes so long: what computes, what meets and where, what the next plans would take.

        Raises SearchError for a plan that was written and not searched: nobody knows what it costs.
        """
        self._searched("to explain")
        longest = sorted(self._meetings, key=lambda m: -m.seconds)
        spent = self._spent()
        rows = [
            str(self).splitlines()[0],
            *(f"  {note}" for note in self.notes),
            *(f"  {line}" for line in self._stage_lines()),
            f"  operators {spent['computation']:.4g} s, {len(longest)} conversions {spent['conversions']:.4g} s, "
            + ", ".join(f"{name} {seconds:.4g} s" for name, seconds in [*spent.items()][2:]),
            *(f"  {m}" for m in longest[:most]),
            *([f"  and {len(longest) - most} shorter ones"] if len(longest) > most else []),
            *(
                f"instead {p.how}: {p.seconds / self.seconds:.3f} times as long, {p.nbytes / 1e9:.3g} GB a rank"
                for p in others
            ),
        ]
        return "\n".join(rows)

    def _stage_lines(self) -> Iterator[str]:
        """What each stage takes."""
        if self.stages is None or self.pipeline is None:
            return
        how = self.pipeline
        for n, (busy, held) in enumerate(zip(self.stages.timeline.busy, self.stages.held, strict=True)):
            where = ", ".join(how.begins(chunk) or "the beginning" for chunk in how.chunks_of(n))
            yield f"stage {n} from {where}: {busy / how.microbatches:.4g} s a microbatch, {held / 1e9:.3g} GB a rank"

    def account(self, others: Sequence[MeshPlan] = ()) -> Account:
        """What `explain` says, as data: every tensor and how it lies, every conversion, and what `others` lose by.

        Raises SearchError as `explain` does.
        """
        cuts, cluster = self._searched("the account of")
        spent, room = self._spent(), cluster.device.memory * USABLE
        rivals = [Rival(p.how, p.seconds, p.nbytes, loses(spent, p._spent())) for p in others]
        elements = sum(prod(map(hint, i.value.shape)) for i in _own(cuts))
        return Account(
            f"a module of {parameters(float(elements))}", self.how,
            f"{self.mesh.size} ranks of {cluster!r}", self.seconds, self.nbytes, room,
            tuple(_why(self.seconds, spent, self._meetings)), spent, self._held(cuts), tuple(self._laid()),
            tuple(self._sent(cluster)), tuple(rivals), self._decided(),
            self.stages.timeline if self.stages else None, tuple(self._curves(cuts, cluster)),
        )  # fmt: skip

    def _decided(self) -> dict[str, object]:
        saving = {name: value for name, value in asdict(self.saving).items() if value != getattr(NOTHING, name)}
        along = {} if self.context == "gather" else {"context": self.context}
        return {**self.mesh.sizes, **(asdict(self.pipeline) if self.pipeline else {}), **saving, **along}

    def _curves(self, cuts: Cuts, cluster: Cluster) -> Iterator[Curve]:
        if self.stages is not None:
            found = self.stages
            for stage, (static, brief) in enumerate(zip(found.static, found.brief, strict=True)):
                yield rising(f"stage {stage}", found.timeline, stage, static + brief, found.costs.held)
            return
        together = min(self.tp, cluster.per_node)
        prices = Prices(cluster, self.tp, together, 1 / self.dp, 0.0, self.dp, self.saving, self.states)
        yield memory_curve(cuts, prices, self.seconds / self.saving.accumulate)

    def _searched(self, asked: str) -> tuple[Cuts, Cluster]:
        """What the search found, where there was one."""
        if self.cuts is None or self.cluster is None:
            raise SearchError(
                f"{asked} a plan of {self.how}", "a plan that was read from a text",
                "a text says how tensors lie, and not why", "mw.plan(model, batch, cluster=...)[0]",
            )  # fmt: skip
        return self.cuts, self.cluster

    @property
    def _meetings(self) -> tuple[Meeting, ...]:
        return self.cuts.meetings if self.cuts else ()

    def _spent(self) -> dict[str, float]:
        """Seconds of a step by what they go to; of a pipeline those of its ranks on average."""
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

    def _held(self, cuts: Cuts) -> dict[str, dict[str, float]]:
        """Bytes by kind, of every rank or of those of each stage."""
        if self.stages is not None:
            rows = zip(self.stages.held, self.stages.static, strict=True)
            return {f"stage {n}": _kinds(state, held - state) for n, (held, state) in enumerate(rows)}
        parts = ((i.value.nbytes, self.tp if cuts.of(i.value).kind == "cut" else 1) for i in _own(cuts))
        each = per_byte(self.saving, self.dp, self.states)
        state = min(self.nbytes, sum(nbytes * each / ranks for nbytes, ranks in parts))
        return {"every rank": _kinds(state, self.nbytes - state)}

    def _laid(self) -> Iterator[Laid]:
        for name, spec in self.layouts.items():
            layer, _, own = name.rpartition(".")
            part = prod(spec.local_shape(self.mesh.process_ids[0])) * spec.dtype.itemsize
            yield Laid(layer, own, repr(spec), float(part))

    def _sent(self, cluster: Cluster) -> Iterator[Sent]:
        link = level(cluster, self.tp, min(self.tp, cluster.per_node))
        for m in self._meetings:
            what = f"{m.value!r} from {m.have!r} to {m.need!r}"
            yield Sent(m.kind, what, m.layer or "the model", link, 1, m.nbytes, m.seconds, m.seconds, m.source)
        if self.stages is not None:
            yield self._messages(cluster, self.stages)
        if self.dp > 1:
            link = level(cluster, self.dp, max(1, min(self.dp, cluster.per_node // self.tp)))
            seconds = self._spent()["gradients of replicas"]
            nbytes = sum(row.nbytes for row in self._laid() if not row.name.startswith("batch_"))
            kind = "reduce-scatter and all-gather" if self.saving.zero else "all-reduce"
            yield Sent(kind, "gradients over dp", "behind the backward pass", link, 1, nbytes, seconds, seconds)

    def _messages(self, cluster: Cluster, stages: Balanced) -> Sent:
        """What goes from a chunk to the next and its gradient back: that of the largest boundary between stages."""
        times, count = stages.timeline.times, 2 * stages.schedule.microbatches
        link = level(cluster, self.mesh.size, min(self.mesh.size, cluster.per_node))
        boundaries = [n for n, (a, b) in enumerate(pairwise(stages.schedule.ways[0])) if a != b]
        nbytes = max(stages.costs.sent[n] for n in boundaries)
        seconds = count * max(times.message(n, n + 1) for n in boundaries)
        return Sent("message", "activations, and their gradients", "between stages", link, count, nbytes, seconds)


def _own(cuts: Cuts) -> list[Input]:
    """The parameters that something looks at."""
    return [i for i in cuts.program.inputs if i.role == "parameter" and i.value in cuts.forms]


def _kinds(state: float, others: float) -> dict[str, float]:
    return {"parameters, gradients, optimizer": state, "activations and batch": others}


def _why(seconds: float, spent: Mapping[str, float], meetings: Sequence[Meeting]) -> Iterator[str]:
    name = max(spent, key=lambda n: spent[n])
    yield f"{name}: {100 * spent[name] / (seconds or 1.0):.1f} % of the step"
    if meetings:
        yield f"the longest conversion: {max(meetings, key=lambda m: m.seconds)}".replace("  ", " ")


def named_inputs(program: Program) -> dict[str, Input]:
    """Parameters, buffers and the tensors of the batch, by their names outside."""
    found: dict[str, Input] = {}
    for given in program.inputs:
        if given.role in ROLES and given.value.is_tensor:
            found[given.name if given.name not in found else given.value.name] = given
    return found


def _found(name: str, spec: Spec, known: Mapping[str, Input]) -> Input:
    """The input of that name, of that shape and dtype."""
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.0)
        raise SearchError(
            f"a plan for {name!r}", f"a model with {', '.join([*known][:6])}{' ...' if len(known) > 6 else ''}",
            "it has no parameter, buffer or input of that name", near[0] if near else "a plan without layouts",
        )  # fmt: skip
    v = known[name].value
    if tuple(spec.shape) != tuple(map(hint, v.shape)) or spec.dtype != tensor_dtype(v):
        raise SearchError(
            f"a plan with {name!r} as {spec!r}", f"{name} is {type_text(v)}", "a layout is that of the whole tensor",
            f"{type_text(v)}, with @ and an axis behind the sizes that are cut",
        )  # fmt: skip
    return known[name]
