"""Checkpoints in the forms of GPTQ, AWQ and bitsandbytes, written as these forms are published, one code at a time.

Codes, scales and zero points are random. The weight that they stand for is computed beside them in plain torch.

Shapes: n outputs, k inputs, g groups of inputs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Position of a code in a word, the lowest bits first → the output that it belongs to."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def words(codes: list[int], bits: int) -> list[int]:
    """Return the int32 words of codes without a sign: one number, cut into pieces of 32 bits."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    found = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(len(codes) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in found]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return the words of each row of codes."""
    return torch.tensor([words(row, bits) for row in codes.tolist()], dtype=torch.int32)


@dataclass(frozen=True)
class Gptq:
    """The form of GPTQ. With `act_order`, the groups of inputs are not in order."""

    bits: int = 4
    group: int = 16
    symmetric: bool = False
    act_order: bool = False
    version: str = "gptq"
    dtype: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        told = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "sym": self.symmetric}
        return told | {"desc_act": self.act_order, "checkpoint_format": self.version}

    def fits(self, layer: nn.Linear) -> bool:
        return not (layer.in_features * self.bits % 32 or layer.out_features * self.bits % 32)

    def layer(self, n: int, k: int, draw: torch.Generator) -> tuple[Tensors, Tensor]:
        size = k if self.group == -1 else self.group
        codes = torch.randint(0, 1 << self.bits, (n, k), generator=draw)
        zeros = torch.randint(0, 1 << self.bits, (n, k // size), generator=draw)
        if self.symmetric:
            zeros = torch.full_like(zeros, 1 << (self.bits - 1))
        scales = (0.01 + 0.02 * torch.rand(n, k // size, generator=draw)).to(self.dtype)
        group_of = torch.arange(k) // size
        group_of = group_of[torch.randperm(k, generator=draw)] if self.act_order else group_of
        missing = 1 if self.version == "gptq" else 0
        tensors = {
            "qweight": packed(codes, self.bits).t().contiguous(),
            "qzeros": packed((zeros.t() - missing) % (1 << self.bits), self.bits),
            "scales": scales.t().contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        return tensors, (codes - zeros[:, group_of]).to(self.dtype) * scales[:, group_of]


@dataclass(frozen=True)
class Awq:
    """The form of AWQ with the packing gemm."""

    group: int = 16
    dtype: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}

    def fits(self, layer: nn.Linear) -> bool:
        return not layer.out_features % 8

    def layer(self, n: int, k: int, draw: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(0, 16, (n, k), generator=draw)
        zeros = torch.randint(0, 16, (n, k // self.group), generator=draw)
        scales = (0.01 + 0.02 * torch.rand(n, k // self.group, generator=draw)).to(self.dtype)
        order = torch.tensor([8 * word + output for word in range(n // 8) for output in AWQ_ORDER])
        tensors = {
            "qweight": packed(codes.t()[:, order], 4),
            "qzeros": packed(zeros.t()[:, order], 4),
            "scales": scales.t().contiguous(),
        }
        group_of = torch.arange(k) // self.group
        return tensors, (codes - zeros[:, group_of]).to(self.dtype) * scales[:, group_of]


@dataclass(frozen=True)
class Nf4:
    """The form of bitsandbytes with nf4 weights; `nested` if the scales are quantized too."""

    block: int = 16
    nested: bool = False
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    """Changed facts of the description of each layer."""

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def fits(self, layer: nn.Linear) -> bool:
        return not layer.in_features % self.block

    def layer(self, n: int, k: int, draw: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(0, 16, (n * k,), generator=draw)
        blocks = n * k // self.block
        told: dict[str, Any] = {"quant_type": "nf4", "blocksize": self.block, "dtype": "float32", "shape": [n, k]}
        tensors: Tensors = {}
        if self.nested:
            number_of = torch.linspace(-1, 1, 256)
            stored = torch.randint(0, 256, (blocks,), generator=draw).to(torch.uint8)
            factors = 0.02 + 0.01 * torch.rand(-(-blocks // 256), generator=draw)
            told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
            scales = number_of[stored.long()] * factors[torch.arange(blocks) // 256] + torch.tensor(0.05)
            tensors |= {"weight.nested_absmax": factors, "weight.nested_quant_map": number_of}
        else:
            stored = scales = 0.02 + 0.05 * torch.rand(blocks, generator=draw)
        tensors |= {
            "weight": torch.tensor([16 * a + b for a, b in codes.view(-1, 2).tolist()], dtype=torch.uint8).unsqueeze(1),
            "weight.absmax": stored,
            "weight.quant_map": torch.tensor(NF4),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(told | self.told).encode()), dtype=torch.uint8
            ),
        }
        return tensors, (torch.tensor(NF4)[codes] * scales[torch.arange(n * k) // self.block]).view(n, k)


FORMS: dict[str, Gptq | Awq | Nf4] = {
    "gptq": Gptq(),
    "gptq, symmetric, 8 bits": Gptq(8, symmetric=True, dtype=torch.float32),
    "gptq, act-order": Gptq(act_order=True),
    "gptq, symmetric, act-order": Gptq(symmetric=True, act_order=True),
    "gptq, a scale per row": Gptq(group=-1),
    "gptq, second version, 2 bits": Gptq(2, version="gptq_v2"),
    "gptq, 3 bits, act-order": Gptq(3, act_order=True),
    "awq": Awq(),
    "awq, bfloat16": Awq(dtype=torch.bfloat16),
    "nf4": Nf4(),
    "nf4, quantized scales": Nf4(nested=True),
}


def write(
    model: nn.Module,
    form: Gptq | Awq | Nf4,
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    change: Callable[[Tensors], None] | None = None,
    without: tuple[str, ...] = (),
) -> nn.Module:
    """Write a checkpoint of the model's sizes, and return the model with the numbers that the checkpoint stands for.

    `config` has further entries of config.json, and `change` changes the tensors in the file.
    """
    draw = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(model)
    tensors = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for name, layer in exact.named_modules():
        if isinstance(layer, nn.Linear) and name not in without and form.fits(layer):
            own, weight = form.layer(layer.out_features, layer.in_features, draw)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{key}": x for key, x in own.items()}
            with torch.no_grad():
                layer.weight.copy_(weight)
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": form.config}))
    return exact
