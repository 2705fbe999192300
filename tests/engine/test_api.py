"""The public API: names, meshes, layers, optimizers, data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.tensor import DistTensor

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
ROWS = [mw.Shard(0)]
CUT = [mw.Replicate(), mw.Shard(0)]


@pytest.fixture(autouse=True)
def no_default_mesh() -> Iterator[None]:
    yield
    mw.set_mesh(None)


def test_every_public_name_exists_for_type_checkers() -> None:
    tree = ast.parse(Path(str(mw.__file__)).read_text())
    seen = {a.asname for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    assert seen == set(mw.__all__) - {"__version__"}
    assert all(getattr(mw, name) is not None for name in mw.__all__)
    assert set(mw.__all__) >= set(dir(mw))


def test_a_missing_name_raises() -> None:
    with pytest.raises(AttributeError, match="shard_tensors"):
        _ = mw.shard_tensors


def test_all_ranks_share_the_default_mesh() -> None:
    assert mw.get_mesh() is None
    mw.set_mesh(MESH)
    assert mw.simulate(lambda: mw.shard_tensor(torch.ones(4, 3), placements=ROWS).mesh is MESH, 4) == [True] * 4


def test_a_rank_can_have_a_default_of_its_own() -> None:
    def go() -> mw.ProcessMesh | None:
        if mw.get_rank() == 1:
            mw.set_mesh(mw.ProcessMesh([1], ["x"]))
        return mw.get_mesh()

    mw.set_mesh(MESH)
    assert mw.simulate(go, 2) == [MESH, mw.ProcessMesh([1], ["x"])]


@pytest.mark.parametrize(
    ("sizes", "ranks", "shape"),
    [({"dp": -1}, 3, (3,)), ({"pp": 2, "dp": -1, "tp": 2}, 8, (2, 2, 2)), ({"dp": 2, "tp": 2}, 1, (1, 1))],
)
def test_a_mesh_of_all_ranks(sizes: dict[str, int], ranks: int, shape: tuple[int, ...]) -> None:
    meshes = mw.simulate(lambda: mw.init_mesh(**sizes), ranks)
    assert all(mesh == meshes[0] for mesh in meshes)
    assert (meshes[0].mesh.shape, meshes[0].process_ids) == (shape, tuple(range(ranks)))


def test_shard_tensor_accepts_the_inputs_of_torch_tensor() -> None:
    def go() -> tuple[Any, ...]:
        x = mw.shard_tensor([[1, 2], [3, 4]], MESH, ROWS, dtype=torch.float32, requires_grad=True)
        return x.dtype, x.requires_grad, x.is_leaf, x.to_local().shape, mw.unshard_dtensor(x).tolist()

    expected = (torch.float32, True, True, (1, 2), [[1.0, 2.0], [3.0, 4.0]])
    assert mw.simulate(go, 4) == [expected] * 4


def test_a_tensor_from_parts_and_from_a_function() -> None:
    def go() -> tuple[Any, ...]:
        part = torch.full((2, 3), float(mw.get_rank()))
        x = mw.dtensor_from_local(part, MESH, [mw.Shard(0), mw.Partial()])
        uneven = mw.dtensor_from_local(torch.ones(2 - mw.get_rank() // 2, 1), MESH, ROWS, shape=(3, 1))
        ones = mw.dtensor_from_fn(torch.ones, MESH, CUT, 4, 2)
        return x.shape, x.sum().item(), uneven.sum().item(), ones.placements, ones.to_local().shape

    assert mw.simulate(go, 4) == [((4, 3), 36.0, 3.0, tuple(CUT), (2, 2))] * 4


def test_values_reach_ranks_outside_the_mesh() -> None:
    def go() -> tuple[float, list[float]]:
        x = mw.shard_tensor(torch.arange(3.0), mw.ProcessMesh([1, 2], ["x"]), ROWS)
        return (x * 2).sum().item(), mw.unshard_dtensor(x + 1).tolist()

    assert mw.simulate(go, 4) == [(6.0, [1.0, 2.0, 3.0])] * 4


# --- layers --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module with nested and shared parameters and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "norm": nn.BatchNorm1d(4)})
        self.inner["head"].weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner["head"](self.inner["norm"](self.embed(tokens))) * self.scale


def cut_embedding(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if name == "embed":
        layer.weight = mw.shard_tensor(layer.weight, mesh, CUT)


def cut_head(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if name == "inner.head":
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(1)])


def cut_both(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    cut_embedding(name, layer, mesh)
    cut_head(name, layer, mesh)


@pytest.mark.parametrize("mark", [None, cut_embedding, cut_head, cut_both])
def test_shard_layer_keeps_shared_tensors_shared(mark: Any) -> None:
    def go() -> bool:
        net = mw.shard_layer(Net(), MESH, mark)
        shared = net.embed.weight is net.inner["head"].weight
        tensors = [*net.parameters(), *net.buffers()]
        cut = net.embed.weight.placements != (mw.Replicate(), mw.Replicate())
        names = [name for name, _ in net.named_parameters()]
        kinds = all(isinstance(p, nn.Parameter) for p in net.parameters())
        return (
            shared
            and kinds
            and all(isinstance(t, DistTensor) for t in tensors)
            and cut == (mark is not None)
            and (names == ["embed.weight", "inner.norm.weight", "inner.norm.bias"])
        )

    assert mw.simulate(go, 4) == [True] * 4


def test_shard_layer_trains_shared_tensors_like_one_device() -> None:
    tokens = torch.tensor([1, 7, 3, 0, 3])

    def go(on_mesh: bool) -> Tensor:
        torch.manual_seed(0)
        net = Net()
        if on_mesh:
            mw.shard_layer(net, MESH, cut_both)
        net(tokens).square().mean().backward()
        return mw.unshard_dtensor(net.embed.weight.grad)

    for grad in mw.simulate(go, 4, True):
        torch.testing.assert_close(grad, go(False))


def test_shard_layer_marks_inputs_and_outputs() -> None:
    def go() -> tuple[Any, ...]:
        layer = mw.shard_layer(
            nn.Linear(3, 4),
            MESH,
            input_fn=lambda inputs, mesh: tuple(mw.reshard(x, mesh, ROWS) for x in inputs),
            output_fn=lambda out, mesh: mw.reshard(out, mesh, [mw.Shard(0), mw.Shard(1)]),
        )
        out = layer(torch.ones(4, 3))
        return out.placements, out.shape

    assert mw.simulate(go, 4) == [((mw.Shard(0), mw.Shard(1)), (4, 4))] * 4


# --- optimizers ----------------------------------------------------------------------------------------------------


def train(on_mesh: bool, shard_fn: Any = None, make: Any = torch.optim.AdamW) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    if on_mesh:
        mw.shard_layer(model, MESH)
    optimizer = make(model.parameters(), lr=0.1)
    if on_mesh:
        assert mw.shard_optimizer(optimizer, shard_fn) is optimizer
    for _ in range(3):
        x = torch.randn(4, 6)
        optimizer.zero_grad()
        model(mw.shard_tensor(x, MESH, ROWS) if on_mesh else x).square().mean().backward()
        optimizer.step()
    state = optimizer.state[model[0].weight]
    where = {key: getattr(value, "placements", None) for key, value in state.items()}
    return [mw.unshard_dtensor(p).detach() for p in model.parameters()], where


def over_data(key: str, parameter: DistTensor, accumulator: DistTensor) -> Any:
    return ROWS if key == "exp_avg" else None


def another_accumulator(key: str, parameter: DistTensor, accumulator: DistTensor) -> Any:
    return mw.reshard(accumulator, accumulator.mesh, CUT)


WHOLE = (mw.Replicate(), mw.Replicate())


@pytest.mark.parametrize(
    ("shard_fn", "first", "second"),
    [(None, WHOLE, WHOLE), (over_data, (mw.Shard(0), mw.Replicate()), WHOLE), (another_accumulator, *[tuple(CUT)] * 2)],
)
def test_optimizer_states_have_the_requested_layout_and_steps_equal_one_device(
    shard_fn: Any, first: Any, second: Any
) -> None:
    expected, _ = train(False)
    for found, where in mw.simulate(train, 4, True, shard_fn):
        assert (where["exp_avg"], where["exp_avg_sq"]) == (first, second)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_loaded_whole_states_are_sharded_over_the_mesh() -> None:
    def go(plain: dict[str, Any]) -> tuple[Any, ...]:
        weight = mw.shard_tensor(nn.Parameter(torch.ones(4, 6)), MESH, CUT)
        optimizer = mw.shard_optimizer(torch.optim.Adam([weight]), over_data)
        optimizer.load_state_dict(plain)
        state = optimizer.state[weight]
        return state["exp_avg"].placements, state["exp_avg_sq"].placements, state["exp_avg"].sum().item()

    one = torch.optim.Adam([weight := nn.Parameter(torch.ones(4, 6))])
    weight.grad = torch.ones(4, 6)
    one.step()
    found = mw.simulate(go, 4, one.state_dict())
    assert [f[:2] for f in found] == [((mw.Shard(0), mw.Replicate()), tuple(CUT))] * 4
    assert found[0][2] == pytest.approx(2.4)


def test_gradients_of_many_parameters_are_reduced_together() -> None:
    from meshwright.comm import current_communicator

    def go() -> dict[str, int]:
        model = mw.shard_layer(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), MESH)
        optimizer = mw.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):  # two passes, one reduction
            model(mw.shard_tensor(torch.ones(4, 6), MESH, ROWS)).sum().backward()
        before = current_communicator().seen.total_calls
        optimizer.step()
        return {"calls": current_communicator().seen.total_calls - before}

    assert mw.simulate(go, 4) == [{"calls": 1}] * 4


# --- data ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


def batches(kind: Any) -> list[Any]:
    return [kind(torch.arange(8.0).reshape(4, 2) + i, torch.arange(4) + i) for i in range(3)]


def laid(batch: Any) -> list[tuple[Any, ...]]:
    values = batch.values() if isinstance(batch, dict) else batch
    return [(repr(v.spec), v.mesh, mw.unshard_dtensor(v).tolist()) for v in values]


@pytest.mark.parametrize(
    "kind",
    [lambda x, y: [x, y], lambda x, y: (x, y), Pair, lambda x, y: {"x": x, "y": y}],
    ids=["list", "tuple", "named", "dict"],
)
def test_batches_keep_their_structure_and_their_numbers(kind: Any) -> None:
    def go() -> list[Any]:
        loader = mw.shard_dataloader(batches(kind), MESH, "dp")
        assert len(loader) == 3
        return [(type(batch), laid(batch)) for batch in loader]

    plain = batches(kind)
    values = [list(b.values()) if isinstance(b, dict) else list(b) for b in plain]
    for found in mw.simulate(go, 4):
        for (form, got), batch, (x, y) in zip(found, plain, values, strict=True):
            assert form is type(batch)
            assert got == [("f32[4@dp, 2]", MESH, x.tolist()), ("i64[4@dp]", MESH, y.tolist())]


def test_inputs_on_meshes_of_their_own() -> None:
    first, last = MESH["dp", 0], MESH["dp", 1]
    loader = [{"x": torch.ones(4, 2), "note": "kept", "y": torch.arange(4)}]

    def go() -> list[Any]:
        data = mw.shard_dataloader(loader, [first, last, last], [0, None, "tp"], input_keys=["x", "note", "y"])
        (batch,) = data
        return [batch["note"], repr(batch["x"].spec), batch["x"].mesh, repr(batch["y"].spec), batch["y"].mesh]

    assert mw.simulate(go, 4) == [["kept", "f32[4@tp, 2]", first, "i64[4@tp]", last]] * 4


def test_batches_that_are_already_split() -> None:
    def go() -> tuple[Any, ...]:
        mine = [torch.full((2, 1), float(mw.get_rank() // 2))]
        (x,) = mw.shard_dataloader(mine, MESH, "dp", is_dataset_splitted=True)
        return repr(x.spec), mw.unshard_dtensor(x).flatten().tolist()

    assert mw.simulate(go, 4) == [("f32[4@dp, 1]", [0.0, 0.0, 1.0, 1.0])] * 4


def test_a_torch_loader_whose_last_batch_is_smaller() -> None:
    def go() -> list[Any]:
        data = torch.utils.data.TensorDataset(torch.arange(7.0))
        loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
        return [mw.unshard_dtensor(x).tolist() for (x,) in mw.shard_dataloader(loader, MESH, 0)]

    ranks = mw.simulate(go, 4)
    assert all(rank == ranks[0] for rank in ranks)
    assert sorted(value for batch in ranks[0] for value in batch) == [float(n) for n in range(7)]
