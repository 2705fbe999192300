"""Why a set of rules comes to an end: a weight per operator under which every rule makes the program lighter.

The weights are looked for with the rules' two sides, as a perceptron looks for a separating plane: a rule that does not
make the program lighter yet pulls them its way. What is found is the proof; where nothing is found, a bound holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._effects import is_view
from ._node import Carry, name_of
from ._reader import CASTS, SAME_OPERATOR
from ._rewrite import AnyRewrite, Rewrite
from ._watch import StepName

ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Measure:
    """A weight for each operator (1 where none is given), and the rules that are not sure to take weight away."""

    weights: Mapping[str, int]
    unproved: tuple[str, ...]

    def weight(self, ops: Iterable[Any]) -> int:
        return sum(self.weights.get(kind_of(op), 1) for op in ops)

    def __str__(self) -> str:
        if self.unproved:
            return f"no proof for {', '.join(self.unproved)}"
        heavy = sorted((f"{name} {w}" for name, w in self.weights.items() if w != 1), key=str)
        return "each rule makes the program lighter" + (f" ({', '.join(heavy)})" if heavy else "")


def kind_of(op: Any) -> str:
    """What operators are weighed by."""
    if isinstance(op, StepName):
        return op.kind.__name__
    if isinstance(op, Carry):
        return type(op.step).__name__
    return name_of(SAME_OPERATOR[op] if op in SAME_OPERATOR else op)


def measure_of(rules: Sequence[AnyRewrite]) -> Measure:
    """Weights under which every rule's `put` is lighter than its `find`, for as many of the rules as there are."""
    sides = {rule.name: list(_differences(rule)) for rule in rules if isinstance(rule, Rewrite)}
    unproved = [rule.name for rule in rules if not isinstance(rule, Rewrite)]
    unproved += [name for name, found in sides.items() if any(d is None for d in found)]
    weights: dict[str, int] = {}
    wanted = {name: [d for d in found if d] for name, found in sides.items() if name not in unproved}
    pulling: set[str] = set()
    for at in range(ROUNDS):
        heavier = [(name, d) for name, found in wanted.items() for d in found if _lost(weights, d) < 1]
        if not heavier:
            return Measure(weights, tuple(unproved))
        if at > ROUNDS // 2:
            pulling.update(name for name, _ in heavier)
        for _, difference in heavier:
            for kind, n in difference.items():
                weights[kind] = max(0, weights.get(kind, 1) + n)
    return Measure({}, (*unproved, *sorted(pulling)))


def _lost(weights: Mapping[str, int], difference: Mapping[str, int]) -> int:
    return sum(weights.get(kind, 1) * n for kind, n in difference.items())


def _differences(rule: Rewrite) -> Iterable[Mapping[str, int] | None]:
    """Per pattern: how many of each operator the rule takes away for sure, less those that it adds."""
    for pattern, put in zip(rule.patterns, rule.puts, strict=True):
        if put is None:
            yield None
            continue
        found = Counter(kind_of(op) for op in pattern.ops if op not in CASTS and not is_view(op))  # pyright: ignore[reportArgumentType] - a step's name is none
        found.subtract(kind_of(call.op) for call in put.calls)
        yield {kind: n for kind, n in found.items() if n}
