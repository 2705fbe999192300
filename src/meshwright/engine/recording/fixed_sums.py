"""Options of static programs that change the order of a sum, and so are refused inside `same_numbers`."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.fixed_order import SameNumbersError

from .strategy import Strategy


def check_fixed_sums(strategy: Strategy) -> None:
    """Raise SameNumbersError for a strategy whose programs would not keep the order of sums."""
    found = next(_changing(strategy), None)
    if found is not None:
        raise SameNumbersError(
            "a program inside same_numbers()",
            f"Strategy({found})",
            "the option replaces sums in a fixed order, or splits the batch in another way",
            "leave the option out, or run the step outside the block",
        )


def _changing(strategy: Strategy) -> Iterator[str]:
    """Yield the options that may change the order of a sum."""
    if strategy.compiler != "none":
        yield f"compiler={strategy.compiler!r}"
    if strategy.fused_passes.enable:
        yield "fused_passes"
    if strategy.amp.enable:
        yield "amp"
    if strategy.merge is not None:
        yield "gradient_merge"
    if strategy.pipeline.asynchronous:
        yield "pipeline.asynchronous"
    if not strategy.full_graph:
        yield "full_graph=False"
    yield from (f"passes with {p.name!r}" for p in strategy.passes if not p.keeps_sums)
