"""Termination proof for a set of rules: a weight per operator under which every rule makes the program lighter.

The weights are found by a perceptron: each rule that does not make the program lighter yet moves the weights in its
direction. The weights are the proof. If none are found, the number of steps is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..program.effects import is_view
from ..program.node import Conversion, Op, name_of
from .node_reader import CASTS, SAME_OPERATOR
from .rewrite_rule import AnyRewrite, Rewrite
from .rule_trace import StepName

ROUNDS = 1000

Difference = Mapping[str, int]
"""Kind of operator → number of removed operators minus number of added ones."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A weight for each operator (default 1), and the rules that are not proved to reduce the weight."""

    weights: Mapping[str, int]
    unproved: tuple[str, ...]

    def weight(self, ops: Iterable[Op]) -> int:
        return sum(self.weights.get(kind_of(op), 1) for op in ops)

    def __str__(self) -> str:
        if self.unproved:
            return f"termination is not proved for {', '.join(self.unproved)}"
        heavy = sorted((f"{name} {w}" for name, w in self.weights.items() if w != 1), key=str)
        return "each rule reduces the weight of the program" + (f" ({', '.join(heavy)})" if heavy else "")


def kind_of(op: Op | StepName) -> str:
    """Return the key of an operator in the weights."""
    if isinstance(op, StepName):
        return op.kind.__name__
    if isinstance(op, Conversion):
        return type(op.step).__name__
    return name_of(SAME_OPERATOR.get(op, op))


def measure_of(rules: Sequence[AnyRewrite]) -> Measure:
    """Return weights under which the `put` of every rule is lighter than its `find`; other rules are `unproved`."""
    unproved, wanted = _requirements(rules)
    weights: dict[str, int] = {}
    pulling: set[str] = set()
    for at in range(ROUNDS):
        heavier = [(name, difference) for name, difference in wanted if _lost(weights, difference) < 1]
        if not heavier:
            return Measure(weights, tuple(unproved))
        if at > ROUNDS // 2:
            pulling.update(name for name, _ in heavier)
        for _, difference in heavier:
            _move_towards(difference, weights)
    return Measure({}, (*unproved, *sorted(pulling)))


def _requirements(rules: Sequence[AnyRewrite]) -> tuple[list[str], list[tuple[str, Difference]]]:
    """Return the rules that cannot be proved, and the differences of the others that must reduce the weight."""
    unproved = [rule.name for rule in rules if not isinstance(rule, Rewrite)]
    differences = {rule.name: list(_differences(rule)) for rule in rules if isinstance(rule, Rewrite)}
    wanted: list[tuple[str, Difference]] = []
    for name, found in differences.items():
        if None in found:
            unproved.append(name)
        else:
            wanted += [(name, difference) for difference in found if difference]
    return unproved, wanted


def _move_towards(difference: Difference, weights: dict[str, int]) -> None:
    """Raise the weights of removed operators, and lower those of added ones."""
    for kind, n in difference.items():
        weights[kind] = max(0, weights.get(kind, 1) + n)


def _lost(weights: Mapping[str, int], difference: Difference) -> int:
    return sum(weights.get(kind, 1) * n for kind, n in difference.items())


def _differences(rule: Rewrite) -> Iterator[Difference | None]:
    """Yield, for each pattern, the number of removed operators minus added ones by kind; None without a `put` trace.

    Casts and views are not counted as removed, since they may stay.
    """
    for pattern, put in zip(rule.patterns, rule.puts, strict=True):
        if put is None:
            yield None
            continue
        found = Counter(kind_of(op) for op in pattern.ops if op not in CASTS and not is_view(op))  # pyright: ignore[reportArgumentType] - a step's name is none
        found.subtract(kind_of(call.op) for call in put.calls)
        yield {kind: n for kind, n in found.items() if n}
