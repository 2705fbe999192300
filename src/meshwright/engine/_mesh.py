"""The mesh that is meant when none is named, and whether the ranks of a mesh are there."""

from __future__ import annotations

import threading
from typing import Any

from meshwright.comm import current
from meshwright.layout import MeshError, ProcessMesh


class _State(threading.local):
    mesh: ProcessMesh | None = None


_state = _State()
_everywhere: list[ProcessMesh | None] = [None]


def set_mesh(mesh: ProcessMesh | None) -> None:
    """Makes `mesh` the one that is meant when none is named, on this rank; None takes it away.

    Set outside `simulate`, it holds for every rank that sets no other.
    """
    _state.mesh = None if mesh is None else _checked(mesh)
    if threading.current_thread() is threading.main_thread():
        _everywhere[0] = mesh


def get_mesh() -> ProcessMesh | None:
    """The mesh that `set_mesh` made the default, or None."""
    return _state.mesh if _state.mesh is not None else _everywhere[0]


def resolve_mesh(mesh: ProcessMesh | None) -> ProcessMesh:
    """`mesh`, or the default one.

    Raises MeshError when there is neither, when it is no mesh, or when it names ranks that the world does not have.
    """
    found = mesh if mesh is not None else get_mesh()
    if found is None:
        raise MeshError(
            "an operation without a mesh", "no default mesh", "somewhere the ranks have to be named",
            "mw.set_mesh(mw.ProcessMesh(…)) once, or the mesh as an argument",
        )  # fmt: skip
    size = current().size
    last = max(_checked(found).process_ids)
    if last >= size:
        raise MeshError(
            f"a tensor on {found!r}", f"rank {last} in a world of {size} ranks",
            f"there are only the ranks 0 to {size - 1}",
            f"a mesh of these ranks, or more of them: mw.simulate(fn, ranks={last + 1})",
        )  # fmt: skip
    return found


def _checked(mesh: Any) -> ProcessMesh:
    if isinstance(mesh, ProcessMesh):
        return mesh
    raise MeshError(
        f"a mesh {mesh!r}", f"a {type(mesh).__name__}", "a mesh is ranks along axes that have names",
        'mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])',
    )  # fmt: skip
