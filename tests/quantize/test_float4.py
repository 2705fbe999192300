"""mxfp4 and nvfp4: the numbers of their definitions, equal on every mesh, and known to compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import QuantizeError, Scheme
from meshwright.quantize._rounding import float4_codes, float4_powers, float4_scales, float4_values
from meshwright.quantize._stored_weight import store, values_in

from .models import MESHES, batches, differences, quantized_on, state_of

SCHEMES = {name: Scheme.preset(name) for name in ("mxfp4", "mxfp4-dynamic", "nvfp4")}
GPTQ = {name: Scheme(SCHEMES[name].weights, method="gptq", act_order=True) for name in ("mxfp4", "nvfp4")}


def perceptron() -> nn.Module:
    """Return a model whose rows are whole groups of 32: on three and four ranks, shards of a row are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False), nn.ReLU(), nn.Linear(64, 40))


@pytest.mark.parametrize("mesh", MESHES)
def test_codes_and_scales_on_a_mesh_are_those_of_one_device(mesh: str) -> None:
    for schemes, data in ((SCHEMES, None), (GPTQ, batches())):
        ones = {name: mw.quantize(perceptron(), scheme, data) for name, scheme in schemes.items()}
        for rank in quantized_on(MESHES[mesh], perceptron, schemes, data):
            for name, one in ones.items():
                assert differences(state_of(one), rank[name][0]) == [], name


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_are_those_of_compressed_tensors() -> None:
    x = torch.cat([torch.linspace(-7, 7, 999), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -2.5])])
    assert torch.equal(float4_values(float4_codes(x)), cast_to_fp4(x.clone()).abs() * x.sign())
    largest = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)) * 9
    theirs = 2.0 ** (generate_mx_scales(largest, num_bits=4).float() - 127)
    assert torch.equal(float4_powers(largest), theirs)


def test_a_group_of_nvfp4_has_the_scale_with_the_smaller_error() -> None:
    x = torch.randn(64, 4, 16, generator=torch.Generator().manual_seed(0))
    largest = x.abs().amax(-1)
    chosen = float4_scales(x, largest).unsqueeze(-1)

    def error(scale: Tensor) -> Tensor:
        return (float4_values(float4_codes(x / scale)) * scale - x).square().sum(-1)

    rounded = [(largest / top).unsqueeze(-1) for top in (4.0, 6.0)]
    near = (torch.minimum(*((chosen / scale - 1).abs() for scale in rounded)) < 1 / 16 + 1e-6).squeeze(-1)
    assert near.all()  # a float8 scale is at most 1/16 off
    assert error(chosen).sum() < 0.95 * min(error(scale).sum() for scale in rounded)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
def test_zeros_and_extreme_numbers_have_finite_values(scheme: str, factor: float) -> None:
    layer = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        layer.weight[0] = 0.0
        layer.weight[1:] *= factor
    new: Any = mw.quantize(nn.Sequential(layer), scheme)[0]  # pyright: ignore[reportIndexIssue]
    values = new.dequantized()
    assert torch.equal(values[0], torch.zeros(64))
    assert 0 < new.error < 0.2
    stored = store(torch.zeros(32, 64, dtype=torch.int8), torch.full((32, 64 // 16), 0.5), None, SCHEMES["nvfp4"])
    assert float(values_in(stored, SCHEMES["nvfp4"], 64).abs().max()) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_saved_model_is_loaded(scheme: str, tmp_path: Path) -> None:
    model = mw.quantize(perceptron(), scheme)
    mw.save_quantized(model, tmp_path / "q")
    assert differences(state_of(model), state_of(mw.load_quantized(perceptron(), tmp_path / "q"))) == []


def test_other_groups_are_refused() -> None:
    with pytest.raises(QuantizeError, match="groups of 32"):
        Scheme.preset("mxfp4", group_size=16)
