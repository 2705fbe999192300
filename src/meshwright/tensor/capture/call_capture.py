"""Capture of one call: the ATen operators that it calls on its global arguments, before autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue, replicated

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import (
    Operator,
    as_on,
    composite_kernel,
    imagining,
    list_kernel,
    no_modes,
    operators_recorded,
    shares_storage,
)
from .kernel_orders import in_kernel_order

CAST = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that autocast converts; it leaves double precision unchanged."""


@dataclass(frozen=True, slots=True)
class CapturedNode:
    """One operator call on global meta tensors, and its result."""

    op: Operator
    args: Arguments
    kwargs: NamedArguments
    out: TorchValue


@dataclass(frozen=True, slots=True)
class Captured:
    """A call as operators.

    `inputs` are the meta tensors for its tensor arguments, one per occurrence. `constants` are tensors that the
    function made from numbers on the host.
    """

    inputs: tuple[Tensor, ...]
    nodes: tuple[CapturedNode, ...]
    out: TorchValue
    constants: tuple[Tensor, ...] = ()


def spec_if_distributed(x: Tensor) -> Spec | None:
    """Return the spec of a distributed tensor; None for a plain tensor."""
    return getattr(x, "_spec", None)


def capture(
    func: TorchFunction,
    args: Arguments,
    kwargs: NamedArguments,
    spec_of: Callable[[Tensor], Spec | None],
) -> Captured:
    """Return the operators that `func(*args, **kwargs)` calls if its distributed arguments are whole.

    Nothing is computed: tensors are on the meta device, where autocast has no effect. If torch rejects the operands'
    dtypes, they are captured in the dtype that autocast would give them. Raises the error of torch for invalid
    arguments.
    """
    try:
        return _captured(func, args, kwargs, spec_of, None)
    except Exception:
        lower = autocast_dtype(tensors_in((args, kwargs)))
        if lower is None:
            raise
        return _captured(func, args, kwargs, spec_of, lower)


def taken_apart(captured: Captured) -> Captured | None:
    """Return a call of one composite operator as the operators that torch decomposes it into; None otherwise.

    None also if torch rejects the decomposition. The constants belong to the whole tensors, so the operators have to
    run one by one. Some decompositions use operators without derivatives if no operand requires a gradient. So all
    operands require one here.
    """
    (node,) = captured.nodes
    kernel = composite_kernel(node.op) or list_kernel(node.op)
    if kernel is None:
        return None
    nodes: list[CapturedNode] = []
    with no_modes(), imagining(n for t in captured.inputs for n in t.shape), torch.no_grad():
        try:
            for x in captured.inputs:
                x.requires_grad_(x.is_floating_point() or x.is_complex())
            with operators_recorded(lambda *found: nodes.append(CapturedNode(*found))):
                out = kernel(*node.args, **node.kwargs)
            found = _canonical(captured.inputs, nodes, out)
        except Exception:  # torch refuses tensors without numbers, in many ways
            return None
    return None if reads_uninitialised(found) else found


def autocast_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype to which autocast converts floating operands; None if it is off for all of their devices."""
    devices = {x.device.type for x in tensors} - {"meta"}
    return next((torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)), None)


def _captured(
    func: TorchFunction,
    args: Arguments,
    kwargs: NamedArguments,
    spec_of: Callable[[Tensor], Spec | None],
    floats: torch.dtype | None,
) -> Captured:
    """Return the operators of a call; operands that autocast converts have the dtype `floats`, if that is given."""
    inputs: list[Tensor] = []

    def stand_in(x: Tensor) -> Tensor:
        spec = spec_of(x)
        shape, dtype = (spec.shape, spec.dtype) if spec is not None else (x.shape, x.dtype)
        dtype = floats if floats is not None and dtype in CAST else dtype
        strides = strides_of(x) if spec is None else spec.strides
        if strides is None:
            inputs.append(torch.empty(shape, dtype=dtype, device="meta"))
        else:
            inputs.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        return inputs[-1]

    nodes: list[CapturedNode] = []
    with no_modes(), imagining(sizes_of(args, kwargs, spec_of)), torch.no_grad():
        meta_args, meta_kwargs = map_tensors(stand_in, args), map_tensors(stand_in, kwargs)
        device = next((x.device for x in tensors_in((args, kwargs))), None)
        meta_kwargs = _with_meta_device(meta_kwargs, device)
        with operators_recorded(lambda *node: nodes.append(CapturedNode(*node)), _run_on(device)):
            out = func(*meta_args, **meta_kwargs)
        return _canonical(inputs, nodes, out)


def _with_meta_device(kwargs: NamedArguments, device: torch.device | None) -> NamedArguments:
    """Return the named arguments with the meta device in place of `device`, where the result would be allocated."""
    named: TorchValue = (kwargs or {}).get("device")
    if named is None or device is None or torch.empty(0, device=named).device != device:
        return kwargs
    return {**kwargs, "device": torch.device("meta")}


def _run_on(device: torch.device | None) -> TorchFunction:
    """Return a function that runs an operator on meta tensors, with results as on a device."""
    run = as_on(device)
    if device is None or device.type != "cpu":
        return run
    return lambda op, args, kwargs: in_kernel_order(op, args, run(op, args, kwargs))


def strides_of(x: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a plain tensor; None if it is contiguous, or not strided at all."""
    return None if x.layout is not torch.strided or x.is_contiguous() else x.stride()


def sizes_of(args: Arguments, kwargs: NamedArguments, spec_of: Callable[[Tensor], Spec | None]) -> Iterator[int]:
    """Yield the global sizes of the call's tensors."""
    for x in tensors_in((args, kwargs)):
        spec = spec_of(x)
        yield from x.shape if spec is None else spec.shape


def asks_sizes(
    func: TorchFunction,
    args: Arguments,
    kwargs: NamedArguments,
    captured: Captured,
    specs: Sequence[Spec],
) -> bool:
    """True if `func` is a Python function whose operators depend on sizes that differ between the whole and the parts.

    An example is `x.sum(0) / x.size(0)`. It is captured again with the shapes of the first and of the last rank's
    parts; its operators then have other constants.
    """
    if not isinstance(func, FunctionType) or not any(s.layout.cut_axes for s in specs):
        return False
    ranks, whole = specs[0].mesh.process_ids, _operators_and_constants(captured)
    return any(_constants_of_part(func, args, kwargs, rank) != whole for rank in (ranks[0], ranks[-1]))


def _separate_part(spec: Spec, rank: int) -> Spec:
    """Return the spec of `rank`'s part as a separate replicated tensor."""
    return Spec(spec.mesh, replicated(spec.ndim), spec.local_shape(rank), spec.dtype)


def _constants_of_part(
    func: TorchFunction, args: Arguments, kwargs: NamedArguments, rank: int
) -> list[tuple[Operator, TorchValue]] | None:
    def part(x: Tensor) -> Spec | None:
        spec = spec_if_distributed(x)
        return None if spec is None else _separate_part(spec.concrete, rank)

    try:
        return _operators_and_constants(capture(func, args, kwargs, part))
    except Exception:  # torch refuses such shapes, in many ways
        return None


def _operators_and_constants(captured: Captured) -> list[tuple[Operator, TorchValue]]:
    return [(n.op, map_tensors(lambda _: ..., (n.args, n.kwargs))) for n in captured.nodes]


def _canonical(inputs: Sequence[Tensor], nodes: Sequence[CapturedNode], out: TorchValue) -> Captured:
    """Return the capture with one object for every tensor.

    Factory functions return another object on the same memory than the operator that they called.
    """
    known: dict[int, Tensor] = {id(t): t for t in inputs}

    def same(t: Tensor) -> Tensor:
        found = known.get(id(t))
        return found if found is not None else _twin(t, known.values())

    done: list[CapturedNode] = []
    for node in nodes:
        done.append(CapturedNode(node.op, map_tensors(same, node.args), map_tensors(same, node.kwargs), node.out))
        known.update((id(t), t) for t in tensors_in(node.out))
    constants = tuple(n.out for n in done if _is_filled_by_host(n, done))
    made = {id(c) for c in constants}
    return Captured(tuple(inputs), tuple(n for n in done if id(n.out) not in made), map_tensors(same, out), constants)


_UNINITIALISED = ("empty", "new_empty", "_empty")
"""Prefixes of names of operators whose results are uninitialized memory."""


def _is_uninitialised(node: CapturedNode) -> bool:
    return node.op._schema.name.partition("::")[2].startswith(_UNINITIALISED)


def _is_filled_by_host(node: CapturedNode, nodes: Sequence[CapturedNode]) -> bool:
    """True if torch made the tensor from a list: no operator writes to it, and it is not on the meta device."""
    if not _is_uninitialised(node) or type(node.out) is not Tensor or node.out.is_meta:
        return False
    return not any(_first_use(node.out, [other]) == "written" for other in nodes)


def reads_uninitialised(captured: Captured) -> bool:
    """True if an operator reads memory that no operator has written before.

    torch fills tensors from lists without an operator. On the meta device their numbers are lost.
    """
    nodes = captured.nodes
    return any(_is_uninitialised(n) and _first_use(n.out, nodes[at + 1 :]) == "read" for at, n in enumerate(nodes))


def _first_use(x: Tensor, nodes: Sequence[CapturedNode]) -> str | None:
    """Return "written" or "read" for the first operator that takes `x`; None if none does."""
    for node in nodes:
        schema = node.op._schema.arguments
        given = [*zip(schema, node.args, strict=False), *((a, node.kwargs.get(a.name)) for a in schema)]
        mine = [a for a, value in given if any(t is x for t in tensors_in([value]))]
        if mine:
            return "written" if all(a.alias_info is not None and a.alias_info.is_write for a in mine) else "read"
    return None


def _twin(t: Tensor, known: Iterable[Tensor]) -> Tensor:
    """Return the known tensor with the same memory, shape, strides and dtype.

    Raises UnknownTensorError if there is none.
    """
    for k in known:
        if shares_storage(k, t) and k.shape == t.shape and k.stride() == t.stride() and k.dtype == t.dtype:
            return k
    raise UnknownTensorError(t.shape)


class UnknownTensorError(Exception):
    """A capture contains a tensor that no operator made. The call cannot be planned, and runs on whole tensors."""
