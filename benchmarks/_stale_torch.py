"""Kinds of change: torch's modes, flags and random state around a step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ._stale_case import Case, Change, Net, Run, attribute, calls, item, kind, kind_on_mesh, reads, switch


def around(case: Case, on: Callable[[float], AbstractContextManager[Any]], trains: bool = True) -> Case:
    """Return the case with a context manager around each step, made for the factor of the step."""
    now = [1.0]

    def change(factor: float) -> None:
        now[0] = factor
        case.change(factor)

    return replace(case, change=change, around=lambda: on(now[0]), trains=trains)


def around_if_on(case: Case, made: Callable[[], AbstractContextManager[Any]], trains: bool = True) -> Case:
    """Return the case with a context manager around each step whose factor is not 1."""
    return around(case, lambda factor: nullcontext() if factor == 1 else made(), trains)


def nothing(factor: float) -> None:
    """Change nothing: the context around the step is the change."""


def flag(run: Run, put: Callable[[Any], object], off: Any, on: Any) -> Change:
    """Return the change that sets a flag of torch, which the run restores."""
    run.callback(put, off)
    return switch(off, on, put)


# --- autocast --------------------------------------------------------------------------------------------------------


@kind_on_mesh
def autocast_around_the_step(run: Run) -> Case:
    return around_if_on(Case(Net(), nothing), lambda: torch.autocast("cpu", torch.bfloat16), trains=False)


@kind
def autocast_around_a_training_step(run: Run) -> Case:
    return around_if_on(Case(Net(), nothing), lambda: torch.autocast("cpu", torch.bfloat16))


@kind
def dtype_of_autocast(run: Run) -> Case:
    case = Case(Net(), nothing)
    dtypes = {1.0: torch.bfloat16}
    return around(case, lambda factor: torch.autocast("cpu", dtypes.get(factor, torch.float16)), trains=False)


@kind
def autocast_inside_forward(run: Run) -> Case:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
                return super().forward(x).float()

    model = Model(amp=False)
    return Case(model, lambda factor: setattr(model, "amp", factor != 1))


@kind
def autocast_read_in_forward(run: Run) -> Case:
    case = reads(run, lambda self: 2.0 if torch.is_autocast_enabled("cpu") else 1.0, nothing)
    return around_if_on(case, lambda: torch.autocast("cpu", torch.bfloat16), trains=False)


# --- gradients -------------------------------------------------------------------------------------------------------


@kind
def gradients_off_around_an_evaluation(run: Run) -> Case:
    case = reads(run, lambda self: 1.0 if torch.is_grad_enabled() else 2.0, nothing)
    return around_if_on(case, torch.no_grad, trains=False)


@kind
def inference_mode_around_an_evaluation(run: Run) -> Case:
    case = reads(run, lambda self: 2.0 if torch.is_inference_mode_enabled() else 1.0, nothing)
    return around_if_on(case, torch.inference_mode, trains=False)


@kind
def gradients_off_inside_forward(run: Run) -> Case:
    class Model(Net):
        def between(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.learns):
                return x.tanh()

    model = Model(learns=True)
    return Case(model, lambda factor: setattr(model, "learns", factor == 1))


@kind
def saved_tensors_hooks_around_the_step(run: Run) -> Case:
    def pack(x: Tensor) -> Tensor:
        return x * 2.0

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    return around_if_on(Case(Net(), nothing), lambda: hooks(pack, lambda x: x))


# --- modes -----------------------------------------------------------------------------------------------------------


class Doubles(TorchFunctionMode):
    """A mode that doubles the result of tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if getattr(func, "__name__", "") == "tanh" else out


class DoublesOperators(TorchDispatchMode):
    """A mode that doubles the result of the operator tanh."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if func is torch.ops.aten.tanh.default else out


@kind
def function_mode_around_the_step(run: Run) -> Case:
    return around_if_on(Case(Net(), nothing), Doubles)


@kind
def dispatch_mode_around_the_step(run: Run) -> Case:
    return around_if_on(Case(Net(), nothing), DoublesOperators)


# --- defaults and flags ----------------------------------------------------------------------------------------------


@kind
def default_dtype(run: Run) -> Case:
    change = flag(run, torch.set_default_dtype, torch.float32, torch.bfloat16)
    return reads(run, lambda self: torch.tensor(4.0 / 3.0), change)


@kind
def default_dtype_of_a_tensor_that_forward_makes(run: Run) -> Case:
    change = flag(run, torch.set_default_dtype, torch.float32, torch.bfloat16)
    return calls(lambda self, x: x.tanh() * torch.full((6,), 4.0 / 3.0), change)


@kind
def default_device(run: Run) -> Case:
    change = flag(run, torch.set_default_device, None, "cpu:0")
    return reads(run, lambda self: 1.0 if str(torch.get_default_device()) == "cpu" else 2.0, change)


@kind
def deterministic_algorithms(run: Run) -> Case:
    change = flag(run, torch.use_deterministic_algorithms, False, True)
    return reads(run, lambda self: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0, change)


@kind
def precision_of_float32_products(run: Run) -> Case:
    before = torch.get_float32_matmul_precision()
    change = flag(run, torch.set_float32_matmul_precision, before, "medium")
    return reads(run, lambda self: 1.0 if torch.get_float32_matmul_precision() == before else 2.0, change)


@kind
def flag_of_a_backend(run: Run) -> Case:
    def put(value: bool) -> None:
        torch.backends.mkldnn.deterministic = value

    change = flag(run, put, False, True)
    return reads(run, lambda self: 2.0 if torch.backends.mkldnn.deterministic else 1.0, change)


@kind
def backend_of_attention(run: Run) -> Case:
    """Return a training in bfloat16, where the backends of attention round differently."""

    def between(self: Any, x: Tensor) -> Tensor:
        spread = torch.arange(16.0).sin().view(1, 1, 16, 1) * 3.0
        q, k, v = (x.view(1, 1, 4, 6).repeat(1, 1, 4, 1).add(i).mul(spread).sin().bfloat16() for i in range(3))
        return F.scaled_dot_product_attention(q, k, v)[0, 0, :4].float() * 10.0

    backends = {1.0: SDPBackend.FLASH_ATTENTION}
    case = calls(between, nothing)
    return around(case, lambda factor: sdpa_kernel(backends.get(factor, SDPBackend.MATH)), trains=False)


@kind
def backend_of_attention_read_in_forward(run: Run) -> Case:
    case = reads(run, lambda self: 1.0 if torch.backends.cuda.flash_sdp_enabled() else 2.0, nothing)
    return around_if_on(case, lambda: sdpa_kernel(SDPBackend.MATH))


# --- random numbers --------------------------------------------------------------------------------------------------


@kind_on_mesh
def seed_set_between_steps(run: Run) -> Case:
    return calls(lambda self, x: self.drop(x), lambda factor: torch.manual_seed(int(factor)), drop=nn.Dropout(0.5))


@kind
def state_of_the_generator_set(run: Run) -> Case:
    state = torch.get_rng_state()
    return calls(lambda self, x: self.drop(x), lambda factor: torch.set_rng_state(state), drop=nn.Dropout(0.5))


@kind
def numbers_drawn_between_steps(run: Run) -> Case:
    return calls(lambda self, x: x + torch.randn(4, 6), lambda factor: torch.rand(3))


@kind
def generator_of_the_model_seeded(run: Run) -> Case:
    generator = torch.Generator().manual_seed(0)
    return calls(
        lambda self, x: x * torch.rand(6, generator=self.generator),
        lambda factor: generator.manual_seed(int(factor)),
        generator=generator,
    )


@kind
def initial_seed_read_in_forward(run: Run) -> Case:
    torch.manual_seed(1)
    return reads(run, lambda self: float(torch.initial_seed()), lambda factor: torch.manual_seed(int(factor)))


# --- user-defined operators, and attributes of tensors ---------------------------------------------------------------

OPERATOR = {"factor": 1.0}


@torch.library.custom_op("stale::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * OPERATOR["factor"]


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@kind
def global_that_an_operator_reads(run: Run) -> Case:
    run.set_item(OPERATOR, "factor", 1.0)
    return calls(lambda self, x: scaled(x.detach()) + x, item(OPERATOR, "factor"))


@kind
def attribute_of_a_tensor(run: Run) -> Case:
    factor: Any = torch.ones(())
    factor.scale = 1.0
    return reads(run, lambda self: self.factor * self.factor.scale, attribute(factor, "scale"), factor=factor)


@kind
def attribute_of_a_parameter(run: Run) -> Case:
    model = Net()
    model.b.weight.scale = 1.0
    model.scale = lambda: model.b.weight.scale
    return Case(model, attribute(model.b.weight, "scale"))


# --- user-defined context managers -----------------------------------------------------------------------------------


@contextmanager
def double_set(of: dict[str, float]) -> Generator[None]:
    """Set a value of a dict inside."""
    of["scale"] = 2.0
    try:
        yield
    finally:
        of["scale"] = 1.0


@kind
def dict_set_around_the_step(run: Run) -> Case:
    settings = {"scale": 1.0}
    case = reads(run, lambda self: self.settings["scale"], nothing, settings=settings)
    return around_if_on(case, lambda: double_set(settings))
