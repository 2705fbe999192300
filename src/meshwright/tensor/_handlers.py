"""Functions that are about a tensor rather than about its numbers, and the few that need a word of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from meshwright.comm import current
from meshwright.layout import Layout, ProcessMesh, Spec, replicated

from . import _random
from ._absent import Absent, absent
from ._convert import convert_local
from ._dist_tensor import DistTensor, plain_view, stamp
from ._local import spec_of, whole_local, write_into
from ._pending import deferring, flush, forget
from ._tree import map_tensors
from .torch_hooks import backward_running, call_plain, no_interception, run_backward, same_kind

Handler = Callable[[Any, Any, Any, Any], Any]
"""`handler(func, types, args, kwargs)`; gives NotImplemented to leave the call to the planner."""

HANDLERS: dict[Any, Handler] = {}


def handles(*funcs: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


_LOCAL = [
    "requires_grad", "is_leaf", "device", "layout", "is_sparse", "is_quantized", "is_cuda", "is_cpu", "is_mps",
    "is_xpu", "is_mkldnn", "is_meta", "is_nested", "retains_grad", "output_nr", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks", "names", "is_vulkan", "is_xla", "is_ipu", "is_maia", "is_mtia", "is_sparse_csr",
    "dtype", "_base", "volatile", "_cdata", "name", "is_hpu",
]  # fmt: skip
_LOCAL_CALLS: list[Any] = [
    Tensor.requires_grad_, Tensor.is_inference, Tensor.is_shared, Tensor.get_device, Tensor.retain_grad,
    Tensor.data_ptr, Tensor._is_view, Tensor.is_pinned, Tensor.__hash__, torch.is_grad_enabled, Tensor.storage_offset,
    Tensor.untyped_storage, same_kind, Tensor.new_tensor,
]  # fmt: skip


@handles(
    *[getattr(Tensor, n).__get__ for n in _LOCAL if hasattr(Tensor, n)],
    *[getattr(Tensor, n).__set__ for n in ("requires_grad", "_backward_hooks") if hasattr(getattr(Tensor, n), "__set__")],
    *_LOCAL_CALLS,
)
def _local(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Asked of the local tensor."""
    return call_plain(func, types, args, kwargs)


# --- gradients -------------------------------------------------------------------------------------------------


def dual_stamp(grad: Tensor, spec: Spec) -> Tensor:
    """A local gradient of a tensor with `spec`, as the distributed tensor it is."""
    with no_interception():
        dual = spec.dual().with_dtype(grad.dtype)
    out = stamp(grad, dual)
    return absent(out, dual) if current().rank not in spec.mesh else out


def _seed(output: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient at `output` to start from, as this rank's part of the dual layout."""
    spec = output._spec if isinstance(output, DistTensor) else None
    if spec is None:
        return torch.ones_like(output) if grad is None else grad
    with no_interception():
        if current().rank not in spec.mesh:
            return torch.empty_like(output)
        if grad is None:
            if spec.shape.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            grad = torch.ones(spec.shape, dtype=spec.dtype, device=output.device)
        if backward_running() != -1 and not isinstance(grad, DistTensor):
            return grad  # a reentrant checkpoint hands on this rank's part of the gradient
    return _as_dual_local(grad, spec)


def _summed(output: Tensor) -> Tensor:
    """`output` with averaged terms as summed ones, whose local gradients are their own."""
    if not isinstance(output, DistTensor) or not any(op != "sum" for _, op in output._spec.layout.partial):
        return output
    spec = output._spec.with_layout(replicated(output._spec.ndim))
    return stamp(convert_local(output, output._spec, spec), spec)


@handles(Tensor.backward)
def _backward(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    gradient = given.get("gradient")
    _run_backward([given["self"]], [gradient], given)


@handles(torch.autograd.backward)
def _backward_many(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = _as_list(given["tensors"])
    _run_backward(outputs, _as_seeds(given.get("grad_tensors"), outputs), given)


def _run_backward(outputs: list[Tensor], gradients: list[Any], given: dict[str, Any]) -> None:
    outputs = [_summed(o) for o in outputs]
    seeds = [_seed(o, g) for o, g in zip(outputs, gradients, strict=True)]
    create = bool(given.get("create_graph") or False)
    keep, inputs = given.get("retain_graph"), tuple(_as_list(given.get("inputs") or ()))
    with deferring(not inputs and not create):
        run_backward(
            outputs, seeds, create if keep is None else keep, create, inputs, allow_unreachable=True, accumulate_grad=True
        )


@handles(torch.autograd.grad)
def _grad(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
             "is_grads_batched", "materialize_grads")  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = [_summed(o) for o in _as_list(given["outputs"])]
    inputs = _as_list(given["inputs"])
    seeds = [_seed(o, g) for o, g in zip(outputs, _as_seeds(given.get("grad_outputs"), outputs), strict=True)]
    create, keep = bool(given.get("create_graph", False)), given.get("retain_graph")
    zeros = bool(given.get("materialize_grads", False))
    grads = run_backward(
        outputs, seeds, create if keep is None else keep, create, tuple(inputs),
        allow_unreachable=bool(given.get("allow_unused")) or zeros, accumulate_grad=False,
    )  # fmt: skip
    return tuple(_returned(g, x, zeros) for g, x in zip(grads, inputs, strict=True))


def _returned(grad: Tensor | None, x: Tensor, zeros: bool) -> Tensor | None:
    if grad is None:
        return torch.zeros_like(x) if zeros else None
    return dual_stamp(grad, x._spec) if isinstance(x, DistTensor) else grad


def _as_seeds(gradients: Any, outputs: list[Tensor]) -> list[Any]:
    return [None] * len(outputs) if gradients is None else _as_list(gradients)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


@handles(Tensor.grad.__get__)
def _get_grad(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    flush()
    (x,) = args[:1]
    with no_interception():
        grad = x.grad
    if grad is None or not isinstance(x, DistTensor):
        return grad
    if isinstance(grad, DistTensor):
        return grad
    return dual_stamp(grad, x._spec)


@handles(Tensor.grad.__set__)
def _set_grad(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    x, grad = args
    forget(x)
    if isinstance(grad, Tensor) and isinstance(x, DistTensor):
        have = spec_of(grad, x._spec)
        need = x._spec.dual().with_dtype(have.dtype)
        local = convert_local(grad, have, need)
        with no_interception():
            x.grad = plain_view(local)
        return
    with no_interception():
        x.grad = grad


@handles(Tensor.grad.__delete__)
def _del_grad(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    forget(args[0])
    with no_interception():
        args[0].grad = None


@handles(Tensor.register_hook)
def _register_hook(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    if not isinstance(x, DistTensor):
        return call_plain(func, types, args, kwargs)
    spec = x._spec

    def on_local(grad: Tensor) -> Any:
        new = hook(dual_stamp(_alias_of(grad), spec))
        return None if new is None else _as_dual_local(new, spec)

    return call_plain(func, types, (x, on_local), kwargs)


class _HookedNode:
    """The autograd node that `nn.Module` hooks are put on; they see distributed gradients.

    torch puts hooks of `register_full_backward_hook` on this node itself, which holds local gradients.
    """

    NAME = "BackwardHookFunctionBackward"

    def __init__(self, node: Any, spec: Spec, at: int) -> None:
        self.node = node
        node.metadata.setdefault("meshwright.specs", {})[at] = spec

    def name(self) -> str:
        return self.NAME

    def register_hook(self, hook: Any) -> Any:
        return self.node.register_hook(lambda ins, outs: self._local(hook(self._whole(ins), self._whole(outs))))

    def register_prehook(self, hook: Any) -> Any:
        return self.node.register_prehook(lambda outs: self._local(hook(self._whole(outs))))

    def _whole(self, grads: Any) -> Any:
        specs = self.node.metadata["meshwright.specs"]
        return tuple(
            dual_stamp(_alias_of(g), specs[at]) if g is not None and at in specs else g for at, g in enumerate(grads)
        )

    def _local(self, grads: Any) -> Any:
        if grads is None:
            return None
        specs = self.node.metadata["meshwright.specs"]
        return tuple(
            _as_dual_local(g, specs[at]) if isinstance(g, Tensor) and at in specs else g for at, g in enumerate(grads)
        )


def _alias_of(grad: Tensor) -> Tensor:
    with no_interception():
        return plain_view(grad).view_as(grad)


def _as_dual_local(grad: Tensor, spec: Spec) -> Tensor:
    """A gradient that a hook gave, as this rank's part of what the tensor's gradient is."""
    have = spec_of(grad, spec)
    local = convert_local(grad, have, spec.dual().with_dtype(have.dtype))
    with no_interception():
        return plain_view(local)


@handles(Tensor.grad_fn.__get__)
def _grad_fn(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    node = call_plain(func, types, args, kwargs)
    x = args[0]
    if node is None or node.name() != _HookedNode.NAME:
        return node
    with no_interception():
        return _HookedNode(node, x._spec, x.output_nr)


@handles(Tensor.register_post_accumulate_grad_hook)
def _register_post_hook(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return call_plain(func, types, args, kwargs)


# --- data and devices ------------------------------------------------------------------------------------------


@handles(Tensor.data.__get__, Tensor.detach, Tensor.detach_)
def _same_layout(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if type(x) not in (DistTensor, Absent):
        return NotImplemented
    out = call_plain(func, types, args, kwargs)
    if out is x:
        return x
    return absent(out, x._spec) if type(x) is Absent else stamp(out, x._spec)


@handles(Tensor.data.__set__)
def _set_data(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    x, new = args
    if isinstance(x, DistTensor):
        new = new if isinstance(new, DistTensor) else stamp(new, spec_of(new, x._spec))
        local = convert_local(new, new._spec, x._spec.with_dtype(new._spec.dtype)) if new.shape == x.shape else new
        with no_interception():
            Tensor.data.__set__(x, plain_view(local))
        x._spec = x._spec.with_dtype(new._spec.dtype)


@handles(Tensor.cpu, Tensor.cuda, Tensor.pin_memory, Tensor.share_memory_)
def _moved(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    out = call_plain(func, types, args, kwargs)
    return x if out is x else stamp(out, x._spec)


@handles(Tensor.to)
def _to(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    named = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, (str, torch.device))]
    if type(x) is not DistTensor or not named or x._spec.layout.partial:
        return NotImplemented
    out = call_plain(func, types, args, kwargs)
    return x if out is x else stamp(out, x._spec.with_dtype(plain_dtype(out)))


def plain_dtype(x: Tensor) -> torch.dtype:
    with no_interception():
        return x.dtype


@handles(Tensor.stride)
def _stride(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Strides that the whole tensor would have in the memory order of the parts."""
    x = args[0]
    with no_interception():
        local = x.stride()
    order = sorted(range(len(local)), key=lambda d: (local[d], -d))
    strides, step = [0] * len(local), 1
    for d in order:
        strides[d] = step
        step *= max(x.shape[d], 1)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(strides) if dim is None else strides[dim]


@handles(Tensor.is_contiguous)
def _is_contiguous(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return call_plain(func, types, args, kwargs)


@handles(Tensor.contiguous)
def _contiguous(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Decided by the part's own memory: the planner sees only whole tensors that are contiguous."""
    x = args[0]
    if type(x) is Absent:
        return NotImplemented
    out = call_plain(func, types, args, kwargs)
    return x if out is x else stamp(out, x._spec)


@handles(Tensor.copy_)
def _copy(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, new = args[0], args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if type(x) is not DistTensor or not isinstance(new, Tensor) or type(new) not in (DistTensor, Tensor):
        return NotImplemented
    return write_into(x, new)


@handles(torch.broadcast_tensors, torch.ops.aten.broadcast_tensors.default)
def _broadcast_tensors(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return tuple(t.expand(shape) for t in tensors)


_EACH = {name: getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")}


@handles(*_EACH.values())
def _foreach(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """One call per tensor of the lists."""
    name = func.__name__.removeprefix("_foreach_")
    one = getattr(Tensor, name, None) or getattr(torch, name)

    def at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    if name.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    out = [one(*[at(a, i) for a in args], **{k: at(v, i) for k, v in kwargs.items()}) for i in range(len(args[0]))]
    return None if name.endswith("_") else out


_RESHAPED = ["squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_"]


@handles(*[getattr(Tensor, n) for n in _RESHAPED])
def _reshape_in_place(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The same tensor under another shape: the local memory is looked at as the view out of place would."""
    x = args[0]
    new = getattr(Tensor, func.__name__[:-1])(*args, **kwargs)
    if type(x) is DistTensor and type(new) is DistTensor:
        with no_interception():
            x.as_strided_(new.size(), new.stride(), new.storage_offset())
    elif type(x) is not Absent:
        return NotImplemented
    x._spec = new._spec
    return x


# --- values ----------------------------------------------------------------------------------------------------


def everywhere(x: Tensor) -> Tensor:
    """The whole value of `x` as a plain tensor on every rank of the world, not only of its mesh."""
    if not isinstance(x, DistTensor):
        return x
    x._read_again()
    carrier = current()
    if x._spec.mesh.size == carrier.size:
        return whole_local(x)
    world = ProcessMesh(range(carrier.size), ["world"])
    spec = x._spec.with_layout(replicated(x._spec.ndim))
    local = convert_local(x, x._spec, spec) if carrier.rank in x._spec.mesh else x
    out = convert_local(local, spec, Spec(world, spec.layout, spec.shape, spec.dtype))
    with no_interception():
        return plain_view(out)


@handles(
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose,
    Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__format__,
)  # fmt: skip
def _value(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The same Python value on every rank."""
    args, kwargs = map_tensors(everywhere, (args, kwargs))
    with no_interception():
        return func(*args, **kwargs)


@handles(torch._amp_foreach_non_finite_check_and_unscale_)
def _unscale(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    """Gradient scaling: every rank of the world learns of a gradient that is not finite anywhere."""
    grads, found, inverse = args
    for grad in grads:
        grad.mul_(whole_local(inverse))
    with no_interception():
        bad = torch.tensor([float(any(not g.isfinite().all() for g in grads))])
    world = ProcessMesh(range(current().size), ["world"])
    spec = Spec(world, Layout(((),), (("world", "max"),)), (1,), bad.dtype)
    worst = convert_local(bad, spec, spec.with_layout(replicated(1)))
    with no_interception():
        found.copy_(torch.maximum(found, worst.reshape(found.shape).to(found.dtype)))


# --- randomness ------------------------------------------------------------------------------------------------

_FILLS = ["uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_"]
handles(*[getattr(Tensor, n) for n in _FILLS if hasattr(Tensor, n)])(_random.fill_random)


@handles(init.uniform_, init.normal_, init.constant_)
def _initialise(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """`nn.init` asks tensors before it turns gradients off itself."""
    names = {"uniform_": ("a", "b"), "normal_": ("mean", "std"), "constant_": ("val",)}[func.__name__]
    given = dict(zip(("tensor", *names), args, strict=False)) | kwargs
    x = given.pop("tensor")
    fill = {"uniform_": x.uniform_, "normal_": x.normal_, "constant_": x.fill_}[func.__name__]
    defaults = {"a": 0.0, "b": 1.0, "mean": 0.0, "std": 1.0}
    with torch.no_grad():
        return fill(*[given.pop(n, defaults.get(n)) for n in names], **given)


@handles(init.kaiming_uniform_)
def _initialise_kaiming(
    func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    names = ("tensor", "a", "mode", "nonlinearity", "generator")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, mode = given["tensor"], given.get("mode", "fan_in")
    fans = dict(zip(("fan_in", "fan_out"), init._calculate_fan_in_and_fan_out(x), strict=True))
    gain = init.calculate_gain(given.get("nonlinearity", "leaky_relu"), given.get("a", 0))
    bound = 3.0**0.5 * gain / fans[mode] ** 0.5
    with torch.no_grad():
        return x.uniform_(-bound, bound, generator=given.get("generator"))


handles(torch.rand_like, torch.randn_like, torch.randint_like)(_random.like_random)
handles(F.dropout, torch.dropout, torch.ops.aten.dropout.default)(_random.dropout)
