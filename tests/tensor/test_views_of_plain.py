"""A result that aliases a plain argument stays its view, and views that a schema omits are views on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import RAN_WHOLE

LAYOUTS: list[list[Any]] = [[mw.Replicate()], [mw.Shard(0)], [mw.Shard(1)], [mw.Partial()]]


def methods() -> dict[str, Callable[..., Any]]:
    """Return every method of a tensor, and every operator, that takes another tensor for its shape or dtype by name."""
    names = [n for n in dir(Tensor) if n.endswith("_as") and not n.startswith("_")]
    found: dict[str, Callable[..., Any]] = {f"Tensor.{n}": getattr(Tensor, n) for n in names}
    found["Tensor.to(other)"] = Tensor.to
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and _takes_shape(schema):
            overload = schema.overload_name or "default"
            found[f"aten.{name}.{overload}"] = getattr(getattr(torch.ops.aten, name), overload)
    return found


def _takes_shape(schema: Any) -> bool:
    """True for a function of two tensors whose result aliases the first one, and which writes to neither."""
    tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
    rest = [a for a in schema.arguments if a not in tensors and not a.has_default_value()]
    aliases = [r for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    return len(tensors) == 2 and not rest and len(aliases) == 1 == len(schema.returns)


METHODS = methods()


def outcome(func: Callable[..., Any], plain: Tensor, other: Tensor) -> Any:
    """Return the memory after writes through either side; "raises" if one device refuses the call."""
    try:
        view = func(plain, other)
    except (RuntimeError, NotImplementedError, TypeError):
        return "raises"
    plain.add_(1)
    first = view.detach().clone()
    view.mul_(3) if torch.is_tensor(view) and 0 not in view.stride() else None
    return [first, plain, view]


def as_plain(x: Any) -> Any:
    return [mw.unshard_dtensor(t) if isinstance(t, mw.DistTensor) else t for t in x] if isinstance(x, list) else x


def test_the_walk_finds_the_functions() -> None:
    assert {"Tensor.view_as", "Tensor.expand_as", "Tensor.reshape_as", "Tensor.type_as"} <= METHODS.keys()
    assert {"aten.view_as.default", "aten.expand_as.default", "aten.to.other"} <= METHODS.keys()


@pytest.mark.filterwarnings("ignore:non-inplace resize_as")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_view_of_a_plain_tensor_keeps_its_memory(name: str, layout: list[Any]) -> None:
    for shape in ((3, 4), (4,), (12,)):
        wanted = outcome(METHODS[name], torch.ones(shape), torch.ones(3, 4))

        def on_rank(shape: tuple[int, ...] = shape) -> Any:
            other = mw.shard_tensor(torch.ones(3, 4), mw.ProcessMesh([0, 1], ["x"]), layout)
            return as_plain(outcome(METHODS[name], torch.ones(shape), other))

        for found in mw.simulate(on_rank, 2):
            assert isinstance(found, str) == isinstance(wanted, str)
            if found != "raises":
                torch.testing.assert_close(found, wanted)


def test_a_rank_outside_the_mesh_views_its_plain_tensor_too() -> None:
    def on_rank() -> Any:
        flat = torch.zeros(4)
        view = flat.view_as(mw.shard_tensor(torch.ones(2, 2), mw.ProcessMesh([0], ["x"]), [mw.Replicate()]))
        view.add_(1)
        return type(view), flat.tolist()

    assert mw.simulate(on_rank, 2) == [(Tensor, [1.0] * 4)] * 2


HIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "a transpose": lambda x: torch.einsum("ij->ji", x),
    "the same": lambda x: torch.einsum("ij->ij", x),
    "a diagonal": lambda x: torch.einsum("ii->i", x[:, :4]),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[:, 0]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "sum_to_size": lambda x: x.sum_to_size(4, 4),
    "dropout2d": lambda x: torch.nn.functional.dropout2d(x[None, None], training=False),
    "atleast_3d": torch.atleast_3d,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_view_missing_in_its_schema_is_a_view_on_every_rank(name: str, layout: list[Any]) -> None:
    def written(lay: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = lay(torch.arange(16.0).view(4, 4)) * 1
        rows = x.reshape(2, 8)  # updated after the write, on every rank or on none
        view = HIDDEN[name](x)
        if 0 not in view.stride():
            view.neg_()
        return [x, view, rows]

    wanted = written(lambda x: x)
    for ranks in (2, 3):

        def on_rank(ranks: int = ranks) -> Any:
            mesh = mw.ProcessMesh(range(ranks), ["x"])  # of three ranks one holds no part
            return as_plain(written(lambda x: mw.shard_tensor(x, mesh, layout)))

        for found in mw.simulate(on_rank, ranks):
            torch.testing.assert_close(found, wanted)


def test_a_distributed_number_may_be_a_size_of_a_plain_view() -> None:
    def on_rank() -> Any:
        mesh = mw.ProcessMesh([0, 1], ["x"])
        count, flat = mw.shard_tensor(torch.tensor(2), mesh, [mw.Replicate()]), torch.arange(6.0)
        flat.as_strided((count,), (3,)).add_(1)
        like = mw.shard_tensor(torch.ones(6), mesh, [mw.Shard(0)])
        assert flat.resize_as_(like) is flat
        return flat.tolist(), tuple(flat.resize_as_(like[:2]).shape), tuple(flat.resize_(count, 2).shape)

    RAN_WHOLE.clear()
    with pytest.warns(mw.RanWholeWarning):
        assert mw.simulate(on_rank, 2) == [([1.0, 1, 2, 4, 4, 5], (2,), (2, 2))] * 2


def test_the_error_in_a_hook_has_the_remedy_for_a_table_of_numbers() -> None:
    def on_rank(table: Tensor | None) -> Any:
        mesh = mw.ProcessMesh([0, 1], ["x"])
        x = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)]).requires_grad_()
        numbers = torch.arange(4.0) if table is None else mw.shard_tensor(table, mesh, [mw.Replicate()])
        y = x * 2
        y.register_hook(lambda g: g * numbers)
        y.sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    with pytest.raises(mw.PlainInBackwardError, match=r"mw\.shard_tensor\(table"):
        mw.simulate(lambda: on_rank(None), 2)
    assert mw.simulate(lambda: on_rank(torch.arange(4.0)), 2) == [[0.0, 2.0, 4.0, 6.0]] * 2
