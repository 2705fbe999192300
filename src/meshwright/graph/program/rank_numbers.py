"""Numbers of a program that depend on the rank: local length, offset, and position along mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from meshwright.comm import Communicator
from meshwright.layout import ProcessMesh, Spec


@dataclass(frozen=True, slots=True)
class Length:
    """Local length of the rank along `dim` of a tensor with the spec `spec`."""

    spec: Spec
    dim: int

    def __call__(self, here: Communicator) -> int:
        return here.local_shape(self.spec)[self.dim]

    def __repr__(self) -> str:
        return f"length of {self.spec!r} along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Offset:
    """First global index of the rank along `dim` of a tensor with the spec `spec`."""

    spec: Spec
    dim: int

    def __call__(self, here: Communicator) -> int:
        return here.offset(self.spec, self.dim)

    def __repr__(self) -> str:
        return f"start of {self.spec!r} along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Position of the rank along mesh `axes`."""

    mesh: ProcessMesh
    axes: tuple[str, ...]

    def __call__(self, here: Communicator) -> int:
        return here.place(self.mesh, self.axes)

    def __repr__(self) -> str:
        return f"place along {' '.join(self.axes)}"


RankNumber = Length | Offset | RankPlace


def is_everywhere(mesh: ProcessMesh, number_on: Callable[[int], int]) -> bool:
    """True if the number is equal on all ranks; only the ranks at the ends of the axes are compared."""
    return len(set(map(number_on, end_ranks(mesh)))) == 1


def end_ranks(mesh: ProcessMesh) -> set[int]:
    """Return the ranks at the ends of the axes of a mesh."""
    return {int(mesh.mesh[place]) for place in product(*((0, n - 1) for n in mesh.mesh.shape))}
