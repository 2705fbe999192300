"""Models with one difficulty each, captured by torch's three functions and by ours: models captured wrong.

Each pair has a process of its own. The model is captured and called twice; losses and gradients of both calls are
compared with the model's own. A capture that silently gives other numbers is worse than one that is refused.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outcome = tuple[Tensor, list[Tensor]]
"""Loss, and the parameters' gradients."""
Step = Callable[[], Outcome]
ROOT = Path(__file__).parents[1]


# --- models with one difficulty each ---------------------------------------------------------------------------


@functools.cache
def table(length: int) -> Tensor:
    """Return angles that are computed once; a capture must not leave its own tensors in this cache."""
    return torch.outer(torch.arange(length), torch.arange(1, 9)).float().cos()


class Cached(nn.Linear):
    """A model that uses a table from a cache."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * table(len(x))


class Counting(nn.Linear):
    """A model that counts its calls in Python."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Branching(nn.Linear):
    """A model with a branch that depends on the value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y - 1


class Setting(nn.Linear):
    """A model with a running sum in a buffer, which it replaces."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("total", torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().mean(0)
        return super().forward(x) + self.total


class Tenfold(torch.autograd.Function):
    """A function that returns x, with ten times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 10


class OwnFunction(nn.Linear):
    """A model that calls a user-defined autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return Tenfold.apply(super().forward(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "table in a cache": lambda: Cached(8, 8),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "counter in Python": lambda: Counting(8, 8),
    "branch on a tensor": lambda: Branching(8, 8),
    "buffer set anew": lambda: Setting(8, 8),
    "own autograd.Function": lambda: OwnFunction(8, 8),
}


# --- ways to capture -------------------------------------------------------------------------------------------


def outcome(model: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor) -> Outcome:
    loss = F.mse_loss(model(x), x)
    return loss.detach(), list(torch.autograd.grad(loss, list(parameters)))


def symbolic_trace(model: nn.Module, x: Tensor) -> tuple[int, Step]:
    module = torch.fx.symbolic_trace(model)
    return len(module.graph.nodes), lambda: outcome(module, list(module.parameters()), x)


def exported(model: nn.Module, x: Tensor, strict: bool) -> tuple[int, Step]:
    program = torch.export.export(model, (x,), strict=strict)
    module = program.module()
    return len(program.graph.nodes), lambda: outcome(module, list(module.parameters()), x)


def dynamo(model: nn.Module, x: Tensor) -> tuple[int, Step]:
    nodes: list[int] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes.append(len(module.graph.nodes))
        return module.forward

    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    compiled(x)
    torch._dynamo.reset()
    again = torch.compile(model, backend=backend)
    return sum(nodes), lambda: outcome(again, list(model.parameters()), x)


def make_fx(model: nn.Module, x: Tensor) -> tuple[int, Step]:
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(parameters: dict[str, Tensor], x: Tensor) -> Outcome:
        return outcome(lambda x: torch.func.functional_call(model, parameters, x), list(parameters.values()), x)

    parameters = dict(model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    module = make_fx(step)(parameters, x)
    model.load_state_dict(before)
    return len(module.graph.nodes), lambda: module(parameters, x)


def ours(model: nn.Module, x: Tensor) -> tuple[int, Step]:
    from meshwright.graph import capture, record_gradients, runner

    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x)

    captured = capture(model, loss, [x])
    program = record_gradients(captured, 0, 1)
    run, slots = runner(program), {slot.name: slot.tensor for slot in captured.slots}

    def step() -> Outcome:
        given = [x if i.role == "batch" else slots[i.name] for i in program.inputs]
        with torch.no_grad():
            outputs, written = run(*given)
            for target, value in zip([t for t, _ in program.writes], written, strict=True):
                next(g for i, g in zip(program.inputs, given, strict=True) if i.value is target).copy_(value)
        return outputs["out"], [outputs["grads"][name] for name, _ in model.named_parameters()]

    return len(captured.program.nodes), step


PATHS: dict[str, Callable[[nn.Module, Tensor], tuple[int, Step]]] = {
    "fx.symbolic_trace": symbolic_trace,
    "torch.export, strict": functools.partial(exported, strict=True),
    "torch.export": functools.partial(exported, strict=False),
    "dynamo, own backend": dynamo,
    "make_fx on the step": make_fx,
    "ours": ours,
}


# --- one pair --------------------------------------------------------------------------------------------------


def tried(path: str, name: str) -> dict[str, Any]:
    """Return the outcome of one model on one path: "right", "wrong" or "refused"."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    begin = time.perf_counter()
    try:
        nodes, step = PATHS[path](model, x)
        seconds = time.perf_counter() - begin
        found = [step() for _ in range(2)]
    except Exception as error:
        said = str(error).replace(f"{ROOT}/", "").strip().splitlines()
        return {"is": "refused", "by": type(error).__name__, "says": said[0][:200] if said else ""}
    try:
        right = same(found, [outcome(reference, list(reference.parameters()), x) for _ in range(2)])
    except Exception as error:
        return {"is": "wrong", "says": f"the model itself is broken afterwards: {type(error).__name__}"}
    return {"is": "right" if right else "wrong", "nodes": nodes, "seconds": round(seconds, 2)}


def same(found: Sequence[Outcome], expected: Sequence[Outcome]) -> bool:
    """True if losses and gradients of all calls are equal, up to rounding."""
    pairs = [
        pair for a, b in zip(found, expected, strict=True) for pair in zip([a[0], *a[1]], [b[0], *b[1]], strict=True)
    ]
    return all(torch.allclose(a, b) for a, b in pairs)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of models that are silently captured wrong; every pair is in the details."""
    models = list(MODELS)[:3] if quick else list(MODELS)
    rows = {path: {name: measured(path, name) for name in models} for path in PATHS}
    wrong = {path: Counter(cell["is"] for cell in row.values()) for path, row in rows.items()}
    return {
        "name": "capture_paths",
        "value": wrong["ours"]["wrong"],
        "goal": "no model captured into another one",
        "ok": wrong["ours"]["wrong"] == 0 and wrong["ours"]["right"] > 0,
        "rival": {path: found["wrong"] for path, found in wrong.items() if path != "ours"},
        "details": {"models": len(models), "rows": rows},
    }


def measured(path: str, name: str) -> dict[str, Any]:
    """Return the outcome of one pair, from a process of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.capture_paths", path, name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"is": "refused", "by": f"exit {done.returncode}"}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import meshwright as mw

        print(json.dumps(mw.simulate(lambda: tried(sys.argv[1], sys.argv[2]), 1)[0]))
    else:
        print(json.dumps(run()))
