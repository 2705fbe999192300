"""Each transform of torch on distributed tensors gives the numbers of one device, or raises one clear error.

The names below are the rows of the table in docs/concepts/transforms.md.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.func import functional_call, functionalize, jacfwd, jvp, linearize, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw
from meshwright.layout import MeshwrightError
from meshwright.tensor import CompileError, MemoryAccessError, OperationError, TraceError

from .oracle import STYLES, Lay, LayOut, Style, compare, run

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "transforms.md"
MESHES = {
    "one rank": Style((1,), (mw.Shard(0),)),
    "uneven": Style((4,), (mw.Shard(0),)),
    "columns": STYLES["columns"],
    "terms": STYLES["terms"],
    "grid": STYLES["grid"],
}
FEW = ("one rank", "uneven", "terms")
"""The meshes for rows whose tests compile or are refused: none of these looks at the axes of a mesh."""
QUIET = pytest.mark.filterwarnings(
    "ignore:.*on whole tensors",
    "ignore:`torch.jit",
    "ignore:.*jit",
    "ignore:Sparse",
    "ignore:The PyTorch API of",
    "ignore:Anomaly Detection",
    "ignore:is_fx_tracing",
    "ignore:.*flex_attention",
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute",
)
Program = Callable[[Lay], Any]
WORKS: dict[str, list[Program]] = {}
REFUSED: dict[str, list[tuple[Program, type[MeshwrightError]]]] = {}


def works(row: str) -> Callable[[Program], Program]:
    return lambda program: WORKS.setdefault(row, []).append(program) or program


def refused(row: str, error: type[MeshwrightError]) -> Callable[[Program], Program]:
    return lambda program: REFUSED.setdefault(row, []).append((program, error)) or program


def network(lay: Lay) -> nn.Module:
    return lay.module(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)))


def square(lay: Lay, grad: bool = False) -> Tensor:
    return lay(torch.randn(6, 6), grad=grad)


def trained(net: Callable[[Tensor], Tensor], parameters: Any, lay: Lay) -> Any:
    """Return the output of a network, and all gradients."""
    x = square(lay, True)
    out = net(x)
    out.square().sum().backward()
    return out, x.grad, [p.grad.clone() for p in parameters]


# --- torch.compile -----------------------------------------------------------------------------------------------


def _compiled(lay: Lay, backend: str) -> Any:
    net = network(lay)
    if lay.style is None:
        backend = "eager"  # Inductor takes a minute
    return trained(torch.compile(net, backend=backend), net.parameters(), lay)


for backend in ("eager", "aot_eager", "inductor"):
    works("torch.compile(model)")(partial(_compiled, backend=backend))


@works("torch.compile(model)")
def _compiled_in_place(lay: Lay) -> Any:
    net = network(lay)
    net.compile(backend="aot_eager")
    return trained(net, net.parameters(), lay)


@works("torch.compile(model)")
def _sharded_after_compiling(lay: Lay) -> Any:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    compiled = torch.compile(net, backend="aot_eager")
    compiled(torch.ones(2, 6))
    lay.module(net)
    return trained(compiled, net.parameters(), lay)


@works("torch.compile(step)")
def _compiled_step(lay: Lay) -> Any:
    net, x = network(lay), square(lay)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [step(x).clone() for _ in range(3)], list(net.parameters())


@works("torch.compile(optimizer.step)")
def _compiled_optimizer(lay: Lay) -> Any:
    net, x = network(lay), square(lay)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        step()
    return list(net.parameters())


@works("torch.compile of a function")
def _compiled_function(lay: Lay) -> Any:
    @torch.compile(backend="aot_eager")
    def double(x: Tensor) -> Tensor:
        return (x.sin() * 2).sum()

    return double(torch.arange(4.0)), double(square(lay)), double(torch.arange(4.0))


@works("torch.compile of a function")
def _compiled_function_that_shards(lay: Lay) -> Any:
    return torch.compile(lambda x: lay(x * 2).sin() * 3, backend="aot_eager")(torch.randn(4, 4))


@refused("torch.compile(fullgraph=True)", CompileError)
def _one_graph(lay: Lay) -> Any:
    return torch.compile(network(lay), backend="eager", fullgraph=True)(square(lay))


@refused("torch.cond, flex_attention", CompileError)
def _condition(lay: Lay) -> Any:
    x = square(lay)
    return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))


@refused("torch.cond, flex_attention", CompileError)
def _flex(lay: Lay) -> Any:
    q = lay(torch.randn(1, 2, 8, 4))
    return flex_attention(q, q, q)


# --- forward mode ------------------------------------------------------------------------------------------------


@works("torch.autograd.forward_ad")
def _dual(lay: Lay) -> Any:
    x, t, w = square(lay), square(lay), square(lay)
    with forward_ad.dual_level():
        out = (forward_ad.make_dual(x, t).sin() @ w).softmax(-1).sum(0)
        primal, tangent = forward_ad.unpack_dual(out)
        return primal.clone(), tangent.clone()


@works("torch.autograd.forward_ad")
def _dual_with_plain_tangent(lay: Lay) -> Any:
    with forward_ad.dual_level():
        out = (forward_ad.make_dual(square(lay), torch.randn(6, 6)) * 3).mean()
        return forward_ad.unpack_dual(out).tangent.clone()


@works("torch.autograd.forward_ad")
def _dual_parameters(lay: Lay) -> Any:
    net, x = network(lay), square(lay)
    with forward_ad.dual_level():
        duals = {k: forward_ad.make_dual(p, lay(torch.ones(p.shape))) for k, p in net.named_parameters()}
        return forward_ad.unpack_dual(functional_call(net, duals, x)).tangent.clone()


@works("torch.autograd.forward_ad")
def _dual_and_backward(lay: Lay) -> Any:
    x = square(lay, True)
    with forward_ad.dual_level():
        out = (forward_ad.make_dual(x, torch.ones(6, 6)).sin() @ square(lay)).sum()
        forward_ad.unpack_dual(out).tangent.backward()
    return x.grad


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tangents[0] * 3 * ctx.saved_tensors[0] ** 2


@works("torch.autograd.forward_ad")
def _dual_through_a_function(lay: Lay) -> Any:
    with forward_ad.dual_level():
        out = Cube.apply(forward_ad.make_dual(square(lay), square(lay)))
        return forward_ad.unpack_dual(out.sum(0)).tangent.clone()


@works("torch.func.jvp, jacfwd, hessian")
def _forward_transforms(lay: Lay) -> Any:
    w = square(lay)
    return (
        jvp(lambda x: x.sin() @ w, (torch.randn(6, 6),), (torch.randn(6, 6),)),
        jacfwd(lambda x: (x.sin() @ w).sum())(square(lay)),
        torch.func.hessian(lambda x: ((x @ w) ** 3).sum())(torch.randn(6)),
    )


@refused("torch.func.linearize", TraceError)
def _linearized(lay: Lay) -> Any:
    return linearize(lambda x: x.sin(), square(lay))[0]


# --- other transforms of torch.func ------------------------------------------------------------------------------


@works("torch.vmap")
def _vmapped(lay: Lay) -> Any:
    x, y = square(lay), square(lay)
    return (
        torch.vmap(lambda a, b: a @ b, in_dims=(0, 1))(x, y),
        torch.vmap(lambda a: a * 2, in_dims=1, out_dims=1, chunk_size=2)(x),
        torch.vmap(lambda a: a + torch.rand(6), randomness="different")(x),
        torch.vmap(lambda a: F.dropout(a, 0.5), randomness="same")(x),
    )


@works("torch.func.grad, vjp, jacrev")
def _reverse_transforms(lay: Lay) -> Any:
    out, pull = torch.func.vjp(lambda x: x.sin() @ x, square(lay))
    return (
        torch.func.grad_and_value(lambda x: (x.sin() @ x).sum())(square(lay)),
        torch.func.jacrev(lambda x: (x.sin() @ x).sum(0))(square(lay)),
        out,
        pull(square(lay)),
    )


@works("functional_call, stack_module_state")
def _stacked_modules(lay: Lay) -> Any:
    nets = [lay.module(nn.Linear(6, 6)) for _ in range(3)]
    parameters, _ = stack_module_state(nets)
    return torch.vmap(lambda p, x: functional_call(nets[0], p, x), (0, None))(parameters, torch.randn(6, 6))


@refused("torch.func.functionalize", OperationError)
def _functionalized(lay: Lay) -> Any:
    return functionalize(lambda x: x.clone().add_(1))(square(lay))


# --- torch.autograd ----------------------------------------------------------------------------------------------


@works("autograd.grad(is_grads_batched=True)")
def _batched(lay: Lay) -> Any:
    x = square(lay, True)
    y = x.sin().sum(0)
    plain = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True, retain_graph=True)
    return plain, torch.autograd.grad(y, x, lay(torch.eye(6)), is_grads_batched=True)


@works("torch.autograd.functional")
def _functional(lay: Lay) -> Any:
    def column(x: Tensor) -> Tensor:
        return x.sin().sum(0)

    def product(x: Tensor) -> Tensor:
        return (x.sin() @ x).sum()

    return (
        functional.jacobian(column, square(lay)),
        functional.jacobian(column, square(lay), vectorize=True),
        functional.hessian(lambda x: (x**3).sum(), lay(torch.randn(4)), vectorize=True),
        functional.jvp(torch.sin, square(lay), square(lay)),
        functional.vjp(column, square(lay), lay(torch.randn(6))),
        functional.hvp(product, square(lay), square(lay)),
        functional.vhp(product, square(lay), square(lay)),
    )


@refused('torch.autograd.functional, strategy="forward-mode"', OperationError)
def _functional_forward(lay: Lay) -> Any:
    return functional.jacobian(torch.sin, square(lay), vectorize=True, strategy="forward-mode")


@works("torch.autograd.gradcheck")
def _gradcheck(lay: Lay) -> Any:
    x = lay(torch.randn(4, 4, dtype=torch.float64), grad=True)
    return (
        torch.autograd.gradcheck(lambda x: x.sin() @ x, (x,), check_forward_ad=True, fast_mode=True),
        torch.autograd.gradgradcheck(lambda x: x.sin() * x, (x,), fast_mode=True),
    )


@works("create_graph, backward(inputs=...)")
def _second_derivative(lay: Lay) -> Any:
    x, w = square(lay, True), square(lay, True)
    (g,) = torch.autograd.grad((x.sin() @ x).sum(), x, create_graph=True)
    torch.autograd.backward([g.square().sum(), (x @ w).sum()], inputs=[x])
    return x.grad, w.grad is None


@works("gradient edges, register_multi_grad_hook")
def _edges(lay: Lay) -> Any:
    x, found = square(lay, True), list[Any]()
    y = x.sin() @ x
    edges = get_gradient_edge(x), get_gradient_edge(y)
    grads = torch.autograd.grad(y.square().sum(), edges, retain_graph=True)
    register_multi_grad_hook([x, y], found.extend)
    y.square().sum().backward()
    return grads, found


@refused("hooks on x.grad_fn, register_backward_hook", MemoryAccessError)
def _hook_of_a_node(lay: Lay) -> Any:
    node: Any = square(lay, True).sin().grad_fn
    return node.register_hook(lambda ins, outs: None)


@refused("hooks on x.grad_fn, register_backward_hook", MemoryAccessError)
def _old_hook_of_a_module(lay: Lay) -> Any:
    net = network(lay)
    net.register_backward_hook(lambda module, ins, outs: None)
    return net(square(lay, True))


@works("torch.utils.checkpoint")
def _checkpointed(lay: Lay) -> Any:
    net = network(lay)
    again = partial(checkpoint, net, use_reentrant=True)
    return [trained(f, net.parameters(), lay) for f in (again, partial(checkpoint, net, use_reentrant=False))]


@works("saved-tensor hooks, anomaly mode")
def _hooked(lay: Lay) -> Any:
    net = network(lay)
    with save_on_cpu(), torch.autograd.detect_anomaly():
        first = trained(net, net.parameters(), lay)
    with saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return first, trained(net, net.parameters(), lay)


@works("saved-tensor hooks, anomaly mode")
def _saved_tensors_that_change(lay: Lay) -> Any:
    x = square(lay, True)
    with allow_mutation_on_saved_tensors():
        y = x.exp()
        total = y.sum()
        total.item()  # other ranks enter the context, too
        y.zero_()
        total.backward()
    return x.grad


@works("torch.inference_mode")
def _inference(lay: Lay) -> Any:
    net = network(lay)
    with torch.inference_mode():
        y = net(square(lay))
        y.add_(1)
        return y.clone(), y[1:3].clone(), y.is_inference()


# --- traces ------------------------------------------------------------------------------------------------------


def scripted(x: Tensor) -> Tensor:
    return x.sin() @ x


@works("torch.jit.script of a function")
def _script(lay: Lay) -> Any:
    return torch.jit.script(scripted)(square(lay))


@refused("torch.jit.script of a sharded module", TraceError)
def _script_module(lay: Lay) -> Any:
    return torch.jit.script(network(lay))


@refused("torch.jit.script of a sharded module", TraceError)
def _sharded_script(lay: Lay) -> Any:
    return lay.module(torch.jit.script(nn.Linear(6, 6)))


@refused("torch.jit.trace", TraceError)
def _jit_trace(lay: Lay) -> Any:
    w = square(lay)
    w.sin(), torch.ones(6, 6) @ w
    return torch.jit.trace(lambda x: x.sin() @ w, (torch.randn(6, 6),))


@refused("make_fx", TraceError)
def _make_fx(lay: Lay) -> Any:
    x = square(lay)
    x.sin()
    return make_fx(torch.sin)(x)


@works('torch.fx.symbolic_trace, make_fx(tracing_mode="fake"), torch.export')
def _global_traces(lay: Lay) -> Any:
    net, x = network(lay), square(lay)
    return (
        torch.fx.symbolic_trace(net)(x),
        make_fx(lambda a: a.sin() @ a, tracing_mode="fake")(x)(x * 2),
        torch.export.export(net, (x,)).module()(x * 2),
    )


@works('torch.fx.symbolic_trace, make_fx(tracing_mode="fake"), torch.export')
def _export_with_distributed_inputs(lay: Lay) -> Any:
    return torch.export.export(network(lay), (square(lay),)).module()(square(lay))


@refused("torch.export(strict=True)", CompileError)
def _strict_export(lay: Lay) -> Any:
    return torch.export.export(network(lay), (square(lay),), strict=True)


# --- modes -------------------------------------------------------------------------------------------------------


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@works("TorchFunctionMode, torch.device as a context")
def _function_mode(lay: Lay) -> Any:
    x = square(lay)
    with Calls() as calls, torch.device("cpu"):
        return (x.sin() @ x).sum() + torch.zeros_like(x), calls.names


@works("TorchDispatchMode, FlopCounterMode")
def _dispatch_mode(lay: Lay) -> Any:
    net = network(lay)
    with Operators(), FlopCounterMode(display=False):
        return trained(net, net.parameters(), lay)


# --- sparse and nested tensors -----------------------------------------------------------------------------------

DENSE = torch.tensor([[1.0, 0, 2], [0, 0, 3], [0, 4, 0]])
INDICES = torch.tensor([[0, 1, 1, 2], [2, 0, 2, 1]])


@works("sparse tensors")
def _sparse(lay: Lay) -> Any:
    x, values, y = (
        lay(DENSE, grad=True),
        lay(torch.tensor([3.0, 4, 5, 6]), grad=True),
        lay(torch.randn(3, 4), grad=True),
    )
    out = torch.sparse.mm(x.to_sparse(), y) + torch.sparse_coo_tensor(lay(INDICES), values, (3, 3)).to_dense() @ y
    out = out + torch.sparse_coo_tensor(INDICES, values, (3, 3)) @ y + DENSE.to_sparse() @ y
    out.square().sum().backward()
    return out, x.grad, values.grad, y.grad


@works("sparse tensors")
def _compressed(lay: Lay) -> Any:
    rows, columns, values = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, 2, 3, 4])
    layouts = {"layout": torch.sparse_csr}
    return (
        torch.sparse_csr_tensor(lay(rows), lay(columns), lay(values)).to_dense(),
        torch.sparse_compressed_tensor(rows, lay(columns), values, **layouts).to_dense(),
        lay(DENSE).to_sparse_csr().to_dense(),
    )


@works("nested tensors")
def _nested(lay: Lay) -> Any:
    a, b = lay(torch.randn(2, 4), grad=True), lay(torch.randn(3, 4), grad=True)
    copied = [torch.nested.nested_tensor([a, b], layout=lo).to_padded_tensor(0) for lo in (torch.strided, torch.jagged)]
    loss = sum(
        torch.nested.as_nested_tensor([a, b], layout=lo).to_padded_tensor(0).square().sum()
        for lo in (torch.strided, torch.jagged)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    joined = torch.nested.nested_tensor_from_jagged(lay(torch.randn(5, 4)), lay(torch.tensor([0, 2, 5])))
    return copied, a.grad, b.grad, joined.to_padded_tensor(0)


# --- the tests ---------------------------------------------------------------------------------------------------


@cache
def on_one_device(program: Program) -> Any:
    return run(program, Lay())


@QUIET
@pytest.mark.parametrize(
    ("row", "style"), [(row, style) for row in WORKS for style in (FEW if row.startswith("torch.compile") else MESHES)]
)
def test_transforms_give_the_numbers_of_one_device(row: str, style: str) -> None:
    for program in WORKS[row]:
        torch.compiler.reset()
        expected = on_one_device(program)
        for found in mw.simulate(run, MESHES[style].ranks, program, LayOut(MESHES[style])):
            compare(found, expected, {"rtol": 1e-4, "atol": 1e-5})


@QUIET
@pytest.mark.parametrize("style", FEW)
@pytest.mark.parametrize("row", REFUSED)
def test_unsupported_transforms_give_one_clear_error(row: str, style: str) -> None:
    for program, error in REFUSED[row]:
        torch.compiler.reset()
        started = time.process_time()
        with pytest.raises(error, match="fix: "):
            mw.simulate(run, MESHES[style].ranks, program, LayOut(MESHES[style]))
        gc.collect()
        assert time.process_time() - started < 10  # the search does not end


def test_the_page_has_a_row_for_each_transform() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = {name.strip(" `"): what.strip() for name, what in rows}
    for row in WORKS:
        assert told[row].startswith(("works", "runs")), row
    for row, cases in REFUSED.items():
        assert told[row] == f"{cases[0][1].__name__}", row
