"""Numbers of a program that depend on the rank: how long its part is, where it starts, its place along mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from meshwright.comm import Carrier
from meshwright.layout import ProcessMesh, Spec


@dataclass(frozen=True, slots=True)
class Length:
    """Length of the rank's part along `dim` of a tensor that lies as `spec` says."""

    spec: Spec
    dim: int

    def __call__(self, here: Carrier) -> int:
        return here.local_shape(self.spec)[self.dim]

    def __repr__(self) -> str:
        return f"length of {self.spec!r} along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Offset:
    """First index along `dim` that the rank holds of a tensor that lies as `spec` says."""

    spec: Spec
    dim: int

    def __call__(self, here: Carrier) -> int:
        return here.offset(self.spec, self.dim)

    def __repr__(self) -> str:
        return f"start of {self.spec!r} along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Number of the rank among those along `axes`."""

    mesh: ProcessMesh
    axes: tuple[str, ...]

    def __call__(self, here: Carrier) -> int:
        return here.place(self.mesh, self.axes)

    def __repr__(self) -> str:
        return f"place along {' '.join(self.axes)}"


RankNumber = Length | Offset | RankPlace


def is_everywhere(mesh: ProcessMesh, of: Callable[[int], int]) -> bool:
    """True when the number is the same on all ranks; those at the ends of the axes tell."""
    ends = [(0, n - 1) for n in mesh.mesh.shape]
    return len({of(int(mesh.mesh[at])) for at in product(*ends)}) == 1
