"""The origin of a view with its own memory, and what follows from it alone: its parts, and the elements of its base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue

from .._errors import OperationError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..conversion.convert import convert_local
from ..conversion.local_parts import spec_of
from ..conversion.whole_call import WholeCall, call_whole
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..core.tree import map_tensors, tensors_in
from ..core.write_counts import version_of, writes_to
from ..torch_hooks import no_interception


@dataclass(slots=True)
class ViewOrigin:
    """The origin of a view: the base, the call, the number of the result, and the writes to the base until the call.

    Attributes:
        single: False for one of several views of one autograd node: torch raises an error on a write to such a view.
        tracked: False for a view that was made under `torch.no_grad`, which gets no gradient from its base.
        counted: False if the base is the memory of a plain tensor, whose writes are not all counted.
        shown: The version counter of the base at the last reading, which does not move with writes to `base.data`.
        made: The version counter of the base at the call.
        ends: For a tensor that took over memory by `x.data = new`: True of the view if only the view uses this memory.
    """

    base: DistTensor
    func: TorchFunction
    args: Arguments
    kwargs: NamedArguments
    at: int
    version: int
    single: bool = True
    tracked: bool = True
    counted: bool = True
    shown: int = 0
    made: int = 0
    ends: Callable[..., bool] | None = None

    def is_read(self) -> None:
        """Record that the view holds the current values of the base."""
        self.version, self.shown = writes_to(self.base), version_of(self.base)

    def arguments_with(self, base: DistTensor) -> tuple[Arguments, NamedArguments]:
        """Return the arguments of the call with `base` in place of the base."""
        return map_tensors(lambda t: base if t is self.base else t, (self.args, self.kwargs))

    def move_to(self, base: DistTensor) -> None:
        """Make the view a view of `base`."""
        self.args, self.kwargs = self.arguments_with(base)
        self.base = base

    def result_for(self, stand_in: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the same view of other memory; `stand_in` returns a plain tensor in place of each argument."""
        args, kwargs = map_tensors(stand_in, (self.args, self.kwargs))
        return self.result_in(self.func(*args, **kwargs))

    def result_in(self, out: TorchValue) -> Tensor:
        """Return the view among the results of a call."""
        return list(tensors_in(out))[self.at]


def part_of_view(source: ViewOrigin, spec: Spec, part: Tensor) -> Tensor:
    """Return this rank's part of a view with this spec, if `part` is this rank's part of the base."""
    base = as_part(part, source.base._spec)
    new = source.result_in(call_whole(source.func, *source.arguments_with(base)).out)
    with no_interception():
        have = spec_of(new, spec)
    return plain_view(convert_local(new, have, spec))


def places_in_base(source: ViewOrigin, done: WholeCall, places: Tensor) -> Tensor:
    """Return for each element of the whole base whether it was written, by elements `places` of the view."""
    whole = done.whole_argument(source.base)
    found = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
    given = {id(t): w for t, w in done.pairs} | {id(source.base): found}
    source.result_for(lambda t: given[id(t)]).copy_(places)
    return found


def overlaps_itself(x: Tensor) -> bool:
    """True if two elements of `x` may share memory."""
    return shares_elements(x.stride(), x.shape)


def shares_elements(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """True if two elements of a tensor with these strides may share memory."""
    reach = 0
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def last_written(source: ViewOrigin, done: WholeCall, whole: Tensor, value: Tensor, written: Tensor) -> Tensor:
    """Return `whole` after elements `written` of its view got `value`; the last one counts of elements at one place.

    Only that one has a gradient. The same view of a tensor of place numbers shows the place of each element.
    """
    places = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.int64, device=whole.device)
    places.copy_(torch.arange(whole.numel(), device=whole.device).reshape(whole.shape))
    given = {id(t): w for t, w in done.pairs} | {id(source.base): places}
    seen = source.result_for(lambda t: given[id(t)]).reshape(-1)
    numbers = torch.where(written.reshape(-1), torch.arange(len(seen), device=whole.device), -1)
    last = torch.full((whole.numel(),), -1, device=whole.device)
    last = last.scatter_reduce(0, seen, numbers, "amax").reshape(whole.shape)
    return torch.where(last < 0, whole, value.reshape(-1)[last.clamp(min=0)])


def one_element_stand_in(t: Tensor, device: str | None = None) -> Tensor:
    """Return a plain tensor with the global shape and the dtype of `t`, and memory for one element.

    The tensor is on `device`, by default on that of `t`.
    """
    shape = t._spec.shape if isinstance(t, DistTensor) else t.shape
    with no_interception():
        return torch.zeros((), dtype=t.dtype, device=device or t.device).expand(shape)


def several_views_error(source: ViewOrigin, found: str) -> OperationError:
    """Return the error for a write to one of several views that a call made, or to their base."""
    name = getattr(source.func, "__name__", str(source.func))
    return OperationError(
        found,
        f"one of several views that {name} made of {source.base._spec!r}",
        "autograd forbids in-place writes to one of several views that one call made, and to their base",
        f"use x.narrow or x.select in place of {name}, or write under torch.no_grad() before calling {name}",
    )
