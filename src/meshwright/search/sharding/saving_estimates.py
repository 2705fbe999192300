"""Estimates for memory-saving options, made before cuts are searched under each of them."""

from __future__ import annotations

from meshwright.graph import Value

from .memory_model import per_byte
from .memory_saving import NOTHING, MemorySaving
from .program_facts import OperatorRow
from .sharding_search import BACKWARD, ShardingProblem


class SavingEstimates:
    """Estimates for memory-saving options, derived from the fastest cuts without any of them."""

    def __init__(self, plain: ShardingProblem) -> None:
        self.plain = plain
        self._again: dict[tuple[str, ...], tuple[float, float]] = {}
        kept, facts = plain.kept, plain.facts
        self._small, self._large = (
            sum(self._fewest(v) for v in kept.parameters if kept.is_cut_by_zero(v) == large) for large in (False, True)
        )
        self._fixed = sum(self._fewest(v) for v in plain.forms if v in facts.given and v not in facts.trains)
        late = sum(self._fewest(v) for v in plain.forms if v in kept.dropped.late)
        self._late = late + sum(map(self._inside, facts.rows))

    def _fewest(self, v: Value) -> float:
        """Return the bytes of a value in the form in which a rank holds least."""
        is_cut = any(form.kind == "cut" for form in self.plain.forms[v])
        return self.plain.kept.nbytes(v) / (self.plain.prices.ranks if is_cut else 1)

    def _inside(self, row: OperatorRow) -> float:
        """Return the bytes inside an operator, under the option that holds least."""
        return self.plain.kept.fewest_inside(row, self.plain.options[row.node])

    def nbytes(self, saving: MemorySaving) -> float:
        """Return a lower bound on the bytes of a rank under any cuts."""
        replicas, late = self.plain.prices.replicas, self._late - self._layers(saving.recompute)[1]
        large, small = (per_byte(how, replicas, self.plain.prices.states) for how in (saving, NOTHING))
        return self._fixed + self._small * small + self._large * large + late / saving.accumulate

    def seconds(self, saving: MemorySaving) -> float:
        """Return the estimated seconds of the fastest cuts under an option.

        Recomputed operators run their forward pass twice. A batch in pieces starts each operator once per piece.
        """
        begun = self.plain.prices.cluster.device.overhead * (1 + BACKWARD) * len(self.plain.facts.rows)
        return self.plain.fastest.seconds + self._layers(saving.recompute)[0] + begun * (saving.accumulate - 1)

    def _layers(self, recompute: tuple[str, ...]) -> tuple[float, float]:
        """Return the forward seconds of the recomputed layers, and the bytes that they do not keep, at the least."""
        if recompute not in self._again:
            plain, dropped = self.plain, self.plain.facts.recomputed(recompute)
            options, late = plain.fastest.options, plain.kept.dropped.late
            seconds = sum(options[node].seconds for node in dropped.layers)
            freed = sum(self._fewest(v) for v in dropped.values if v in late)
            freed += sum(self._inside(row) for row in plain.facts.rows if row.node in dropped.layers)
            self._again[recompute] = seconds / (1 + BACKWARD), freed
        return self._again[recompute]
