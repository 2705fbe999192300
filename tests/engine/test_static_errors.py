"""Models that cannot become a program get an error of four parts, and stay unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError
from meshwright.graph import CaptureError, ProgramError, SideEffectError
from meshwright.layout import MeshError

MESH = mw.ProcessMesh([0, 1], ["dp"])
ROWS = [mw.Shard(0)]
KEPT: list[Any] = []


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.count, self.sizes, self.table = 0, [1, 2], {"x": [1]}

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x))).square().mean()


def model(between: Callable[[Any, Tensor], Any]) -> type[Base]:
    """Return a model with this function between its layers."""

    def then(self: Any, x: Tensor) -> Tensor:
        out = between(self, x)
        return out if isinstance(out, Tensor) else x

    return type(between.__name__, (Base,), {"between": then})


def counts(self: Any, x: Tensor) -> None:
    self.count += 1


def collects(self: Any, x: Tensor) -> None:
    self.sizes.append(3)
    self.table["x"].append(2)
    self.table["y"] = 1


def grows(self: Any, x: Tensor) -> None:
    self.extra = nn.Linear(4, 4)


def adds_a_buffer(self: Any, x: Tensor) -> None:
    self.register_buffer("other", torch.ones(3))


def changes_a_part(self: Any, x: Tensor) -> None:
    self.b = nn.Linear(4, 2)


def replaces_a_parameter(self: Any, x: Tensor) -> None:
    self.b.weight = nn.Parameter(torch.ones(2, 4))


def resizes_a_buffer(self: Any, x: Tensor) -> None:
    self.seen = torch.zeros(5)


def rolls_dice(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def seeds(self: Any, x: Tensor) -> None:
    torch.manual_seed(0)


def asks_for_a_number(self: Any, x: Tensor) -> Tensor:
    return x * float(x.sum())


def branches(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def branches_on_chance(self: Any, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.5 else -x


def branches_on_dice_it_holds(self: Any, x: Tensor) -> Tensor:
    return x if bool((torch.zeros(1).uniform_() + 1 > 1.5).any()) else -x


def branches_on_what_it_wrote(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask[0] = x.sum()
    return x if bool(mask[0] > 0) else -x


def selects(self: Any, x: Tensor) -> Tensor:
    return x * int(x.argmax())


def trains_inside(self: Any, x: Tensor) -> None:
    x.sum().backward()


def reads_gradients(self: Any, x: Tensor) -> Tensor:
    return x if self.a.weight.grad is None else x * 2


def asks_for_parts(self: Any, x: Tensor) -> Tensor:
    return x.to_local()


def differentiates_by_a_transform(self: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda t: t.square().sum())(x)


def draws_from_a_distribution(self: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x.exp(), validate_args=True).rsample()  # torch.compile changes the default


def takes_parts(self: Any, x: Tensor) -> Tensor:
    return mw.dtensor_from_local(x, MESH, ROWS)


def brings_a_distributed_tensor(self: Any, x: Tensor) -> Tensor:
    return x * KEPT[-1]


def brings_a_parameter(self: Any, x: Tensor) -> Tensor:
    return x * KEPT[-1]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def writes_in_a_function(self: Any, x: Tensor) -> Tensor:
    return InPlace.apply(x * 1)


def picks_rows(self: Any, x: Tensor) -> Any:
    return x - x[x > 0].mean()


def sizes_by_numbers(self: Any, x: Tensor) -> Any:
    return x + torch.zeros(x.argmax(), 1).sum()


SIDE_EFFECTS = [
    (counts, "count was 0, and is 1"), (collects, r"sizes|table"),
    (grows, "'extra'"), (adds_a_buffer, "'other'"), (changes_a_part, "_modules"), (replaces_a_parameter, "b.weight"),
    (resizes_a_buffer, "seen"), (rolls_dice, "Python's random generator"), (seeds, "torch's random generator"),
]  # fmt: skip
WITHOUT_NUMBERS = "torch.where"
NUMBERS = [
    asks_for_a_number, branches, branches_on_chance, branches_on_dice_it_holds, branches_on_what_it_wrote, selects,
    picks_rows, sizes_by_numbers,
]  # fmt: skip
OTHERS = [
    (trains_inside, CaptureError, "the step itself runs the backward pass"), (reads_gradients, CaptureError, r"\.grad"),
    (asks_for_parts, CaptureError, "local_map"), (takes_parts, mw.MeshwrightError, "local_map"),
    (brings_a_distributed_tensor, CaptureError, "a buffer of the model"),
    (brings_a_parameter, CaptureError, "into the model"),
    (writes_in_a_function, CaptureError, "return a new tensor"),
    (differentiates_by_a_transform, CaptureError, r"torch\.autograd\.grad"),
    (draws_from_a_distribution, CaptureError, "validate_args=False"),
]  # fmt: skip


def state(module: Any) -> Any:
    return (
        module.count,
        list(module.sizes),
        {k: list(v) if isinstance(v, list) else v for k, v in module.table.items()},
        [*module._modules],
        {k: id(v) for k, v in (*module.named_parameters(), *module.named_buffers())},
        sorted(module.__dict__),
        module.training,
        random.getstate(),
        bytes(torch.get_rng_state().numpy()),
    )


def refused(between: Callable[[Any, Tensor], Any], kind: type[mw.MeshwrightError], match: str) -> mw.MeshwrightError:
    """Return the error; check that the model is unchanged, and runs eagerly and, without refused code, as a program."""

    def go() -> mw.MeshwrightError:
        KEPT[:] = [
            mw.shard_tensor(torch.ones(4), MESH, ROWS)
            if "distributed" in between.__name__
            else nn.Parameter(torch.ones(4))
        ]
        module: Any = mw.shard_layer(model(between)(), MESH)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        static = mw.to_static(module, None, None, optimizer)
        x, before, apply = torch.ones(4, 3), state(module), torch.autograd.Function.apply.__func__
        with pytest.raises(kind, match=match) as caught:
            static(x)
        assert state(module) == before
        assert torch.autograd.Function.apply.__func__ is apply
        type(module).between = Base.between
        static(x)
        module(x).backward()
        optimizer.step()
        return caught.value

    return mw.simulate(go, 2)[0]


@pytest.mark.parametrize(("between", "match"), SIDE_EFFECTS, ids=[b.__name__ for b, _ in SIDE_EFFECTS])
def test_side_effects(between: Any, match: str) -> None:
    refused(between, SideEffectError, match)


@pytest.mark.parametrize("between", NUMBERS, ids=lambda b: b.__name__)
def test_values_of_tensors_in_python(between: Any) -> None:
    error = refused(between, CaptureError, WITHOUT_NUMBERS)
    assert f"{__file__}:" in error.asked
    first = between.__code__.co_firstlineno
    assert first < int(error.asked.rpartition(":")[2]) <= first + 3


@pytest.mark.parametrize(("between", "kind", "match"), OTHERS, ids=[b.__name__ for b, *_ in OTHERS])
def test_other_refused_code(between: Any, kind: Any, match: str) -> None:
    refused(between, kind, match)


class SetsOnce(Base):
    """A model that sets an attribute in its first pass."""

    kind: str | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind, self.table["rows"] = "numbers", [len(x)]
        return x if self.kind == "numbers" else -x


class GoesAnotherWayOnce(Base):
    """A model whose first pass differs from later ones."""

    first = True

    def between(self, x: Tensor) -> Tensor:
        x = x * 2 if self.first else x
        self.first = False
        return x


def test_attributes_set_in_the_first_pass_stay() -> None:
    def go() -> tuple[Any, ...]:
        module = mw.shard_layer(SetsOnce(), MESH)
        mw.to_static(module, None, None, torch.optim.SGD(module.parameters(), lr=0.1))(torch.ones(4, 3))
        return module.kind, module.table

    assert mw.simulate(go, 2) == [("numbers", {"x": [1], "rows": [4]})] * 2


def test_a_different_first_pass_is_refused() -> None:
    def go() -> bool:
        module = mw.shard_layer(GoesAnotherWayOnce(), MESH)
        with pytest.raises(SideEffectError, match="first"):
            mw.to_static(module, None, None, torch.optim.SGD(module.parameters(), lr=0.1))(torch.ones(4, 3))
        return module.first

    assert mw.simulate(go, 2) == [True, True]


def on_two(fn: Callable[[], Any]) -> Any:
    return mw.simulate(fn, 2)


def step(module: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: Any = None) -> Any:
    mw.shard_layer(module, MESH)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    static = mw.to_static(module, None, loss, optimizer)
    return [static(torch.ones(4, 3)) for _ in range(2)]  # the first step makes states


def of_another_model() -> None:
    step(Base(), torch.optim.SGD(Base().parameters(), lr=0.1))


def made_before_the_marks() -> None:
    module = Base()
    step(module, torch.optim.SGD(module.parameters(), lr=0.1))


def on_a_mesh_beyond_the_world() -> None:
    class Elsewhere(Base):
        def between(self, x: Tensor) -> Tensor:
            return mw.reshard(x, mw.ProcessMesh([0, 1, 2, 3], ["x"]), ROWS)

    step(Elsewhere())


def without_one_loss() -> None:
    step(nn.Linear(3, 2))


def with_backward_hooks() -> None:
    module = Base()
    module.a.register_full_backward_hook(lambda *_: None)
    step(module)


def with_accumulate_hooks() -> None:
    module = mw.shard_layer(Base(), MESH)
    module.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    step(module)


def with_a_hook_that_uses_the_forward_pass() -> None:
    class Hooked(Base):
        def between(self, x: Tensor) -> Tensor:
            inner = x.detach().requires_grad_()
            outer = inner.tanh()
            x.register_hook(lambda grad: torch.autograd.grad(outer, inner, grad, retain_graph=True)[0])
            return x

    step(mw.shard_layer(Hooked(), MESH))


def with_a_closure() -> None:
    module = Base()
    mw.shard_layer(module, MESH)
    step(module, torch.optim.LBFGS(module.parameters()))


def with_numbers_of_states() -> None:
    module = mw.shard_layer(Base(), MESH)
    step(module, torch.optim.RAdam(module.parameters()))


def with_a_step_of_its_own() -> None:
    module = mw.shard_layer(Base(), MESH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = lambda: None
    step(module, optimizer)


def training_without_an_optimizer() -> None:
    mw.to_static(Base()).train()


def asked_before_the_first_call() -> None:
    _ = mw.to_static(Base()).program


def with_a_batch_of_arrays() -> None:
    mw.to_static(Base())(np.ones((4, 3)))


def with_a_batch_norm_that_reads_its_counter() -> None:
    step(nn.Sequential(nn.BatchNorm1d(3, momentum=None), Base()))


def with_a_transform_over_stages() -> None:
    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(super().forward)(x).square().mean()

    module = mw.split_pipeline(Layers(nn.Linear(3, 4), nn.Linear(4, 2)), mw.ProcessMesh([0, 1], ["pp"]))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2})
    mw.to_static(module, None, None, optimizer, strategy)(torch.ones(4, 3))


CASES: list[tuple[Callable[[], Any], type[mw.MeshwrightError], str]] = [
    (of_another_model, CaptureError, "after the marks"), (made_before_the_marks, CaptureError, "optimizer after"),
    (on_a_mesh_beyond_the_world, MeshError, "ranks=4"), (without_one_loss, CaptureError, "loss="),
    (with_backward_hooks, CaptureError, "register_hook"), (with_accumulate_hooks, CaptureError, "register_step_pre"),
    (with_a_hook_that_uses_the_forward_pass, CaptureError, "save_for_backward"),
    (with_a_closure, CaptureError, "another optimizer"), (with_numbers_of_states, CaptureError, "capturable"),
    (with_a_step_of_its_own, CaptureError, "subclass"), (training_without_an_optimizer, StaticError, "optimizer"),
    (with_a_batch_of_arrays, StaticError, "as_tensor"),
    (with_a_batch_norm_that_reads_its_counter, CaptureError, "set momentum"),
    (with_a_transform_over_stages, CaptureError, "a call inside a transform of torch.func"),
    (asked_before_the_first_call, StaticError, r"dist_model\(\*batch\)"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "match"), CASES, ids=[c[0].__name__ for c in CASES])
def test_invalid_training_steps_are_refused(act: Any, kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        on_two(act)
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))


def test_a_program_that_breaks_the_laws() -> None:
    from meshwright.graph import Node, Program, Value, verify

    a, b = Value("a", (2,), torch.float32), Value("b", (2,), torch.float32)
    with pytest.raises(ProgramError, match="read before it is computed"):
        verify(Program((), (Node(torch.ops.aten.neg.default, (a,), {}, b),), b))
