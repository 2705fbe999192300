"""Seconds for a hundred rules on a program of 5,000 operators; RMS norms found in five ways to write them.

torch.fx's `subgraph_rewriter` and Inductor's `pattern_matcher` are measured with the same two rules, each in its own
form: lines of a rule, styles in which the norm is found, and the time of one rule on the same program.
Times are seconds of one core, the best of several, because other work on the machine only adds time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.graph import Program, Rewrite, apply_passes, count_ops, rewrite
from meshwright.passes import FuseNorm

from . import _rewrite_rivals as rivals
from ._rewrite_samples import STYLES, hundred_rules, model, model_inputs, program_of

GOAL_S = 0.5
OPERATORS = 5000


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the best time of several; all else is in the details."""
    program = large_program(OPERATORS)
    rules = hundred_rules()
    cold = seconds(lambda: [rule.patterns for rule in rules if isinstance(rule, Rewrite)])
    took = min(seconds(lambda: rewrite(program, rules)) for _ in range(3 if quick else 9))
    after = rewrite(program, rules)
    styles = {dtype: sum(is_found(style, dtype) for style in STYLES) for dtype in (torch.float32, torch.bfloat16)}
    table = beside_rivals(program, quick)
    return {
        "value": {
            "seconds": round(took, 3),
            "styles": min(styles.values()),
            "lines": table["meshwright"]["norm"]["lines"],
        },
        "goal": f"at most {GOAL_S} s; {len(STYLES)} styles",
        "ok": took <= GOAL_S and all(found == len(STYLES) for found in styles.values()),
        "rival": {
            f"{name}, {what}": row["norm"][what]
            for name, row in table.items()
            for what in ("styles", "lines", "seconds")
            if name != "meshwright" and what in row["norm"]
        },
        "details": {
            "operators": {"before": len(program.nodes), "after": len(after.nodes)},
            "rules": len(rules),
            "steps": len(after.changes) - 1,
            "seconds to read the rules, once": round(cold, 3),
            "seconds when nothing is left to do": round(seconds(lambda: rewrite(after, rules)), 3),
            "styles": {str(dtype): found for dtype, found in styles.items()},
            "beside rivals": table,
        },
    }


def large_program(operators: int) -> Program:
    blocks = -(-operators // len(program_of(model(1), *model_inputs()).nodes))
    return program_of(model(blocks), *model_inputs())


def seconds(fn: Callable[[], Any]) -> float:
    start = time.process_time()
    fn()
    return time.process_time() - start


def is_found(style: str, dtype: torch.dtype) -> bool:
    """True if the norm of a style is one operator after the pass."""
    program = program_of(STYLES[style], torch.randn(2, 3, 8).to(dtype), torch.ones(8, dtype=dtype))
    counts = count_ops(apply_passes(program, [FuseNorm()]).nodes)
    return counts.get("aten.rms_norm.default") == 1 and "aten.mean.dim" not in counts


def beside_rivals(program: Program, quick: bool) -> dict[str, Any]:
    """Return, for each rewriter and rule, lines to write, styles found (of the norm), seconds and steps."""
    rows: dict[str, Any] = {}
    for name, norm, linear, make in (
        ("meshwright", rivals.our_norm, rivals.our_linear, rivals.ours),
        ("torch.fx subgraph_rewriter", rivals.fx_norm, rivals.fx_linear, rivals.by_fx),
        ("Inductor pattern_matcher", rivals.inductor_norm, rivals.inductor_linear, rivals.by_inductor),
    ):
        applies = {"norm": make(norm()), "linear": make(linear())}
        rows[name] = {
            "norm": {"lines": rivals.lines(norm), "styles": sum(finds(applies["norm"], style) for style in STYLES)},
            "linear": {"lines": rivals.lines(linear)},
        }
        if not quick:
            rows[name]["norm"] |= timed(applies["norm"], program)
    return rows


def finds(apply: Callable[[Program], int], style: str) -> bool:
    """True if a rule is right for a style in float32, because other rewriters do not handle casts."""
    program = program_of(STYLES[style], torch.randn(2, 16, 32), torch.ones(32))
    return apply(program) > 0


def timed(apply: Callable[[Program], int], program: Program) -> dict[str, Any]:
    found: list[int] = []
    took = seconds(lambda: found.append(apply(program)))
    return {"seconds": round(took, 3), "steps": found[0]}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
