"""Results have the strides of one device, in any memory order of the operands.

Torch fills tensors in memory order, so the strides decide which elements dropout drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.opinfo.core import UnaryUfuncInfo
from torch.utils._pytree import tree_flatten, tree_leaves

import meshwright as mw
from benchmarks import _samples
from meshwright.tensor.capture.call_capture import capture

PROGRAMS = """
F.conv2d(x, w); F.conv2d(x, w[:, :2], groups=2); F.conv2d(x, w[:4, :1], padding=1, groups=4); F.conv2d(x[0], w)
F.conv2d(x, w[:, :, :1, :1]); F.conv2d(x, w, stride=2); F.conv2d(x, w, dilation=2, padding=2); F.conv2d(x, w[:1])
F.conv2d(x, last(w)); F.conv1d(x[0], last(w)[..., 0]); F.conv_transpose1d(x[0], last(v)[..., 0])
F.conv_transpose2d(x, v); F.conv_transpose2d(x, last(v), stride=2); F.unfold(x, 2); F.fold(F.unfold(x, 2), (4, 4), 2)
F.batch_norm(x, m, m + 1, training=True); F.batch_norm(x, m, m + 1); F.instance_norm(x); F.group_norm(x, 2)
F.layer_norm(x, (4, 4)); F.rms_norm(x, (4, 4)); F.local_response_norm(x, 2); F.normalize(x, dim=1)
F.max_pool2d(x, 2, return_indices=True); F.avg_pool2d(x, 2); F.adaptive_avg_pool2d(x, 2); F.adaptive_max_pool2d(x, 2)
F.lp_pool2d(x, 2, 2); F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2); F.interpolate(x, scale_factor=2)
F.interpolate(x, scale_factor=2, mode="bilinear"); F.interpolate(x, scale_factor=2, mode="bicubic")
F.interpolate(x, scale_factor=2, mode="nearest-exact"); F.pad(x, (1, 1)); F.pad(x, (1, 1, 1, 1))
F.pad(x, (1, 1, 1, 1), mode="reflect"); F.pad(x, (1, 1, 1, 1), mode="circular")
F.pad(x, (1, 1, 1, 1), mode="replicate"); F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"); F.pixel_unshuffle(x, 2)
F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"); F.pixel_shuffle(x, 2); torch.channel_shuffle(x, 2); x.roll(1, 0)
x.roll((1, 2), (0, 1)); x.roll(1); x.flip(0); x.rot90(1, (2, 3)); x.mT + x; x + m[:, None, None]; torch.cat([x, x], 1)
torch.cat([x, x.contiguous()], 1); torch.cat([x.contiguous(), x], 1); torch.stack([x, x]); x.tile(2)
x.repeat(1, 2, 1, 1); x.repeat_interleave(2, 1); x.clone(); x.double(); x.contiguous(); x.reshape(4, 16, 4)
torch.zeros_like(x); x.new_zeros(x.shape); x.sin(); x * x.contiguous(); x.contiguous() * x; torch.lerp(x, x.mT, 0.3)
torch.where(x > 0, x, 0.0); x.masked_fill(x > 0, 0); torch.copysign(x, x[0]); torch.xlogy(x, m + 1); x // (m + 1)
torch.div(x[0], x[:1, 0], rounding_mode="floor"); torch.logaddexp(x, x[0]); torch.isin(x, m)
torch.special.xlog1py(x, m); F.logsigmoid(x); F.rrelu(x); F.gelu(x); F.silu(x); F.mish(x); F.softplus(x); F.elu(x)
F.glu(x, 1); F.prelu(x, m); x.softmax(1); x.log_softmax(2); x.cumsum(1); x.cummax(1); x.logcumsumexp(1); x.sort(1)
x.argsort(1); x.topk(2, 1); x.sum(0); x.mean(1, keepdim=True); x.amax(1); torch.var_mean(x, 0); x.norm(dim=1)
x.logsumexp(1); x.argmax(1); x[[0, 1]]; x[:, [0, 1]]; x[:, :, [0, 1], [1, 0]]; x.index_select(1, i)
x.gather(1, i[:, None, None, None].expand(2, 1, 4, 4)); x.index_add(1, i, x[:, :2]); x.index_copy(1, i, x[:, :2])
x.index_fill(1, i, 0.0); x.index_put((i,), m[0]); torch.select_scatter(x, x[0], 0, 0)
torch.slice_scatter(x, x[:2], 0, 0, 2); torch.diagonal_scatter(x, x.diagonal()); x @ x; F.linear(x, w[:, :, 0, 0])
torch.einsum("bchw,cd->bdhw", x, w[:4, :, 0, 0]); torch.tensordot(x, w, ([1], [1]))
F.scaled_dot_product_attention(x, x, x); torch.cdist(x, x); x.triu(); x.diff(dim=1); x.logit(0.1); x.nan_to_num()
torch.linalg.svd(x, full_matrices=False); torch.linalg.inv(x + 9 * e); torch.fft.rfft(x); torch.fft.fft2(x)
F.mse_loss(x, x, reduction="none"); F.cross_entropy(x, x.argmax(1), reduction="none")
torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255); F.dropout(x, 0.5); torch.rand_like(x)
F.grid_sample(x, x[..., :2], align_corners=False)
"""
LINES = [line.strip() for line in PROGRAMS.replace("\n", ";").split(";") if line.strip()]
LAYOUTS = {
    "one rank": (1, mw.Replicate()),
    "rows": (2, mw.Shard(0)),
    "columns": (2, mw.Shard(1)),
    "terms": (2, mw.Partial()),
}
QUIET = pytest.mark.filterwarnings("ignore:.*on whole tensors")


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels-last": last,
    "transposed": lambda x: x.mT.contiguous().mT,
    "permuted": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "with gaps": lambda x: last(torch.cat([x, x], 1))[:, : x.shape[1]],
}


def strides(tree: Any) -> list[Any]:
    """Return the strides of all tensors of a tree, along dims with more than one element."""
    found = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.layout is torch.strided]
    return [[s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else [] for x in found]


def names(x: Tensor) -> dict[str, Any]:
    w, v = torch.ones(6, 4, 3, 3), torch.ones(4, 2, 3, 3)
    return {
        "F": F,
        "torch": torch,
        "last": last,
        "x": x,
        "w": w,
        "v": v,
        "m": torch.zeros(4),
        "e": torch.eye(4),
        "i": torch.tensor([0, 1]),
    }


@QUIET
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_strides_of_one_device(layout: str, order: str) -> None:
    ranks, placement = LAYOUTS[layout]
    mesh = mw.ProcessMesh(list(range(ranks)), ["a"])
    whole = torch.randn(4, 4, 4, 4)

    def program(x: Tensor) -> dict[str, Any]:
        scope = names(ORDERS[order](x))
        return {line: strides(eval(line, scope)) for line in LINES}

    expected = program(whole)
    for found in mw.simulate(lambda: program(mw.shard_tensor(whole, mesh, [placement])), ranks):
        assert {k: v for k, v in found.items() if v != expected[k]} == {}


def calls(entry: _samples.Entry) -> Iterator[tuple[list[Any], Any]]:
    """Yield the flat arguments of samples of an operator, in all memory orders."""
    if entry.dtype is None or isinstance(entry.op, UnaryUfuncInfo):  # one kernel for all of them
        return
    for sample in islice(entry.op.sample_inputs("cpu", entry.dtype), 1):
        flat, tree = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        for seed in (0, 2):  # transposed, channels-last
            yield [_samples.in_other_memory(detached(v), seed) for v in flat], tree


def detached(value: Any) -> Any:
    return _samples.contiguous(value).detach() if isinstance(value, Tensor) else value


def compared(entry: _samples.Entry, flat: list[Any], tree: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the captured and the real strides of the results; None without values or without a meta kernel."""
    try:
        with torch.no_grad():
            real = strides(entry.call(flat, tree))
        return strides(capture(lambda *a: entry.call(a, tree), flat, {}, lambda _: None).out), real
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore")
def test_captured_strides_are_those_of_the_kernels() -> None:
    """The strides of results come from a capture on the meta device."""
    wrong: dict[str, Any] = {}
    for entry in _samples.entries(("memory",)):
        for flat, tree in () if entry.op.name in (*_samples.LEFT_OUT, *UNLIKE) else calls(entry):
            found = compared(entry, flat, tree)
            if found is not None and found[0] != found[1]:
                wrong[entry.name] = *found, strides(flat)
    assert wrong == {}


UNLIKE = {
    "nn.functional.dropout": "distributed tensors have a dropout of their own; see the first test",
    "nn.functional.nll_loss": "the operator ignores its reduction; the function has rules for each",
}
"""Operators with strides that one capture does not determine, each with the reason."""


def test_index_fill_keeps_the_memory_order_of_its_operand() -> None:
    x, at = torch.ones(2, 3, 4).permute(2, 0, 1), torch.tensor([0, 1])
    found = capture(lambda x, at: x.index_fill(1, at, 0.0), (x, at), {}, lambda _: None).out
    assert found.stride() == x.index_fill(1, at, 0.0).stride() != x.contiguous().stride()
