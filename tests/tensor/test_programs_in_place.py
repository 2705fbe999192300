"""Programs that write in place: in inference mode, through `set_`, into views with shared elements, in odd orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.tensor import OperationError

Put = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((4,), [mw.Shard(0)]),
    "rows and columns": ((2, 2), [mw.Shard(0), mw.Shard(1)]),
    "an axis of size 1": ((1, 3), [mw.Shard(0), mw.Shard(0)]),
    "pending": ((2,), [mw.Partial()]),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def cache_of_inference(put: Put) -> list[Tensor]:
    with torch.inference_mode():
        cache, found = put(torch.zeros(2, 6, 4)), list[Tensor]()
        for step in range(6):
            cache[:, step] = put(numbers(2, 4, seed=step))
            query = put(numbers(2, 1, 4, seed=9 + step))
            found.append((query @ cache[:, : step + 1].transpose(1, 2)).softmax(-1) @ cache[:, : step + 1])
        return [cache.clone(), torch.cat(found, 1)]


def views_of_inference(put: Put) -> list[Tensor]:
    with torch.inference_mode():
        x = put(numbers(6, 4))
        view = x[1:4]
        inner = view.t()[1:]
        inner += 1
        x.mul_(2)
        view[view > 0] = 5
        x[0] = view[1]
        torch._foreach_add_([view, x], 1.0)  # pyright: ignore[reportPrivateImportUsage] - torch has no public name
        return [x.clone(), view.clone(), inner.clone()]


def spectral_norm(put: Put) -> list[Any]:
    layer = nn.Linear(5, 6, bias=False)
    layer.weight = nn.Parameter(put(numbers(6, 5)))
    torch.manual_seed(3)
    layer = nn.utils.parametrizations.spectral_norm(layer)
    layer(put(numbers(4, 5))).sum().backward()
    return [layer.weight, layer.parametrizations.weight.original.grad]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess] - made by torch


def memory_taken_over(put: Put) -> list[Tensor]:
    a, b = put(numbers(6, 4)), put(numbers(6, 4, seed=3))
    a.set_(b)  # pyright: ignore[reportArgumentType] - torch's stubs lack this overload
    b.add_(1)
    a[0] = 7
    return [a, b]


def windows_set_to_zero(put: Put) -> list[Tensor]:
    x = put(numbers(8, 3))
    x.unfold(0, 3, 1).zero_()
    pairs = x.unfold(0, 2, 2)
    pairs.add_(1)
    return [x, pairs]


def kron_of_transposed(put: Put) -> list[Any]:
    a, b = put(numbers(5, 5)).t().detach().requires_grad_(), put(numbers(10, 4)).t().detach().requires_grad_()
    y = torch.kron(a, b)
    y.pow(2).sum().backward()
    return [y, a.grad, b.grad]


def householder_of_few_matrices(put: Put) -> list[Any]:
    a, tau = put(numbers(2, 1, 5, 5)).detach().requires_grad_(), put(numbers(2, 1, 5)).detach().requires_grad_()
    y = torch.linalg.householder_product(a, tau)
    y.pow(2).sum().backward()
    return [y, a.grad, tau.grad]


def bags(put: Put) -> list[Any]:
    rows, ids = nn.Parameter(put(numbers(9, 4))), torch.tensor([0, 3, 3, 8, 1, 2])
    y = F.embedding_bag(ids, rows, torch.tensor([0, 3]), padding_idx=3)
    y = y + F.embedding_bag(ids, rows, torch.tensor([0, 3, 6]), mode="sum", include_last_offset=True)
    y.pow(2).sum().backward()
    return [y, rows.grad]


PROGRAMS = [
    cache_of_inference, views_of_inference, spectral_norm, memory_taken_over, windows_set_to_zero, kron_of_transposed,
    householder_of_few_matrices, bags,
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_the_numbers_of_one_device(program: Callable[[Put], list[Any]], layout: str) -> None:
    shape, placements = LAYOUTS[layout]
    size = torch.Size(shape).numel()
    wanted = [x.detach() for x in program(lambda x: x.clone())]

    def ranks() -> list[Tensor]:
        mesh = mw.ProcessMesh(torch.arange(size).reshape(shape).tolist(), ["a", "b"][: len(shape)])
        found = program(lambda x: mw.shard_tensor(x.clone(), mesh, placements))
        return [mw.unshard_dtensor(x).detach() for x in found]

    for found in mw.simulate(ranks, size):
        for mine, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-5)


def test_a_write_that_reads_a_view_with_shared_elements_is_refused() -> None:
    """On one device an element is multiplied once for every window that contains it; torch calls this undefined."""
    mesh = mw.ProcessMesh(range(4), ["x"])

    def write() -> None:
        mw.shard_tensor(numbers(8, 3), mesh, [mw.Shard(0)]).unfold(0, 3, 1).mul_(2)

    with pytest.raises(OperationError, match="share memory"):
        mw.simulate(write, 4)
