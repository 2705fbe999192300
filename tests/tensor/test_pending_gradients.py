"""Every call that reads, copies or moves a gradient gets it even if its reduction is still pending."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

Put = Callable[[Tensor], Tensor]
Read = Callable[[Tensor, Put], Any]


@contextmanager
def swapping() -> Generator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swapped(v: Tensor, put: Put) -> Any:
    other = put(torch.ones(6)).requires_grad_()
    torch.utils.swap_tensors(v, other)
    return v.grad, other.grad, v, other


def swapped_with_graded(v: Tensor, put: Put) -> Any:
    other = leaf(put, lambda x: nn.Parameter(x) if isinstance(v, nn.Parameter) else x, torch.full((6,), 3.0))
    torch.utils.swap_tensors(v, other)
    return v.grad, other.grad


def module_of(v: Tensor) -> Any:
    net = nn.Module()
    net.p = v if isinstance(v, nn.Parameter) else nn.Parameter(v.detach())
    if net.p is not v:
        net.p.grad = v.grad
    return net


def applied(change: Callable[[Any], Any], swaps: bool = False) -> Read:
    def read(v: Tensor, put: Put) -> Any:
        net = module_of(v)
        if swaps:
            with swapping():
                change(net)
        else:
            change(net)
        return net.p.grad, net.p.detach()

    return read


def other_data(new: Callable[[], Tensor]) -> Read:
    def read(v: Tensor, put: Put) -> Any:
        try:
            v.data = put(new())
        except (mw.MeshwrightError, RuntimeError):
            return "refused"
        return v.grad

    return read


def reshaped(v: Tensor, put: Put) -> Any:
    with torch.no_grad():
        v.unsqueeze_(0)
    return v.grad


def moved(v: Tensor, put: Put) -> Any:
    with torch.no_grad():
        v.unsqueeze_(0)
        try:
            v.t_()
        except mw.MeshwrightError:
            return "refused"
    return v.grad, v.detach()


def other_memory(v: Tensor, put: Put) -> Any:
    with torch.no_grad():
        new: Any = mw.shard_tensor(torch.ones(6), v.mesh, []) if isinstance(v, mw.DistTensor) else put(torch.ones(6))
        v.set_(new)
    return v.grad, v.detach()


def laid_again(v: Tensor, put: Put) -> Any:
    if isinstance(v, mw.DistTensor):
        v = mw.shard_tensor(v, v.mesh, [mw.Shard(0)])
    return v.grad


def attribute_of_c(v: Tensor, put: Put) -> Any:
    return v._grad  # pyright: ignore[reportAttributeAccessIssue] - an attribute of C++


def put_by_c(v: Tensor, put: Put) -> Any:
    v._grad = put(torch.ones(6))  # pyright: ignore[reportAttributeAccessIssue] - an attribute of C++
    return v.grad


def clipped(v: Tensor, put: Put) -> Any:
    torch.nn.utils.clip_grad_value_([v], 0.5)
    return v.grad


def grouped(v: Tensor, put: Put) -> Any:
    optimizer = torch.optim.SGD([put(torch.ones(2)).requires_grad_()], 0.5)
    optimizer.add_param_group({"params": [v]})
    optimizer.step()
    return v.detach()


def in_a_hook(v: Tensor, put: Put) -> Any:
    net, seen = module_of(v), list[Any]()
    net.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(module.p.grad))
    net.state_dict()
    return seen


def loaded(v: Tensor, put: Put) -> Any:
    net = module_of(v)
    with swapping():
        net.load_state_dict({"p": put(torch.ones(6))})
    return net.p.detach()


def assigned(v: Tensor, put: Put) -> Any:
    net = module_of(v)
    net.load_state_dict({"p": put(torch.ones(6))}, assign=True)
    return net.p.grad


READS: dict[str, Read] = {
    "v.grad": lambda v, put: v.grad,
    "v._grad": attribute_of_c,
    "v._grad = g": put_by_c,
    "getattr": lambda v, put: getattr(v, "grad", None),
    "deepcopy": lambda v, put: copy.deepcopy(v).grad,
    "deepcopy of a list": lambda v, put: [x.grad for x in copy.deepcopy([v, v])],
    "deepcopy of a module": lambda v, put: copy.deepcopy(module_of(v)).p.grad,
    "swap": swapped,
    "swap of two": swapped_with_graded,
    "zero_grad": applied(lambda net: net.zero_grad(set_to_none=False)),
    "zero_grad to None": applied(lambda net: net.zero_grad()),
    "double": applied(lambda net: net.double()),
    "double by swap": applied(lambda net: net.double(), swaps=True),
    "bfloat16": applied(lambda net: net.bfloat16()),
    "to": applied(lambda net: net.to(torch.float64)),
    "requires_grad_(False)": applied(lambda net: net.requires_grad_(False)),
    "data": other_data(lambda: torch.ones(6)),
    "data of another dtype": other_data(lambda: torch.ones(6, dtype=torch.float64)),
    "data of another shape": other_data(lambda: torch.ones(4)),
    "set_": other_memory,
    "unsqueeze_": reshaped,
    "t_": moved,
    "detach": lambda v, put: v.detach().grad,
    "nn.Parameter": lambda v, put: nn.Parameter(v).grad,
    "clip_grad_value_": clipped,
    "get_total_norm": lambda v, put: torch.nn.utils.get_total_norm([v.grad] if v.grad is not None else []),
    "add_param_group": grouped,
    "a hook of state_dict": in_a_hook,
    "load_state_dict by swap": loaded,
    "load_state_dict by assignment": assigned,
    "laid again": laid_again,
}


def leaf(put: Put, kind: Callable[[Tensor], Tensor], factor: Tensor) -> Tensor:
    """Return a leaf whose gradient has not been read yet."""
    v = kind(put(torch.arange(6.0)))
    v.requires_grad_()
    (put_rows(put, torch.arange(30.0).view(5, 6)) * v * factor).sum().backward()
    return v


def put_rows(put: Put, x: Tensor) -> Tensor:
    like = put(torch.ones(6))
    return mw.shard_tensor(x, like.mesh, [mw.Shard(0)]) if isinstance(like, mw.DistTensor) else x


def plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return mw.unshard_dtensor(x.detach()).clone()
    return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"tensor": lambda x: x, "parameter": nn.Parameter}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", READS)
def test_a_pending_gradient_is_read(read: str, kind: str) -> None:
    def program(put: Put) -> Any:
        return plain(READS[read](leaf(put, KINDS[kind], torch.full((6,), 2.0)), put))

    mesh = mw.ProcessMesh([0, 1], ["dp"])
    try:
        wanted = program(lambda x: x)
    except RuntimeError:
        pytest.skip("one device refuses it")
    for placements in ([mw.Replicate()], [mw.Shard(0)]):

        def on_rank(placements: Any = placements) -> Any:
            return program(lambda x: mw.shard_tensor(x, mesh, placements))

        for found in mw.simulate(on_rank, 2):
            if found != "refused":
                torch.testing.assert_close(found, wanted)


def test_a_static_step_gets_a_pending_gradient() -> None:
    def on_rank() -> None:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        net = mw.shard_layer(nn.Linear(4, 2), mesh)
        x, y = (mw.shard_tensor(torch.ones(4, n), mesh, [mw.Shard(0)]) for n in (4, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = mw.to_static(net, loss=nn.functional.mse_loss, optimizer=optimizer).train()
        nn.functional.mse_loss(net(x), y).backward()
        with pytest.raises(mw.StaticError, match="earlier backward pass"):
            model(x, y)

    mw.simulate(on_rank, 2)
