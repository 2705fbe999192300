"""Calls made of smaller operators: torch's conversions of lists, and devices among the arguments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.tensor.capture import call_capture

TIMES, SAMPLES, CLASSES = 6, 5, 4
INPUTS, TARGETS = [6, 6, 5, 6, 4], [3, 2, 1, 3, 2]
LINE, PAIRS = mw.ProcessMesh([0, 1, 2, 3], ["x"]), mw.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
LENGTHS: dict[str, Callable[[list[int]], Any]] = {"list": list, "tuple": tuple, "tensor": torch.tensor}


def losses() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(TIMES, SAMPLES, CLASSES).log_softmax(-1), torch.randint(1, CLASSES, (SAMPLES, max(TARGETS)))


def loss_and_gradient(scores: Tensor, call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    scores = scores.detach().requires_grad_()
    found = call(scores)
    found.sum().backward()
    assert scores.grad is not None
    return mw.unshard_dtensor(found.detach()), mw.unshard_dtensor(scores.grad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "one dim"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_ctc_accepts_lengths_in_any_form(kind: str, flat: bool, reduction: str) -> None:
    """The composite operator makes a tensor from the list, which no operator fills."""
    scores, rows = losses()
    targets = torch.cat([row[:n] for row, n in zip(rows, TARGETS, strict=True)]) if flat else rows
    inputs, lengths = LENGTHS[kind](INPUTS), LENGTHS[kind](TARGETS)
    wanted = loss_and_gradient(scores, lambda x: F.ctc_loss(x, targets, inputs, lengths, reduction=reduction))
    layouts = [
        (LINE, [mw.Replicate()]),
        *[(LINE, [mw.Shard(d)]) for d in range(3)],
        (PAIRS, [mw.Shard(1), mw.Shard(2)]),
    ]

    def on_rank() -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        for mesh, placements in layouts:
            x = mw.shard_tensor(scores.clone(), mesh, placements)
            y = mw.shard_tensor(targets.clone(), mesh, [mw.Shard(0)] + [mw.Replicate()] * (len(placements) - 1))
            call = lambda x, y=y: F.ctc_loss(x, y, inputs, lengths, reduction=reduction)  # noqa: E731
            found.append(loss_and_gradient(x, call))
        return found

    for found in mw.simulate(on_rank, 4):
        for one in found:
            torch.testing.assert_close(one, wanted)


CONVOLUTIONS = [
    (F.conv1d, (2,)),
    (F.conv1d, (4,)),
    (F.conv2d, (2, 3)),
    (F.conv2d, (4, 1)),
    (F.conv2d, (3, 3)),
    (F.conv3d, (2, 3, 3)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("convolve", "kernel"), CONVOLUTIONS, ids=lambda x: getattr(x, "__name__", None))
def test_an_even_kernel_keeps_the_size_of_a_sharded_dim(convolve: Any, kernel: tuple[int, ...]) -> None:
    """Each position needs one more row after it than before it."""
    torch.manual_seed(0)
    shapes = (2, 4, *[7, 5, 3][: len(kernel)]), (6, 4, *kernel), (6,)
    x, w, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    wanted = loss_and_gradient(x, lambda x: convolve(x, w, b, padding="same").square())

    def on_rank(cut: tuple[int, ...]) -> tuple[bool, tuple[Tensor, Tensor]]:
        laid = mw.shard_tensor(x.clone(), PAIRS, [mw.Shard(cut[0]), mw.Shard(cut[1])])
        out = convolve(laid, w, b, padding="same")
        fits = tuple(out.to_local().shape) == out.spec.local_shape(current_communicator().rank)
        return fits, loss_and_gradient(laid, lambda x: convolve(x, w, b, padding="same").square())

    for cut in product(range(x.dim()), repeat=2):
        for fits, found in mw.simulate(on_rank, 4, cut):
            assert fits, f"a local part has another shape than its layout, cut along {cut}"
            torch.testing.assert_close(found, wanted)


def capture_of(function: Callable[[Tensor], Any]) -> call_capture.Captured:
    return call_capture.capture(function, (torch.ones(3),), {}, lambda _: None)


def test_a_plan_does_not_read_uninitialised_memory() -> None:
    assert call_capture.reads_uninitialised(capture_of(lambda x: x + torch.empty(3, device="meta")))
    assert not call_capture.reads_uninitialised(capture_of(lambda x: torch.empty_like(x).copy_(x) + 1))
    assert not call_capture.reads_uninitialised(capture_of(torch.empty_like))
