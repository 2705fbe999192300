"""Layouts of a transformer's tensors under a plan: the parameters of each stage's layers, and the activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ..plan_data.account import TensorLayout
from ..plan_data.plan import Plan
from .layer_shares import part_sizes
from .schedule_facts import placement
from .sizes import Transformer

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Size of each dim of the whole tensor, and the axes that shard it."""


class StagePart(NamedTuple):
    """Part of the model on one pipeline rank: its layers, as ranges, and whether it has the embedding or the head."""

    name: str
    layers: tuple[range, ...]
    first: bool
    last: bool

    def __str__(self) -> str:
        runs = [f"layer {r[0]}" if len(r) == 1 else f"layers {r[0]} to {r[-1]}" for r in self.layers]
        return ", ".join([*(["embedding"] if self.first else []), *runs, *(["head"] if self.last else [])])


def stage_parts(model: Transformer, plan: Plan) -> list[StagePart]:
    """Return the part of the model on each pipeline rank.

    >>> llama = Transformer(30, 4096, 32, 32, 128, 14336, 32000)
    >>> [str(s) for s in stage_parts(llama, Plan(pp=4, batch=8))][::3]
    ['embedding, layers 0 to 6', 'layers 23 to 29, head']
    """
    ends = [int(n) for n in np.cumsum([0, *part_sizes(model, plan.pp * plan.chunks)])]
    runs = [range(a, b) for a, b in pairwise(ends)]
    where = placement(plan.schedule, plan.pp, plan.chunks)
    return [
        StagePart(
            _stage_name(r, plan.pp),
            tuple(run for run, at in zip(runs, where, strict=True) if at == r and run),
            where[0] == r,
            where[-1] == r,
        )
        for r in range(plan.pp)
    ]


def _stage_name(rank: int, ranks: int) -> str:
    return f"pipeline rank {rank}" if ranks > 1 else "model"


def tensor_layouts(model: Transformer, plan: Plan) -> Iterator[TensorLayout]:
    """Yield every tensor of one layer of each kind, stage by stage, and then the activations."""
    for stage in stage_parts(model, plan):
        if stage.first:
            yield _parameter(f"{stage.name}.embedding", "table", ((model.vocab, ("tp",)), (model.hidden, ())), plan)
        for run in stage.layers:
            yield from _layers(model, plan, stage.name, run)
        if stage.last:
            note = "the embedding's table" if model.tied and stage.first else ""
            dims = ((model.vocab, ("tp",)), (model.hidden, ()))
            yield _parameter(f"{stage.name}.head", "table", dims, plan, note)
            yield from _layers_ahead(model, plan, stage.name)
    yield from _activations(model, plan)


def _layers(model: Transformer, plan: Plan, stage: str, run: range) -> Iterator[TensorLayout]:
    """Yield a row for each tensor of a layer, once for all layers that are alike."""
    dense = range(run.start, min(run.stop, model.dense_layers))
    sparse = range(max(run.start, model.dense_layers), run.stop)
    for layers, inner in ((dense, _mlp(model)), (sparse, _experts(model))):
        if layers:
            name = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}, each"
            for part, dims in {**_attention(model, plan), **inner}.items():
                yield replace(_parameter(f"{stage}.{name}", part, dims, plan), count=len(layers))


def _layers_ahead(model: Transformer, plan: Plan, stage: str) -> Iterator[TensorLayout]:
    """Yield the tensors of a layer that predicts a further token, once for all of them."""
    joined: dict[str, Dims] = {"join": ((model.hidden, ("tp",)), (2 * model.hidden, ()))}
    inner = _mlp(model) if model.experts is None else _experts(model)
    for part, dims in {**joined, **_attention(model, plan), **inner}.items() if model.ahead else ():
        yield replace(_parameter(f"{stage}.layers ahead", part, dims, plan), count=model.ahead)


def _attention(m: Transformer, plan: Plan) -> dict[str, Dims]:
    """Return the tensors of attention; if there are more ranks than key heads, each head is there several times."""
    x, heads = m.latent, max(m.kv_heads, plan.tp)
    out: Dims = ((m.hidden, ()), (m.heads * m.value_width, ("tp",)))
    if x is None:
        kv: Dims = ((heads * m.head_dim, ("tp",)), (m.hidden, ()))
        return {"query": ((m.heads * m.head_dim, ("tp",)), (m.hidden, ())), "key": kv, "value": kv, "out": out}
    up: Dims = ((m.heads * m.key_width, ("tp",)), (x.query or m.hidden, ()))
    queries: dict[str, Dims] = {"query down": ((x.query, ()), (m.hidden, ())), "query up": up}
    return {
        **(queries if x.query else {"query": up}),
        "key and value down": ((x.key + x.rotary, ()), (m.hidden, ())),
        "key and value up": ((m.heads * (x.plain + x.value), ("tp",)), (x.key, ())),
        "out": out,
    }


def _mlp(m: Transformer) -> dict[str, Dims]:
    return _feed_forward(m.hidden, m.ffn, m.gated)


def _feed_forward(hidden: int, ffn: int, gated: bool) -> dict[str, Dims]:
    up: Dims = ((ffn, ("tp",)), (hidden, ()))
    return {**({"gate": up} if gated else {}), "up": up, "down": ((hidden, ()), (ffn, ("tp",)))}


def _experts(m: Transformer) -> dict[str, Dims]:
    x = m.experts
    if x is None:
        return {}
    up: Dims = ((x.count, ("ep",)), (x.ffn, ()), (m.hidden, ()))
    own: dict[str, Dims] = {"router": ((x.count, ()), (m.hidden, ()))}
    own |= {"experts' gate": up, "experts' up": up, "experts' down": ((x.count, ("ep",)), (m.hidden, ()), (x.ffn, ()))}
    shared = _feed_forward(m.hidden, x.shared, gated=True) if x.shared else {}
    return own | {f"shared {n}": dims for n, dims in shared.items()}


def _parameter(layer: str, name: str, dims: Dims, plan: Plan, note: str = "") -> TensorLayout:
    """Return the row of a parameter, with a note on its gradient and state; ZeRO-3 shards the parameter too."""
    axes = {axis for _, cut in dims for axis in cut}
    is_expert = "ep" in axes
    several = plan.dp * plan.cp > (plan.ep / plan.tp if is_expert else 1)
    where = "the copies of an expert" if is_expert else "dp" if plan.cp == 1 else "dp and cp"
    if plan.zero == 3 and several and not is_expert:
        dims = ((dims[0][0], (*dims[0][1], "dp", "cp")), *dims[1:])
    parts = {
        1: f"state sharded over {where}",
        2: f"gradient and state sharded over {where}",
        3: f"gathered over {where} for use",
    }
    notes = [note, parts.get(plan.zero, "") if several else ""]
    return _row(layer, name, dims, plan, "; ".join(filter(None, notes)))


def _activations(m: Transformer, plan: Plan) -> Iterator[TensorLayout]:
    """Yield the activations of one microbatch of every replica."""
    rows = (plan.microbatch * plan.dp, ("dp",))
    length = (plan.sequence, ("cp",))
    divided = (plan.sequence, ("cp", "tp") if plan.sequence_parallel else ("cp",))
    where, note = "one microbatch", "of each replica"
    yield _row(where, "residual", (rows, divided, (m.hidden, ())), plan, note)
    yield _row(where, "queries", (rows, length, (m.heads * m.key_width, ("tp",))), plan, note)
    if m.dense_layers:
        yield _row(where, "feed-forward", (rows, length, (m.ffn, ("tp",))), plan, note)
    yield _row(where, "logits", (rows, length, (m.vocab, ("tp",))), plan, note)


def _row(layer: str, name: str, dims: Dims, plan: Plan, note: str) -> TensorLayout:
    """Return a row in half precision; axes with one rank do not shard."""
    real = [(n, [a for a in axes if getattr(plan, a) > 1]) for n, axes in dims]
    text = ", ".join(f"{n}" + "".join(f"@{a}" for a in axes) for n, axes in real)
    parts = prod(getattr(plan, a) for _, axes in real for a in axes)
    return TensorLayout(layer, name, f"bf16[{text}]", 2.0 * prod(n for n, _ in real) / parts, note)
