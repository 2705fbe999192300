"""The form of bitsandbytes (`quant_method: bitsandbytes`) with nf4 weights, read without the package bitsandbytes.

tensor                                   content of a layer with n outputs, k inputs and b blocks
weight                                   uint8 [n k / 2, 1]: codes in the order of elements, the first in the high bits
weight.absmax                            float32 [b]: the scale of each block; uint8 if scales are quantized too
weight.quant_map                         float32 [16]: the numbers of nf4
weight.quant_state.bitsandbytes__nf4     a JSON text as bytes: shape, block size, and more
weight.nested_absmax                     float32 [b / 256]: the scale of each 256 quantized scales
weight.nested_quant_map                  float32 [256]: the numbers of quantized scales; their mean is in the JSON text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Catalogue
from meshwright.layout import InputError, Layout, Product, axes_of, read_json
from meshwright.tensor import DistTensor

from .._packing import pack
from .._rounding import NORMAL_FLOAT4
from .._scheme import NumberFormat, Scheme
from .._stored_weight import PACKED, SCALE, SHAPE, Stored
from ..layers.linear_layers import is_linear
from .file_tensor import FileTensor, refused

CODES, ABSMAX, MAP, STATE = "weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"
NESTED, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
NESTED_BLOCK = 256
"""Number of quantized scales that share a scale."""


@dataclass(frozen=True, slots=True)
class BitsandbytesForm:
    """A checkpoint in the form of bitsandbytes."""

    where: str

    @classmethod
    def read(cls, told: Mapping[str, Any], where: str) -> BitsandbytesForm:
        """Return the form that a `quantization_config` describes.

        Raises:
            QuantizeError: it describes int8 or fp4 weights.
        """
        kind = told.get("bnb_4bit_quant_type", "fp4") if told.get("load_in_4bit") else "int8"
        if kind != "nf4":
            raise refused(where, f"{kind} weights", "of the forms of bitsandbytes, only nf4 is known")
        return cls(where)

    def layers_of(self, model: nn.Module, catalogue: Catalogue) -> Iterator[tuple[str, nn.Linear, Scheme]]:
        for name, module in model.named_modules():
            if is_linear(module) and f"{name}.{STATE}" in catalogue.entries:
                yield name, module, self._scheme(name, module, catalogue)

    def _scheme(self, name: str, layer: nn.Linear, catalogue: Catalogue) -> Scheme:
        """Return the scheme of a layer; its block size follows from the number of scales."""
        scales = catalogue.entries.get(f"{name}.{ABSMAX}")
        blocks = scales.shape[0] if scales is not None and scales.shape else 0
        size, rest = divmod(layer.out_features * layer.in_features, blocks) if blocks else (0, 1)
        if rest or layer.in_features % size or size % 8:
            raise refused(
                self.where,
                f"{name}: {blocks} blocks of a weight of {layer.out_features} rows of {layer.in_features} numbers",
                "a block with numbers of two rows is not supported, and blocks have a multiple of 8 numbers",
            )
        return Scheme(NumberFormat(4, "nf", "group", size))

    def files_of(self, name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
        count = layer.out_features * layer.in_features
        blocks = count // (scheme.weights.group_size or count)
        layouts = [_flat_layout(layer.weight, dims) for dims in (2, 1)]
        is_nested = f"{name}.{NESTED}" in catalogue.entries
        found = {
            CODES: FileTensor((count // 2, 1), torch.uint8, layouts[0]),
            ABSMAX: FileTensor((blocks,), torch.uint8 if is_nested else torch.float32, layouts[1]),
            MAP: FileTensor((len(NORMAL_FLOAT4),), torch.float32),
            STATE: FileTensor(catalogue.entries[f"{name}.{STATE}"].shape, torch.uint8),
        }
        if not is_nested:
            return found
        nested = FileTensor((-(-blocks // NESTED_BLOCK),), torch.float32)
        return found | {NESTED: nested, NESTED_MAP: FileTensor((256,), torch.float32)}

    def check(self, name: str, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> None:
        told = self._state(name, files)
        wanted = {
            "shape": [layer.out_features, layer.in_features],
            "blocksize": scheme.weights.group_size,
            "quant_type": "nf4",
        }
        if NESTED in files:
            wanted["nested_blocksize"] = NESTED_BLOCK
        differences = [
            f"{key} {told.get(key)!r}, not {wanted[key]!r}" for key in wanted if told.get(key) != wanted[key]
        ]
        if NESTED in files and not isinstance(told.get("nested_offset"), float):
            differences.append(f"nested_offset {told.get('nested_offset')!r}")
        if not torch.equal(files[MAP].cpu(), torch.tensor(NORMAL_FLOAT4, device="cpu")):
            differences.append("other numbers than those of nf4")
        if differences:
            raise refused(self.where, f"{name}: {', '.join(differences)}", "the layer does not have these numbers")

    def _state(self, name: str, files: Mapping[str, Tensor]) -> Mapping[str, Any]:
        try:
            told = read_json(files[STATE].cpu().numpy().tobytes())
        except InputError as error:
            raise refused(self.where, f"{name}.{STATE}: {error.found}", error.why) from error
        return told if isinstance(told, Mapping) else {}

    def stored(self, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> Stored:
        rows, columns = layer.out_features, layer.in_features
        pairs = files[CODES].reshape(rows, columns // 2)
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten(-2).to(torch.int8) - 8
        scale = self._scales(files).reshape(rows, columns // (scheme.weights.group_size or columns))
        shape = torch.tensor((rows, columns), device=scale.device)
        return {PACKED: pack(codes, 4), SCALE: scale, SHAPE: shape}

    def _scales(self, files: Mapping[str, Tensor]) -> Tensor:
        """Return the scale of each block in float32."""
        if NESTED not in files:
            return files[ABSMAX]
        factors = files[NESTED].repeat_interleave(NESTED_BLOCK)[: files[ABSMAX].shape[0]]
        return files[NESTED_MAP][files[ABSMAX].long()] * factors + float(self._state("", files)["nested_offset"])


def _flat_layout(weight: Tensor, ndim: int) -> Layout | None:
    """Return the layout of flat elements: sharded over all axes of the weight, if each rank then has whole rows."""
    if not isinstance(weight, DistTensor):
        return None
    rows, columns = weight.spec.layout.dims
    rest = ((),) * (ndim - 1)
    if isinstance(rows, Product) or isinstance(columns, Product):
        return Layout(((), *rest))
    ranks = prod(weight.mesh.sizes[axis] for dim in (rows, columns) for axis in axes_of(dim))
    return Layout(((*rows, *columns) if weight.shape[0] % ranks == 0 else (), *rest))
