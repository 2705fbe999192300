"""Views of a base whose history changes, and tensors of inference mode: values and errors are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

Put = Callable[[Tensor], Tensor]
VALUES = torch.arange(1.0, 13.0).view(4, 3)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, :2],
    "transposed": lambda x: x.t(),
    "part of a part": lambda x: x[1:][:, 1:],
}
LAYOUTS: list[tuple[int, Any]] = [(1, mw.Shard(0)), (2, mw.Shard(1)), (2, mw.Partial()), (7, mw.Shard(0))]


def facts(v: Tensor, *others: Tensor) -> Iterator[Callable[[], Any]]:
    """Yield questions about a view, then about a backward pass from the view, then about gradients."""
    yield lambda: v.requires_grad
    yield lambda: v.is_leaf
    yield lambda: v.grad_fn is not None
    yield lambda: v.detach().tolist()
    yield lambda: (v * v).sum().backward()
    for x in (v, *others):
        yield lambda x=x: x.detach().tolist()
        yield lambda x=x: None if x.grad is None else x.grad.tolist()


def base_requires_grad_later(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    b = put(VALUES)
    v = view(b)
    b.requires_grad_()
    yield lambda: v.mul_(2)
    with torch.no_grad():
        v.mul_(2)
    yield from facts(v, b)


def leaf_view_of_a_written_base(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    b, w = put(VALUES), put(VALUES / 3).requires_grad_()
    v = view(b).requires_grad_()
    b.mul_(w)
    yield from facts(v, w)


def view_without_grad_of_a_written_base(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    b, w = put(VALUES), put(VALUES / 3).requires_grad_()
    with torch.no_grad():
        v = view(b)
    b.mul_(w)
    yield lambda: v.mul_(w[0, 0])
    yield lambda: (v * w[0, 0]).sum().backward()
    yield from facts(v)


def view_without_grad_of_a_leaf(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    w, u = put(VALUES / 3).requires_grad_(), put(VALUES[0, 0]).requires_grad_()
    with torch.no_grad():
        v = view(w)
        v.mul_(2)
    yield lambda: (v * u).sum().backward()
    yield from facts(v, w)


def view_of_inference_mode(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    b, u = put(VALUES), put(VALUES[0, 0]).requires_grad_()
    with torch.inference_mode():
        v = view(b)
        v.mul_(2)
    yield lambda: [v.is_inference(), v._version, b._version]
    yield lambda: v.mul_(2).tolist()
    yield lambda: (v * u).sum().backward()
    yield from facts(v, b, u)


def base_of_inference_mode(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    u = put(VALUES[0, 0]).requires_grad_()
    with torch.inference_mode():
        b = put(VALUES) * 2
    v = view(b)
    yield v.is_inference
    yield lambda: v._version
    yield lambda: (v * u).sum().backward()
    yield lambda: (v + u).sum().backward()
    yield lambda: (v.clone() * u).sum().backward()
    yield lambda: u.grad is None or u.grad.tolist()


def operand_of_inference_mode(put: Put, view: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Any]]:
    w = put(VALUES / 3).requires_grad_()
    with torch.inference_mode():
        x = put(VALUES) * 2
    yield lambda: (view(w) * view(x)).sum().backward()
    yield lambda: (view(w) + view(x)).sum().backward()
    yield lambda: (view(w).t() @ view(x)).sum().backward()
    yield lambda: torch.nn.functional.linear(w, x).sum().backward()
    yield lambda: (w * 1).mul_(x).sum().backward()
    yield lambda: w.grad is None or w.grad.tolist()


PROGRAMS = [
    base_requires_grad_later,
    leaf_view_of_a_written_base,
    view_without_grad_of_a_written_base,
    view_without_grad_of_a_leaf,
    view_of_inference_mode,
    base_of_inference_mode,
    operand_of_inference_mode,
]


def answers(program: Callable[..., Iterator[Callable[[], Any]]], view: str, put: Put) -> list[Any]:
    found: list[Any] = []
    for question in program(put, VIEWS[view]):
        try:
            answer = question()
        except RuntimeError:
            answer = "raises"
        found.append(None if isinstance(answer, Tensor) else answer)
    return found


def test_the_base_of_a_view_is_the_first_tensor_as_on_one_device() -> None:
    def program(x: Tensor) -> list[Any]:
        views = [x[1:], x[1:][:, 1:], x[1:][1], x.t()[:, 1:], x[:1].expand(4, 3), x[1:].reshape(-1), x[1:].detach()]
        return [(v._base is x, v._is_view()) for v in views[:-1]] + [views[-1]._base is None]

    wanted = program(VALUES.clone())
    for placement in (mw.Shard(0), mw.Shard(1), mw.Partial()):
        mesh = mw.ProcessMesh(range(3), ["x"])
        found = mw.simulate(lambda p=placement, m=mesh: program(mw.shard_tensor(VALUES, m, [p])), 3)
        assert found == [wanted] * 3


def test_a_tensor_that_requires_grad_is_not_resized() -> None:
    def program() -> None:
        x = mw.shard_tensor(VALUES, mw.ProcessMesh(range(2), ["x"]), [mw.Shard(0)]).requires_grad_()
        with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
            x.resize_(x.shape)

    mw.simulate(program, 2)


def rounded(x: Any) -> Any:
    return [rounded(y) for y in x] if isinstance(x, list) else round(x, 3) if isinstance(x, float) else x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("ranks", "placement"), LAYOUTS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_view_has_the_history_of_one_device(program: Any, ranks: int, placement: Any) -> None:
    def on_rank() -> list[Any]:
        mesh = mw.ProcessMesh(range(ranks), ["x"])

        def put(x: Tensor) -> Tensor:
            return mw.shard_tensor(x.clone(), mesh, [placement if x.ndim else mw.Replicate()])

        return [answers(program, view, put) for view in VIEWS]

    wanted = [answers(program, view, torch.clone) for view in VIEWS]
    for found in mw.simulate(on_rank, ranks):
        for view, mine, goal in zip(VIEWS, found, wanted, strict=True):
            assert rounded(mine) == rounded(goal), view
