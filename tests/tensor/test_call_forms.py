"""Forms of calls that torch permits: results by `out=`, sizes as a tuple, devices by a context, scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.tensor.core.shared_elements import share_elements

MESH = mw.ProcessMesh(range(2), ["x"])
VALUE = torch.arange(12.0).reshape(4, 3)


def _laid(value: Tensor = VALUE, placement: mw.Placement | None = None) -> Tensor:
    return mw.shard_tensor(value, MESH, [placement or mw.Shard(0)])


def on_two(program: Callable[[], Any]) -> list[Any]:
    return mw.simulate(program, 2)


def test_results_are_written_to_out_in_its_own_layout() -> None:
    def program() -> tuple[Any, ...]:
        x, total = _laid(), _laid(torch.zeros(4, 3), mw.Shard(1))
        values, places = _laid(torch.zeros(4)), _laid(torch.zeros(4, dtype=torch.int64), mw.Replicate())
        same = torch.add(x, x, out=total) is total
        torch.max(x, dim=1, out=(values, places))
        return same, total.tolist(), values.tolist(), places.tolist(), total.placements

    wanted = True, (2 * VALUE).tolist(), VALUE.amax(1).tolist(), [2] * 4, (mw.Shard(1),)
    assert on_two(program) == [wanted] * 2


def _written_by_two_operands() -> list[Any]:
    """Return torch's operators of two tensors that write to the first one, but for those that replace its memory."""
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if "aten::" in name
    }
    packets = (getattr(torch.ops.aten, name, None) for name in sorted(names - {"set_", "set_data"}))
    operators = (getattr(each, overload) for each in packets for overload in getattr(each, "overloads", list)())
    return [op for op in operators if _has_two_operands(op._schema)]


def _has_two_operands(schema: Any) -> bool:
    needed = [(a.name, str(a.type), a.is_write) for a in schema.arguments if not a.has_default_value()]
    return len(needed) == 2 and needed[0] == ("self", "Tensor", True) and needed[1][1:] == ("Tensor", False)


def test_tensors_that_a_call_writes_to_may_be_passed_by_keyword() -> None:
    """Also in later calls, which have a plan."""

    def written(op: Any, place: Callable[[Tensor], Tensor]) -> list[Any] | str:
        x, y = place(VALUE.clone()), place(VALUE + 1)
        _, second = (a.name for a in op._schema.arguments[:2])
        try:
            for _ in range(2):
                op(**{second: y, "self": x})
        except mw.MeshwrightError:
            return "refused"
        except (NotImplementedError, RuntimeError) as error:
            return type(error).__name__
        return x.tolist()

    operators = _written_by_two_operands()
    assert len(operators) > 50
    expected = [written(op, Tensor.clone) for op in operators]
    for found in on_two(lambda: [written(op, _laid) for op in operators]):
        for op, ours, theirs in zip(operators, found, expected, strict=True):
            assert ours == theirs or (ours == "refused" and isinstance(theirs, str)), op


def test_a_resize_to_the_same_shape_returns_the_tensor() -> None:
    def program() -> tuple[bool, ...]:
        x = _laid()
        return x.resize_((4, 3)) is x, x.resize_(4, 3) is x, x.resize_as_(VALUE) is x

    assert on_two(program) == [(True,) * 3] * 2


def test_asarray_with_requires_grad() -> None:
    assert on_two(lambda: torch.asarray(_laid(), requires_grad=True).requires_grad) == [True] * 2


def test_constructors_follow_a_device_context() -> None:
    with torch.device("meta"):
        found = [torch.tensor([1.0]), torch.asarray([1.0]), torch.as_tensor([1.0]), torch.zeros(2)]
    assert [x.device.type for x in found] == ["meta"] * 4


def test_constructors_are_scripted() -> None:
    def made(x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0]) + torch.as_tensor(3.0) + x

    assert torch.jit.script(made)(torch.ones(2)).tolist() == [5.0, 6.0]


def test_the_memory_of_a_meta_tensor_has_no_numbers() -> None:
    def program() -> tuple[str, int]:
        memory = _laid(torch.ones(4, 3, device="meta")).untyped_storage()
        return memory.device.type, memory.nbytes()

    assert on_two(program) == [("meta", 48)] * 2


def test_a_view_with_arguments_by_name_has_the_memory_of_its_base() -> None:
    def program() -> tuple[bool, Any]:
        x = _laid()
        view = torch.narrow(x, dim=0, start=1, length=2)
        return view.data_ptr() - x.data_ptr() == 12, np.asarray(view).tolist()

    assert on_two(program) == [(True, VALUE[1:3].tolist())] * 2


class _Names(TorchDispatchMode):
    """A mode that records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_gets_calls_whose_plan_is_known() -> None:
    def program() -> tuple[list[str], list[str]]:
        x, seen = _laid(), [_Names(), _Names()]
        for names in seen:
            _ = x.sin() + x
            with names:
                _ = x.sin() + x
        return seen[0].seen, seen[1].seen

    for first, second in on_two(program):
        assert first == second
        assert "aten.sin.default" in first


@pytest.mark.parametrize("name", ["all", "even", "apart"])
def test_elements_in_common(name: str) -> None:
    memory = torch.zeros(10)
    a, b, wanted = {
        "all": (memory, memory[2:4], True),
        "even": (memory[::2], memory[1::2], False),
        "apart": (memory[:5], memory[5:], False),
    }[name]
    assert share_elements(a, b) is share_elements(b, a) is wanted


def test_a_masked_write_to_a_view_of_inference_mode() -> None:
    @torch.inference_mode()
    def written(x: Tensor) -> list[Any]:
        view = x[1:3]
        view[view > 4] = torch.arange(4.0)
        return [x.tolist(), view.tolist()]

    wanted = written(VALUE.clone())
    assert on_two(lambda: written(_laid())) == [wanted] * 2


def test_a_plain_tensor_in_a_backward_pass_is_refused_by_the_name_of_the_call() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return torch.atan2(_laid(), torch.ones(4, 3))

    def program() -> None:
        x = torch.ones(4, 3, requires_grad=True)
        Scaled.apply(x).sum().backward()

    with pytest.raises(mw.MeshwrightError, match="atan2 inside a backward pass"):
        on_two(program)


def test_foreach_of_computed_floats_is_not_planned_for_one_value() -> None:
    def program() -> list[Any]:
        xs = [_laid(), _laid()]
        return [[t.tolist() for t in torch._foreach_clamp_min(xs, low)] for low in (3.0, 5.0)]

    assert on_two(program) == [[[VALUE.clamp_min(low).tolist()] * 2 for low in (3.0, 5.0)]] * 2


def test_no_result_is_written_if_one_does_not_fit() -> None:
    def program() -> list[Any]:
        values, places = _laid(torch.zeros(4)), _laid(torch.zeros(3, dtype=torch.int64), mw.Replicate())
        with pytest.raises(mw.MeshwrightError, match="out"):
            torch.max(_laid(), dim=1, out=(values, places))
        return values.tolist()

    assert on_two(program) == [[0.0] * 4] * 2


def test_a_trace_is_refused_even_if_the_plan_of_the_call_is_known() -> None:
    def program() -> None:
        x = _laid()
        _ = x.sin()
        with pytest.raises(mw.MeshwrightError, match="inside make_fx"):
            make_fx(torch.sin)(x)

    on_two(program)
