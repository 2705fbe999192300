"""`full_graph=False`: code that cannot be captured runs as Python between programs, with the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.engine import StaticError
from meshwright.graph import CaptureError

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
ROWS = [mw.Shard(0)]
PIECES = mw.Strategy(full_graph=False)


class Asking(nn.Module):
    """A model with a branch in Python that depends on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden) if hidden.sum().item() > 0 else hidden * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
        self.asking = Asking()
        self.behind = nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.behind(self.asking(self.before(x))), labels)


def whole(x: Tensor) -> Tensor:
    return mw.unshard_dtensor(x.detach()) if isinstance(x, mw.DistTensor) else x.detach().clone()


def train(static: bool, full_graph: bool = False, on: Any = MESH) -> Any:
    torch.manual_seed(0)
    model = Model()
    if on is not None:
        first = model.before[0]
        first.weight = mw.shard_tensor(first.weight, MESH, [mw.Replicate(), mw.Shard(0)])
        mw.shard_layer(model, MESH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: grads.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    dist_model = mw.to_static(model, None, None, optimizer, mw.Strategy(full_graph=full_graph))
    losses: list[float] = []
    for n in (8, 8, 4, 12):
        torch.manual_seed(n)
        batch = [torch.randn(n, 8), torch.randint(0, 4, (n,))]
        batch = batch if on is None else [mw.shard_tensor(v, MESH, ROWS) for v in batch]
        if static:
            losses.append(dist_model(*batch).item())
            continue
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {name: whole(x) for name, x in model.state_dict().items()}
    return losses, values, grads, dist_model.pieces, "forward" in model.before.__dict__


@pytest.mark.parametrize(("on", "ranks"), [(None, 1), (MESH, 4)])
def test_pieces_have_the_numbers_of_eager_mode(on: Any, ranks: int) -> None:
    eager = mw.simulate(lambda: train(False, on=on), ranks)[0]
    static = mw.simulate(lambda: train(True, on=on), ranks)[0]
    assert static[0] == eager[0]
    assert all(torch.equal(static[1][name], value) for name, value in eager[1].items())  # running means, too
    assert len(eager[2]) == len(static[2]) == 4
    for ours, theirs in zip(static[2], eager[2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
    assert set(static[3].compiled) == {"before", "asking.first", "asking.second", "behind"}
    assert set(static[3].eager) == {"", "asking"}
    assert "test_pieces.py" in static[3].eager["asking"]
    assert not static[4]


def test_the_full_graph_is_required_by_default() -> None:
    with pytest.raises(CaptureError, match=r"test_pieces\.py"):
        mw.simulate(lambda: train(True, full_graph=True), 4)


class Around(nn.Module):
    """Python code around one part."""

    def __init__(self, part: nn.Module, use: Callable[[Any, Tensor], Any] = lambda part, x: part(x)) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), part
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        assert x.sum().item() < 1e9
        return self.use(self.part, x).square().mean()


Between = Callable[[Any, int], None]


def steps(make: Callable[[], nn.Module], static: bool, ranks: int, between: Between | None = None) -> Any:
    """Return losses and the state after four steps of two sizes, parts that ran as programs, and those in Python."""
    mesh = mw.ProcessMesh(list(range(ranks)), ["dp"])

    def rank() -> Any:
        torch.manual_seed(0)
        model = make() if ranks == 1 else mw.shard_layer(make(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dist_model = mw.to_static(model, None, None, optimizer, PIECES)
        losses: list[float] = []
        for step, n in enumerate((4, 4, 6, 4)):
            if between is not None:
                between(model, step)
            torch.manual_seed(step)
            x = torch.randn(n, 8) if ranks == 1 else mw.shard_tensor(torch.randn(n, 8), mesh, ROWS)
            if static:
                losses.append(dist_model(x).item())
                continue
            loss = model(x)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {name: whole(v) for name, v in model.state_dict().items()}, dist_model.pieces

    return mw.simulate(rank, ranks)[0]


def check(make: Callable[[], nn.Module], ranks: int, between: Between | None = None, exact: bool = True) -> Any:
    """Check that pieces give the numbers of eager mode, and return the pieces."""
    eager, static = (steps(make, how, ranks, between) for how in (False, True))
    close = 0.0 if exact else 1e-5
    torch.testing.assert_close(static[:2], eager[:2], rtol=close, atol=close)
    return static[2]


class Moving(nn.Module):
    """A part that replaces its buffers after the values for the backward pass were computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale: Tensor
        self.other: Tensor
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.register_buffer("other", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.scale
        self.scale, self.other = self.other, self.scale * 0.9
        return out + self.other.view(1, 8) * x


class Pair(NamedTuple):
    x: Any
    y: Any


class Tree(nn.Module):
    """A part that returns a tree: tensors twice, views, its argument, and other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"a": y, "more": [Pair(y, 3), (y.float(), None)], "flat": y.view(-1), "x": x}


def all_of_it(part: Any, x: Tensor) -> Tensor:
    found = part(x)
    (y, n), (z, none) = found["more"]
    assert isinstance(found["more"][0], Pair)
    assert none is None
    return found["a"] * n + y * z + found["flat"].view(y.shape) + found["x"]


def one_behind_the_other(part: Any, x: Tensor) -> Tensor:
    for layer in part:
        x = F.gelu(layer(x))
    return x


def ignoring_the_result(part: Any, x: Tensor) -> Tensor:
    part(x)
    return x * x


def in_other_orders(part: Any, x: Tensor) -> Tensor:
    """Return a part's result; neither the input nor the gradient of the output is contiguous."""
    return part(x.view(-1, 2, 4).transpose(0, 1)).transpose(1, 2).contiguous()


class Views(nn.Module):
    """A part whose results are views, each alone in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return h[:, 8:], (h * 2).transpose(0, 1)


def writing_to_views(part: Any, x: Tensor) -> Tensor:
    first, second = part(x)
    first[x > 1] = 0.5
    second.mul_(3)
    return first.tanh() + second.tanh().transpose(0, 1)[:, :8]


class Asked(nn.Module):
    """A module that belongs to two parents."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x).tanh()


class Twice(Around):
    def __init__(self) -> None:
        shared = nn.Linear(8, 8)
        super().__init__(shared)
        self.again = Asked(shared)

    def forward(self, x: Tensor) -> Tensor:
        assert x.sum().item() < 1e9
        return (self.again(self.part(x)) + self.part(self.first(x))).square().mean()


class Counting(nn.Module):
    """A part that returns a size, which differs in other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), x.shape[0]


class Config:
    """An object that a program cannot watch."""

    scale = 2.0


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, config: Config) -> Tensor:
        return self.inner(x) * config.scale


def configured() -> Any:
    config = Config()

    def use(part: Any, x: Tensor) -> Tensor:
        config.scale += 0.25
        return part(x, config)

    return use


def own_forward() -> nn.Module:
    layer = nn.Sequential(nn.Linear(8, 8))
    inner = layer.forward
    layer.forward = lambda input: inner(input) * 2
    return layer


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "compiled", "exact"),
    [
        (lambda: Around(Moving()), {"part"}, True),
        (lambda: Around(Tree(), all_of_it), {"part"}, False),
        (lambda: Around(Views(), writing_to_views), {"part"}, False),
        (
            lambda: Around(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), one_behind_the_other),
            {"part.0", "part.1"},
            True,
        ),
        (lambda: Around(nn.ReLU(inplace=True), ignoring_the_result), set(), True),
        (lambda: Around(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))), {"part"}, True),
        (Twice, {"part", "again"}, False),
        (lambda: Around(Counting(), lambda part, x: part(x)[0] * part(x)[1]), {"part.inner"}, True),
        (lambda: Around(Configured(), configured()), {"part.inner"}, True),
        (lambda: Around(own_forward()), {"part.0"}, True),
        (lambda: Around(nn.Linear(8, 8), lambda part, x: part(input=x)), set(), True),
        (
            lambda: Around(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()),
                lambda part, x: checkpoint(part, x, use_reentrant=True),
            ),
            {"part"},
            True,
        ),
        (lambda: Around(nn.Linear(4, 4), in_other_orders), {"part"}, False),
    ],
    ids=[
        "buffers",
        "tree",
        "views",
        "list",
        "writes",
        "inside",
        "shared",
        "size",
        "object",
        "own forward",
        "by name",
        "again",
        "orders",
    ],
)
def test_parts_may_have_any_inputs_and_outputs(make: Any, compiled: set[str], exact: bool, ranks: int) -> None:
    pieces = check(make, ranks, exact=exact)
    assert set(pieces.compiled) - {"first"} == compiled
    assert all(pieces.eager.values())


def freezes(model: Any, step: int) -> None:
    model.part[0].weight.requires_grad_(step % 2 == 1)


def drops(model: Any, step: int) -> None:
    model.part[1].p = 0.2 * (step % 3)


def swaps_a_layer(model: Any, step: int) -> None:
    if step == 1:
        model.part[2] = nn.Tanh()


def swaps_a_piece(model: Any, step: int) -> None:
    if step == 1:
        model.part = nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Tanh())


def swaps_a_parameter(model: Any, step: int) -> None:
    if step == 1:
        old, new = model.part[0].weight, nn.Parameter(torch.eye(8))
        cut = isinstance(old, mw.DistTensor)
        model.part[0].weight = mw.shard_tensor(new, old.spec.mesh, [mw.Replicate()]) if cut else new


def switches(model: Any, step: int) -> None:
    model.part[1].train(step % 2 == 0)


def hooks(model: Any, step: int) -> None:
    if step == 1:
        model.part[0].register_forward_hook(lambda module, args, out: out * 2)


def swaps_a_hook(model: Any, step: int) -> None:
    if step:
        model.hook.remove()
    model.hook = model.part[0].register_forward_hook(lambda module, args, out: out * step)


def hooks_backward(model: Any, step: int) -> None:
    if step == 1:
        model.part[0].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))


def hooks_a_parameter(model: Any, step: int) -> None:
    if step == 1:
        model.part[0].weight.register_hook(lambda grad: grad * 2)


def sets_a_number(model: Any, step: int) -> None:
    model.part[2].approximate = "none" if step % 2 else "tanh"


def freezes_all(model: Any, step: int) -> None:
    model.part.requires_grad_(step > 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "between",
    [
        freezes,
        drops,
        swaps_a_layer,
        swaps_a_piece,
        swaps_a_parameter,
        switches,
        hooks,
        hooks_backward,
        swaps_a_hook,
        hooks_a_parameter,
        sets_a_number,
        freezes_all,
    ],
)
def test_assumptions_of_a_piece_may_change(between: Between, ranks: int) -> None:
    pieces = check(lambda: Around(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())), ranks, between)
    assert "first" in pieces.compiled


def test_a_piece_is_reused_if_nothing_changed() -> None:
    def go() -> Any:
        model = Around(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        dist_model = mw.to_static(model, None, None, torch.optim.SGD(model.parameters(), lr=0.1), PIECES)
        found: list[Any] = []
        for _ in range(3):
            dist_model(torch.ones(4, 8))
            assert dist_model.pieces is not None
            found.append(dist_model.pieces.programs["part"])
        return found

    first, second, third = mw.simulate(go, 1)[0]
    assert len(first) == 2
    assert all(a is b is c for a, b, c in zip(first, second, third, strict=True))


def gradients_of_gradients(part: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = part(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out + grad.square().sum()


def test_gradients_of_gradients_are_refused() -> None:
    with pytest.raises(StaticError, match="create_graph=True through Tanh"):
        steps(lambda: Around(nn.Tanh(), gradients_of_gradients), True, 1)


def test_the_number_of_programs_is_bounded() -> None:
    def go() -> None:
        dropout = nn.Dropout(0.3)
        model = Around(nn.Sequential(nn.Linear(8, 8), dropout))
        dist_model = mw.to_static(model, strategy=mw.Strategy(full_graph=False, max_programs=2))
        for step in range(3):
            dropout.p = 0.1 * step
            dist_model(torch.ones(4, 8))

    with pytest.raises(StaticError, match="max_programs"):
        mw.simulate(go, 1)
