"""Calibration: codes on any mesh equal those of one device, for whole models and every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.quantize import CalibrationError, NumberFormat, QuantizedLinear, QuantizeError, Scheme
from meshwright.quantize._stored_weight import codes_in

from .models import INT4, MESHES, batches, differences, perceptron, quantized_on, state_of

GPTQ = Scheme(INT4, method="gptq", act_order=True)
SCHEMES = {
    "gptq": GPTQ,
    "gptq, int3, asymmetric": Scheme(NumberFormat(3, strategy="group", group_size=16, symmetric=False), method="gptq"),
    "gptq, one scale": Scheme(NumberFormat(8, strategy="tensor"), method="gptq"),
    "fp8": Scheme.preset("fp8"),
    "awq": Scheme(INT4, method="awq"),
    "smoothquant": Scheme.preset("w8a8-smoothquant"),
}
CONFIG = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=48)


@pytest.mark.parametrize("mesh", MESHES)
def test_codes_on_a_mesh_are_those_of_one_device(mesh: str) -> None:
    ones = {name: mw.quantize(perceptron(), scheme, batches()) for name, scheme in SCHEMES.items()}
    for rank in quantized_on(MESHES[mesh], perceptron, SCHEMES, batches()):
        for name, one in ones.items():
            assert differences(state_of(one), rank[name][0]) == [], name


def texts(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, CONFIG.vocab, (count, 2, 2, 8), generator=generator)
    return [(x[0], x[1]) for x in tokens]


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 3, 1), (2, 1, 2)])
def test_a_language_model_on_stages_replicas_and_shards(shape: tuple[int, ...]) -> None:
    lines: list[str] = []
    one = mw.quantize(Llama(CONFIG), GPTQ, texts(), progress=lines.append)
    assert [line.partition(",")[0] for line in lines[:2]] == ["blocks.0: 7 layers", "blocks.1: 7 layers"]

    def program() -> list[str]:
        model = Llama(CONFIG)
        mark(model, mw.ProcessMesh(np.arange(np.prod(shape)).reshape(shape), ["pp", "dp", "tp"]))
        return differences(state_of(one), state_of(mw.quantize(model, GPTQ, texts())))

    assert mw.simulate(program, int(np.prod(shape))) == [[]] * int(np.prod(shape))


def test_zero_keeps_its_hooks_and_shards() -> None:
    one = mw.quantize(perceptron(), GPTQ, batches())

    def program() -> tuple[list[str], Any]:
        model = perceptron()
        optimizer = torch.optim.AdamW(model.parameters())
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        mw.parallelize(model, optimizer, mesh, mw.Parallelism(zero=3))
        mw.quantize(model, GPTQ, batches())
        with torch.no_grad():
            values = mw.unshard_dtensor(model(batches(1)[0]))
        torch.testing.assert_close(values, one(batches(1)[0]), rtol=1e-5, atol=1e-5)
        packed: Any = model.get_buffer("0.weight_packed")
        return differences(state_of(one), state_of(model)), packed.spec.layout

    for found, layout in mw.simulate(program, 2):
        assert found == []
        assert layout.cut_axes == ("dp",)


def textbook(weight: Tensor, inputs: Tensor, scale: Tensor) -> Tensor:
    """Return the codes of GPTQ in float64, one column after the other, with the inverse that is updated each time."""
    left = weight.double().clone()
    hessian = inputs.double().t() @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = hessian.inverse()
    codes = torch.zeros_like(left)
    for i in range(left.shape[1]):
        at = scale[:, i // 16].double()
        codes[:, i] = (left[:, i] / at).round().clamp(-8, 7)
        error = (left[:, i] - codes[:, i] * at) / inverse[i, i]
        left[:, i:] -= error.unsqueeze(-1) * inverse[i, i:]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    return codes.to(torch.int8)


def test_gptq_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(160, 40, bias=False)
    weight = layer.weight.detach().clone()
    x = torch.randn(400, 160) + 2 * torch.randn(400, 1)
    new: Any = mw.quantize(layer, Scheme(INT4, method="gptq"), [x])
    codes = codes_in(dict(new.named_buffers()), new.scheme, 160)
    assert (codes != textbook(weight, x, new.weight_scale)).float().mean() < 0.01
    nearest = mw.quantize(_like(weight), Scheme(INT4))
    exact = x @ weight.t()
    assert (new(x) - exact).norm() < 0.7 * (nearest(x) - exact).norm()
    torch.testing.assert_close(new.error, float((new(x) - exact).norm() / exact.norm()), rtol=1e-3, atol=0)


def _like(weight: Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


class Twisted(nn.Module):
    """A model whose blocks take the outputs of all blocks before them, so they form no chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for block in self.blocks:
            total = total + block(total).relu()
        return total


def test_a_model_without_a_chain_is_one_stage() -> None:
    lines: list[str] = []
    model = mw.quantize(Twisted(), GPTQ, batches(), progress=lines.append)
    assert lines[0].startswith("the model: 3 layers")
    assert all(isinstance(block, QuantizedLinear) for block in model.get_submodule("blocks").children())


def test_layers_with_inputs_that_are_always_zero() -> None:
    model: Any = mw.quantize(perceptron(), GPTQ, [torch.zeros(2, 64)])
    assert model(batches(1)[0]).isfinite().all()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no batch": (list, "at least one batch"),
    "NaN": (lambda: [*batches(), torch.full((2, 64), float("nan"))], "remove the batch"),
    "wrong shape": (lambda: [torch.ones(2, 63)], "batch 0 fails with RuntimeError"),
    "a later batch": (lambda: [*batches(), torch.ones(2, 64, dtype=torch.long)], "batch 5 fails with RuntimeError"),
    "one batch": (lambda: batches(1)[0], "calibration=[batch, ...]"),
    "a number": (lambda: 3, "calibration=[batch, ...]"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_bad_calibration_data_leaves_the_model_as_it_was(case: str, ranks: int) -> None:
    data, fix = CASES[case]

    def program() -> list[str]:
        model = perceptron() if ranks == 1 else MESHES["tp 2"].marked(perceptron())
        before = state_of(model)
        with pytest.raises(CalibrationError) as caught:
            mw.quantize(model, GPTQ, data())
        assert fix in str(caught.value)
        assert model.training
        return differences(before, state_of(model))

    assert mw.simulate(program, ranks) == [[]] * ranks


def test_ranks_with_other_batches_are_refused() -> None:
    def program() -> None:
        model = MESHES["tp 2"].marked(perceptron())
        mw.quantize(model, GPTQ, batches(2 + mw.get_rank()))

    with pytest.raises(CalibrationError, match="batches of rank 1 that differ"):
        mw.simulate(program, 2)


@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_a_cache_of_keys_and_values_is_not_used(method: Any) -> None:
    """Blocks run several times, and each run would add to a cache. The decoder of T5 has a configuration of its own."""
    sizes = {"vocab_size": 24, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    settings: dict[str, Any] = sizes | {"decoder_start_token_id": 0}
    ids = torch.arange(16).view(2, 8)
    scheme = Scheme(INT4, method=method)

    def quantized(cached: bool, **asked: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
        for module in model.modules():
            vars(module).get("config", model.config).use_cache = cached
        mw.quantize(model, scheme, [dict(input_ids=ids + k, labels=ids, **asked) for k in range(3)])
        assert model.decoder.config.use_cache is cached
        return state_of(model)

    without = quantized(cached=False)
    assert differences(without, quantized(cached=True)) == []
    assert differences(without, quantized(cached=False, use_cache=True)) == []


def test_a_layer_without_inputs_is_named() -> None:
    model = Twisted()
    model.unused = nn.Linear(16, 16)
    with pytest.raises(CalibrationError, match="no input of unused"):
        mw.quantize(model, GPTQ, batches())


def test_functions_of_parts_are_refused() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return mw.local_map(torch.relu, [[mw.Shard(0)]], process_mesh=mw.ProcessMesh([0]))(self.layer(x))

    def program() -> None:
        with pytest.raises(QuantizeError, match="local_map"):
            mw.quantize(Parts(), GPTQ, batches())

    mw.simulate(program, 1)
