"""Torch's own operator samples, their expected results on one device, and the layouts to try.

A `Case` is one sample of one `op_db` entry with its results on a single device: the outputs, and the gradients of a
weighted sum of them. A `Variant` gives the layout of every tensor argument of a case on a mesh. This file is
independent of the library under test; `opdb` adds the libraries.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as op_samples
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import ReductionOpInfo
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks._own_samples import OPS

# torch reads the whole stack for each list of samples, to find a unittest.TestCase. Below pytest this takes 20 ms.
for _module in (common_utils, core):
    _module.extract_test_fn = lambda: None

RANKS = 4
KINDS = ("function", "in place", "view", "memory", "infinities", "own")
"""Uses of an entry: as a function, by its in-place method, with a write into the view that it returns, on tensors in
other memory orders, on tensors with infinities and NaN, and on samples that torch lacks."""
RIVAL_KINDS = KINDS[:3]

UNINITIALISED = "its values are uninitialised memory"
UNINITIALISED_GRADIENT = "torch's own gradient reads uninitialised memory"
NO_CPU_KERNEL = "it has no CPU kernel"
LEFT_OUT = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "resize_": UNINITIALISED,
    "resize_as_": UNINITIALISED,
    "_segment_reduce/lengths": UNINITIALISED_GRADIENT,
    "_segment_reduce/offsets": UNINITIALISED_GRADIENT,
    "torch.ops.aten._flash_attention_forward": NO_CPU_KERNEL,
    "torch.ops.aten._efficient_attention_forward": NO_CPU_KERNEL,
    "nn.functional.batch_norm/without_cudnn": NO_CPU_KERNEL,
}

_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn)


# --- entries -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One `op_db` entry or own sample, and the kind of its use, one of KINDS."""

    op: Any
    kind: str = "function"

    @property
    def name(self) -> str:
        base = f"{self.op.name}/{self.op.variant_test_name}" if self.op.variant_test_name else self.op.name
        return base if self.kind == "function" else f"{base} ({self.kind})"

    @property
    def dtype(self) -> torch.dtype | None:
        """Return float32 if the operator supports it, else the first supported dtype of a fixed list."""
        return next((d for d in _DTYPES if self.op.supports_dtype(d, "cpu")), None)

    @property
    def differentiable(self) -> bool:
        dtype = self.dtype
        floating = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        return self.kind != "infinities" and floating and dtype in self.op.supported_backward_dtypes("cpu")

    def call(self, values: Sequence[Any], spec: Any) -> Any:
        """Return the entry's result for flat arguments; an in-place entry also returns the argument it wrote to."""
        first, args, kwargs = tree_unflatten(list(values), spec)
        if self.kind not in ("in place", "view"):
            return self.op(first, *args, **kwargs)
        base = first.clone()
        if self.kind == "in place":
            return self.op.inplace_variant(base, *args, **kwargs), base
        views = self.op(base, *args, **kwargs)
        with torch.no_grad() if isinstance(views, (tuple, list)) else contextlib.nullcontext():
            _write(views)
        return views, base


def _write(view: Any) -> None:
    """Double a view in place, or fill one whose elements share memory; of several views only the first."""
    target = view[0] if isinstance(view, (tuple, list)) else view
    if shares_elements(target):
        target.fill_(2)
    else:
        target.mul_(2)


def shares_elements(value: torch.Tensor) -> bool:
    """True if two elements of a strided tensor may have the same place in memory."""
    reached = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def entries(kinds: Sequence[str] = ("function",)) -> list[Entry]:
    """Return all entries of the given kinds, in `op_db`'s order."""
    found: list[Entry] = []
    for op in op_samples.op_db:
        for kind in kinds:
            if kind == "in place" and op.inplace_variant is None:
                continue
            if kind == "view" and not _may_alias(op):
                continue
            if kind == "own" or (kind == "infinities" and not _looks_along(op)):
                continue
            found.append(Entry(op, kind))
    return found + [Entry(op, "own") for op in OPS if "own" in kinds]


_VIEWS = (
    "__getitem__ T H mH mT adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk "
    "contiguous diagonal dsplit expand expand_as flatten hsplit movedim narrow permute positive ravel real reshape "
    "reshape_as select slice split squeeze swapaxes t tensor_split transpose unbind unflatten unfold unsqueeze view "
    "view_as vsplit detach linalg.diagonal"
).split()


def _may_alias(op: Any) -> bool:
    return op.name in _VIEWS


_ALONG = (
    "max min argmax argmin logsumexp softmax log_softmax cummax cummin cumsum cumprod logcumsumexp median nanmedian "
    "aminmax sort topk mode kthvalue quantile nanquantile msort argsort norm linalg.norm linalg.vector_norm softmin "
    "nn.functional.softmin isfinite isinf isnan maximum minimum fmax fmin clamp nan_to_num diff dist bucketize "
    "searchsorted"
).split()


def _looks_along(op: Any) -> bool:
    """True for operators that use all elements along a dim, or that test for infinities or NaN."""
    return isinstance(op, ReductionOpInfo) or op.name in _ALONG


def infinite(value: Any, seed: int) -> Any:
    """Return the tensor with some or all elements replaced by infinities and NaN."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    rng = torch.Generator().manual_seed(seed)
    special = torch.tensor([-math.inf, -math.inf, math.inf, math.nan, 0.0][: 2 + seed % 4], dtype=value.dtype)
    drawn = special[torch.randint(0, len(special), value.shape, generator=rng)]
    share = (0.3, 0.7, 1.1)[seed % 3]
    return torch.where(torch.rand(value.shape, generator=rng) < share, drawn, value.detach())


# --- memory ------------------------------------------------------------------------------------------------------


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.mT.contiguous().mT


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with dim 1 innermost in memory."""
    return value.movedim(1, -1).contiguous().movedim(-1, 1)


def with_gaps(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value, value], -1).flatten(-2)[..., ::2]


def expanded(value: torch.Tensor) -> torch.Tensor:
    """Return the first row, expanded to the shape of the tensor."""
    return value[:1].clone().expand(value.shape)


_ORDERS = (transposed, with_gaps, channels_last, expanded)


def in_other_memory(value: Any, seed: int) -> Any:
    """Return the same tensor in another memory order; an expanded tensor only keeps the first row."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.ndim < 2 or not value.numel():
        return value
    wants = value.requires_grad
    return _ORDERS[seed % len(_ORDERS)](value.detach()).requires_grad_(wants)


# --- cases -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One sample of an entry with its expected results."""

    entry: Entry
    flat: list[Any]
    spec: Any
    grads_of: Callable[[Any], Any]  # normalises outputs that are only defined up to a phase
    seed: int
    is_random: bool = False
    outs: Any = None
    weights: list[torch.Tensor | None] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    _terms: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> list[int]:
        """Return the flat positions of strided tensors, which can be distributed."""
        return [i for i, v in enumerate(self.flat) if isinstance(v, torch.Tensor) and v.layout is torch.strided]

    def terms(self, position: int, ranks: int) -> list[torch.Tensor]:
        key = position, ranks
        if key not in self._terms:
            self._terms[key] = exact_terms(self.flat[position].detach(), ranks, seed=position)
        return self._terms[key]

    @cached_property
    def exact(self) -> tuple[Any, list[torch.Tensor | None]] | None:
        """Return outputs and gradients in double precision, or None if the entry does not support it."""
        try:
            return derive(self, [_doubled(v) for v in self.flat])
        except Exception:
            return None

    @cached_property
    def truths(self) -> list[tuple[Any, list[torch.Tensor | None]]]:
        """Return results and gradients on one device; other memory orders also give those of contiguous copies.

        Torch's kernels for the two may differ in rounding, and a part of a tensor is often contiguous.
        """
        if self.entry.kind != "memory":
            return [(self.outs, self.grads)]
        return [(self.outs, self.grads), derive(self, [contiguous(v) for v in self.flat])]

    def describe(self) -> str:
        return ", ".join(_short(v) for v in self.flat)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:40]


def exact_terms(value: torch.Tensor, ranks: int, seed: int = 0) -> list[torch.Tensor]:
    """Return random terms whose sum is `value` to the last bit in any order.

    Every element is `c + (v - c)` on two random ranks and zero elsewhere, with c between v and 2 v: by Sterbenz's
    lemma the difference is exact. The terms differ in sign, so a function that is not linear shows.
    """
    if value.is_complex():
        real = exact_terms(torch.view_as_real(value.resolve_conj()), ranks, seed)
        return [torch.view_as_complex(t) for t in real]
    rng = torch.Generator().manual_seed(seed)
    first = torch.randint(0, ranks, value.shape, generator=rng)
    second = (first + torch.randint(1, max(ranks, 2), value.shape, generator=rng)) % ranks
    factor = 1.25 + 0.25 * torch.randint(0, 4, value.shape, generator=rng)
    whole = value.to(torch.float64) if value.is_floating_point() else value
    c = (whole * factor).to(value.dtype) if value.is_floating_point() else 2 * value
    c = torch.where(torch.isfinite(c), c, value) if value.is_floating_point() else c
    rest = torch.where(torch.isfinite(value), value - c, 0) if value.is_floating_point() else value - c
    zero = torch.zeros_like(value)
    terms = [torch.where(first == r, c, zero) + torch.where(second == r, rest, zero) for r in range(ranks)]
    return [torch.empty_like(value).copy_(term) for term in terms]  # in the memory order of the value


@contextlib.contextmanager
def sizes(**values: int) -> Iterator[None]:
    """Draw torch's samples with other values of their size constants (`S`, `M`, `L`) inside the context."""
    before = {name: getattr(op_samples, name) for name in values}
    for name, value in values.items():
        setattr(op_samples, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(op_samples, name, value)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw(entry: Entry, cap: int) -> list[Case]:
    """Return at most `cap` cases: half from torch's odd default sizes, half from even ones, most diverse first."""
    odd = _most_diverse(_samples(entry), (cap + 1) // 2)
    with sizes(S=4, M=8, L=20):
        even = _most_diverse(_samples(entry), cap - len(odd))
    cases = [_case(entry, sample, seed) for seed, sample in enumerate(odd + even)]
    return [case for case in cases if case is not None]


def _samples(entry: Entry) -> list[Any]:
    seed_all(0)
    drawn = entry.op.sample_inputs("cpu", entry.dtype, requires_grad=entry.differentiable)
    found: list[Any] = []
    with contextlib.suppress(Exception):  # some samplers fail with other sizes: keep the samples before the failure
        for sample in drawn:
            found.append(sample)
            if len(found) == 200:
                break
    return found


def _most_diverse(samples: list[Any], count: int) -> list[Any]:
    """Return the samples with different descriptions first, then evenly spaced ones."""
    if len(samples) <= count:
        return samples
    spaced = [samples[i * len(samples) // count] for i in range(count)]
    kinds: dict[str, Any] = {}
    for sample in samples:
        kinds.setdefault(_description(sample), sample)
    distinct = list(kinds.values())
    if len(distinct) > count:
        return [distinct[i * len(distinct) // count] for i in range(count)]
    return (distinct + [s for s in spaced if not any(s is d for d in distinct)])[:count]


def _description(sample: Any) -> str:
    """Return a coarse description: tensor ranks, emptiness, and the names and types of other arguments."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    parts = [(v.ndim, v.numel() == 0) if isinstance(v, torch.Tensor) else type(v).__name__ for v in flat]
    return f"{parts}{spec}"


def _case(entry: Entry, sample: Any, seed: int) -> Case | None:
    """Return the case with its results, or None if it has no value on a single device."""
    flat, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    flat = [contiguous(v) for v in flat]
    if entry.kind == "memory":
        flat = [in_other_memory(v, seed) for v in flat]
    if entry.kind == "infinities":
        flat = [infinite(v, seed + at) for at, v in enumerate(flat)]
    if entry.kind == "in place" and sample.broadcasts_input:
        return None
    finish = sample.output_process_fn_grad if entry.kind in ("function", "memory") else _identity
    case = Case(entry, flat, spec, finish, seed)
    try:
        outs, grads = _truth(case)
    except Exception:
        case.flat = [v.detach() if isinstance(v, torch.Tensor) else v for v in flat]
        try:
            outs, grads = _truth(case)
        except Exception:
            return None
    case.outs, case.grads = outs, grads
    return case


def _identity(x: Any) -> Any:
    return x


def contiguous(value: Any) -> Any:
    """Return a contiguous leaf with the same value."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return value.detach()
    copy = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(value.requires_grad)


def fresh(value: Any) -> Any:
    """Return a leaf with the same value in the same memory order."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_contiguous():
        return contiguous(value)
    value_only = value.detach()
    memory = value_only.untyped_storage().clone()
    copy = value_only.new_empty(0).set_(memory, value.storage_offset(), value.shape, value.stride())
    return copy.requires_grad_(value.requires_grad)


def _truth(case: Case) -> tuple[Any, list[torch.Tensor | None]]:
    outs = evaluate(case, [fresh(v) for v in case.flat])[0]
    seed_all(case.seed + 1)
    with patch.object(torch, "manual_seed", lambda seed: torch.default_generator):  # some samples seed themselves
        again = evaluate(case, [fresh(v) for v in case.flat])[0]
    case.is_random = differ(again, outs) is not None
    results = evaluate(case, [fresh(v) for v in case.flat])[1]
    targets = [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]
    case.weights = [_weights(t, k) if t.requires_grad else None for k, t in enumerate(targets)]
    return derive(case, [fresh(v) for v in case.flat])


def derive(case: Case, leaves: Sequence[Any]) -> tuple[Any, list[torch.Tensor | None]]:
    """Return the outputs, and the gradients of their weighted sum."""
    raw, results = evaluate(case, leaves)
    if not any(w is not None for w in case.weights):
        return detached(raw), []
    targets = [t for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]
    weighted_sum(targets, case.weights).backward()
    grads = [v.grad if isinstance(v, torch.Tensor) and v.requires_grad else None for v in leaves]
    return detached(raw), grads


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _doubled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDER:
        return fresh(value)
    return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)


def as_exact_as(found: Any, wanted: Any, exact: Any) -> bool:
    """True if the error of `found` is at most four times that of `wanted`, compared with double precision."""
    flat = [tree_flatten(t)[0] for t in (found, wanted, exact)]
    if len({len(leaves) for leaves in flat}) > 1:
        return False
    return all(_as_exact_as(f, w, e) for f, w, e in zip(*flat, strict=True))


def _as_exact_as(found: Any, wanted: Any, exact: Any) -> bool:
    if differ(found, wanted) is None:
        return True
    if not all(isinstance(t, torch.Tensor) and t.shape == exact.shape for t in (found, wanted)):
        return False
    if found.dtype != wanted.dtype or wanted.dtype not in _WIDER:
        return False
    mine, one_device = (float((t.detach() - exact).abs().max()) for t in (found, wanted))
    return mine <= 4 * one_device


def evaluate(case: Case, values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the outputs, and the targets whose gradients are taken."""
    seed_all(case.seed)
    outs = case.entry.call(values, case.spec)
    return outs, case.grads_of(outs)


def _weights(out: torch.Tensor, k: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 + k)
    weights = torch.rand(out.shape, generator=rng, dtype=torch.float64) + 0.5
    signs = 1 - 2 * torch.randint(0, 2, out.shape, generator=rng)
    return (weights * signs).to(out.dtype)


def weighted_sum(targets: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the scalar whose gradients are compared."""
    total: Any = 0
    for target, weight in zip(targets, weights, strict=True):
        if weight is None:
            continue
        part = (target * weight).sum()
        total = total + (part.real if part.is_complex() else part)
    return total


def detached(tree: Any) -> Any:
    flat, spec = tree_flatten(tree)
    return tree_unflatten([v.detach().clone() if isinstance(v, torch.Tensor) else v for v in flat], spec)


# --- comparing ---------------------------------------------------------------------------------------------------

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.complex64: 1e-4}


def differ(found: Any, wanted: Any, slack: float = 1.0) -> str | None:
    """Return the first difference in words, or None. Compares trees, tensors and numbers; NaN equals NaN."""
    found_flat, wanted_flat = tree_flatten(found)[0], tree_flatten(wanted)[0]
    if len(found_flat) != len(wanted_flat):
        return f"{len(found_flat)} results, wanted {len(wanted_flat)}"
    for k, (a, b) in enumerate(zip(found_flat, wanted_flat, strict=True)):
        message = _differ_leaf(a, b, slack)
        if message:
            return f"result {k}: {message}" if len(wanted_flat) > 1 else message
    return None


def _differ_leaf(a: Any, b: Any, slack: float) -> str | None:
    if isinstance(b, torch.Tensor):
        return _differ_tensor(a, b, slack) if isinstance(a, torch.Tensor) else f"{type(a).__name__}, wanted a tensor"
    if isinstance(b, (float, complex)) and isinstance(a, (float, complex)):
        return _differ_tensor(torch.tensor(a), torch.tensor(b), slack)
    return None if type(a) is type(b) and a == b else f"{a!r:.60}, wanted {b!r:.60}"


def _differ_tensor(a: torch.Tensor, b: torch.Tensor, slack: float) -> str | None:
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, wanted {tuple(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.dtype}, wanted {b.dtype}"
    a, b = a.detach(), b.detach()
    if b.dtype is torch.complex32:  # the CPU has too few operators to compare it directly
        return _differ_tensor(a.to(torch.complex64), b.to(torch.complex64), 50 * slack)
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return _differ_tensor(a.to_dense(), b.to_dense(), slack)
    if torch.equal(a, b) or not b.numel():
        return None
    if not (b.is_floating_point() or b.is_complex()):
        return f"values differ: {_at_worst(a.to(torch.float64), b.to(torch.float64))}"
    tolerance = _TOLERANCE.get(b.dtype, 1e-9) * slack
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = b[torch.isfinite(b)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if torch.allclose(a, b, rtol=tolerance, atol=tolerance * (0.2 * scale + 1e-2), equal_nan=True):
        return None
    return f"values differ: {_at_worst(a, b)}"


def _at_worst(a: torch.Tensor, b: torch.Tensor) -> str:
    gap = torch.nan_to_num((a - b).abs(), nan=float("inf")).flatten()
    i = int(gap.argmax())
    return f"{a.flatten()[i].item():.6g}, wanted {b.flatten()[i].item():.6g} (element {i} of {gap.numel()})"


# --- layouts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Layout of the tensors of a case: a mesh shape and, per tensor, one mark per mesh axis.

    The marks: `R` replicated, `P` a pending sum, `S0`, `S1`, … sharded along that dim.
    """

    name: str
    mesh: tuple[int, ...]
    marks: tuple[tuple[str, ...], ...]


def variants(case: Case) -> list[Variant]:
    """Return the layouts for a case; layouts that would repeat an earlier one are dropped."""
    tensors = [case.flat[i] for i in case.tensors]
    line, square, flat, tall = (RANKS,), (2, 2), (1, RANKS), (RANKS, 1)

    def partial(t: torch.Tensor) -> str:
        """Return the mark of a pending sum, if the tensor can be one."""
        return "R" if t.dtype is torch.bool or "float8" in str(t.dtype) else "P"

    rules: list[tuple[str, tuple[int, ...], Callable[[int, torch.Tensor], tuple[str, ...]]]] = [
        ("replicated", line, lambda k, t: ("R",)),
        ("first dim cut", line, lambda k, t: (_cut(t, 0),)),
        ("last dim cut", line, lambda k, t: (_cut(t, t.ndim - 1),)),
        ("uneven", line, lambda k, t: (_uneven(t),)),
        ("partial", line, lambda k, t: (partial(t),)),
        ("mixed", line, lambda k, t: ((_cut(t, 0), "R", _cut(t, t.ndim - 1), partial(t))[k % 4],)),
        ("2x2: first and second dim cut", square, lambda k, t: (_cut(t, 0), _cut(t, 1))),
        ("2x2: first dim cut, partial", square, lambda k, t: (_cut(t, 0), partial(t))),
        ("1x4: first dim cut by an axis of one", flat, lambda k, t: (_cut(t, 0), "R")),
        ("1x4: first dim cut by an axis of one, last dim cut", flat, lambda k, t: (_cut(t, 0), _cut(t, t.ndim - 1))),
        ("4x1: first dim cut, partial on an axis of one", tall, lambda k, t: (_cut(t, 0), partial(t))),
    ]
    found: dict[Any, Variant] = {}
    for name, mesh, rule in rules:
        variant = Variant(name, mesh, tuple(rule(k, t) for k, t in enumerate(tensors)))
        found.setdefault(
            (mesh if any("S" in str(m) or "P" in m for m in variant.marks) else None, variant.marks), variant
        )
    return list(found.values())


def _cut(t: torch.Tensor, dim: int) -> str:
    return f"S{dim}" if 0 <= dim < t.ndim else "R"


def _uneven(t: torch.Tensor) -> str:
    """Return the mark of a dim that does not divide evenly over four ranks; an inner dim if there is a choice."""
    dims = [d for d in range(t.ndim) if t.shape[d] % RANKS]
    return f"S{dims[len(dims) // 2]}" if dims else "R"


def marks_by_position(case: Case, variant: Variant) -> dict[int, tuple[str, ...]]:
    return dict(zip(case.tensors, variant.marks, strict=True))
