"""Activation recomputation: values that the backward pass reads are recomputed there instead of saved.

A policy names layers; of each layer, only the inputs are saved. A budget limits the fraction of saved bytes that stay;
values that free most bytes per second of work are dropped first. Random numbers are never recomputed; communication is
repeated only if it is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import ClassVar

from meshwright.cost import DEVICES, Device
from meshwright.graph import (
    AliasClasses,
    Change,
    Draft,
    Node,
    Pass,
    Program,
    RewriteError,
    Spot,
    Value,
    alias_classes,
    is_assertion,
    is_cross_mesh,
    is_random_call,
    live_memory,
    map_values,
    refuse_writing,
    register_pass,
    work_of,
    writes_to,
)

from .._fixed_order import is_collective


@register_pass
@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute activations by layer or by budget.

    `policy` has layer names with wildcards for each part ("blocks.*" is each block). `budget` is the fraction of saved
    bytes to keep, between 0 and 1. With both, only values of the named layers are dropped. Passes that merge equal
    operators must run before this one.

    Raises:
        RewriteError: there is neither policy nor budget, the budget is out of range, or a budget is combined with
            `communication`.
    """

    name: ClassVar[str] = "recompute"
    keeps_sums: ClassVar[bool] = True
    policy: tuple[str, ...] = ()
    budget: float | None = None
    communication: bool = False
    device: Device = DEVICES["H100"]

    def __post_init__(self) -> None:
        asked = f"Recompute(policy={self.policy}, budget={self.budget}, communication={self.communication})"
        if self.budget is None and not self.policy:
            raise RewriteError(
                asked,
                "neither layers nor a budget",
                "layers or a budget must select the activations",
                'write policy=("blocks.*",)',
            )
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise RewriteError(
                asked, f"a budget of {self.budget}", "the budget is the kept fraction of all bytes", "write budget=0.5"
            )
        if self.budget is not None and self.communication:
            raise RewriteError(
                asked,
                "communication with a budget of bytes",
                "parts may differ in bytes, so ranks could decide differently",
                "use a policy, which decides the same on all ranks",
            )

    def run(self, program: Program) -> Program:
        refuse_writing(program, repr(self))
        saved = _SavedValues(program, self)
        chosen = saved.of_layers() if self.budget is None else saved.within(self.budget)
        if not chosen:
            return program
        made = _RecomputedProgram(program, saved, chosen)
        out = made.program()
        before, after = (live_memory(p).peak_in("forward", "backward") for p in (program, out))
        peak = Change(self.name, f"peak before the update: {before:,} → {after:,} bytes", "", {"bytes": before - after})
        return out.with_changes(*made.changes(), peak)


@dataclass
class _SavedValues:
    """Values that a program saves for its backward pass, by memory, and the choice of values to drop."""

    program: Program
    how: Recompute
    found: AliasClasses = field(init=False)

    def __post_init__(self) -> None:
        self.found = alias_classes(self.program)

    @cached_property
    def fixed(self) -> set[Value]:
        """Memories that are always kept: inputs, results, and values that cannot be recomputed.

        Also new values of buffers, and values that go from one pipeline chunk to another, since the backward pass of
        the later chunk runs first.
        """
        given = [i.value for i in self.program.inputs]
        single = [v for n in self._forward if not self._is_again(n) for v in n.outs]
        held = (*self._taken_over(), *self._between_chunks())
        return {self.found.of(v) for v in (*given, *self.program.results, *single, *held)}

    def _taken_over(self) -> Iterator[Value]:
        """Yield the new values of buffers, and the values that they depend on, back to the forward pass."""
        waiting = [v for x, v in self.program.writes if x in self._buffers]
        while waiting:
            v = waiting.pop()
            yield v
            node = self.program.producers.get(v)
            if node is not None and node.origin.phase != "forward":
                waiting += node.ins

    def _between_chunks(self) -> Iterator[Value]:
        made = self.program.producers
        for n in self._forward:
            yield from (v for v in n.ins if v in made and made[v].origin.chunk != n.origin.chunk)

    @cached_property
    def _forward(self) -> list[Node]:
        return [n for n in self.program.nodes if n.origin.phase == "forward"]

    def _is_again(self, node: Node) -> bool:
        if is_collective(node):
            return self.how.communication and not is_cross_mesh(node.op)
        if is_random_call(node) or writes_to(node.op) or is_assertion(node.op) or self._reads_renewed(node):
            return False
        return all(v.is_tensor for v in node.outs)

    def _reads_renewed(self, node: Node) -> bool:
        """True if a recomputed node would read a buffer after later microbatches of a pipeline updated it."""
        return node.origin.chunk is not None and any(
            x in node.ins for x, _ in self.program.writes if x in self._buffers
        )

    @cached_property
    def _buffers(self) -> set[Value]:
        return {i.value for i in self.program.inputs if i.role == "buffer"}

    @cached_property
    def kept(self) -> dict[Value, int]:
        """Memory that the forward pass creates and a later phase reads → bytes."""
        late = {self.found.of(v) for n in self.program.nodes if n.origin.phase != "forward" for v in n.ins}
        early = {self.found.of(v) for n in self._forward for v in n.outs}
        given = {self.found.of(i.value) for i in self.program.inputs}
        return {root: root.nbytes for root in sorted(late & early - given, key=lambda v: v.name) if root.is_tensor}

    @cached_property
    def layers(self) -> dict[Value, str | None]:
        """Memory → layer of the policy that creates it, or None."""
        made = self.program.producers
        roots = [root for n in self._forward for v in n.outs if (root := self.found.of(v)) in made]
        return {root: layer_of(made[root].origin.layer, self.how.policy) for root in roots}

    def of_layers(self) -> set[Value]:
        """Return the memories that a named layer creates and no other layer reads; empty if none of them is saved."""
        left = {
            root
            for n in self._forward
            for v in n.ins
            if (root := self.found.of(v)) in self.layers
            and layer_of(n.origin.layer, self.how.policy) != self.layers[root]
        }
        inside = {root for root, layer in self.layers.items() if layer is not None}
        found = inside - left - self.fixed
        return found if any(root in self.kept for root in found) else set()

    def within(self, budget: float) -> set[Value]:
        """Return the memories to drop for the budget, including intermediate ones of the recomputation.

        The choice is greedy, by freed bytes per second.
        """
        dropped: set[Value] = set()
        again: set[Node] = set()
        kept = dict(self.kept)
        limit = budget * sum(kept.values())
        for root in sorted(self._candidates(), key=lambda r: (-self._benefit(r), r.name)):
            if sum(kept.values()) <= limit:
                break
            nodes, leaves = self._way(root, set(kept) - {root})
            more = {leaf: leaf.nbytes for leaf in leaves if leaf not in kept and leaf not in dropped}
            if sum(more.values()) < kept[root]:
                del kept[root]
                kept |= more
                dropped.add(root)
                again.update(nodes)
        passing = {self.found.of(v) for n in again for v in n.outs}
        return (dropped | passing) - set(kept)

    def _candidates(self) -> Iterator[Value]:
        named = bool(self.how.policy)
        return (r for r in self.kept if r not in self.fixed and not (named and self.layers.get(r) is None))

    def _benefit(self, root: Value) -> float:
        nodes, _ = self._way(root, set(self.kept) - {root})
        return root.nbytes / (self.seconds(nodes) or 1e-12)

    def seconds(self, nodes: Iterable[Node]) -> float:
        found = (work_of(n) for n in nodes)
        return sum(self.how.device.seconds(w.flops, w.nbytes, w.dtype) for w in found if w.nbytes)

    def _way(self, root: Value, kept: set[Value]) -> tuple[set[Node], set[Value]]:
        """Return the nodes that recompute a memory, and the kept memories that they read, without inputs."""
        nodes: set[Node] = set()
        leaves: set[Value] = set()
        waiting = [v for v in self._members[root] if v in self.program.producers]
        while waiting:
            node = self.program.producers[waiting.pop()]
            if node in nodes:
                continue
            nodes.add(node)
            for v in node.ins:
                if (base := self.found.of(v)) in kept or base in self.fixed:
                    leaves.add(base)
                else:
                    waiting.append(v)
        return nodes, leaves - {self.found.of(i.value) for i in self.program.inputs}

    @cached_property
    def _members(self) -> dict[Value, list[Value]]:
        members: dict[Value, list[Value]] = {}
        for n in self._forward:
            for v in n.outs:
                members.setdefault(self.found.of(v), []).append(v)
        return members


@dataclass
class _RecomputedProgram:
    """Builder of a program in which the chosen memories are recomputed before their first backward reader."""

    before: Program
    saved: _SavedValues
    chosen: set[Value]
    became: dict[Value, Value] = field(default_factory=dict[Value, Value])
    added: list[tuple[str, Node]] = field(default_factory=list[tuple[str, Node]])

    def program(self) -> Program:
        draft = Draft(self.before)
        for spot in list(draft):
            if spot.origin.phase != "forward":
                for v in spot.ins:
                    self._make(v, spot, draft)
                args, kwargs = map_values(self._read, (spot.args, spot.kwargs))
                draft.set_args(spot, args, kwargs)
        out = draft.finish()
        specs = {new: out.specs[old] for old, new in self.became.items() if old in out.specs}
        return replace(out, specs={**out.specs, **specs})

    def changes(self) -> Iterator[Change]:
        """Yield a change for each layer: recomputed operators, freed bytes, and the cost in seconds."""
        told: set[Value] = set()
        for layer in dict.fromkeys(layer for layer, _ in self.added):
            nodes = [n for at, n in self.added if at == layer]
            roots = {self.saved.found.of(v) for n in nodes for v in n.outs} - told
            told |= roots
            freed = sum(self.saved.kept.get(root, 0) for root in roots)
            saved = {"bytes": freed, "seconds": -self.saved.seconds(nodes)}
            yield Change("recompute", f"{len(nodes)} operators recomputed", layer, saved)

    def _make(self, v: Value, at: Spot, draft: Draft) -> None:
        """Add the nodes that recompute `v`, unless it is kept or already recomputed."""
        waiting = [v]
        while waiting:
            top = waiting[-1]
            node = self.before.producers.get(top)
            if node is None or top in self.became or self.saved.found.of(top) not in self.chosen:
                waiting.pop()
                continue
            missing = [x for x in node.ins if self._is_missing(x)]
            if missing:
                waiting += missing
                continue
            self._copy(node, at, draft)

    def _read(self, v: Value) -> Value:
        """Return the recomputed value of `v`, or `v` if it is kept. An operator may have results of both kinds."""
        return self.became.get(v, v) if self.saved.found.of(v) in self.chosen else v

    def _is_missing(self, v: Value) -> bool:
        return v not in self.became and self.saved.found.of(v) in self.chosen and v in self.before.producers

    def _copy(self, node: Node, at: Spot, draft: Draft) -> None:
        args, kwargs = map_values(self._read, (node.args, dict(node.kwargs)))
        for v in node.outs:
            self.became[v] = Value(draft.names.fresh(v.name), v.shape, v.dtype, v.device)
        out = map_values(lambda v: self.became[v], node.out)
        draft.add_as(node.op, args, kwargs, out, at, replace(node.origin, phase="backward"))
        layer = layer_of(node.origin.layer, self.saved.how.policy)
        self.added.append((node.origin.layer if layer is None else layer, node))


def layer_of(layer: str, patterns: Sequence[str]) -> str | None:
    """Return the layer that contains `layer` and matches one of the patterns; None if there is none.

    >>> layer_of("blocks.3.attention.q", ["blocks.*"])
    'blocks.3'
    >>> layer_of("exit.norm", ["blocks.*"])
    """
    return _layer_of(layer, tuple(patterns))


@lru_cache(2**16)
def _layer_of(layer: str, patterns: tuple[str, ...]) -> str | None:
    parts = layer.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted)):
            return ".".join(parts[: len(wanted)])
    return None
