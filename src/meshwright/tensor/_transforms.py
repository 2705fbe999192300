"""Inside `vmap`, `grad`, `jvp` and what else `torch.func` makes of them, distributed tensors are whole and plain.

A transform's tensors are torch's own wrappers, of which no part can be sent to another rank. So what comes in, and
what a transformed function uses beside, is gathered outside of all transforms; what comes out is plain, the same on
each rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.comm import current

from ._dist_tensor import DistTensor
from ._errors import OperationError
from ._local import whole_local, whole_spec
from ._registry import DIRECT
from ._tree import map_tensors, tensors_in
from ._whole import tell_whole
from .torch_hooks import call_plain, forward_mode, tell_transforms, transforms_paused

NAME = "torch.func"
WHY = "its transforms see plain tensors"


def _inside(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)`, called inside a transform; what it looks up about a tensor is that of the part."""
    if func in DIRECT:
        return call_plain(func, types, args, kwargs or {})
    wholes = _Wholes((args, kwargs))
    args, kwargs = map_tensors(wholes.plain, (args, kwargs or {}))
    out = func(*args, **kwargs)
    wholes.check(func)
    return out


def _entering(x: Any) -> Any:
    """A tensor as a transform takes it in."""
    return _Wholes(x).plain(x) if isinstance(x, DistTensor) else x


class _Wholes:
    """Distributed tensors of a tree beside their whole values, which take part in autograd."""

    def __init__(self, tree: Any) -> None:
        with transforms_paused():
            found = {id(t): t for t in tensors_in(tree) if isinstance(t, DistTensor)}
            for t in found.values():
                _check_one_at_a_time(t)
            self.pairs = {key: (t, whole_local(t)) for key, t in found.items()}
            self.versions = {key: w._version for key, (_, w) in self.pairs.items()}
        tell_whole(NAME, WHY)

    def plain(self, t: Tensor) -> Tensor:
        return self.pairs[id(t)][1] if id(t) in self.pairs else t

    def check(self, func: Any) -> None:
        """Raises OperationError where the call wrote into a tensor whose parts lie elsewhere."""
        for key, (t, whole) in self.pairs.items():
            if whole._version != self.versions[key] and whole_spec(t._spec) is not t._spec:
                raise OperationError(
                    f"to write with {getattr(func, '__name__', func)} inside a transform of {NAME}", repr(t._spec),
                    "there the tensor is a whole copy, and what is written to it is lost",
                    "the new value as a result of the transformed function, written outside",
                )  # fmt: skip


def _check_one_at_a_time(t: DistTensor) -> None:
    """Raises OperationError where another simulated rank would go on while this one is in forward mode."""
    if (
        forward_mode()
        and current().kind == "simulated"
        and t._spec.mesh.size > 1
        and whole_spec(t._spec) is not t._spec
    ):
        raise OperationError(
            f"a tensor of other ranks inside {NAME}.jvp, jacfwd or linearize", repr(t._spec),
            "torch has one forward mode for all threads of a process, and simulated ranks are threads",
            "mw.reshard(x, mesh, []) before it, vjp or jacrev, or ranks that are processes: torchrun",
        )  # fmt: skip


DistTensor._transformed = staticmethod(_inside)
tell_transforms(_entering)
