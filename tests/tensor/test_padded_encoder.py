"""`nn.TransformerEncoder` gives one device's numbers at padded positions, whether torch packs the sequences or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

PADDINGS = {
    "at the end": [[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]],
    "anywhere": [[0, 0, 0, 0, 0], [1, 0, 0, 1, 1], [0, 1, 0, 0, 1]],
    "nowhere": [[0, 0, 0, 0, 0]] * 3,
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"norm": True},
    {"enable_nested_tensor": False},
    {"mask_check": False},
    {"grad": True},
    {"training": True},
    {"mask": True},
    {"floats": True},
]
MARKED = ["input", "input and mask", "weights"]
MESH = mw.ProcessMesh(range(2), ["x"])


def encoded(padding: Any, setting: dict[str, Any], marked: str = "") -> Tensor:
    """Return the output of the encoder, with the `marked` tensors distributed."""

    def mark(x: Tensor, *where: str) -> Tensor:
        return mw.shard_tensor(x, MESH, [mw.Shard(0)]) if marked in where else x

    torch.manual_seed(0)
    options = {name: setting[name] for name in ("enable_nested_tensor", "mask_check") if name in setting}
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(8) if "norm" in setting else None
    encoder = nn.TransformerEncoder(layer, 2, norm, **options).train("training" in setting)
    if norm is not None:
        nn.init.constant_(norm.bias, 0.5)
    for block in encoder.layers if marked == "weights" else ():
        block.linear1.weight = mark(block.linear1.weight, "weights")
    x, ignored = torch.randn(3, 5, 8), torch.tensor(padding, dtype=torch.bool)
    if "floats" in setting:
        ignored = torch.zeros(3, 5).masked_fill(ignored, float("-inf"))
    mask = torch.zeros(5, 5, dtype=torch.bool) if "mask" in setting else None
    with torch.set_grad_enabled("grad" in setting):
        out = encoder(mark(x, "input", "input and mask"), mask, mark(ignored, "input and mask"))
    return mw.unshard_dtensor(out.detach()) if marked else out.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", PADDINGS)
def test_padded_positions_have_the_numbers_of_one_device(padding: str) -> None:
    for setting in SETTINGS:
        want = encoded(PADDINGS[padding], setting)
        got = mw.simulate(lambda s=setting: [encoded(PADDINGS[padding], s, marked) for marked in MARKED], 2)
        for found in got:
            for marked, out in zip(MARKED, found, strict=True):
                torch.testing.assert_close(out, want, msg=lambda m, s=setting, n=marked: f"{s}, {n} marked: {m}")


def test_torch_compiles_and_scripts_the_encoder_as_without_meshwright() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x = torch.randn(3, 5, 8)
    torch.compiler.reset()  # else the compilations of other tests count toward torch's limit
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(encoder, backend="eager", fullgraph=True)(x), encoder(x))
        torch.testing.assert_close(torch.jit.script(encoder)(x), encoder(x))
