"""Errors of distributed tensors and of operations on them."""

from __future__ import annotations

from meshwright.layout import MeshwrightError

from .torch_hooks import GraphError


class MixedMeshError(MeshwrightError, ValueError):
    """Operands of one operation are on different meshes."""


class PlainInBackwardError(MeshwrightError, RuntimeError):
    """A plain tensor and a distributed one meet inside a backward pass, where the plain one is ambiguous."""


class LocalShapeError(MeshwrightError, ValueError):
    """A local part does not have the shape that its layout gives this rank."""


class PickleError(MeshwrightError, TypeError):
    """Pickling of a distributed tensor."""


class MemoryAccessError(MeshwrightError, RuntimeError):
    """An access to the memory of a distributed tensor that is not possible for the whole tensor."""


class CollectiveError(MeshwrightError, RuntimeError):
    """A call of torch.distributed on a distributed tensor whose result would differ from that of one device."""


class AbsentError(MeshwrightError, RuntimeError):
    """A rank outside a tensor's mesh needs a value that only the mesh's ranks know."""


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
    """A trace of torch met a distributed tensor."""


class RandomSourceError(MeshwrightError, ValueError):
    """An unknown source of random numbers."""


class RanWholeWarning(UserWarning):
    """An operator without a rule ran on the whole tensors: correct, but slow. Warned once per name."""
