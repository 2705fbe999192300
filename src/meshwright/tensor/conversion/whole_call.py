"""Calls of a function on whole tensors: slow, but correct for every operator.

Every argument that the function writes to is written back. An argument counts as written if the operator's schema marks
it, if its version counter moved, or if its values changed. One test is not enough: fused optimizers move no counter,
and the schema of batch norm marks nothing. All arguments are checked before the first one is written back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshwright.layout import Cache, Spec, TorchValue, warn_user, whole_of

from .._errors import OperationError, RanWholeWarning
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.dist_tensor import DistTensor, plain_view
from ..core.shared_elements import share_elements
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import FakeTensor, Operator, no_interception, shares_storage, written_arguments
from .convert import convert_local
from .local_parts import whole_spec
from .saved_operands import note_copy

RAN_WHOLE = Cache[str, str](4096)
"""Functions that ran on whole tensors for lack of a rule → the reason; warned once each."""


def warn_ran_whole(name: str, why: str) -> None:
    """Warn once per name, with the line that called the caller of this function."""
    if name not in RAN_WHOLE:
        RAN_WHOLE[name] = why
        warn_user(f"{name} runs on whole tensors: {why}", RanWholeWarning)


@dataclass(frozen=True, slots=True)
class WholeCall:
    """The result of a function on whole tensors, and pairs of an argument and its whole tensor."""

    out: TorchValue
    pairs: tuple[tuple[Tensor, Tensor], ...]

    def whole_argument(self, argument: Tensor) -> Tensor:
        """Return the whole tensor of an argument."""
        return next(whole for t, whole in self.pairs if t is argument)

    def gathered(self) -> tuple[tuple[DistTensor, Tensor], ...]:
        """Return the arguments whose whole tensor has its own memory."""
        return tuple((t, w) for t, w in self.pairs if isinstance(t, DistTensor) and whole_spec(t._spec) is not t._spec)


def call_whole(func: TorchFunction, args: Arguments, kwargs: NamedArguments) -> WholeCall:
    """Call `func` on the whole tensors, the same on every rank, and write back every argument that it wrote to.

    Raises OperationError, before anything is written back, if `func` gave an argument another shape or memory, or wrote
    to two arguments that share elements.
    """
    tensors = {id(t): t for t in tensors_in((args, kwargs))}
    whole = {key: whole_in_order(t) for key, t in tensors.items()}
    with no_interception():
        stands_for = [WholeArgument(t, whole[key]) for key, t in tensors.items() if isinstance(t, DistTensor)]
        whole_args, whole_kwargs = map_tensors(lambda t: whole[id(t)], (args, kwargs))
        out = func(*whole_args, **whole_kwargs)
        marked = written_by_schema(func, args, kwargs)
    done = WholeCall(out, tuple((t, whole[key]) for key, t in tensors.items()))
    copied = done.gathered() if torch.is_grad_enabled() else ()
    versions = [_version_counter(t) for t, _ in copied]
    _write_back(func, stands_for, marked)
    _note_unwritten(copied, versions)
    return done


def _note_unwritten(copied: Sequence[tuple[DistTensor, Tensor]], versions: Sequence[int]) -> None:
    """Note the whole copies of the arguments that the call did not write to; autograd may have saved them."""
    with no_interception():
        for (t, whole), version in zip(copied, versions, strict=True):
            if _version_counter(t) == version:
                note_copy(whole, t, partial(_gathered, spec=t._spec))


def written_by_schema(func: TorchFunction, args: Sequence[TorchValue], kwargs: NamedArguments) -> set[int]:
    """Return the ids of the tensors that an operator's schema marks as written; empty for a Python function."""
    if not isinstance(func, Operator):
        return set()
    given = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    return {id(t) for t in tensors_in([given.get(a.name) for a in written_arguments(func)])}


class WholeArgument:
    """A distributed argument, its whole tensor, and the state of the whole tensor before the call."""

    def __init__(self, tensor: DistTensor, whole: Tensor) -> None:
        self.tensor, self.whole = tensor, whole
        self.has_memory = whole_spec(tensor._spec) is not tensor._spec
        self.before = whole.detach()
        self.version, self.node = _version_counter(whole), whole.grad_fn
        is_partial = self.has_memory and bool(tensor._spec.layout.partial) and not isinstance(whole, FakeTensor)
        self.values = whole.detach().clone() if is_partial else None

    def is_moved(self) -> bool:
        """True if the whole tensor has another shape, other strides or another memory than before the call."""
        whole, before = self.whole, self.before
        if whole.layout is not torch.strided or whole.shape != before.shape or whole.stride() != before.stride():
            return True
        return whole.numel() > 0 and not shares_storage(whole, before)

    def is_differentiated(self) -> bool:
        """True if autograd recorded a write."""
        return self.whole.grad_fn is not self.node

    def is_written(self) -> bool:
        """True if the version counter moved, or the values of this rank's part changed."""
        if _version_counter(self.whole) != self.version:
            return True
        if isinstance(self.whole, FakeTensor):
            return False
        if self.values is not None:
            return not _have_equal_values(self.whole, self.values)
        return not _have_equal_values(_local_part(self.whole.detach(), self.tensor), self.tensor)


def _version_counter(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _have_equal_values(a: Tensor, b: Tensor) -> bool:
    """True if all values are equal, where NaN equals NaN."""
    a, b = plain_view(a.detach()), plain_view(b.detach())
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _write_back(func: TorchFunction, stands_for: Sequence[WholeArgument], marked: set[int]) -> None:
    differentiated: list[WholeArgument] = []
    others: list[WholeArgument] = []
    with no_interception():
        for x in stands_for:
            if x.is_moved():
                raise _changed_argument_error(func, x.tensor)
            if not x.has_memory:
                continue
            if x.is_differentiated():
                differentiated.append(x)
            elif id(x.tensor) in marked or x.is_written():
                others.append(x)
        _check_disjoint(func, [x.tensor for x in (*differentiated, *others)])
        _check_no_leaf(x.tensor for x in differentiated)
    for x in differentiated:
        write_back_whole(x.tensor, x.whole)
    with torch.no_grad():
        for x in others:
            write_back_whole(x.tensor, x.whole)


def _changed_argument_error(func: TorchFunction, t: DistTensor) -> OperationError:
    name = getattr(func, "__name__", str(func))
    return OperationError(
        f"{name} that changes the shape or the memory of an argument",
        repr(t._spec),
        "a distributed tensor keeps its shape, and its parts keep their memory",
        f"make a new tensor with the functional form of {name} or with torch.empty",
    )


def _check_disjoint(func: TorchFunction, written: Sequence[DistTensor]) -> None:
    """Raise OperationError if two written tensors share elements: each would be written back from its own copy."""
    for i, a in enumerate(written):
        for b in written[:i]:
            if share_elements(a, b):
                raise OperationError(
                    f"{getattr(func, '__name__', func)} that writes to two views of one memory",
                    f"{a._spec!r} and {b._spec!r}",
                    "it runs on whole copies, and each write would undo the other",
                    "make one call for each view",
                )


def _check_no_leaf(written: Iterable[DistTensor]) -> None:
    """Raise the error that torch raises on one device, before any argument is written back."""
    if any(t.is_leaf and t.requires_grad for t in written):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def whole_in_order(t: Tensor) -> Tensor:
    """Return the whole tensor with its global strides; new memory unless the part is the whole tensor."""
    return _gathered(t, t._spec) if isinstance(t, DistTensor) else t


def _gathered(t: Tensor, spec: Spec) -> Tensor:
    """Return the whole tensor of which `t` is this rank's part."""
    out = convert_local(t, spec, whole_spec(spec))
    with no_interception():
        if whole_spec(spec) is spec:
            return plain_view(out)
        if spec.strides is not None:
            return _with_strides(out, spec.strides)
        return out.clone() if shares_storage(out, t) else out


def _with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of `x` with these strides; differentiable."""
    if 0 in strides:
        return _Overlapping.apply(x, strides)  # pyright: ignore[reportReturnType] - torch's stub: anything
    return whole_of(x, strides)


class _Overlapping(torch.autograd.Function):
    """A differentiable copy whose elements may share memory; each element has its own gradient."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, strides: Sequence[int]) -> Tensor:
        return whole_of(x, strides)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def write_back_whole(t: DistTensor, whole: Tensor) -> None:
    """Write the whole value into the parts of `t`; of elements that share memory by a stride of 0, the first one."""
    local, target = _local_part(whole, t), t
    with no_interception():
        for dim, (size, stride) in enumerate(zip(local.shape, t.stride(), strict=True)):
            if size > 1 and stride == 0:
                local, target = local.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        target.copy_(local)


def _local_part(whole: Tensor, t: DistTensor) -> Tensor:
    """Return this rank's part of the whole value in the layout of `t`, in any memory format."""
    have = whole_spec(t._spec).contiguous
    return convert_local(whole, have, have.with_layout(t._spec.layout))
