"""From a searched plan to code for a person: styles by patterns of module names, and the remainder of the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.cost import Cluster
from meshwright.layout import ProcessMesh, Shard, Spec, axes_of
from meshwright.search import MemorySaving, MeshPlan, SearchError
from meshwright.tensor import DistTensor

from ..eager.parallelize import Parallelism, parallelize
from ..eager.styles import ColwiseParallel, RowwiseParallel, Style
from .auto import plan

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Suggestion:
    """Styles by patterns for `parallelize`, and the parts of the searched plan that they leave out."""

    mesh: ProcessMesh
    config: Parallelism
    left_out: tuple[str, ...]
    searched: MeshPlan

    def text(self) -> str:
        """Return lines of Python to paste into a program."""
        rows = [f'    "{pattern}": mw.{style_code(style)},' for pattern, style in self.config.plan.items()]
        lies = f"batch={self.config.batch!r}, sequence={self.config.sequence!r}"
        lies += f", split={self.config.split!r}" if self.config.split else ""
        lies += f", way={self.config.way!r}" if self.config.way else ""
        lies += f", zero={self.config.zero}" if self.config.zero else ""
        lies += f", context={self.config.context!r}" if self.config.context != Parallelism({}).context else ""
        return "\n".join(
            [
                f"# {str(self.searched).splitlines()[0]}, as predicted",
                f"mesh = mw.ProcessMesh({self.mesh.mesh.tolist()}, {list(self.mesh.dim_names)})",
                *(["plan = {", *rows, "}"] if rows else ["plan = {}  # weights are whole on every rank"]),
                f"config = mw.Parallelism(plan, {lies})",
                "model, optimizer = mw.parallelize(model, optimizer, mesh, config)",
                *(f"# left out: {line}" for line in self.left_out),
            ]
        )


def style_code(style: Any) -> str:
    """Return a style as a person writes it.

    >>> style_code(ColwiseParallel(transposed=True))
    'ColwiseParallel(transposed=True)'
    """
    told = [f"{f.name}={getattr(style, f.name)!r}" for f in fields(style) if getattr(style, f.name) != f.default]
    return f"{type(style).__name__}({', '.join(told)})"


def suggest(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
) -> Suggestion:
    """Suggest a `Parallelism` for `model`: the best plan for a `mesh` of pp, dp and tp, or for a number of `ranks`.

    The styles are tried on the model. A parameter to which they give another layout than the plan is reported in
    `left_out`.

    Raises:
        SearchError: no plan has that mesh, or no plan fits into memory.
    """
    sizes = dict(mesh or {})
    if strange := sorted(set(sizes) - set(AXES)):
        raise SearchError(
            f"a suggestion for a mesh with {strange[0]}",
            f"a mesh {sizes}",
            "the search shards layers (pp), batches (dp) and weights (tp)",
            "pass dp=2,tp=4, or pp=2,dp=2,tp=2",
        )
    pp, dp, tp = (sizes.get(axis, 1) for axis in AXES)
    plans = plan(model, batch, loss, cluster=cluster, ranks=ranks or pp * dp * tp, stages=pp if mesh else None)
    found = [p for p in plans if not mesh or (p.dp, p.tp) == (dp, tp)]
    if not found:
        raise SearchError(
            f"a suggestion for a mesh {sizes}",
            f"plans for {', '.join(p.how for p in plans)}",
            "that mesh does not fit into memory, or its dp does not divide the batch",
            "pass another mesh, or none",
        )
    best = found[0]
    styles = _patterns(model, dict(_styles(model, best.layouts)))
    split, way = (best.pipeline.split, best.pipeline.way or None) if best.pipeline else (None, None)
    config = Parallelism(
        styles, *_batch(model, best), split=split, way=way, zero=best.saving.zero, context=best.context
    )
    return Suggestion(
        best.mesh, config, (*_scheduled(best), *_saved(best.saving), *_left_out(model, best, config)), best
    )


def _scheduled(best: MeshPlan) -> Iterator[str]:
    """Yield the schedule of the microbatches, which `split` and `way` do not express."""
    if best.pipeline is not None:
        pipeline = best.pipeline
        asked = {"enable": True, "schedule_mode": pipeline.schedule, "accumulate_steps": pipeline.microbatches}
        yield f"{pipeline.microbatches} microbatches by {pipeline.schedule}: Strategy.of(pipeline={asked})"


def _saved(saving: MemorySaving) -> Iterator[str]:
    """Yield the memory-saving options of the plan that layouts do not express."""
    if saving.recompute:
        layers = {"enable": True, "layers": [*saving.recompute]}
        yield f"recompute {', '.join(saving.recompute)}: torch.utils.checkpoint, or Strategy.of(recompute={layers})"
    if saving.accumulate > 1:
        merged = {"enable": True, "k_steps": saving.accumulate}
        yield f"gradient accumulation over {saving.accumulate} pieces: a loop, or Strategy.of(gradient_merge={merged})"


def _inputs(model: nn.Module, best: MeshPlan) -> dict[str, Spec]:
    """Return the layouts of values that are neither parameter nor buffer."""
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: spec for name, spec in best.layouts.items() if name not in own}


def _batch(model: nn.Module, best: MeshPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes that shard the first two dims of the first sharded input."""
    first = next((s for s in _inputs(model, best).values() if s.layout.cut_axes), None)
    dims = [axes_of(d) for d in first.layout.dims[:2]] if first is not None else []
    rows, columns = [*dims, (), ()][:2]
    return rows, columns


def _styles(model: nn.Module, layouts: Mapping[str, Spec]) -> Iterator[tuple[str, Style]]:
    """Yield the path of each module and the style that shards its weight as in the plan."""
    for path, module in model.named_modules():
        spec = layouts.get(f"{path}.weight" if path else "weight")
        where = spec.layout.on("tp") if spec is not None and "tp" in spec.mesh.sizes else None
        if not isinstance(where, Shard) or not isinstance(getattr(module, "weight", None), Tensor):
            continue
        transposed = type(module).__name__ == "Conv1D"  # stores its weight as (in, out)
        over_results = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or transposed
        style = ColwiseParallel if where.dim == (1 if over_results else 0) else RowwiseParallel
        if where.dim < 2:
            yield path, style(transposed=transposed)


def _patterns(model: nn.Module, wanted: Mapping[str, Style]) -> dict[str, Style]:
    """Return patterns that give each module its style and match no other; numbers of layers become `*` if possible."""
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: dict[str, Style] = {}
    for path, style in wanted.items():
        pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", path)
        matched = [p for p in paths if fnmatchcase(p, pattern)]
        fits = len(matched) > 1 and all(wanted.get(p) == style for p in matched)
        found[pattern if fits else path] = style
    return found


def _left_out(model: nn.Module, best: MeshPlan, config: Parallelism) -> Iterator[str]:
    """Yield the tensors to which the styles give other layouts than the plan, found on a copy on the meta device."""
    laid = deepcopy(model).to("meta")
    with using_communicator(PeerlessCommunicator(0, best.mesh.size)):
        parallelize(laid, None, best.mesh, replace(config, zero=0))
    held = dict([*laid.named_parameters(), *laid.named_buffers()])
    for name, spec in best.layouts.items():
        own = held.get(name)
        if isinstance(own, DistTensor) and own.spec.layout.dims != spec.layout.dims:
            yield f"{name}: the plan has the layout {spec!r}, and the styles give {own.spec!r}"
    for name, spec in _inputs(model, best).items():
        if [axes_of(d) for d in spec.layout.dims] != [config.batch, config.sequence, *[()] * spec.ndim][: spec.ndim]:
            yield f"{name}: the plan has the layout {spec!r}"
