"""A mesh is an array of ranks with named axes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given

from meshwright.layout import MeshError, ProcessMesh, evenly

from .strategies import meshes

CUBE = ProcessMesh(np.arange(12).reshape(2, 3, 2), ["dp", "pp", "tp"])


@given(meshes())
def test_evenly_spaced_ranks_are_restored_from_their_strides(mesh):
    if mesh.steps is not None:
        assert np.array_equal(evenly(*mesh.steps, mesh.shape), mesh.mesh)


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        ([3], (3, (0,))),
        ([[0, 4], [1, 5]], (0, (1, 4))),
        ([5, 3, 1], (5, (-2,))),
        ([0, 1, 3], None),
        ([[0, 1], [2, 4]], None),
    ],
)
def test_strides_of_ranks(ranks, steps):
    assert ProcessMesh(ranks).steps == steps


def test_the_text_of_a_large_mesh_omits_its_ranks():
    assert repr(ProcessMesh(range(64, 128), ["dp"])) == "ProcessMesh([dp=64], ranks=64 and on by (1,))"
    assert repr(ProcessMesh([*range(40), 99], ["dp"])).endswith("38, 39, 99])")


@given(meshes())
def test_coordinates_find_the_rank_in_the_array(mesh):
    assert mesh.size == len(mesh.process_ids) == mesh.mesh.size
    assert mesh.ndim == len(mesh.shape) == mesh.mesh.ndim
    assert mesh.sizes == dict(zip(mesh.dim_names, mesh.shape, strict=True))
    for rank in mesh.process_ids:
        at = mesh.coordinate(rank)
        assert list(at) == list(mesh.dim_names)
        assert mesh.mesh[tuple(at.values())] == rank
        assert rank in mesh


@given(meshes())
def test_groups_differ_only_along_their_axes(mesh):
    for axes in (mesh.dim_names[:1], mesh.dim_names, mesh.dim_names[::-1], mesh.dim_names[-1:], ()):
        for rank in mesh.process_ids:
            at = mesh.coordinate(rank)
            wanted = [r for r in mesh.process_ids if all(mesh.coordinate(r)[a] == at[a] for a in at if a not in axes)]
            wanted.sort(key=lambda r: [mesh.coordinate(r)[a] for a in axes])
            assert list(mesh.group(rank, axes)) == wanted
            assert mesh.group(rank, axes) is mesh.group(rank, list(axes))


@given(meshes())
def test_equal_meshes_are_one_object(mesh):
    again = ProcessMesh(mesh.mesh.tolist(), list(mesh.dim_names))
    assert again is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert copy.deepcopy(mesh) is mesh
    renamed = ProcessMesh(mesh.mesh, [f"n{i}" for i in range(mesh.ndim)])
    assert renamed is not mesh
    assert renamed.process_ids == mesh.process_ids


@given(meshes())
def test_a_submesh_has_the_ranks_of_the_group(mesh):
    for rank in mesh.process_ids:
        for names in (list(mesh.dim_names), list(mesh.dim_names[::-1]), [mesh.dim_names[0]]):
            sub = mesh.get_submesh(names, rank)
            assert sub.dim_names == tuple(names)
            assert sub.shape == tuple(mesh.sizes[n] for n in names)
            assert sub.process_ids == mesh.group(rank, names)
        assert mesh.get_submesh_with_dim(mesh.dim_names[-1], rank) is mesh.get_submesh([mesh.dim_names[-1]], rank)


def test_axes_by_name():
    assert [CUBE.axis(n) for n in ("dp", "pp", "tp")] == [0, 1, 2]
    assert [CUBE.get_dim_size(n) for n in ("dp", "pp", "tp")] == [2, 3, 2]
    for ask in (CUBE.axis, CUBE.get_dim_size, lambda name: CUBE.get_submesh([name], 0), CUBE.get_mesh_with_dim):
        with pytest.raises(MeshError, match="there is no axis 'cp'"):
            ask("cp")


def test_an_axis_can_be_moved_to_the_front():
    moved = CUBE.get_mesh_with_dim("pp")
    assert moved.dim_names == ("pp", "dp", "tp")
    assert moved.mesh.tolist() == CUBE.mesh.transpose(1, 0, 2).tolist()
    assert CUBE.get_mesh_with_dim("tp").dim_names == ("tp", "dp", "pp")
    assert CUBE.get_mesh_with_dim("dp") is CUBE
    assert CUBE.get_mesh_with_dim("pp", 2) is CUBE["pp", 2]


def test_indexing_equals_that_of_the_array():
    assert CUBE["pp", 1].mesh.tolist() == CUBE.mesh[:, 1].tolist()
    assert CUBE["pp", 1].dim_names == ("dp", "tp")
    assert CUBE["dp", 1, "tp", 0].mesh.tolist() == CUBE.mesh[1, :, 0].tolist()
    assert CUBE["dp", 1, "tp", 0].dim_names == ("pp",)
    assert CUBE[1].dim_names == ("pp", "tp")
    assert CUBE[1].mesh.tolist() == CUBE.mesh[1].tolist()
    assert CUBE[:, 1:].mesh.tolist() == CUBE.mesh[:, 1:].tolist()
    assert CUBE[:, 1:].dim_names == ("dp", "pp", "tp")
    assert CUBE[0, 2].dim_names == ("tp",)


def test_a_single_rank_keeps_the_last_axis():
    one = CUBE[1, 2, 0]
    assert (one.process_ids, one.shape, one.dim_names) == ((10,), (1,), ("tp",))


def test_wrong_indices_are_refused():
    with pytest.raises(MeshError, match="several lines of ranks"):
        CUBE["pp"]
    with pytest.raises(MeshError, match="out of bounds"):
        CUBE[5]
    with pytest.raises(MeshError, match="there is no axis 'cp'"):
        CUBE["cp", 0]


def test_scalars_and_default_names():
    one = ProcessMesh(3)
    assert (one.process_ids, one.shape, one.dim_names) == ((3,), (1,), ("d0",))
    assert ProcessMesh([[0, 1], [2, 3]]).dim_names == ("d0", "d1")


def test_the_array_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        CUBE.mesh[0] = 1


@pytest.mark.parametrize(
    ("ranks", "names", "why"),
    [
        ([0, 1, 0], ["x"], "a rank has one position"),
        ([0, -1], ["x"], "ranks count from 0"),
        ([], ["x"], "at least one rank"),
        ([[0, 1], [2]], ["x", "y"], "rows that do not form an array"),
        (["a"], ["x"], "rows that do not form an array"),
        (torch.arange(2, device="meta"), ["x"], "rows that do not form an array"),
        ([0.5, 1.0], ["x"], "ranks are whole numbers"),
        ([float("nan")], ["x"], "ranks are whole numbers"),
        ([0, 1], ["x", "y"], "one name of its own"),
        ([[0], [1]], ["x", "x"], "one name of its own"),
        ([0, 1], ["a b"], "an identifier"),
    ],
)
def test_meshes_that_cannot_exist_are_refused(ranks, names, why):
    with pytest.raises(MeshError, match=why):
        ProcessMesh(ranks, names)


def test_a_repeated_rank_is_named():
    with pytest.raises(MeshError, match="rank 5 more than once"):
        ProcessMesh([1, 5, 2, 5], ["x"])


def test_rank_0_is_a_rank():
    assert 0 in ProcessMesh([0, 1], ["x"])
    assert 2 not in ProcessMesh([0, 1], ["x"])
    with pytest.raises(MeshError, match="rank 2 is not in the mesh"):
        ProcessMesh([0, 1], ["x"]).coordinate(2)


def test_text():
    assert repr(CUBE) == "ProcessMesh([dp=2, pp=3, tp=2])"
    assert repr(CUBE["pp", 1]) == "ProcessMesh([dp=2, tp=2], ranks=[2, 3, 8, 9])"
    assert repr(ProcessMesh([1, 0], ["x"])) == "ProcessMesh([x=2], ranks=[1, 0])"
