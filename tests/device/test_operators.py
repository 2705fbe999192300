"""Operators on the device give the same bits as on the CPU, and refuse what other accelerators refuse."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.inspection import Devices

_X = torch.linspace(-2, 3, 40).view(5, 8)
_W = torch.linspace(-1, 1, 48).view(6, 8).cos()


def _gradients(module: nn.Module, x: Tensor, device: str) -> list[Tensor]:
    model = copy.deepcopy(module).to(device)
    torch.manual_seed(1)
    y = model(x.to(device))
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def _mlp() -> nn.Module:
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4)]
    return nn.Sequential(*layers)


_MLP, _CONV, _TRANSPOSED = _mlp(), nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(1, 2, 3)


def _adamw(device: str, foreach: bool) -> list[Tensor]:
    p = nn.Parameter(_X.to(device).clone())
    p.grad = _W[:5].to(device)
    optimizer = torch.optim.AdamW([p], foreach=foreach)
    optimizer.step()
    return [p.detach(), *(x for x in optimizer.state[p].values() if x.dim())]


def _attention(device: str) -> Tensor:
    q = torch.randn(2, 4, 16, 8, device=device)
    return F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)


def _in_place(device: str) -> Tensor:
    x = _X.to(device).clone()
    x.t()[2:4].mul_(3)
    x[:, ::2] = 7
    return x.index_add_(0, torch.tensor([1, 1], device=device), x[:2].clone())


CASES: dict[str, Callable[[str], Tensor | list[Tensor]]] = {
    "mlp": lambda d: _gradients(_MLP, _X, d),
    "convolution": lambda d: _gradients(_CONV, _X.view(1, 1, 5, 8), d),
    "transposed convolution": lambda d: _gradients(_TRANSPOSED, _X.view(1, 1, 5, 8), d),
    "batch norm": lambda d: _gradients(nn.BatchNorm1d(8), _X, d),
    "adamw": lambda d: _adamw(d, foreach=False),
    "adamw foreach": lambda d: _adamw(d, foreach=True),
    "attention": _attention,
    "in place": _in_place,
    "randn": lambda d: torch.randn(5, device=d),
    "multinomial": lambda d: torch.multinomial(torch.ones(3, 10, device=d), 4),
    "native dropout": lambda d: list(torch.native_dropout(torch.ones(50, device=d), 0.3, True)),
    "randperm": lambda d: torch.randperm(10, device=d),
    "nonzero": lambda d: _X.to(d).gt(0).nonzero(),
    "index": lambda d: _X.to(d)[torch.tensor([0, 2])],
    "complex": lambda d: torch.view_as_real(torch.view_as_complex(_X.view(5, 4, 2).to(d)).conj() * 2),
    "out": lambda d: torch.add(_X.to(d), 1, out=torch.empty(0, device=d)),
    "out of a view": lambda d: torch.mul(_X.to(d), 2, out=torch.zeros(8, 5, device=d).t()),
    "sort": lambda d: list(_X.to(d).sort(1, descending=True)),
    "strided": lambda d: _X.to(d).t().clone(memory_format=torch.preserve_format),
    "two results without memory of their own": lambda d: [*_X.to(d).median(1), *_X.to(d).kthvalue(2)],
    "storage": lambda d: torch.empty(0, device=d).set_(_X.to(d).untyped_storage(), 3, (2, 2), (8, 1)),
    "resized": lambda d: _X.to(d).clone().resize_(2, 3),
    "no elements": lambda d: torch.cat([_X.to(d)[:0], _X.to(d)]),
    "embedding": lambda d: F.embedding(torch.tensor([[1, 4]], device=d), _X.to(d)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_on_the_cpu(mesh_device: Devices, name: str) -> None:
    results = []
    for device in ("cpu", "mesh:1"):
        torch.manual_seed(1)
        found = CASES[name](device)
        results.append(found if isinstance(found, list) else [found])
    for expected, found in zip(*results, strict=True):
        assert found.device == torch.device("mesh:1")
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("storage", "resized")])
def test_same_bits_on_a_queued_stream(mesh_device: Devices, name: str) -> None:
    """The queue keeps shapes, strides, numbers and random numbers."""
    torch.manual_seed(1)
    expected = CASES[name]("cpu")
    torch.manual_seed(1)
    torch.accelerator.set_device_index(1)
    before = torch.accelerator.current_stream()
    try:
        with torch.Stream("mesh:1"):
            found = CASES[name]("mesh:1")
            expected, found = (x if isinstance(x, list) else [x] for x in (expected, found))
            copies = [x.cpu() for x in found]
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(0)
    for x, y in zip(expected, copies, strict=True):
        assert torch.equal(x, y)


def test_views_share_memory(mesh_device: Devices) -> None:
    x = torch.zeros(2, 3, device="mesh:0")
    x.t()[1].add_(1)
    x.view(-1)[-1:].fill_(5)
    assert x.tolist() == [[0, 1, 0], [0, 1, 5]]
    assert x.t()._base is x


def test_saved_tensors_come_back(mesh_device: Devices) -> None:
    file = io.BytesIO()
    torch.save({"x": _X.to("mesh:2")}, file)
    file.seek(0)
    x = torch.load(file)["x"]
    assert x.device == torch.device("mesh:2")
    assert torch.equal(x.cpu(), _X)


def test_autocast_lowers_products(mesh_device: Devices) -> None:
    with torch.autocast("mesh", dtype=torch.bfloat16):
        product = _X.to("mesh") @ _W.to("mesh").t()
        assert product.dtype == torch.bfloat16
        assert product.softmax(0).dtype == torch.float32


def test_other_devices_are_refused(mesh_device: Devices) -> None:
    x = _X.to("mesh:0")
    for other in (_X, _X.to("mesh:1")):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, other])
    assert (x + torch.tensor(1.0)).device == x.device


def test_copies_between_devices(mesh_device: Devices) -> None:
    x = _X.to("mesh:0").to("mesh:3")
    assert x.device == torch.device("mesh:3")
    assert torch.equal(x.to("mesh:1", torch.float64).cpu(), _X.double())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_fused_cells_have_the_numbers_of_the_cpu(mesh_device: Devices, kind: type[nn.Module]) -> None:
    torch.manual_seed(2)
    model, x = kind(8, 4, 2, bidirectional=True), _X.view(1, 5, 8)
    results = []
    for device in ("cpu", "mesh:0"):
        here, given = copy.deepcopy(model).to(device), x.to(device, copy=True).requires_grad_()
        out, _ = here(given)
        out.square().sum().backward()
        results.append([out, given.grad, *(p.grad for p in here.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected)


def test_the_choice_of_attention_is_no_call_of_an_operator(mesh_device: Devices) -> None:
    """A recorder would take its operands, which are on the CPU, for constants."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 2, 4, 8, device="mesh:0", requires_grad=True)
    with Names():
        F.scaled_dot_product_attention(x, x, x)
    assert names
    assert not [name for name in names if "choice" in name]
