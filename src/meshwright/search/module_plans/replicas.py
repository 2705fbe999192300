"""Replicas of a captured model and the ranks that share each: the cuts that fit, and the options that save memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from meshwright.cost import Cluster
from meshwright.graph import Program, name_of, type_text
from meshwright.layout import hint

from .._errors import SearchError
from ..plan_data.units import size, size_rounded_up
from ..sharding.accumulation_check import AccumulationCheck, check_accumulation
from ..sharding.conversion_prices import Prices
from ..sharding.memory_saving import NOTHING, MemorySaving, blocks_of, patterns_of
from ..sharding.program_facts import ProgramFacts
from ..sharding.saving_estimates import SavingEstimates
from ..sharding.sharding_search import ShardingProblem, Shardings
from ..transformer_plans.choose import usable_memory

SHOWN_TENSORS = 3


def largest_tensors_text(program: Program) -> str:
    """Return the largest tensors of a program, with the sizes of the whole tensors, as text."""
    named = {i.value: i.name for i in program.inputs if i.value.is_tensor}
    made = {v: f"{v.name} of {name_of(node.op)}" for node in program.nodes for v in node.outs if v.is_tensor}
    found = sorted((made | named).items(), key=lambda item: -item[0].nbytes)[:SHOWN_TENSORS]
    return ", ".join(f"{name} {type_text(v)} with {size(v.nbytes)}" for v, name in found)


PIECES = 256
"""Upper bound on the number of pieces of a batch."""
CLOSE = 5e-3
"""Relative difference below which faster candidates are not tried."""


@dataclass(frozen=True)
class PlanRequest:
    """Request for plans: a captured model, its batch, the devices, and whether to save memory by more than cuts."""

    program: Program
    cluster: Cluster
    saving: bool
    batch: Sequence[Any]
    states: float
    shared: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False, compare=False)
    """Orders of elimination, which numbers of ranks and memory-saving options share if their tables are alike."""

    @cached_property
    def memory_limit(self) -> float:
        """Bytes that a rank may hold."""
        return usable_memory(self.cluster) or inf

    @cached_property
    def facts(self) -> ProgramFacts:
        return ProgramFacts(self.program)

    @cached_property
    def rows(self) -> int:
        batch = (i.value for i in self.program.inputs if i.role == "batch")
        sizes = [hint(v.shape[0]) for v in batch if v.is_tensor and v.shape]
        return sizes[0] if sizes and len(set(sizes)) == 1 else 1

    @cached_property
    def evenly(self) -> AccumulationCheck:
        """Result of the check that pieces of a batch give the loss of the whole."""
        found = check_accumulation(self.program)
        return (
            AccumulationCheck("the number of ignored labels differs between the pieces")
            if self.batch and found.ignores(self.batch)
            else found
        )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return blocks_of(self.program)

    @cached_property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Choices of layers to recompute: none, the first half, or all."""
        blocks = self.blocks
        half = [blocks[: len(blocks) // 2]] if len(blocks) > 1 else []
        return ((), *half, *([patterns_of(blocks)] if blocks else []))

    def pieces(self, replicas: int) -> list[int]:
        """Return the powers of two into which the batch of a replica may be divided."""
        rows = self.rows // replicas
        powers = [n for n in range(1, min(rows, PIECES) + 1) if rows % n == 0 and n & (n - 1) == 0]
        return [1] if self.evenly.why_not else powers


@dataclass(frozen=True)
class Replicas:
    """`dp` replicas of `tp` ranks each, with their memory-saving options and the costs of these."""

    of: PlanRequest
    dp: int
    tp: int
    known: dict[MemorySaving, ShardingProblem] = field(
        default_factory=dict[MemorySaving, ShardingProblem], repr=False, compare=False
    )

    @property
    def prices(self) -> Prices:
        together = min(self.tp, self.of.cluster.per_node)
        return Prices(self.of.cluster, self.tp, together, 1 / self.dp, replicas=self.dp, states=self.of.states)

    def problem(self, saving: MemorySaving) -> ShardingProblem:
        """Return the problem of the best cuts under a memory-saving option.

        Options that differ in ZeRO alone share the work that does not depend on it.
        """
        alike = replace(saving, zero=0)
        if alike not in self.known:
            prices = replace(self.prices, saving=alike)
            self.known[alike] = ShardingProblem(self.of.facts, prices, self.of.shared)
        return self.known[alike].saving(saving)

    def forget(self) -> None:
        """Release the problems that were stated, after the last search for these replicas."""
        self.known.clear()
        self.__dict__.pop("about", None)

    @cached_property
    def about(self) -> SavingEstimates:
        return SavingEstimates(self.problem(NOTHING))

    @cached_property
    def found(self) -> tuple[Shardings, MemorySaving] | None:
        """The fastest cuts that fit, and their memory-saving option; None if nothing fits.

        Options are tried in the order of their estimated seconds.
        """
        plain, memory_limit = self.problem(NOTHING), self.of.memory_limit
        if plain.fastest.nbytes <= memory_limit or not self.of.saving:
            cuts = plain.fitting(memory_limit)
            return None if cuts is None else (cuts, NOTHING)
        best: tuple[float, Shardings, MemorySaving] | None = None
        for about, saving in self._in_order():
            if best is not None and about * (1 + CLOSE) >= best[0]:
                break
            cuts = self.problem(saving).fitting(memory_limit)
            if cuts is not None:
                seconds = cuts.seconds + self.sync(cuts, saving)
                best = (seconds, cuts, saving) if best is None or seconds < best[0] else best
        return None if best is None else best[1:]

    def _in_order(self) -> list[tuple[float, MemorySaving]]:
        """Return the memory-saving options that may fit, with estimated seconds of a step, fastest first."""
        fitting = [saving for saving in self._savings() if self.about.nbytes(saving) <= self.of.memory_limit]
        return sorted(((self._at_least(saving), saving) for saving in fitting), key=lambda way: way[0])

    def _at_least(self, saving: MemorySaving) -> float:
        return self.about.seconds(saving) + self._reduced(self.fastest_parameters, saving)

    def sync(self, cuts: Shardings, saving: MemorySaving) -> float:
        """Return the exposed seconds of reducing gradients over replicas, with the gathers of ZeRO."""
        return self._reduced(self._parameters(cuts), saving)

    def _reduced(self, nbytes: float, saving: MemorySaving) -> float:
        return float(replace(self.prices, saving=saving).reduced(nbytes))

    @cached_property
    def fastest_parameters(self) -> float:
        """Bytes of a rank's parameters under the fastest cuts."""
        return self._parameters(self.about.plain.fastest)

    def _parameters(self, cuts: Shardings) -> float:
        """Return the bytes of a rank's parameters that get a gradient, in their initial layouts."""
        return sum(
            i.value.nbytes / (self.tp if cuts.of(i.value).kind == "cut" else 1)
            for i in self.of.program.inputs
            if i.role == "parameter" and not i.frozen and i.value in cuts.forms
        )

    def _savings(self) -> Iterator[MemorySaving]:
        """Yield all memory-saving options.

        With pieces, ZeRO stops at stage 1, because parameters are not gathered again for each piece.
        """
        for pieces in self.of.pieces(self.dp):
            for zero in range((4 if pieces == 1 else 2) if self.dp > 1 else 1):
                yield from (MemorySaving(zero, again, pieces) for again in self.of.layers)

    @cached_property
    def at_least(self) -> float:
        """Lower bound on the bytes of a rank."""
        return min(map(self.about.nbytes, self._savings() if self.of.saving else [NOTHING]))

    @cached_property
    def fewest(self) -> float:
        """Bytes of a rank under the plan that takes least: a device that may hold this many is enough."""
        found, ways = inf, self._savings() if self.of.saving else [NOTHING]
        for about, saving in sorted(((self.about.nbytes(s), s) for s in ways), key=lambda way: way[0]):
            if about >= found:
                break
            found = min(found, self.problem(saving).smallest_bytes)
        return found

    def nothing(self) -> SearchError:
        """Return the error if nothing fits, which says how much memory is missing."""
        why_not, memory_limit, least = self.of.evenly.why_not, self.of.memory_limit, self.fewest
        enough = least * self.of.cluster.device.memory / usable_memory(self.of.cluster)
        return SearchError(
            f"a model on {self.dp} replica{'s' * (self.dp > 1)} of {self.tp} rank{'s' * (self.tp > 1)} of "
            f"{size_rounded_up(memory_limit)}",
            f"the model needs {size_rounded_up(least)} per rank; "
            f"its largest whole tensors: {largest_tensors_text(self.of.program)}",
            f"{size_rounded_up(least - memory_limit)} are missing with every sharding"
            + (", with ZeRO, with recomputation, " if self.of.saving else "")
            + (
                ("and the batch cannot be split: " + why_not if why_not else "and with gradient accumulation")
                if self.of.saving
                else ""
            ),
            f"use devices of {size_rounded_up(enough)} (libraries use some of it), more ranks, or a smaller batch",
        )
