"""What can be wrong with a distributed tensor or with an operation on it."""

from __future__ import annotations

from meshwright.layout import MeshwrightError

from .torch_hooks import GraphError


class MixedMeshError(MeshwrightError, ValueError):
    """Operands of one operation live on different meshes."""


class PlainInBackwardError(MeshwrightError, RuntimeError):
    """A plain tensor met a distributed one inside a backward pass, where its meaning cannot be known."""


class LocalShapeError(MeshwrightError, ValueError):
    """A local part does not have the shape that its layout gives this rank."""


class PickleError(MeshwrightError, TypeError):
    """A distributed tensor was to be pickled."""


class MemoryAccessError(MeshwrightError, RuntimeError):
    """A request for the memory of a distributed tensor that cannot be answered for the whole tensor."""


class CollectiveError(MeshwrightError, RuntimeError):
    """A call of torch.distributed on a distributed tensor whose result would not be that of one device."""


class AbsentError(MeshwrightError, RuntimeError):
    """A rank outside a tensor's mesh was asked for something that only the mesh's ranks can know."""


class OperationError(MeshwrightError, RuntimeError):
    """torch refuses the operation for the whole tensors: one device would refuse it too."""


class SimulatedRankError(MeshwrightError, RuntimeError):
    """A simulated rank used a distributed tensor that another simulated rank made."""


class CompileError(MeshwrightError, GraphError):
    """A function that must become one graph and uses a distributed tensor."""

    def __init__(self, asked: str, found: str, why: str, write: str) -> None:
        GraphError.__init__(self, asked)
        self.args = (asked, found, why, write)
        self.asked, self.found, self.why, self.write = asked, found, why, write


class TraceError(MeshwrightError, RuntimeError):
    """A trace of torch that met a distributed tensor."""


class RandomSourceError(MeshwrightError, ValueError):
    """A source of random numbers was asked for that does not exist."""


class RanWholeWarning(UserWarning):
    """An operator without a rule ran on the whole tensors: right, and slow. Told once by name."""
