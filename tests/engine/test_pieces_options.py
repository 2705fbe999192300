"""Options of a model that runs in pieces: each affects the pieces, or is refused with the line that is the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError
from meshwright.graph import Pass, Program
from meshwright.layout import parse_spec
from meshwright.passes import Amp, Bucket, Recompute, Release, SequenceParallel, ShardParameters

MESH = mw.ProcessMesh([0, 1], ["dp"])
PIECES = {"full_graph": False}
SEEN: list[torch.dtype] = []


class Norm(nn.Module):
    """An RMS norm in plain operators, between matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.ones(16))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.last.weight.t()
        return self.norm(x) + self.last.bias.softmax(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Norm(), nn.Linear(8, 4)
        self.own = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.part(x))
        assert x.sum().item() < 1e9, "Python asks here"
        SEEN.append(x.dtype)
        return self.loss((x @ self.own).float())

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(x, torch.ones_like(x))


@dataclass(frozen=True)
class Steps:
    """The results of three steps."""

    losses: list[float]
    values: dict[str, Tensor]
    pieces: Any
    seen: tuple[torch.dtype, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        return self.pieces.programs["part"]

    @property
    def changed_by(self) -> set[str]:
        return {change.by for program in self.programs for change in program.changes}


def run(strategy: mw.Strategy | None, ranks: int = 1, autocast: bool = False, kind: type[Model] = Model) -> Steps:
    """Return the results of steps with a strategy, or of eager steps without one."""

    def rank() -> Any:
        torch.manual_seed(0)
        model = kind() if ranks == 1 else mw.shard_layer(kind(), MESH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dist_model = mw.to_static(model, None, None, optimizer, strategy)
        losses: list[float] = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 8)
            x = x if ranks == 1 else mw.shard_tensor(x, MESH, [mw.Shard(0)])
            if strategy is not None:
                losses.append(dist_model(x).item())
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        values = {
            k: mw.unshard_dtensor(v) if isinstance(v, mw.DistTensor) else v for k, v in model.state_dict().items()
        }
        return losses, values, dist_model.pieces

    SEEN.clear()
    losses, values, pieces = mw.simulate(rank, ranks)[0]
    return Steps(losses, values, pieces, tuple(SEEN))


def same(a: Steps, b: Steps, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close((a.losses, a.values), (b.losses, b.values), rtol=rtol, atol=atol)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_operators_are_in_the_piece(ranks: int) -> None:
    found = run(mw.Strategy.of(fused_passes={"enable": True}, **PIECES), ranks)
    same(found, run(None, ranks), rtol=1e-5, atol=1e-5)
    assert "fuse_norm" in found.changed_by
    assert "fuse_norm" not in run(mw.Strategy(full_graph=False), ranks).changed_by


@dataclass(frozen=True)
class Tanh(Pass):
    """A rewrite to another activation, before gradients are recorded."""

    name: ClassVar[str] = "tanh"
    on: ClassVar[Literal["captured", "recorded"]] = "captured"

    def run(self, program: Program) -> Program:
        relu, tanh = torch.ops.aten.relu.default, torch.ops.aten.tanh.default
        nodes = tuple(replace(n, op=tanh) if n.op is relu else n for n in program.nodes)
        return replace(program, nodes=nodes)


class Smooth(Model):
    def __init__(self) -> None:
        super().__init__()
        self.part.forward = self.smooth

    def smooth(self, x: Tensor) -> Tensor:
        part, x = self.part, torch.tanh(self.part.first(x))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * part.weight
        return part.norm(x.float() @ part.last.weight.t()) + part.last.bias.softmax(-1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_user_defined_passes_change_the_captured_program(ranks: int) -> None:
    found = run(mw.Strategy(passes=(Tanh(),), full_graph=False), ranks)
    same(found, run(None, ranks, kind=Smooth), rtol=1e-5, atol=1e-5)
    assert "tanh" in found.changed_by


def test_user_defined_passes_change_the_recorded_program() -> None:
    off = {"dp_optimization": {"enable": False}, **PIECES}
    plain, own = run(mw.Strategy.of(**off), 2), run(mw.Strategy.of(passes=(Bucket(bytes=4096),), **off), 2)
    same(own, plain)
    assert "bucket" in own.changed_by - plain.changed_by


def test_options_of_the_programs_have_their_effect() -> None:
    on, eager = run(mw.Strategy(full_graph=False), 2), run(None, 2)
    none = {"enable": False}
    off = run(mw.Strategy.of(inplace=False, dp_optimization=none, mp_optimization=none, **PIECES), 2)
    same(on, eager)
    same(off, eager)
    assert {"bucket", "in_place"} <= on.changed_by - off.changed_by


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixed_precision_applies_autocast_to_programs_and_python(ranks: int) -> None:
    found, eager = (run(s, ranks, True) for s in (mw.Strategy.of(amp={"enable": True}, **PIECES), None))
    same(found, eager)
    assert set(found.seen) == set(eager.seen) == {torch.bfloat16}
    assert {x.dtype for x in found.values.values() if x.is_floating_point()} == {torch.float32}
    products = {n.outs[0].dtype for p in found.programs for n in p.nodes if "mm" in str(n.op)}
    assert products == {torch.bfloat16, torch.float32}  # the strategy without autocast is unchanged


def test_calls_inside_autocast_are_not_cast_twice() -> None:
    def rank() -> Any:
        torch.manual_seed(0)
        model = Model()
        dist_model = mw.to_static(model, None, None, None, mw.Strategy(full_graph=False))
        x = torch.randn(4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            model.eval()
            return model(x).item(), dist_model.predict()(x).item(), dist_model.pieces

    eager, found, pieces = mw.simulate(rank, 1)[0]
    assert found == eager
    assert "part" in pieces.compiled


def test_kernels_are_compiled_for_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    pieces: Any = import_module("meshwright.engine.static.pieces")
    compile_it = pieces.compiled

    def counted(program: Program, *args: Any, **kwargs: Any) -> Program:
        found = compile_it(program, *args, **kwargs)
        made.append(len(program.nodes) - len(found.nodes))
        return found

    monkeypatch.setattr(pieces, "compiled", counted)
    found = run(mw.Strategy(compiler="inductor", full_graph=False), 2)
    same(found, run(None, 2), rtol=1e-4, atol=1e-5)
    assert len(made) == 4 * 2  # two pieces, forward and backward, on two ranks
    assert max(made) > 10


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"sharding": {"enable": True}}, "sharding", "shard_tensor"),
    ({"sharding": {"enable": True, "stage": 3}}, "sharding", "shard_tensor"),
    ({"passes": (ShardParameters(),)}, "ShardParameters", "shard_tensor"),
    ({"gradient_merge": {"enable": True, "k_steps": 2}}, "gradient_merge", "backward"),
    ({"sp_optimization": {"enable": True}}, "sp_optimization", "reshard"),
    ({"passes": (SequenceParallel("tp"),)}, "SequenceParallel", "reshard"),
    ({"recompute": {"enable": True, "budget": 0.5}}, "recompute", "checkpoint"),
    ({"passes": (Recompute(budget=0.5),)}, "Recompute", "checkpoint"),
    ({"amp": {"enable": True, "level": "O2"}}, "amp", "O1"),
    ({"passes": (Amp(),)}, "Amp", "amp="),
    ({"release": True}, "release", "release=False"),
    ({"passes": (Release(),)}, "Release", "release=False"),
    ({"layouts": {"part_weight": parse_spec("f32[16]", MESH)}}, "layouts", "shard_tensor"),
]


@pytest.mark.parametrize(("options", "asked", "write"), REFUSED)
def test_options_that_need_the_whole_step_are_refused(options: dict[str, Any], asked: str, write: str) -> None:
    def rank() -> Any:
        torch.manual_seed(0)
        model = mw.shard_layer(Model(), MESH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dist_model = mw.to_static(model, None, None, optimizer, mw.Strategy.of(**options, **PIECES))
        lies = [getattr(p, "spec", None) for p in model.parameters()]
        x = mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0)])
        with pytest.raises(StaticError):
            dist_model(x)
        assert dist_model.pieces is None
        with pytest.raises(StaticError) as caught:  # nothing is cached: the second call is refused like the first
            dist_model(x)
        assert dist_model.pieces is None
        assert lies == [getattr(p, "spec", None) for p in model.parameters()]
        assert all("forward" not in part.__dict__ for part in model.modules())
        model(x).backward()  # continues in eager mode
        return caught.value

    error: StaticError = mw.simulate(rank, 2)[0]
    assert asked in error.asked
    assert "full_graph=False" in error.asked
    assert "test_pieces_options.py" in error.found
    assert "torch.where" in error.write
    assert write in error.write
    assert error.why


@pytest.mark.parametrize("options", [case[0] for case in REFUSED if "layouts" not in case[0]])
def test_a_model_that_is_one_program_may_use_these_options(options: dict[str, Any]) -> None:
    def rank() -> Any:
        model = mw.shard_layer(Norm(), MESH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = mw.Strategy.of(**options, **PIECES)
        dist_model = mw.to_static(model, None, lambda out, y: F.mse_loss(out.float(), y), optimizer, strategy)
        dist_model(*[mw.shard_tensor(torch.ones(4, 8), MESH, [mw.Shard(0)]) for _ in range(2)])
        return dist_model.pieces

    assert mw.simulate(rank, 2)[0] is None
