"""The same two rules, an RMS norm and a linear layer with its activation, for us and for the two rewriters in torch.

`lines` counts the lines of the functions below: the code that a user writes for a rule.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from meshwright.graph import Program, Rewrite, rewrite, to_fx

aten = torch.ops.aten


def our_norm() -> list[Rewrite]:
    def find(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w

    def put(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w, eps)

    return [Rewrite("norm", find, put, "... d, d")]


def our_linear() -> list[Rewrite]:
    def find(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x @ w.mT + b)

    def put(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w, b))

    return [Rewrite("linear", find, put, "... k, n k, n")]


def fx_norm() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def find(x: Any, w: Any, dims: Any, eps: Any) -> Any:
        squares = aten.mul.Tensor(x, x)
        mean = aten.mean.dim(squares, dims, True)
        root = aten.sqrt.default(aten.add.Tensor(mean, eps))
        return aten.mul.Tensor(aten.div.Tensor(x, root), w)

    def put(x: Any, w: Any, dims: Any, eps: Any) -> Any:
        return rms_of_last_dim(x, w, eps)  # the shape is unknown here, so the operator needs a function

    return find, put


def rms_of_last_dim(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return aten.rms_norm.default(x, [x.shape[-1]], w, eps)


def fx_linear() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def find(x: Any, w: Any, b: Any) -> Any:
        return aten.relu.default(aten.add.Tensor(aten.matmul.default(x, aten.t.default(w)), b))

    def put(x: Any, w: Any, b: Any) -> Any:
        return aten.relu.default(aten.linear.default(x, w, b))

    return find, put


def inductor_norm() -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor], dict[str, float]]:
    def find(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w

    def put(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w, eps)

    return find, put, [torch.empty(2, 16, 32), torch.empty(32)], {"eps": 1e-6}


def inductor_linear() -> tuple[Callable[..., Any], Callable[..., Any], list[Tensor], dict[str, float]]:
    def find(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x @ w.t() + b)

    def put(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w, b))

    return find, put, [torch.empty(2, 16, 32), torch.empty(32, 32), torch.empty(32)], {}


def lines(fn: Callable[..., Any]) -> int:
    """Return the number of code lines in a function's body."""
    return sum(bool(line.strip()) for line in inspect.getsource(fn).splitlines()[1:])


Apply = Callable[[Program], int]
"""A function that rewrites a program, and returns how often a rule applied."""


def ours(rules: Sequence[Rewrite]) -> Apply:
    return lambda program: max(len(rewrite(program, rules).changes) - 1, 0)


def by_fx(rule: tuple[Callable[..., Any], Callable[..., Any]]) -> Apply:
    def apply(program: Program) -> int:
        return len(fx.subgraph_rewriter.replace_pattern(to_fx(program), *rule))

    return apply


def by_inductor(rule: tuple[Callable[..., Any], Callable[..., Any], list[Tensor], dict[str, float]]) -> Apply:
    """Return a function that applies the rule; Inductor reads the rule here, outside of the measured time."""
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

    find, put, examples, numbers = rule
    patterns = PatternMatcherPass()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        register_replacement(find, put, examples, fwd_only, patterns, scalar_workaround=numbers)

    def apply(program: Program) -> int:
        module = with_shapes(program)
        return patterns.apply(module.graph)

    return apply


def with_shapes(program: Program) -> fx.GraphModule:
    """Return the program in Inductor's form: traced below autograd, every node with its fake value."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(i.value.shape, dtype=i.value.dtype) for i in program.inputs]
        return make_fx(to_fx(program))(*fakes)
