"""Nodes of the autograd graph act on the whole tensor, or raise an error: no attribute gives this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, register_multi_grad_hook

import meshwright as mw
from meshwright.tensor.autograd.graph_node import GraphNode

Lay = Callable[[Tensor], Tensor]
PLACEMENTS = [mw.Shard(0), mw.Partial(), mw.Replicate()]


class Scaled(torch.autograd.Function):
    """A user-defined function with an attribute and a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.by, None


def leaf(lay: Lay) -> Tensor:
    return lay(torch.arange(1.0, 5.0)).requires_grad_()


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "exp": torch.exp,
    "product": lambda x: (x * x).sum(),
    "a view": lambda x: x[::2].view(-1),
    "several": lambda x: x.split(2)[1],
    "a matrix": lambda x: x.view(2, 2) @ x.view(2, 2),
    "a function": lambda x: Scaled.apply(x, 2.0),
    "in place": lambda x: (x * 1).mul_(x),
    "repeated": lambda x: x.expand(2, 4),
}


def on_mesh(run: Callable[[Lay], Any], placement: Any = PLACEMENTS[0]) -> Any:
    mesh = mw.ProcessMesh([0, 1], ["a"])
    first, second = mw.simulate(lambda: run(lambda t: mw.shard_tensor(t, mesh, [placement])), 2)
    assert first == second
    return first


def one_device(t: Tensor) -> Tensor:
    return t


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for other, _ in node.next_functions:
        if other is not None:
            yield from nodes(other)


def unguarded(node: Any) -> list[str]:
    """Return the attributes of a node that give anything but structure, a distributed tensor or an error."""
    found: list[str] = []
    for name in sorted({*dir(type(node._node)), *dir(node._node), *dir(Node)} - set(dir(object))):
        if name.startswith("__") and name != "__call__":
            continue
        try:
            got = getattr(node, name)
            got = got(torch.ones(4)) if name == "__call__" else got
        except mw.MeshwrightError:
            continue
        except AttributeError:
            assert not hasattr(node._node, name)
            continue
        if not is_structure(name, got):
            found.append(f"{node!r}.{name}: {got!r}")
    return found


def is_structure(name: str, got: Any) -> bool:
    if name == "next_functions":
        return all(n is None or isinstance(n, GraphNode) for n, _ in got)
    if name == "saved_tensors":
        return all(isinstance(t, mw.DistTensor) for t in got)
    if name == "variable":
        return isinstance(got, mw.DistTensor)
    allowed = {"name", "metadata", "_sequence_nr", "_set_sequence_nr", "needs_input_grad", "by", "_abc_impl"}
    return name in allowed or isinstance(got, (bool, int, float, str))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_no_attribute_of_a_node_gives_a_part(placement: Any) -> None:
    def run(lay: Lay) -> list[str]:
        return [line for f in RESULTS.values() for n in nodes(f(leaf(lay)).grad_fn) for line in unguarded(n)]

    assert on_mesh(run, placement) == []


def test_a_node_is_a_node_of_torch() -> None:
    def run(lay: Lay) -> Any:
        x = leaf(lay)
        y = x.exp()
        node: Any = y.grad_fn
        last: Any = nn.functional.relu(y).grad_fn
        same = node is y.grad_fn, node == y.grad_fn, last.next_functions[0][0] is node, node in {y.grad_fn: 1}
        return isinstance(node, Node), same, node.name(), repr(node)[:15], hasattr(node, "other"), x.grad_fn

    assert on_mesh(run) == run(one_device)


def test_a_user_defined_function_gives_its_saved_values() -> None:
    def run(lay: Lay) -> Any:
        x = leaf(lay)
        node: Any = Scaled.apply(x * 1, 2.0).grad_fn  # pyright: ignore[reportAttributeAccessIssue] - torch's stub
        before = node.by, node.saved_tensors[0].tolist(), node.saved_tensors[0].shape
        y: Any = Scaled.apply(x, 2.0)
        y.grad_fn.by = 5.0
        y.sum().backward()
        assert x.grad is not None
        return before, x.grad.tolist()

    assert on_mesh(run) == run(one_device)


def with_edges(lay: Lay) -> Any:
    x = leaf(lay)
    h = x.exp()
    loss = (h * h).sum()
    ends = [get_gradient_edge(x), get_gradient_edge(h)]
    grads = torch.autograd.grad(loss, ends, retain_graph=True)
    (one,) = torch.autograd.grad(loss, ends[0], retain_graph=True)
    torch.autograd.backward(loss, inputs=[ends[0]])
    assert x.grad is not None
    return [(g.shape, g.tolist()) for g in (*grads, one, x.grad)]


def values(grad: Tensor | None) -> Any:
    return None if grad is None else (grad.shape, grad.tolist())


def with_hook_on_all(lay: Lay) -> Any:
    x, unused = leaf(lay), leaf(lay)
    h, seen = x.sin(), list[Any]()
    register_multi_grad_hook([x, h, unused], lambda gs: seen.append([values(g) for g in gs]))
    register_multi_grad_hook([x, h], lambda g: seen.append(g.shape), mode="any")
    (h * h).sum().backward(retain_graph=True)
    (h * h).sum().backward()
    return sorted(map(repr, seen))


def with_hook_of_a_view(lay: Lay) -> Any:
    x, seen = leaf(lay), list[Any]()
    b = torch.zeros_like(x)
    v = b[::2]
    b.copy_(x)
    register_multi_grad_hook([v, x], lambda gs: seen.append([values(g) for g in gs]))
    (v * v).sum().backward()
    return seen


def with_mutation(lay: Lay) -> Any:
    x = leaf(lay)
    with graph.allow_mutation_on_saved_tensors():
        y = x * 1
        z = y.sin()
        y.mul_(2)
        z.sum().backward()
    assert x.grad is not None
    return [round(v, 4) for v in x.grad.tolist()]


def with_version(lay: Lay) -> Any:
    x = leaf(lay)
    y = x * 1
    z = y.sin()
    graph.increment_version(y)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return None


def with_save_on_cpu(lay: Lay) -> Any:
    x = leaf(lay)
    with graph.save_on_cpu():
        y = x.exp() * x
    y.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


OF_TENSORS: dict[str, list[Callable[[Lay], Any]]] = {
    "get_gradient_edge": [with_edges],
    "register_multi_grad_hook": [with_hook_on_all, with_hook_of_a_view],
    "allow_mutation_on_saved_tensors": [with_mutation],
    "increment_version": [with_version],
    "save_on_cpu": [with_save_on_cpu],
}
WITHOUT_TENSORS = {
    "Node", "GradientEdge", "disable_saved_tensors_hooks", "region_activation_memory_budget",
    "saved_tensors_hooks",  # gets local parts (docs/concepts/transforms.md)
}  # fmt: skip


def test_every_function_of_the_graph_is_tested() -> None:
    names = {name for name in graph.__all__ if not name.startswith("set_")}
    assert names <= OF_TENSORS.keys() | WITHOUT_TENSORS


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("run", [run for found in OF_TENSORS.values() for run in found], ids=lambda f: f.__name__)
def test_functions_of_the_graph_get_whole_tensors(run: Callable[[Lay], Any], placement: Any) -> None:
    assert on_mesh(run, placement) == run(one_device)


def of_walked_node(x: Tensor) -> Any:
    y: Any = x.exp() * 2
    return torch.autograd.grad(y.sum(), GradientEdge(y.grad_fn.next_functions[0][0], 0))


REFUSED_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "backward from edges": lambda x: torch.autograd.backward([get_gradient_edge(x.exp())], [torch.ones(4)]),
    "backward from an edge": lambda x: torch.autograd.backward(get_gradient_edge(x.sum()), inputs=[x]),
    "grad of an edge": lambda x: torch.autograd.grad([get_gradient_edge(x.sum())], [x]),
    "grad at a walked node": of_walked_node,
}


@pytest.mark.parametrize("asked", REFUSED_CALLS)
def test_an_edge_with_a_local_part_is_refused(asked: str) -> None:
    with pytest.raises(mw.MeshwrightError, match="fix:"):
        on_mesh(lambda lay: REFUSED_CALLS[asked](leaf(lay)))
