"""Checks of rules: both sides are compared on random tensors, with gradients, in every dtype and for every choice.

The reference is `find` in float64. The error of `put` may be a few roundings, or as large as that of `find`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import RewriteError
from ..program.draft import Draft
from ..program.node import Value, name_of
from ..program.program import Input, Program
from .match_confirmation import results
from .node_reader import Reader
from .pattern import Pattern
from .pattern_match import find_match
from .rewrite_rule import Rewrite
from .rule_arguments import RuleVariant, Shape, sample_sizes, variants_of
from .rule_trace import CallTrace

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUNDINGS = 16
"""Allowed error of `put`, in roundings of the dtype relative to the largest number."""

Outcome = tuple[Tensor | None, ...]


def check_rule(rule: Rewrite, dtypes: Sequence[torch.dtype] = DTYPES, seed: int = 0) -> int:
    """Return the number of compared cases, on which both sides agree.

    Raises:
        RewriteError: the sides differ in a case, `where` refuses every sample, or the rule does not match itself.
    """
    torch.manual_seed(seed)
    done = 0
    for variant in variants_of(rule.arguments):
        for given, dtype in _cases(rule, variant, dtypes):
            if rule.is_met({k: _as_value(k, v) for k, v in given.items()}):
                _compare(rule, given, dtype)
                done += 1
    if not done:
        raise RewriteError(
            f"check of rule {rule.name}",
            "where=... refuses every sample",
            "nothing was compared",
            "pass shapes and samples that the rule accepts",
        )
    _check_matches_itself(rule)
    return done


def _check_matches_itself(rule: Rewrite) -> None:
    """Raise RewriteError if no pattern of the rule matches a program that has just the calls of `find`."""
    if any(_matches_calls(pattern, trace) for pattern in rule.patterns for trace in (pattern.told, *pattern.others)):
        return
    calls = ", ".join(name_of(call.op) for call in rule.patterns[0].told.calls)
    raise RewriteError(
        f"check of rule {rule.name}",
        f"no match in a program of find's own calls: {calls}",
        "programs are read without calls that change nothing, such as x * 1.0, so the rule would never apply",
        "leave calls that change nothing out of find, or remove them with a Rewriter (edit.unchanged)",
    )


def _matches_calls(pattern: Pattern, trace: CallTrace) -> bool:
    """True if the pattern matches the program of traced calls; `where` is not asked."""
    inputs = tuple(Input(v, "batch", name) for name, v in trace.inputs.items())
    draft = Draft(Program(inputs, trace.calls, trace.out))
    reader = Reader(draft.producer)
    return any(find_match(pattern, spot, draft, reader, lambda match: True) is not None for spot in draft)


def _cases(
    rule: Rewrite, variant: RuleVariant, dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[dict[str, Any], torch.dtype]]:
    """Yield arguments of a rule for two sets of sizes, all dtypes, and both samples of the constants."""
    names = [a.name for a in variant.attributes]
    constants = list(zip(*(a.samples for a in variant.attributes), strict=True)) or [()]
    for other, dtype, chosen in product((False, True), dtypes, constants):
        sizes = sample_sizes(rule.tensor_shapes, other)
        named = dict(zip(names, chosen, strict=True))
        yield {**variant.given, **named, **_tensors(variant, rule.tensor_shapes, sizes, dtype)}, dtype


def _tensors(
    variant: RuleVariant, shapes: Mapping[str, Shape], sizes: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in variant.tensors:
        shape = shapes.get(name, Shape(("4", "4")))
        dims = shape.sized(sizes)
        if shape.kind == "float":
            found[name] = torch.randn(dims, dtype=torch.float64, device="cpu").to(dtype)
        elif shape.kind == "bool":
            found[name] = torch.randint(0, 2, dims, device="cpu").to(torch.bool)
        else:
            found[name] = torch.randint(0, sizes[shape.below] if shape.below else 4, dims, device="cpu")
    return found


def _as_value(name: str, v: TorchValue) -> TorchValue:
    return Value(name, tuple(v.shape), v.dtype, str(v.device)) if isinstance(v, Tensor) else v


def _compare(rule: Rewrite, given: Mapping[str, Any], dtype: torch.dtype) -> None:
    exact, found, put = _run(rule.find, given, torch.float64), _run(rule.find, given), _run(rule.put, given)
    names = [f"result {i}" for i in range(len(results(rule.find(**given))))]
    names += [f"the gradient of {k}" for k, v in given.items() if _is_real(v)]
    if len(found) != len(put):
        raise _differ(rule, given, f"{len(found)} results and gradients of find, but {len(put)} of put")
    for name, truth, ours, theirs in zip(names, exact, put, found, strict=True):
        if ours is None or theirs is None or truth is None:
            if ours is not theirs:
                raise _differ(rule, given, f"{name}: only one side has it")
            continue
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            raise _differ(rule, given, f"{name}: {_type(theirs)} of find, but {_type(ours)} of put")
        allowed = max(_distance(theirs, truth), ROUNDINGS * _epsilon(dtype, ours) * _size(truth))
        if not _distance(ours, truth) <= allowed:
            raise _differ(
                rule, given, f"{name}: {_distance(ours, truth):.3g} off, but rounding explains only {allowed:.3g}"
            )


def _run(fn: Callable[..., TorchValue], given: Mapping[str, Any], dtype: torch.dtype | None = None) -> Outcome:
    """Return the results of a side, then the gradients of its float arguments for a fixed random cotangent."""
    args = {k: v.to(dtype or v.dtype).detach().requires_grad_() if _is_real(v) else v for k, v in given.items()}
    outs = results(fn(**args))
    wanted = [v for v in args.values() if _is_real(v)]
    sources = [v for v in outs if v.requires_grad]
    drawn = torch.Generator().manual_seed(1)
    seeds = [torch.randn(v.shape, generator=drawn, dtype=torch.float64, device="cpu").to(v.dtype) for v in sources]
    grads = (
        torch.autograd.grad(sources, wanted, seeds, allow_unused=True) if sources and wanted else (None,) * len(wanted)
    )
    return (*(v.detach() for v in outs), *grads)


def _is_real(v: TorchValue) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


def _epsilon(dtype: torch.dtype, x: Tensor) -> float:
    """Return the larger machine epsilon of the arguments' dtype and the result's dtype; 0 for integers."""
    return max(torch.finfo(dtype).eps, torch.finfo(x.dtype).eps) if x.is_floating_point() else 0.0


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; infinite if only one side is NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(torch.inf)).max()) if a.numel() else 0.0


def _size(x: Tensor) -> float:
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def _type(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}"


def _differ(rule: Rewrite, given: Mapping[str, Any], found: str) -> RewriteError:
    about = ", ".join(f"{k} {_type(v) if isinstance(v, Tensor) else v}" for k, v in given.items())
    return RewriteError(
        f"check of rule {rule.name} for {about}",
        found,
        "both sides of a rule must be the same computation",
        "write a put that computes the same as find, or add a where=... that refuses such arguments",
    )
