"""The default mesh, and a check that the ranks of a mesh exist."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import numpy as np

from meshwright.comm import init_process, world_size
from meshwright.layout import MeshError, ProcessMesh


class _State(threading.local):
    mesh: ProcessMesh | None = None


_state = _State()
_everywhere: list[ProcessMesh | None] = [None]


def set_mesh(mesh: ProcessMesh | None) -> None:
    """Set the default mesh of this rank; None removes it.

    Set outside `simulate`, it is the default of every rank that sets no other.
    """
    _state.mesh = None if mesh is None else _checked(mesh)
    if threading.current_thread() is threading.main_thread():
        _everywhere[0] = mesh


def get_mesh() -> ProcessMesh | None:
    """Return the default mesh that `set_mesh` has set, or None."""
    return _state.mesh if _state.mesh is not None else _everywhere[0]


def init_mesh(**sizes: int) -> ProcessMesh:
    """Return a mesh of all ranks with these axes, outermost first; one size may be -1, which is inferred.

    One script then runs everywhere: `init_process` is called if nobody has called it. In a single process, such as that
    of `python script.py`, there is one rank and every size is 1.

    >>> from meshwright.comm import simulate
    >>> simulate(lambda: init_mesh(pp=2, dp=-1, tp=2), ranks=8)[0]
    ProcessMesh([pp=2, dp=2, tp=2])

    Raises:
        MeshError: the product of the sizes is not the number of ranks.
    """
    _check_integers(sizes)
    ranks = init_process().size
    if ranks == 1:
        sizes = dict.fromkeys(sizes, 1)
    given = math.prod(size for size in sizes.values() if size != -1)
    remaining = ranks // max(given, 1)
    filled = {name: remaining if size == -1 else size for name, size in sizes.items()}
    open_axes = list(sizes.values()).count(-1)
    if not sizes or min(filled.values()) < 1 or open_axes > 1 or math.prod(filled.values()) != ranks:
        raise MeshError(
            f"init_mesh({', '.join(f'{name}={size}' for name, size in sizes.items())})",
            f"{ranks} ranks",
            "the product of the sizes must be the number of ranks; one size may be -1, for the remaining ranks",
            f"write init_mesh(dp={ranks}), or start other ranks: `meshwright run --ranks {max(given, 2)} script.py`",
        )
    return ProcessMesh(np.arange(ranks).reshape(tuple(filled.values())), list(filled))


def _check_integers(sizes: Mapping[str, object]) -> None:
    wrong = [f"{name}={size!r}" for name, size in sizes.items() if not hasattr(size, "__index__")]
    if wrong:
        raise MeshError(
            f"init_mesh({', '.join(wrong)})",
            "sizes that are not integers",
            "the size of an axis is a number of ranks",
            "write init_mesh(dp=-1, tp=2)",
        )


def resolve_mesh(mesh: ProcessMesh | None) -> ProcessMesh:
    """Return `mesh`, or the default mesh.

    Raises:
        MeshError: there is neither, it is no mesh, or it names ranks that the world does not have.
    """
    found = mesh if mesh is not None else get_mesh()
    if found is None:
        raise MeshError(
            "an operation without a mesh",
            "no default mesh",
            "the mesh says which ranks take part",
            "call mw.set_mesh(mw.ProcessMesh(…)) once, or pass the mesh as an argument",
        )
    size = world_size()
    last = max(_checked(found).process_ids)
    if last >= size:
        raise MeshError(
            f"a tensor on {found!r}",
            f"rank {last} in a world of {size} ranks",
            f"this world has only the ranks 0 to {size - 1}",
            f"use a mesh of these ranks, or start more ranks: mw.simulate(fn, ranks={last + 1})",
        )
    return found


def _checked(mesh: object) -> ProcessMesh:
    if isinstance(mesh, ProcessMesh):
        return mesh
    raise MeshError(
        f"a mesh {mesh!r}",
        f"a {type(mesh).__name__}",
        "a mesh is an array of ranks with named axes",
        'pass mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])',
    )
