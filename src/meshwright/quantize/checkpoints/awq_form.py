"""The form of AWQ (`quant_method: awq`) with the packing "gemm", as AutoAWQ writes it.

tensor    shape         dtype   content of a layer with n outputs, k inputs, g groups, and 4 bits
qweight   [k, n / 8]    int32   codes, packed along the outputs
qzeros    [g, n / 8]    int32   zero points, packed in the same way
scales    [g, n]        float   scales

Codes have no sign. The 8 codes of a word are those of the outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Catalogue

from .._errors import QuantizeError
from .._packing import pack, unpack
from .._scheme import NumberFormat, Scheme
from .._stored_weight import PACKED, ZERO, Stored
from .file_tensor import FileTensor, layout_like, refused
from .gptq_form import CODES, ZEROS, grouped, packed_layers, scale_files, stored_scale

BITS = 4
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output → the position of its code in a word."""


@dataclass(frozen=True, slots=True)
class AwqForm:
    """The numbers of a checkpoint in the form of AWQ."""

    numbers: NumberFormat

    @classmethod
    def read(cls, told: Mapping[str, Any], where: str) -> AwqForm:
        """Return the form that a `quantization_config` describes.

        Raises:
            QuantizeError: it describes other numbers, or another packing.
        """
        bits, version = told.get("bits", told.get("w_bit")), told.get("version", told.get("format", "gemm"))
        if bits != BITS:
            raise refused(where, f"bits {bits!r}", "the packing is that of 4 bits")
        if str(version).lower() != "gemm":
            raise refused(where, f"version {version!r}", "only the packing gemm is known")
        size = told.get("group_size", told.get("q_group_size", -1))
        return cls(grouped(BITS, size, False, where))

    def layers_of(self, model: nn.Module, catalogue: Catalogue) -> Iterator[tuple[str, nn.Linear, Scheme]]:
        yield from packed_layers(model, catalogue, self.numbers)

    def files_of(self, name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
        if layer.out_features % len(POSITIONS):
            raise QuantizeError(
                f"load {name} in the form of AWQ",
                f"a layer with {layer.out_features} outputs",
                f"a word has the codes of {len(POSITIONS)} outputs",
                "build the model with the sizes that the checkpoint's config.json has",
            )
        codes = (layer.in_features, layer.out_features // len(POSITIONS))
        return {
            CODES: FileTensor(codes, torch.int32, layout_like(codes, (1, 0), layer.weight)),
            **scale_files(name, layer, scheme, catalogue),
        }

    def check(self, name: str, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> None:
        """Accept all values: every word has codes."""

    def stored(self, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> Stored:
        rows = layer.out_features
        return {
            PACKED: pack(_in_order(unpack(files[CODES], BITS, rows)).t().contiguous(), BITS),
            **stored_scale(layer, files),
            ZERO: pack(_in_order(unpack(files[ZEROS], BITS, rows)), BITS).t().contiguous(),
        }


def _in_order(codes: Tensor) -> Tensor:
    """Return the codes [., n] of words in the order of the outputs."""
    words = codes.unflatten(-1, (codes.shape[-1] // len(POSITIONS), len(POSITIONS)))
    return words[..., torch.tensor(POSITIONS, device=codes.device)].flatten(-2)
