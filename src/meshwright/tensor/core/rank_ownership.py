"""Guard against simulated ranks that use a tensor of another rank, which holds the other rank's part.

Simulated ranks are threads of one process and share its caches, so a rank can find a tensor that another rank made. Two
checks detect that at no cost while operations run. Tensors in shared containers have the class `OtherRanksTensor` while
other ranks run. Tensors that the API makes know their rank, which the API compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from meshwright.comm import WATCHED_TYPES, WatchedType, installed_communicator
from meshwright.layout import TorchValue

from .._errors import SimulatedRankError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from .dist_tensor import DistTensor, change_class
from .tree import tensors_in


class OtherRanksTensor(DistTensor):
    """A distributed tensor in a shared container, seen by a simulated rank that did not make it."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: NamedArguments | None = None,
    ) -> TorchValue:
        found = next((x for x in tensors_in((args, kwargs)) if isinstance(x, OtherRanksTensor)), None)
        if found is None:
            return super().__torch_function__(func, types, args, kwargs)
        raise _refused(found, getattr(func, "__name__", str(func)), found.__dict__["_maker"])

    def to_local(self) -> Tensor:
        raise _refused(self, "to_local", self.__dict__["_maker"])

    def _read_again(self) -> None:
        raise _refused(self, "a use", self.__dict__["_maker"])


def mark_maker(x: DistTensor) -> None:
    """Store the simulated rank that made `x`."""
    here = installed_communicator()
    if here is not None and here.kind == "simulated":
        vars(x)["_maker"] = here.rank


def check_maker(x: DistTensor, asked: str) -> None:
    """Raise SimulatedRankError if another simulated rank made `x`."""
    maker = x.__dict__.get("_maker")
    here = installed_communicator()
    if maker is not None and here is not None and here.kind == "simulated" and here.rank != maker:
        raise _refused(x, asked, maker)


def _refused(x: DistTensor, asked: str, maker: int) -> SimulatedRankError:
    here = installed_communicator()
    who = f"made by rank {maker}, used by " + (f"rank {here.rank}" if here is not None else "no rank")
    return SimulatedRankError(
        f"{asked} of a distributed tensor of another simulated rank",
        f"{x._spec!r}, {who}",
        "the tensor holds the other rank's part; simulated ranks share caches, globals and global modules",
        "create the tensor or the module inside the simulated function, or key the cache by mw.get_rank()",
    )


def _hide(x: DistTensor, rank: int) -> Callable[[], None]:
    """Give `x` the class `OtherRanksTensor`; return a function that gives it back its own class."""
    own = type(x)
    vars(change_class(x, OtherRanksTensor))["_maker"] = rank
    return partial(_show, x, own)


def _show(x: DistTensor, own: type[DistTensor]) -> None:
    change_class(x, own)


WATCHED_TYPES.append(WatchedType(DistTensor, _hide))
