"""The mesh that is meant when none is named."""

from __future__ import annotations

import threading

from meshwright.layout import MeshError, ProcessMesh


class _State(threading.local):
    mesh: ProcessMesh | None = None


_state = _State()
_everywhere: list[ProcessMesh | None] = [None]


def set_mesh(mesh: ProcessMesh) -> None:
    """Makes `mesh` the one that is meant when none is named, on this rank."""
    _state.mesh = mesh
    if threading.current_thread() is threading.main_thread():
        _everywhere[0] = mesh


def get_mesh() -> ProcessMesh | None:
    """The mesh that `set_mesh` made the default, or None."""
    return _state.mesh if _state.mesh is not None else _everywhere[0]


def resolve_mesh(mesh: ProcessMesh | None) -> ProcessMesh:
    """`mesh`, or the default one; raises MeshError when there is neither."""
    found = mesh if mesh is not None else get_mesh()
    if found is None:
        raise MeshError(
            "an operation without a mesh", "no default mesh", "somewhere the ranks have to be named",
            "mw.set_mesh(mw.ProcessMesh(…)) once, or the mesh as an argument",
        )  # fmt: skip
    return found
