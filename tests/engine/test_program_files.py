"""A model that loads programs makes the same steps as the one that saved them, and records nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError
from meshwright.graph import ProgramFileError
from meshwright.models import Llama, LlamaConfig, mark

inductor: Any = import_module("meshwright.graph.execution.inductor")
MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
DEFAULT = mw.Strategy()
STEPS = 4


class Mlp(nn.Module):
    def __init__(self, width: int = 16, rate: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(8, width), nn.Linear(width, 4), rate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), self.rate, self.training))


STAGES = [mw.ProcessMesh([0, 1], ["tp"]), mw.ProcessMesh([2, 3], ["tp"])]


class Staged(Mlp):
    """A model whose second layer is on other ranks than its first."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(mw.reshard(x, STAGES[0], [mw.Replicate()])))
        return self.down(mw.reshard(x, STAGES[1], [mw.Shard(1)]))


def staged(model: Mlp) -> Mlp:
    for layer, stage, dim in zip((model.up, model.down), STAGES, (0, 1), strict=True):
        layer.weight = mw.shard_tensor(layer.weight, stage, [mw.Shard(dim)])
        layer.bias = mw.shard_tensor(layer.bias, stage, [mw.Replicate()])
    return model


class Other(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def cut(model: Mlp) -> Mlp:
    model.up.weight = mw.shard_tensor(model.up.weight, MESH, [mw.Replicate(), mw.Shard(0)])
    model.down.weight = mw.shard_tensor(model.down.weight, MESH, [mw.Replicate(), mw.Shard(1)])
    return model


def mean_square(out: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(out, wanted)


def mean_size(out: Tensor, wanted: Tensor) -> Tensor:
    return F.l1_loss(out, wanted)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with states and few operators to compile."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Setup:
    """The arguments that make a model."""

    module: Callable[[], Any] = Mlp
    marks: Callable[[Any], Any] = cut
    loss: Callable[..., Tensor] | None = mean_square
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    strategy: mw.Strategy = DEFAULT

    def model(self) -> Any:
        torch.manual_seed(0)
        module = self.marks(self.module())
        return mw.to_static(module, None, self.loss, self.optimizer(module.parameters()), self.strategy)


def rows(n: int) -> list[Tensor]:
    return [mw.shard_tensor(x, MESH, [mw.Shard(0)]) for x in plain_rows(n)]


def plain_rows(n: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    return [torch.randn(n, 8, generator=g), torch.randn(n, 4, generator=g)]


def whole(x: Tensor) -> Tensor:
    return (mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x).detach().clone()


def steps(model: Any, batch: Callable[[int], Any] = rows, sizes: Any = (8,) * STEPS) -> list[Any]:
    """Return the losses, and parameters and states afterwards."""
    found: list[Any] = []
    for n in sizes:
        torch.manual_seed(n)
        found.append(model(*batch(n)).clone())
    return [*found, *[whole(x) for x in model.state_dict().values()]]


def check_equal(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def save(folder: Path, setup: Setup, ranks: int = 4, **how: Any) -> list[list[Any]]:
    def go() -> list[Any]:
        model = setup.model()
        found = steps(model, **how)
        model.save(folder)
        return found

    return mw.simulate(go, ranks)


def load(folder: Path, setup: Setup, ranks: int = 4, **how: Any) -> list[tuple[list[Any], int]]:
    def go() -> tuple[list[Any], int]:
        model = setup.model().load(folder, kernels=True)
        return steps(model, **how), model.recordings

    return mw.simulate(go, ranks)


def tokens(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(64, (4, 9), generator=g)
    return [found[:, :-1], found[:, 1:]]


def llama() -> Setup:
    mesh = mw.ProcessMesh([[[0, 1], [2, 3]]], ["pp", "dp", "tp"])

    def marked(model: Llama) -> Llama:
        mark(model, mesh)
        return model

    return Setup(lambda: Llama(LlamaConfig(64, 32, 2, 4, 4, 64)), marked, None)


@pytest.mark.parametrize(
    ("setup", "batch"),
    [
        (Setup(), rows),
        (Setup(strategy=mw.Strategy.of(sharding={"enable": True, "stage": 3, "least": 1})), rows),
        (llama(), tokens),
        (Setup(Staged, staged), plain_rows),
    ],
    ids=["mlp", "mlp cut like ZeRO 3", "llama", "two stages"],
)
def test_loaded_programs_equal_saved_ones(tmp_path: Path, setup: Setup, batch: Any) -> None:
    if batch is tokens:
        save(tmp_path, setup, batch=batch)  # computes the cached table of rotary positions
    wanted = save(tmp_path, setup, batch=batch)
    for (found, recordings), before in zip(load(tmp_path, setup, batch=batch), wanted, strict=True):
        check_equal(found, before)
        assert recordings == 0


SIZES = (8, 8, 12, 4, 16, 20)


def test_programs_for_any_batch_size_are_loaded(tmp_path: Path) -> None:
    wanted = save(tmp_path, Setup(), sizes=SIZES)
    for (found, recordings), before in zip(load(tmp_path, Setup(), sizes=SIZES), wanted, strict=True):
        check_equal(found, before)
        assert recordings == 0


def test_a_new_size_is_recorded(saved: Path) -> None:
    def go() -> list[int]:
        model = Setup().model().load(saved)
        counts: list[int] = []
        for rate, n in [(0.1, 8), (0.5, 8), (0.1, 8), (0.1, 12), (0.1, 16)]:
            model.network.rate = rate
            model(*rows(n))
            counts.append(model.recordings)
        model.eval()(*rows(8))
        return [*counts, model.recordings]

    assert mw.simulate(go, 4)[0] == [0, 1, 1, 1, 1, 2]


def test_every_mode_is_saved_and_saved_again(tmp_path: Path) -> None:
    def run(model: Any) -> list[Any]:
        model.train()(*rows(8))
        model.train()(*rows(8))
        return [model.eval()(*rows(8)), whole(model.predict()(rows(8)[0]))]

    def go() -> None:
        first = Setup().model()
        wanted = run(first)
        first.save(tmp_path / "one")
        second = Setup().model().load(tmp_path / "one")
        check_equal(run(second), wanted)
        second.save(tmp_path / "two")
        third = Setup().model().load(tmp_path / "two")
        check_equal(run(third), wanted)
        assert (first.recordings, second.recordings, third.recordings) == (3, 0, 0)

    mw.simulate(go, 4)


def test_a_loaded_model_continues_with_states(tmp_path: Path) -> None:
    def go() -> None:
        first = Setup().model()
        steps(first, sizes=(8, 8))
        first.save(tmp_path)
        states = {
            p: {k: whole(v) for k, v in state.items()} for p, state in first.optimizer.state_dict()["state"].items()
        }
        second = Setup().model()
        for x, y in zip(second.network.parameters(), first.network.parameters(), strict=True):
            x.data.copy_(y.data if x.data.shape == y.data.shape else whole(y))
        second.optimizer.load_state_dict({**second.optimizer.state_dict(), "state": states})
        second.load(tmp_path)
        check_equal(steps(second, sizes=(8,)), steps(first, sizes=(8,)))
        assert second.recordings == 0

    mw.simulate(go, 4)


def test_kernels_are_loaded_or_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(marks=lambda model: model, optimizer=momentum, strategy=mw.Strategy(compiler="inductor"))

    def go() -> list[Any]:
        model = setup.model()
        found = steps(model, plain_rows, (8,))
        model.save(tmp_path, kernels=True)
        return found

    (wanted,) = mw.simulate(go, 1)
    (package,) = tmp_path.glob("*.pt2")
    made: list[Any] = []
    compile_graph = inductor.compile_graph
    monkeypatch.setattr(inductor, "compile_graph", lambda *a: (made.append(a), compile_graph(*a))[1])
    for damaged in (False, True):
        package.write_bytes(package.read_bytes() + b"." * damaged)
        ((found, recordings),) = load(tmp_path, setup, 1, batch=plain_rows, sizes=(8,))
        check_equal(found, wanted)
        assert (recordings, len(made)) == (0, int(damaged))


def test_kernels_of_programs_that_communicate_are_not_saved(tmp_path: Path) -> None:
    def go() -> None:
        model = Setup().model()
        model(*rows(8))
        model.save(tmp_path, kernels=True)

    mw.simulate(go, 4)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert list(tmp_path.glob("*.pt2")) == []


def other_marks(model: Mlp) -> Mlp:
    model.up.weight = mw.shard_tensor(model.up.weight, MESH, [mw.Shard(0), mw.Replicate()])
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two programs: for one batch size, and for others."""
    place = tmp_path_factory.mktemp("saved")
    save(place, Setup(), sizes=(8, 12))
    return place


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder that a test may damage."""
    return Path(copytree(folder, tmp_path / "saved"))


@pytest.mark.parametrize(
    ("setup", "ranks", "told"),
    [
        (Setup(lambda: Mlp(32)), 4, r"tensor up.weight was torch.float32\[16, 8\], and is torch.float32\[32, 8\]"),
        (Setup(Other), 4, "module . was .*Mlp .*, and is .*Other"),
        (Setup(marks=other_marks), 4, r"up.weight was f32\[16@tp, 8\] .*, and is f32\[16@dp, 8\]"),
        (Setup(loss=mean_size), 4, "loss was mean_square .*, and is mean_size"),
        (Setup(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), 4, "optimizer was .*AdamW .*, and is .*SGD"),
        (Setup(strategy=mw.Strategy(inplace=False)), 4, "strategy was .*, and is .*inplace=False"),
        (Setup(), 5, "number of ranks was 4, and is 5"),
    ],
    ids=["shapes", "code", "marks", "loss", "optimizer", "strategy", "ranks"],
)
def test_programs_of_another_model_are_refused(saved: Path, setup: Setup, ranks: int, told: str) -> None:
    with pytest.raises(StaticError, match=told):
        load(saved, setup, ranks)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramFileError, match="no index of programs"):
        load(tmp_path, Setup())


def test_a_damaged_file_changes_nothing(saved: Path) -> None:
    second = sorted(saved.glob("program-*"))[1]
    second.write_bytes(second.read_bytes()[:-7] + b"0000000")

    def go() -> None:
        model = Setup().model()
        if mw.get_rank() == 0:
            with pytest.raises(ProgramFileError, match="no readable program"):
                model.load(saved)
            assert not isinstance(model.network.up.bias, mw.DistTensor)
            assert model._builder.loaded == []

    mw.simulate(go, 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("dp", "pd"),
        lambda text: text[:50],
        lambda text: "[]",
        lambda text: json.dumps({"sha256": sha256(b"[]").hexdigest(), "index": "[]"}),
        lambda text: "{}",
        lambda text: "\x00",
    ],
)
def test_a_damaged_index_is_refused(saved: Path, damage: Callable[[str], str]) -> None:
    for path in saved.glob("programs-*.json"):
        path.write_text(damage(path.read_text()))
    with pytest.raises(ProgramFileError):
        load(saved, Setup())


def test_files_of_dropped_programs_are_removed(saved: Path) -> None:
    before = {p.name for p in saved.glob("*")}
    save(saved, Setup(), sizes=(12,))
    after = {p.name for p in saved.glob("*")}
    assert (len(before), len(after)) == (3, 2)
    assert before & after == {"programs-0.json"}


def test_a_model_without_a_recording_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(StaticError, match=r"dist_model\.compile"):
        mw.simulate(lambda: Setup().model().save(tmp_path), 4)
