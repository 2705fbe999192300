"""Operators with a `dtype` argument give one device's values, dtypes and gradients for every pair of dtypes.

The operators come from torch's schemas: every overload of `torch.ops.aten` with one tensor and a `dtype` whose other
required arguments have a value in `VALUES`. Every pair of dtypes is tried in one layout; the layouts take turns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
VALUES: dict[str, tuple[Any, ...]] = {"dim": (0, -1), "keepdim": (False, True), "p": (2, 3), "ord": (2, 1, 0)}
VALUES |= {"fill_value": (3,), "half_to_float": (False,)}
NOT_COMPARED = ("empty", "rand", "to.prim", "_assert", "_sparse", "to_", "_to_dense", "as_tensor")
"""First parts of the names of operators whose results no argument defines, or that are for other kinds of tensors."""
SHAPE = (5, 3)
STEP = 7
ROUNDING = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operators() -> Iterator[Any]:
    for schema in torch._C._jit_get_all_schemas():
        tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
        if not schema.name.startswith("aten::") or [str(a.type) for a in tensors] != ["Tensor"] or tensors[0].is_out:
            continue
        required = {a.name for a in schema.arguments if not a.has_default_value()} - {tensors[0].name, "dtype"}
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        overload = schema.overload_name or "default"
        if packet is None or overload not in packet.overloads() or not required <= set(VALUES):
            continue
        if any(a.name == "dtype" and "int" in str(a.type) for a in schema.arguments):
            yield getattr(packet, overload)


def ways(op: Any) -> Iterator[dict[str, Any]]:
    """Return arguments of the operator beside the tensor and the dtype."""
    names = [a.name for a in op._schema.arguments if a.name in VALUES]
    lists = {a.name for a in op._schema.arguments if "List" in str(a.type)}
    optional = {a.name for a in op._schema.arguments if a.name == "dim" and "Optional" in str(a.type)}
    values = [(*VALUES[n], *((None,) if n in optional else ())) for n in names]
    for chosen in product(*values):
        given = dict(zip(names, chosen, strict=True))
        yield {k: [v] if k in lists and v is not None else v for k, v in given.items()}
        if "dim" in lists and given["dim"] == 0:
            yield {**given, "dim": [0, 1]}


def values(dtype: torch.dtype) -> Tensor:
    """Return small numbers whose sums and products wrap around in eight bits and are exact in the floating dtypes."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(0, 7, SHAPE, generator=generator)
    return (whole / 2).to(dtype) if dtype.is_floating_point or dtype.is_complex else whole.to(dtype)


def term(x: Tensor) -> Tensor:
    """Return the part of a pending sum of `x` on the first rank; the second holds the rest, which may wrap around."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x - 4
    return torch.full_like(x, torch.iinfo(x.dtype).max - 3)


@dataclass(frozen=True)
class Lay:
    """A mesh of one axis, and the placement of a tensor on it."""

    ranks: int
    placement: Any

    def of(self, x: Tensor, wants: bool) -> Tensor:
        mesh = mw.ProcessMesh(range(self.ranks), ["x"])
        if not self.placement.is_partial():
            return mw.shard_tensor(x, mesh, [self.placement]).requires_grad_(wants)
        first = term(x)
        parts = [first, x - first, *[torch.zeros_like(x)] * (self.ranks - 2)]
        return mw.dtensor_from_local(parts[current_communicator().rank], mesh, [self.placement]).requires_grad_(wants)


def layouts(dtype: torch.dtype) -> list[Lay]:
    placements = [mw.Shard(0), mw.Shard(1)] + ([mw.Partial("sum")] if dtype != torch.bool else [])
    return [Lay(ranks, placement) for placement in placements for ranks in (2, 3)]


Found = tuple[Tensor, Tensor | None]
"""The result of a call, and the gradient."""


def found(call: Callable[[Tensor], Any], x: Tensor) -> Found:
    out = call(x)
    if out.requires_grad:
        (out.real if out.is_complex() else out).square().sum().backward()
    return mw.unshard_dtensor(out.detach()), None if x.grad is None else mw.unshard_dtensor(x.grad)


def difference(mine: Found, goal: Found, rounding: float) -> str | None:
    """Return the difference of a call on a mesh from the call on one device, or None.

    A gradient of zeros equals none.
    """
    none = torch.zeros_like(next(g for g in (mine[1], goal[1], goal[0]) if g is not None))
    for a, b in zip(mine, goal, strict=True):
        have, need = (none if x is None else x for x in (a, b))
        largest = torch.where(need.isfinite(), need, 0).to(torch.complex128).abs().max().item()
        try:
            torch.testing.assert_close(have, need, equal_nan=True, rtol=rounding, atol=rounding * largest)
        except AssertionError as error:
            return f"{error}: {have} not {need}"
    return None


Case = tuple[torch.dtype, torch.dtype | None, dict[str, Any], Lay]


def cases(op: Any, every: bool) -> Iterator[Case]:
    """Return all pairs of dtypes, each in every layout and way, or in one of them."""
    needs_dtype = any(a.name == "dtype" and not a.has_default_value() for a in op._schema.arguments)
    for turn, (source, target) in enumerate(product(DTYPES, DTYPES if needs_dtype else (None, *DTYPES))):
        all_ways = list(product(ways(op), layouts(source)))
        for given, lay in all_ways if every else [all_ways[turn * STEP % len(all_ways)]]:
            yield source, target, given, lay


def run(op: Any, case: Case, is_whole: bool) -> Found:
    source, target, kwargs, lay = case
    x, wants = values(source), source.is_floating_point or source.is_complex
    return found(lambda x: op(x, **kwargs, dtype=target), x.requires_grad_(wants) if is_whole else lay.of(x, wants))


def check(op: Any, every: bool = False) -> Iterator[str]:
    """Return the calls whose results differ from one device's; of those that one device refuses, try some."""
    accepted: dict[int, list[tuple[Case, Found]]] = {2: [], 3: []}
    refused: list[Case] = []
    for case in cases(op, every):
        try:
            accepted[case[3].ranks].append((case, run(op, case, True)))
        except RuntimeError:
            refused.append(case)
    for case in refused[:: 1 if every else 5]:
        if is_accepted(op, case):
            yield f"{op} {case}: a result, but one device raises an error"
    for ranks, pairs in accepted.items():
        results = mw.simulate(lambda pairs=pairs: [run(op, case, False) for case, _ in pairs], ranks)
        for on_rank in results:
            yield from differences(op, on_rank, pairs)


def is_accepted(op: Any, case: Case) -> bool:
    try:
        mw.simulate(lambda: run(op, case, False), case[3].ranks)
    except (RuntimeError, mw.MeshwrightError):
        return False
    return True


def differences(op: Any, on_rank: list[Found], pairs: list[tuple[Case, Found]]) -> Iterator[str]:
    for mine, (case, goal) in zip(on_rank, pairs, strict=True):
        rounding = max(ROUNDING.get(d, 1e-5) for d in case[:2] if d)
        text = difference(mine, goal, rounding)
        if text is not None:
            yield f"{op} {case}: {text}"


OPERATORS = [op for op in operators() if not op._schema.name.split("::")[1].startswith(NOT_COMPARED)]


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name())
def test_an_operator_returns_the_requested_dtype(op: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = list(check(op))
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("name", ["a wider tensor", "a float", "a quotient", "a float tensor", "an integer"])
def test_a_pending_sum_of_integers_wraps_around_before_it_is_converted(name: str, dtype: torch.dtype) -> None:
    use: Callable[[Tensor], Tensor] = {
        "a wider tensor": lambda x: x * torch.full((3,), 2),
        "a float": lambda x: x * 0.5,
        "a quotient": lambda x: x / 2,
        "a float tensor": lambda x: x + torch.ones(3),
        "an integer": lambda x: x * 3 - x,
    }[name]
    wanted = use(values(dtype))
    for ranks in (2, 3):
        lay = Lay(ranks, mw.Partial("sum"))
        for found in mw.simulate(lambda lay=lay: mw.unshard_dtensor(use(lay.of(values(dtype), False))), ranks):
            torch.testing.assert_close(found, wanted)
