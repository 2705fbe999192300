"""Loading a tensor into any other layout on any other mesh, to the bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import meshwright as mw
from meshwright.checkpoint import CheckpointError, open_checkpoint
from meshwright.layout import Layout, ProcessMesh, parse_layout, parse_spec

from .oracle import journeys, laid, numbered

PAIR = ProcessMesh([0, 1], ["x"])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


def save_and_load(path: Path, x: torch.Tensor, src: Any, dst: Any, ranks: int, format: str) -> list[torch.Tensor]:
    """Return the parts of all ranks after saving under `src` and loading under `dst`."""

    def save() -> None:
        mw.save_state_dict({"x": laid(x.clone(), src)}, path, format=format)

    def load() -> torch.Tensor:
        there = laid(torch.zeros_like(x), dst)
        mw.load_state_dict({"x": there}, path)
        return mw.unshard_dtensor(there)

    mw.simulate(save, ranks)
    return mw.simulate(load, ranks)


@pytest.mark.parametrize("format", ["meshwright", "safetensors"])
@settings(max_examples=40)
@given(journeys())
def test_a_tensor_is_loaded_into_any_other_layout(format: str, journey: Any) -> None:
    shape, src, dst = journey
    x = numbered(shape)
    with tempfile.TemporaryDirectory() as folder:
        found = save_and_load(Path(folder) / "one", x, src, dst, 9, format)
    assert all(torch.equal(got, x) for got in found)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("format", ["meshwright", "dcp"])
def test_every_dtype_is_restored(tmp_path: Path, dtype: torch.dtype, format: str) -> None:
    x = numbered((5, 3)).to(dtype)

    def save() -> None:
        local = laid(torch.arange(15), (PAIR, parse_layout("[@x]")))  # a tensor beside it
        mw.save_state_dict({"x": x, "other": local}, tmp_path / "one", format=format)

    mw.simulate(save, 2)
    state = {"x": torch.zeros(5, 3).to(dtype)}
    mw.load_state_dict(state, tmp_path / "one")
    assert torch.equal(state["x"].view(torch.uint8), x.view(torch.uint8))


def test_loading_converts_to_a_wider_dtype_and_refuses_a_narrower_one(tmp_path: Path) -> None:
    mw.save_state_dict({"x": numbered((3,), torch.bfloat16)}, tmp_path / "one")
    wide = torch.zeros(3)
    mw.load_state_dict({"x": wide}, tmp_path / "one")
    assert wide.tolist() == [1, 2, 3]
    with pytest.raises(CheckpointError, match="holds all its numbers"):
        mw.load_state_dict({"x": torch.zeros(3, dtype=torch.float16)}, tmp_path / "one")


def test_numbers_of_8_bits_are_not_widened(tmp_path: Path) -> None:
    """The scales of float8 numbers are other tensors, so a wider tensor with these numbers would be wrong."""
    mw.save_state_dict({"x": numbered((3,), torch.float8_e4m3fn)}, tmp_path / "one")
    with pytest.raises(CheckpointError, match="float8_e4m3fn of shape"):
        mw.load_state_dict({"x": torch.zeros(3)}, tmp_path / "one")


def test_saving_a_pending_sum_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def save(load: bool) -> str:
        x = mw.dtensor_from_local(torch.ones(2), PAIR, [mw.Partial()])
        with pytest.raises(CheckpointError, match="Partial first") as caught:
            mw.load_state_dict({"x": x}, tmp_path / "one") if load else mw.save_state_dict({"x": x}, tmp_path / "two")
        return str(caught.value)

    mw.save_state_dict({"x": torch.ones(2)}, tmp_path / "one")
    assert len(set(mw.simulate(save, 2, True))) == 1
    assert len(set(mw.simulate(save, 2, False))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_replicated_data_is_written_once_and_writes_are_balanced(tmp_path: Path) -> None:
    def save() -> None:
        state = {
            f"{n}": laid(numbered((8, 8)), (SQUARE, parse_layout(text)))
            for n, text in enumerate(["[:, :]"] * 8 + ["[@x, :]"] * 8 + ["[@x@y, :]"] * 4)
        }
        mw.save_state_dict(state, tmp_path / "one")

    mw.simulate(save, 4)
    found = open_checkpoint(tmp_path / "one")
    sizes = [sum(part.nbytes for part in found.entries.values()), [f.nbytes or 0 for f in found.files.values()]]
    assert sizes[0] == 20 * 256
    assert max(sizes[1]) - min(sizes[1]) < 600  # headers
    assert sum(sizes[1]) < 20 * 256 + 8000


def test_the_checkpoint_records_the_layout(tmp_path: Path) -> None:
    mw.simulate(
        lambda: mw.save_state_dict(
            {"x": laid(numbered((6, 4)), (SQUARE, parse_layout("[3 * 2@x, @y]")))}, tmp_path / "one"
        ),
        4,
    )
    entry = open_checkpoint(tmp_path / "one").entries["x"]
    assert entry.mesh is SQUARE
    assert parse_spec(entry.lies, SQUARE).layout == parse_layout("[3 * 2@x, @y]")


def test_values_of_every_kind_are_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "step": 3,
        "name": "run",
        "on": True,
        "none": None,
        "betas": (0.9, float("inf")),
        "list": [1, [2, (3,)]],
        "deep": {"a": {"b": 1.5}},
        "mixed": [torch.ones(2), {"lr": 0.1}],
        7: {"x": 2},
    }
    mw.save_state_dict(state, tmp_path / "one")
    found: dict[str, Any] = {
        "step": 0,
        "name": "",
        "on": False,
        "none": 1,
        "betas": None,
        "list": None,
        "deep": {"a": {"b": 0.0}},
        "mixed": [torch.zeros(2), {"lr": 0.0}],
        7: {"x": 0},
    }
    mixed = found["mixed"][0]
    mw.load_state_dict(found, tmp_path / "one")
    assert found["mixed"][0] is mixed
    assert mixed.tolist() == [1, 1]
    assert {k: v for k, v in found.items() if k != "mixed"} == {k: v for k, v in state.items() if k != "mixed"}
    assert found["mixed"][1] == {"lr": 0.1}


def test_a_part_of_a_state_can_be_loaded(tmp_path: Path) -> None:
    mw.save_state_dict({"model": {"w": numbered((3,)), "b": numbered((2,))}, "step": 4}, tmp_path / "one")
    state = {"model": {"b": torch.zeros(2)}}
    mw.load_state_dict(state, tmp_path / "one")
    assert state["model"]["b"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"y": torch.ones(2)}, "no such tensor"),
        ({"x": torch.ones(3)}, "saved name and shape"),
        ({"x": torch.ones(2), "step": 1}, "no such value"),
        ({"x": torch.ones(2, dtype=torch.int64)}, "in its dtype"),
    ],
)
def test_a_missing_key_is_named_and_nothing_is_loaded(tmp_path: Path, state: Any, words: str) -> None:
    mw.save_state_dict({"x": torch.zeros(2)}, tmp_path / "one")
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    with pytest.raises(CheckpointError, match=words):
        mw.load_state_dict(state, tmp_path / "one")
    assert all(torch.equal(v, before[k]) for k, v in state.items() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"x": {1, 2}}, "a set"),
        ({"a": {"b": 1}, "a.b": 2}, "two values with that name"),
        ({"f": torch.nn.Linear}, "no code"),
        ({"x": torch.ones(2).to_sparse()}, "sparse"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused(tmp_path: Path, state: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        mw.save_state_dict(state, tmp_path / "one")
    assert not list(tmp_path.iterdir())


def test_ranks_with_different_states_are_named(tmp_path: Path) -> None:
    def save() -> None:
        mw.save_state_dict({"step": mw.get_rank()}, tmp_path / "one")

    with pytest.raises(CheckpointError, match="0 on rank 0 and 1 on rank 1"):
        mw.simulate(save, 2)


def test_each_pipeline_rank_saves_its_own_parameters(tmp_path: Path) -> None:
    stages = [ProcessMesh([0], ["x"]), ProcessMesh([1], ["x"])]

    def save() -> None:
        rank = mw.get_rank()
        mine = laid(numbered((4,)) + rank, (stages[rank], Layout(((),)))) if rank in stages[rank] else None
        mw.save_state_dict({f"stage{rank}": mine, f"count{rank}": torch.tensor(rank), "all": 3}, tmp_path / "one")

    mw.simulate(save, 2)
    state = {"stage0": torch.zeros(4), "stage1": torch.zeros(4), "count1": torch.tensor(9), "all": 0}
    mw.load_state_dict(state, tmp_path / "one")
    assert [state["stage0"].tolist(), state["stage1"].tolist()] == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert (state["count1"].item(), state["all"]) == (1, 3)
