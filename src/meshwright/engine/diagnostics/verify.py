"""Compare a model on one device with the same model on a mesh, and find the first tensor that differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import reduce_terms, simulate
from meshwright.layout import ProcessMesh, Spec, expand_products

from .._errors import DifferenceError, StrategyError
from ..eager.parallelize import Parallelism, parallelize
from .observed_tensors import INPUT, LOSS, OF_INPUT, OF_OUTPUT, OF_PARAMETER, OUTPUT, Key, Part, observe

Marks = Parallelism | Callable[[nn.Module, ProcessMesh], Any]
Parts = Mapping[int, Part]
"""Rank → its part of one tensor."""
MOST = 8
NOISE = 10.0
_LOOK = {
    INPUT: "the code that computes the input of {0}: the forward pass of {1} before that call",
    OUTPUT: "the forward pass of {0}: its inputs are right",
    LOSS: "the code that computes the loss from the model's result",
    OF_OUTPUT: "the backward pass of the code after {0}, in {1}: a rule, a local_map or an autograd.Function",
    OF_INPUT: "the backward pass of {0}: the gradients of its outputs are right",
    OF_PARAMETER: "the use of {0}: the gradients of the inputs and outputs around it are right",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of the sharded run that differs from that of one device.

    `what` is an output, an input, or a gradient; `path` is that of its module or parameter; `layout` is its layout.
    `error` is the largest deviation, relative to the largest number. `why` says what is wrong with the numbers, and
    `look` where to look for the cause.
    """

    what: str
    path: str
    call: int
    layout: str
    error: float
    why: str
    look: str

    @property
    def name(self) -> str:
        """Return the name of the tensor for a person."""
        of = f" of {self.path or 'the model'}" if self.what != LOSS else ""
        return f"{self.what}{of}" + (f", number {self.call + 1}" if self.call else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.why}, relative error {self.error:.2g}, as {self.layout}"


@dataclass(frozen=True, repr=False)
class Verified:
    """The result of `verify`: the number of compared tensors, the largest error, and the differences in order."""

    mesh: ProcessMesh
    compared: int
    largest: float
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """True if all tensors equal those on one device."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """Return the first tensor that differs, or None; all tensors before it are right."""
        return self.differences[0] if self.differences else None

    def check(self) -> None:
        """Raise DifferenceError if a tensor differs."""
        if self.first is not None:
            raise DifferenceError(
                f"the numbers of one device on {self.mesh!r}",
                f"the {self.first.name} is the first that differs",
                f"{self.first.why}; relative error {self.first.error:.2g}",
                f"look at {self.first.look}",
            )

    def __str__(self) -> str:
        if self.first is None:
            return f"equal: {self.compared} tensors on {self.mesh!r}, relative error at most {self.largest:.2g}"
        rows = [f"{len(self.differences)} of {self.compared} tensors differ on {self.mesh!r}; the first is the"]
        rows += [f"  {self.first}", f"  look at {self.first.look}"]
        rows += [f"then {d.name}: {d.error:.2g}" for d in self.differences[1:MOST]]
        more = len(self.differences) - MOST
        return "\n".join([*rows, *([f"and {more} more"] if more > 0 else [])])

    __repr__ = __str__


def verify(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Any] | None = None,
    *,
    mesh: ProcessMesh,
    marks: Marks,
    lay: Callable[[Sequence[Any], ProcessMesh], Sequence[Any]] | None = None,
    rtol: float | None = None,
) -> Verified:
    """Compare `model` on one device with the marked model on simulated ranks, and find the first tensor that differs.

    `marks` is a `Parallelism`, or a function that distributes a model over the mesh; `lay` is a function that
    distributes the batch. Both runs make a forward and a backward pass with copies of the model. Inputs and outputs of
    every module, their gradients and those of the parameters are compared. `loss` is called as by `to_static`; without
    it, the model's results are summed. `rtol` is the allowed relative error, by default the square root of the dtype's
    precision.

    >>> import torch, meshwright as mw
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> plan = mw.Parallelism({"0": mw.ColwiseParallel(), "2": mw.RowwiseParallel()})
    >>> mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    >>> mw.verify(net, [torch.randn(5, 4)], mesh=mesh, marks=plan).equal
    True
    """
    mark = _marking(marks)

    def on_mesh() -> dict[Key, Part]:
        laid = copy.deepcopy(model)
        laid = mark(laid, mesh) or laid
        return observe(laid, batch if lay is None else lay(batch, mesh), loss)

    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        reference = observe(copy.deepcopy(model), batch, loss)
        torch.set_rng_state(state)
        ranks = simulate(on_mesh, max(mesh.process_ids) + 1)
    return _compared(model, reference, ranks, mesh, rtol)


def _marking(marks: object) -> Callable[[nn.Module, ProcessMesh], Any]:
    if isinstance(marks, Parallelism):
        return lambda model, mesh: parallelize(model, None, mesh, marks)[0]
    if callable(marks):
        return marks
    raise StrategyError(
        "verify(model, batch, loss, mesh=mesh, marks=marks)",
        f"a {type(marks).__name__} for marks",
        "marks distribute the model over the mesh",
        "pass a Parallelism, or a function of the model and the mesh",
    )


def _compared(
    model: nn.Module,
    reference: Mapping[Key, Part],
    ranks: Sequence[Mapping[Key, Part]],
    mesh: ProcessMesh,
    rtol: float | None,
) -> Verified:
    found, largest = list[Difference](), 0.0
    largest_of: dict[str, float] = {}
    for (what, *_), part in reference.items():
        largest_of[what] = max(largest_of.get(what, 0.0), _size(part.local))
    for key, part in reference.items():
        held = {rank: seen[key] for rank, seen in enumerate(ranks) if key in seen and rank in mesh}
        error, why = _deviation(part.local, held, NOISE * _precision(part.local.dtype) * largest_of.get(key[0], 0.0))
        allowed = _precision(part.local.dtype) if rtol is None else rtol
        if error <= allowed:
            largest = max(largest, error)
        else:
            layout = repr(next((p.spec for p in held.values()), None) or "a plain tensor").strip("'")
            look = _LOOK[key[0]].format(*_names(model, key))
            found.append(Difference(*key, layout, error, why or "wrong numbers", look))
    return Verified(mesh, len(reference), largest, tuple(found))


def _names(model: nn.Module, key: Key) -> tuple[str, str]:
    """Return the names, for a person, of the module or parameter and of the module around it."""
    what, path, _ = key
    above = path.rpartition(".")[0]
    kinds = {name: type(m).__name__ for name, m in model.named_modules()}
    own = path if what == OF_PARAMETER else f"{path or 'the model'} ({kinds.get(path, '?')})"
    return own, f"{above or 'the model'} ({kinds.get(above, '?')})" if path else "the code around the model"


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def _size(x: Tensor) -> float:
    return float(x.abs().max().nan_to_num(posinf=0.0)) if x.numel() else 0.0


def _deviation(whole: Tensor, held: Parts, least: float) -> tuple[float, str]:
    """Return the largest deviation of the parts from the whole, relative to its largest number, and what is wrong.

    A tensor with numbers below `least` is rounding error: terms that cancel, such as a bias's gradient before a batch
    norm.
    """
    if not held:
        return float("inf"), "no rank of the mesh computes it"
    specs = {part.spec for part in held.values()}
    if len(specs) > 1:
        return float("inf"), f"its layout differs between ranks: {', '.join(map(repr, specs))}"
    (spec,) = specs
    pairs = list(_pairs(whole, spec, held))
    if bad := next((pair for pair in pairs if pair[1].shape != pair[2].shape), None):
        return float("inf"), f"its shape on rank {bad[0]} is {tuple(bad[1].shape)}, but should be {tuple(bad[2].shape)}"
    scale = max(_size(whole), least)
    errors = [(_max_distance(a, b), rank) for rank, a, b in pairs]
    worst, rank = max(errors)
    relative = worst / scale if scale > 0 else worst
    return relative, "" if relative == 0 else _difference_pattern(pairs, rank)


def _pairs(whole: Tensor, spec: Spec | None, held: Parts) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the rank, its part (pending reductions done), and the same part of the whole."""
    if spec is None or spec.shape != whole.shape:
        yield from ((rank, part.local, whole) for rank, part in held.items())
        return
    shape, _ = expand_products(spec.shape, spec.layout)
    for rank in held:
        group = spec.mesh.group(rank, spec.layout.partial_axes) if rank in spec.mesh else ()
        if not group or group[0] != rank:
            continue
        at = tuple(slice(begin, begin + length) for begin, length in spec.local_ranges(rank))
        own = _whole_term(spec.mesh, spec.layout.partial, rank, held)
        yield rank, own, whole.reshape(shape)[at].reshape(spec.local_shape(rank))


def _whole_term(mesh: ProcessMesh, axes: Sequence[tuple[str, str]], rank: int, held: Parts) -> Tensor:
    """Return the terms along all these axes, reduced."""
    if not axes:
        return held[rank].local
    *others, (axis, op) = axes
    return reduce_terms([_whole_term(mesh, others, peer, held) for peer in mesh.group(rank, [axis])], op)


def _max_distance(a: Tensor, b: Tensor) -> float:
    """Return the largest distance; infinite if only one of two numbers is NaN."""
    if not b.numel():
        return 0.0
    wide = torch.complex128 if b.is_complex() or a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf")).max())


def _difference_pattern(pairs: Sequence[tuple[int, Tensor, Tensor]], rank: int) -> str:
    """Return, in words, the common factor of all parts, or else the rank whose numbers differ."""
    a = torch.cat([held.reshape(-1).to(torch.complex128) for _, held, _ in pairs])
    b = torch.cat([right.reshape(-1).to(torch.complex128) for *_, right in pairs])
    power = float((b.abs() ** 2).sum())
    ratio = float((a * b.conj()).real.sum()) / power if power else 1.0
    if power and _max_distance(a, ratio * b) <= 1e-3 * abs(ratio) * float(b.abs().max()) and abs(ratio - 1) > 1e-3:
        return f"{ratio:.4g} times the numbers of one device"
    return f"wrong numbers on rank {rank}"
