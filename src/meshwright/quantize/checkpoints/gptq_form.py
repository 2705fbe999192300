"""The form of GPTQ (`quant_method: gptq`), as AutoGPTQ and GPTQModel write it.

tensor    shape                dtype   content of a layer with n outputs, k inputs, g groups, b bits
qweight   [k b / 32, n]        int32   codes of a column, packed along the inputs
qzeros    [g, n b / 32]        int32   zero points, packed along the outputs
scales    [g, n]               float   scales
g_idx     [k]                  int32   the group of each input; not in order after act-order

Codes have no sign, and the lowest bits of a word come first. The first version ("gptq") stores zero points minus one,
modulo 2^b; the second ("gptq_v2") stores them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Catalogue

from .._errors import QuantizeError
from .._packing import pack, packed_length, unpack
from .._scheme import NumberFormat, Scheme
from .._stored_weight import GROUP_OF, PACKED, SCALE, SHAPE, ZERO, Stored
from ..layers.linear_layers import is_linear
from .file_tensor import FileTensor, check_groups, float_dtype, layout_like, refused

CODES, ZEROS, SCALES, INDEX = "qweight", "qzeros", "scales", "g_idx"
BITS = (2, 3, 4, 8)
ZERO_SHIFT = {"gptq": 1, "gptq_v2": 0}
"""Version of the form → the number that is missing in its zero points."""


@dataclass(frozen=True, slots=True)
class GptqForm:
    """The numbers of a checkpoint in the form of GPTQ."""

    numbers: NumberFormat
    zero_shift: int

    @classmethod
    def read(cls, told: Mapping[str, Any], where: str) -> GptqForm:
        """Return the form that a `quantization_config` describes.

        Raises:
            QuantizeError: it describes other numbers, or a packing for one kernel.
        """
        bits, version = told.get("bits"), told.get("checkpoint_format") or told.get("format") or "gptq"
        if bits not in BITS:
            raise refused(where, f"bits {bits!r}", "the form has 2, 3, 4 or 8 bits")
        if not isinstance(version, str) or version not in ZERO_SHIFT:
            raise refused(where, f"checkpoint_format {version!r}", "this packing is that of one kernel")
        if told.get("dynamic"):
            raise refused(where, f"dynamic {told['dynamic']!r}", "layers with numbers of their own are not supported")
        symmetric = told.get("sym", True) is True
        return cls(grouped(bits, told.get("group_size", -1), symmetric, where), ZERO_SHIFT[version])

    def layers_of(self, model: nn.Module, catalogue: Catalogue) -> Iterator[tuple[str, nn.Linear, Scheme]]:
        yield from packed_layers(model, catalogue, self.numbers)

    def files_of(self, name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
        rows, columns, bits = layer.out_features, layer.in_features, self.numbers.num_bits
        codes = (packed_length(columns, bits), rows)
        found = {
            CODES: FileTensor(codes, torch.int32, layout_like(codes, (1, 0), layer.weight)),
            **scale_files(name, layer, scheme, catalogue),
        }
        if f"{name}.{INDEX}" in catalogue.entries:
            found[INDEX] = FileTensor((columns,), torch.int32)
        if layer._parameters["bias"] is None and f"{name}.bias" in catalogue.entries:
            found["bias"] = FileTensor((rows,), float_dtype(catalogue, f"{name}.bias", layer.weight.dtype))
        return found

    def check(self, name: str, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> None:
        if INDEX in files:
            check_groups(name, files[INDEX], layer.in_features, scheme)
        if self.numbers.symmetric and bool((self._zeros(files, layer.out_features) != 0).any()):
            raise QuantizeError(
                f"load {name}",
                "zero points that differ from the middle",
                "its configuration says sym: true, and symmetric numbers have none",
                "write sym: false into config.json, or the checkpoint_format that the file has",
            )
        if "bias" in files and bool(files["bias"].any()):
            raise QuantizeError(
                f"load {name}",
                "a bias that is not zero",
                "the layer of the model has no bias",
                "build the model from the checkpoint's config.json",
            )

    def _zeros(self, files: Mapping[str, Tensor], rows: int) -> Tensor:
        """Return the zero points [g, n] as int8; 0 is the middle code."""
        bits = self.numbers.num_bits
        half = 1 << (bits - 1)
        plain = unpack(files[ZEROS], bits, rows).to(torch.int32) + half + self.zero_shift
        return ((plain & ((1 << bits) - 1)) - half).to(torch.int8)

    def stored(self, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> Stored:
        found = {PACKED: files[CODES].t().contiguous(), **stored_scale(layer, files)}
        if not self.numbers.symmetric:
            found[ZERO] = pack(self._zeros(files, layer.out_features), self.numbers.num_bits).t().contiguous()
        if INDEX in files and not _in_order(files[INDEX], self.numbers):
            found[GROUP_OF] = files[INDEX]
        return found


def _in_order(group_of: Tensor, numbers: NumberFormat) -> bool:
    """True if groups are neighbours."""
    columns = torch.arange(len(group_of), dtype=torch.int32, device=group_of.device)
    return torch.equal(group_of, columns // (numbers.group_size or len(group_of)))


def grouped(bits: int, size: object, symmetric: bool, where: str) -> NumberFormat:
    """Return integers in groups of a size; -1 means one group for each row."""
    if size == -1:
        return NumberFormat(bits, symmetric=symmetric)
    if not isinstance(size, int) or size < 1:
        raise refused(where, f"group_size {size!r}", "a group has at least one number, or -1 means a whole row")
    return NumberFormat(bits, strategy="group", group_size=size, symmetric=symmetric)


def packed_layers(
    model: nn.Module, catalogue: Catalogue, numbers: NumberFormat
) -> Iterator[tuple[str, nn.Linear, Scheme]]:
    """Yield the linear layers for which the files have packed codes."""
    for name, module in model.named_modules():
        if is_linear(module) and f"{name}.{CODES}" in catalogue.entries:
            yield name, module, Scheme(numbers)


def scale_files(name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
    """Return the scales, which are sharded like the rows, and the zero points, which are whole."""
    rows, bits = layer.out_features, scheme.weights.num_bits
    groups = layer.in_features // (scheme.weights.group_size or layer.in_features)
    dtype = float_dtype(catalogue, f"{name}.{SCALES}", layer.weight.dtype)
    return {
        SCALES: FileTensor((groups, rows), dtype, layout_like((groups, rows), (None, 0), layer.weight)),
        ZEROS: FileTensor((groups, packed_length(rows, bits)), torch.int32),
    }


def stored_scale(layer: nn.Linear, files: Mapping[str, Tensor]) -> Stored:
    """Return the scale [n, g], and the shape."""
    scale = files[SCALES].t().contiguous()
    return {SCALE: scale, SHAPE: torch.tensor((layer.out_features, layer.in_features), device=scale.device)}
