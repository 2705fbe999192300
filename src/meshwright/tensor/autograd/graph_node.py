"""Nodes of the autograd graph of distributed tensors, which answer for the whole tensor or raise an error.

Autograd runs on local tensors. So a hook on a node gets this rank's part of a gradient, the saved tensors of a node are
parts, and conversions between layouts are nodes too. A program gets each node as a GraphNode, which shows the structure
of the graph and raises MemoryAccessError for everything else. That includes new attributes of torch's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from meshwright.layout import Spec, TorchValue

from .._errors import MemoryAccessError
from .._torch_call import TorchFunction
from ..core.dist_tensor import DistTensor
from ..torch_hooks import call_plain, interception_on, no_interception, offer_call
from .dual_gradient import alias_of, as_dual_local, dual_stamp
from .intercepted_call import argument_at
from .torch_hooks import node_finders

_KEY = "meshwright.node"
"""Key in the metadata of a node: a weak reference to its GraphNode."""
_STRUCTURE = ("name", "metadata", "_sequence_nr", "_set_sequence_nr", "needs_input_grad", "variable")
"""Attributes that are the same for the part and for the whole tensor. `variable` is the distributed leaf itself."""
_HOOKS = (
    "call x.register_hook(hook) on the tensor, x.register_post_accumulate_grad_hook(hook) on a parameter, "
    "or module.register_full_backward_hook(hook)"
)
_INSTEAD = {
    "register_hook": _HOOKS,
    "register_prehook": _HOOKS,
    "_register_hook_dict": _HOOKS,
    "__call__": "call torch.autograd.grad(x, inputs, gradient)",
    "_input_metadata": "pass the tensor x itself to torch.autograd in place of its gradient edge",
}
"""Attribute → its replacement in programs."""
_SAVED = "keep the tensor in a variable, or save it by ctx.save_for_backward in an autograd.Function"


class GraphNode:
    """A node of the autograd graph, of which this rank computes a part.

    Attributes:
        specs: The number of a result → its spec, for the results that asked for this node.
    """

    _node: TorchValue
    """Torch's own node. Its type in torch lacks attributes that a node has, such as `saved_tensors`."""
    specs: dict[int, Spec]

    def __init__(self, node: TorchValue) -> None:
        self.__dict__.update(_node=node, specs={})

    @property
    def next_functions(self) -> tuple[tuple[GraphNode | None, int], ...]:
        return tuple((graph_node(node), at) for node, at in self._node.next_functions)

    def __getattr__(self, name: str) -> TorchValue:
        node = self._node
        of_user = vars(node) if hasattr(node, "meshwright") else {}
        if name in _STRUCTURE or (name in of_user and not name.startswith("meshwright")):
            return getattr(node, name)
        if name == "saved_tensors" and of_user:
            return node.saved_tensors
        if not hasattr(type(node), name) and name not in getattr(node, "__dict__", ()):
            raise AttributeError(f"{type(node).__name__!r} object has no attribute {name!r}")
        raise self._refusal(name)

    def __setattr__(self, name: str, value: TorchValue) -> None:
        setattr(self._node, name, value)

    def __call__(self, *grads: TorchValue) -> TorchValue:
        raise self._refusal("__call__")

    def __repr__(self) -> str:
        return f"<{self._node.name()} object at {id(self):#x}>"

    def _refusal(self, name: str) -> MemoryAccessError:
        specs = ", ".join(map(repr, self.specs.values())) or "a tensor from which a distributed tensor is computed"
        return MemoryAccessError(
            f"grad_fn.{name}",
            f"{self._node.name()}, the autograd node of {specs}",
            "a node computes this rank's part of a gradient, and holds parts of tensors",
            _INSTEAD.get(name, _SAVED),
        )


class _HookedNode(GraphNode):
    """The autograd node that `nn.Module` hooks are put on; they see distributed gradients.

    torch puts hooks of `register_full_backward_hook` on this node itself, which holds local gradients.
    """

    NAME = "BackwardHookFunctionBackward"

    def register_hook(self, hook: Callable[..., TorchValue]) -> TorchValue:
        return self._node.register_hook(lambda ins, outs: self._local(hook(self._whole(ins), self._whole(outs))))

    def register_prehook(self, hook: Callable[..., TorchValue]) -> TorchValue:
        return self._node.register_prehook(lambda outs: self._local(hook(self._whole(outs))))

    def _whole(self, grads: TorchValue) -> TorchValue:
        specs = self._node.metadata["meshwright.specs"]

        def whole(at: int, grad: Tensor | None) -> Tensor | None:
            return dual_stamp(alias_of(grad), specs[at]) if grad is not None and at in specs else grad

        return tuple(whole(at, grad) for at, grad in enumerate(grads))

    def _local(self, grads: TorchValue) -> TorchValue:
        if grads is None:
            return None
        specs = self._node.metadata["meshwright.specs"]

        def local(at: int, grad: TorchValue) -> TorchValue:
            return as_dual_local(grad, specs[at]) if isinstance(grad, Tensor) and at in specs else grad

        return tuple(local(at, grad) for at, grad in enumerate(grads))


Node.register(GraphNode)


def graph_node(node: TorchValue, at: int = 0, spec: Spec | None = None) -> GraphNode | None:
    """Return the GraphNode of a node, of whose results number `at` has this spec; the same one while it is in use."""
    if node is None or isinstance(node, GraphNode):
        return node
    kept = node.metadata.get(_KEY)
    found: GraphNode | None = None if kept is None else kept()
    if found is None:
        found = (_HookedNode if node.name() == _HookedNode.NAME else GraphNode)(node)
        node.metadata[_KEY] = ref(found)
        leaf = getattr(node, "variable", None)
        spec = leaf._spec if spec is None and isinstance(leaf, DistTensor) else spec
    if spec is not None:
        found.specs[at] = spec
    return found


def grad_fn(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return `x.grad_fn`: the node itself if interception is off, otherwise its GraphNode."""
    node = call_plain(func, types, args, kwargs or {})
    if node is None or not interception_on():
        return node
    x = args[0]
    with no_interception():
        at = x.output_nr
    if node.name() == _HookedNode.NAME:
        node.metadata.setdefault("meshwright.specs", {})[at] = x._spec
    return graph_node(node, at, x._spec)


def own_edge(x: TorchValue) -> TorchValue:
    """Return a gradient edge with torch's own node, which the engine accepts; any other input or output unchanged."""
    if not isinstance(x, GradientEdge) or not isinstance(x.node, GraphNode):
        return x
    return GradientEdge(x.node._node, x.output_nr)


def edge_spec(edge: GradientEdge) -> Spec | None:
    """Return the spec of the tensor of a gradient edge, None for an edge of a plain tensor.

    Raises MemoryAccessError for an edge that the program made of a node whose tensor is not known.
    """
    if not isinstance(edge.node, GraphNode):
        return None
    spec = edge.node.specs.get(edge.output_nr)
    if spec is None:
        raise edge.node._refusal("_input_metadata")
    return spec


def check_no_edges(outputs: Sequence[TorchValue]) -> None:
    """Raise MemoryAccessError if a backward pass would start at a gradient edge of a distributed tensor."""
    for x in outputs:
        if isinstance(x, GradientEdge) and isinstance(x.node, GraphNode):
            raise x.node._refusal("_input_metadata")


def _edge(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the gradient edge of a distributed tensor, with guarded nodes."""
    x = argument_at(args, kwargs, 0, "tensor")
    if not isinstance(x, DistTensor):
        return NotImplemented
    x._read_again()
    with no_interception():
        edge = own(x)
        found = edge._replace(node=graph_node(edge.node, edge.output_nr, x._spec))
        if getattr(edge, "ownership_token", None) is not None:
            found = found._replace(ownership_token=graph_node(edge.ownership_token))
    return found


def _own_node(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return torch's own node for the functions of torch that compare nodes with those that a backward pass runs."""
    (x,) = args
    if isinstance(x, GradientEdge):
        return own_edge(x).node
    if not isinstance(x, DistTensor):
        return NotImplemented
    x._read_again()
    with no_interception():
        return own(x)


offer_call(torch.autograd.graph, "get_gradient_edge", _edge)
for _owner, _name in node_finders():
    offer_call(_owner, _name, _own_node)
