"""`verify`: equal for a right model on a mesh; names the module of a wrong rule or a wrong local function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import DifferenceError

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
SUMS = {"*.up": mw.ColwiseParallel(), "*.down": mw.RowwiseParallel()}


class Twice(torch.autograd.Function):
    """The identity, with twice the right gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Block(nn.Module):
    """Three places for a fault: between its layers, forward or backward, and in its own result."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.3)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.spoil(self.act(self.up(x)), "between")
        return self.spoil(self.drop(self.down(hidden)), "result") + x

    def spoil(self, x: Tensor, where: str) -> Tensor:
        if not isinstance(x, mw.DistTensor) or not self.wrong.startswith(where):
            return x
        if self.wrong.endswith("backward"):
            return mw.local_map(Twice.apply, [x.placements], process_mesh=MESH, out_shapes=[x.shape])(x)
        return mw.local_map(
            lambda a: a * (1 + mw.get_rank() // 2), [x.placements], process_mesh=MESH, out_shapes=[x.shape]
        )(x)


def net(*wrong: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(how) for how in wrong)).double()


def verified(model: nn.Module, mesh: mw.ProcessMesh = MESH, rows: int = 5, **how: Any) -> Any:
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    return mw.verify(model, [x], mesh=mesh, marks=mw.Parallelism(SUMS), **how)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (4, 1), (3, 2)])
def test_a_right_model_is_equal(shape: tuple[int, int]) -> None:
    mesh = mw.ProcessMesh(torch.arange(shape[0] * shape[1]).reshape(shape).tolist(), ["dp", "tp"])
    found = verified(net("", ""), mesh)
    assert found.equal, str(found)
    assert found.compared > 40
    assert str(found).startswith(f"equal: {found.compared} tensors on {mesh!r}")
    found.check()


def test_the_callers_random_state_is_unchanged() -> None:
    model, state = net(""), torch.get_rng_state()
    mw.verify(model, [torch.ones(4, 6, dtype=torch.float64)], mesh=MESH, marks=mw.Parallelism(SUMS))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("wrong", "first", "look"),
    [
        ("between", "input of 1.down", "the forward pass of 1 (Block) before that call"),
        ("result", "output of 1", "the forward pass of 1 (Block): its inputs are right"),
        ("between backward", "gradient of the output of 1.act", "the code after 1.act (GELU), in 1 (Block)"),
        ("result backward", "gradient of the output of 1.drop", "the code after 1.drop (Dropout), in 1 (Block)"),
    ],
)
def test_a_wrong_local_function_is_found(wrong: str, first: str, look: str) -> None:
    found = verified(net("", wrong, ""))
    assert not found.equal
    assert found.first.name == first
    assert look in found.first.look
    assert first in str(found)
    with pytest.raises(DifferenceError, match=first):
        found.check()
    if wrong.endswith("backward"):
        assert "2 times the numbers of one device" in found.first.why


def test_a_wrong_rule_is_found() -> None:
    @torch.library.custom_op("verified::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x / x.sum(0, keepdim=True)

    torch.library.register_fake("verified::scaled", torch.empty_like)
    scaled.register_autograd(lambda ctx, grad: grad)
    mw.register_rule("verified.scaled", "r c -> r c")

    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(x)

    model = nn.Sequential(nn.Linear(6, 6), Scales(), nn.Linear(6, 6))
    found = mw.verify(model, [torch.rand(4, 6)], mesh=MESH, marks=mw.Parallelism())
    assert found.first is not None
    assert (found.first.what, found.first.path) == ("output", "1")
    assert "1 (Scales)" in found.first.look


def test_verify_with_marks_a_loss_and_a_distributed_batch() -> None:
    def marks(model: nn.Module, mesh: mw.ProcessMesh) -> None:
        mw.shard_layer(model, mesh, lambda _, layer, mesh: None)

    def lay(batch: Any, mesh: mw.ProcessMesh) -> Any:
        return [mw.shard_tensor(x, mesh, [mw.Shard(0)]) for x in batch]

    model, batch = nn.Linear(3, 2), [torch.randn(7, 3), torch.randn(7, 2)]
    right = mw.verify(model, batch, nn.functional.mse_loss, mesh=MESH, marks=marks, lay=lay)
    assert right.equal, str(right)
    wrong = mw.verify(
        model,
        batch,
        lambda out, y: (
            mw.local_map(lambda a, b: ((a - b) ** 2).mean(), [[mw.Partial("avg")]], process_mesh=MESH)(out, y)
            if isinstance(out, mw.DistTensor)
            else nn.functional.mse_loss(out, y)
        ),
        mesh=MESH,
        marks=marks,
        lay=lay,
    )
    assert wrong.first is not None
    assert wrong.first.name == "loss"  # uneven rows: the mean of the means is not the mean
    assert mw.verify(model, batch, nn.functional.mse_loss, mesh=MESH, marks=marks, lay=lay, rtol=-1.0).first is not None


def test_an_error_names_the_module() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, mw.DistTensor):
                raise ValueError("lost")
            return x

    with pytest.raises(ValueError, match="lost") as caught:
        mw.verify(nn.Sequential(nn.Linear(2, 2), Fails()), [torch.ones(4, 2)], mesh=MESH, marks=mw.Parallelism())
    assert caught.value.__notes__[0].endswith(" in 1")


def test_rounding_by_cancellation_is_no_difference() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
    torch.manual_seed(0)
    assert mw.verify(model, [torch.randn(5, 4)], mesh=MESH, marks=mw.Parallelism()).equal
    stages = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
    assert mw.verify(net("", "").float(), [torch.randn(4, 6)], mesh=stages, marks=mw.Parallelism()).equal
