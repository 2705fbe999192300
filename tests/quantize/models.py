"""Small models, their marks on meshes of all kinds, and the comparison with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import NumberFormat, Scheme

Placements = list[mw.Placement]
COLUMNS, ROWS = mw.Shard(0), mw.Shard(1)


def perceptron() -> nn.Module:
    """Return a model whose second layer has rows of 48 numbers: with shards of 16 on three ranks, 12 on four."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 80, bias=False), nn.ReLU(), nn.Linear(80, 40))


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 64, generator=generator) for _ in range(count)]


@dataclass(frozen=True)
class Mesh:
    """A mesh, and the placements of the weights of columns-parallel and rows-parallel layers."""

    sizes: dict[str, int]
    columns: Placements
    rows: Placements

    @property
    def ranks(self) -> int:
        return int(np.prod(list(self.sizes.values())))

    def mesh(self) -> mw.ProcessMesh:
        return mw.ProcessMesh(np.arange(self.ranks).reshape(*self.sizes.values()), list(self.sizes))

    def marked(self, model: nn.Module) -> nn.Module:
        """Return the model with its linear layers in turns parallel by columns and by rows."""
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        return mw.shard_layer(model, self.mesh(), partial(self._mark, linear))

    def _mark(self, linear: list[nn.Linear], _: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        if isinstance(layer, nn.Linear):
            placements = self.rows if linear.index(layer) % 2 else self.columns
            layer.weight = mw.shard_tensor(layer.weight, mesh, placements)  # pyright: ignore[reportAttributeAccessIssue]


MESHES = {
    "tp 2": Mesh({"tp": 2}, [COLUMNS], [ROWS]),
    "tp 4": Mesh({"tp": 4}, [COLUMNS], [ROWS]),
    "rows, uneven": Mesh({"tp": 3}, [ROWS], [ROWS]),
    "columns, uneven": Mesh({"tp": 3}, [COLUMNS], [COLUMNS]),
    "dp 2": Mesh({"dp": 2}, [mw.Replicate()], [mw.Replicate()]),
    "ZeRO-3": Mesh({"dp": 4}, [COLUMNS], [COLUMNS]),
    "dp 2 x tp 2": Mesh({"dp": 2, "tp": 2}, [mw.Replicate(), COLUMNS], [mw.Replicate(), ROWS]),
    "ZeRO-3 x tp": Mesh({"dp": 2, "tp": 2}, [ROWS, COLUMNS], [COLUMNS, ROWS]),
    "one dim twice": Mesh({"dp": 2, "tp": 2}, [COLUMNS, COLUMNS], [ROWS, ROWS]),
}

INT4 = NumberFormat(4, strategy="group", group_size=16)
SCHEMES = {
    "int8": Scheme.preset("int8"),
    "int8-dynamic": Scheme.preset("int8-dynamic"),
    "w4a16": Scheme(INT4),
    "int4, asymmetric": Scheme(NumberFormat(4, strategy="group", group_size=16, symmetric=False)),
    "int4, one zero point": Scheme(NumberFormat(4, strategy="tensor", symmetric=False)),
    "int3": Scheme(NumberFormat(3, strategy="group", group_size=16)),
    "int8, one scale": Scheme(NumberFormat(8, strategy="tensor"), NumberFormat(8, strategy="token", dynamic=True)),
    "nf4": Scheme.preset("nf4", group_size=16),
    "fp8-dynamic": Scheme.preset("fp8-dynamic"),
}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, whole; float8 as bytes."""
    with torch.no_grad():
        found = {name: mw.unshard_dtensor(x) for name, x in model.state_dict().items()}
    return {name: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for name, x in found.items()}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in dtype or in any bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def quantized_on(
    mesh: Mesh, make: Callable[[], nn.Module], schemes: Mapping[str, Scheme], calibration: Sequence[Any] | None = None
) -> list[dict[str, tuple[dict[str, Tensor], Tensor]]]:
    """Return, for each rank and scheme, the whole state of the quantized model, and its values for the first batch."""
    x = batches(1)[0]

    @torch.no_grad()
    def program() -> dict[str, tuple[dict[str, Tensor], Tensor]]:
        models = {name: mw.quantize(mesh.marked(make()), scheme, calibration) for name, scheme in schemes.items()}
        return {name: (state_of(model), mw.unshard_dtensor(model(x))) for name, model in models.items()}

    return mw.simulate(program, mesh.ranks)
