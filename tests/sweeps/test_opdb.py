"""A small fixed part of the figure `opdb`: common operators, two samples each, every layout, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import _samples, opdb

COMMON = """
    abs add addmm all amax amin any argmax argmin argsort baddbmm bmm cat ceil chunk clamp clone cos cummax
    cumprod cumsum diagonal diff div/no_rounding_mode einsum eq exp expand fill flatten flip floor gather ge
    index_add index_copy index_put index_select isnan le linalg.norm linalg.vector_norm log log_softmax
    logcumsumexp logsumexp lt masked_fill matmul max/reduction_with_dim maximum mean min/reduction_no_dim
    minimum mm mul narrow ne neg norm outer permute pow prod reciprocal repeat reshape roll rsqrt scatter
    scatter_add select sigmoid sign sin slice softmax sort split sqrt square squeeze stack std sub sum
    take_along_dim tanh tile topk transpose tril triu unbind unflatten unsqueeze var view where zeros_like
    __getitem__ nn.functional.binary_cross_entropy nn.functional.conv1d nn.functional.conv2d
    nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding nn.functional.gelu
    nn.functional.group_norm nn.functional.huber_loss nn.functional.layer_norm nn.functional.linear
    nn.functional.mse_loss nn.functional.nll_loss nn.functional.pad/constant nn.functional.relu
    nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu
    nn.functional.smooth_l1_loss nn.functional.softplus
""".split()
WRITTEN = "add cumsum index_put masked_fill mul transpose view __getitem__".split()

ENTRIES = [e for e in _samples.entries(("function",)) if e.name in COMMON] + [
    e for e in _samples.entries(("in place", "view")) if e.op.name in WRITTEN and not e.op.variant_test_name
]


@pytest.fixture(scope="module")
def library() -> opdb.Ours:
    return opdb.Ours()


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Save and restore the global generator, from which samples are drawn."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_operator_gives_one_devices_numbers_in_every_layout(entry: _samples.Entry, library: opdb.Ours) -> None:
    row = opdb.try_entry(library, entry, cap=1 if entry.kind != "function" else 2)
    assert row.status == "right", f"{row.variant} of {row.sample}: {row.message}"


def test_every_common_operator_is_in_torchs_list() -> None:
    assert {e.name for e in ENTRIES if e.kind == "function"} == set(COMMON)


def test_the_sweep_is_right_for_one_device() -> None:
    """The sweep's own changes of samples must change no number."""
    entries = [e for e in ENTRIES if e.name in ("add", "cumsum", "nn.functional.layer_norm", "unbind (view)")]
    assert [opdb.try_entry(opdb.Plain(), e, cap=2).status for e in entries] == ["right"] * len(entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_terms_add_up_to_the_last_bit(dtype: torch.dtype, ranks: int) -> None:
    value = torch.testing.make_tensor(7, 5, dtype=dtype, device="cpu")
    terms = _samples.exact_terms(value, ranks)
    for order in (terms, terms[::-1]):
        assert torch.equal(sum(order[1:], order[0]).to(dtype), value)
    assert not any(torch.equal(t, value) for t in terms)
