"""Quantized models on simulated meshes: codes, scales and zero points that differ from those of one device in any bit.

Every scheme is applied to every model under every kind of parallelism, and each stored tensor of each rank's model is
compared, whole, with that of the model that was quantized on one device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, VOCAB, GROUP = 96, 32, 16
COLUMNS, ROWS = ("q", "k", "v", "gate", "up", "inner"), ("o", "down", "outer")


class Attention(nn.Module):
    """Attention with one head for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, inside, bias=False), nn.Linear(HIDDEN, inside, bias=False)
        self.down = nn.Linear(inside, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    """A feed-forward layer with biases."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(HIDDEN, inside), nn.Linear(inside, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.gelu(self.inner(x)))


class Conv1D(nn.Module):
    """A linear layer as in GPT-2 of transformers: it stores the transposed weight."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Transposed(nn.Module):
    """A feed-forward layer as in GPT-2."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.inner, self.outer = Conv1D(inside, HIDDEN), Conv1D(HIDDEN, inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.gelu(self.inner(x)))


class Experts(nn.Module):
    """Three experts, each with one parameter for all of them; every token goes to all experts."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, inside, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(3, HIDDEN, inside) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.silu(torch.einsum("bsh,eih->bsei", x, self.up))
        return torch.einsum("bsei,ehi->bsh", inner, self.down)


class Block(nn.Module):
    """A transformer layer; `parts` are its sublayers."""

    def __init__(self, norm: Callable[[], nn.Module], parts: list[nn.Module]) -> None:
        super().__init__()
        self.norms, self.parts = nn.ModuleList(norm() for _ in parts), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Model(nn.Module):
    """An embedding, two blocks, and an output layer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rms() -> nn.Module:
    return nn.RMSNorm(HIDDEN)


def layer_norm() -> nn.Module:
    return nn.LayerNorm(HIDDEN)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: Block(rms, [Attention(), Gated(96)]),
    "GPT": lambda: Block(layer_norm, [Attention(), Plain(192)]),
    "narrow": lambda: Block(rms, [Attention(), Gated(80)]),
    "attention only": lambda: Block(layer_norm, [Attention(), Attention()]),
    "mixer": lambda: Block(layer_norm, [Plain(64), Gated(64)]),
    "perceptron": lambda: Plain(112),
    "GPT-2": lambda: Block(layer_norm, [Attention(), Transposed(192)]),
    "experts": lambda: Block(rms, [Attention(), Experts(80)]),
}


@dataclass(frozen=True)
class Setting:
    """A mesh, and the axes that shard the columns-parallel and the rows-parallel layers along each dim."""

    sizes: dict[str, int]
    columns: tuple[int | None, ...]
    rows: tuple[int | None, ...]

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())


SETTINGS = {
    "tp 2": Setting({"tp": 2}, (0,), (1,)),
    "tp 4": Setting({"tp": 4}, (0,), (1,)),
    "tp 8": Setting({"tp": 8}, (0,), (1,)),
    "columns, uneven": Setting({"tp": 5}, (0,), (0,)),
    "rows, uneven": Setting({"tp": 5}, (1,), (1,)),
    "dp 2": Setting({"dp": 2}, (None,), (None,)),
    "dp 3": Setting({"dp": 3}, (None,), (None,)),
    "ZeRO-3, 4": Setting({"dp": 4}, (0,), (0,)),
    "dp 2 x tp 2": Setting({"dp": 2, "tp": 2}, (None, 0), (None, 1)),
    "ZeRO-3 x tp": Setting({"dp": 2, "tp": 2}, (1, 0), (0, 1)),
    "one dim twice": Setting({"dp": 2, "tp": 3}, (0, 0), (1, 1)),
    "pp 2 x tp 2": Setting({"pp": 2, "tp": 2}, (0,), (1,)),
}


def schemes() -> dict[str, Any]:
    """Return the schemes by name."""
    from meshwright.quantize import NumberFormat, Scheme

    int4, int3 = (NumberFormat(bits, strategy="group", group_size=GROUP) for bits in (4, 3))
    asymmetric = NumberFormat(4, strategy="group", group_size=GROUP, symmetric=False)
    return {
        "int8": Scheme.preset("int8"),
        "int8-dynamic": Scheme.preset("int8-dynamic"),
        "w4a16": Scheme(int4),
        "int4, asymmetric": Scheme(asymmetric),
        "int3": Scheme(int3),
        "nf4": Scheme.preset("nf4", group_size=GROUP),
        "fp8-dynamic": Scheme.preset("fp8-dynamic"),
        "mxfp4": Scheme.preset("mxfp4", ignore=("re:.*(down|outer|norms)",)),  # each family has one of these names
        "nvfp4": Scheme.preset("nvfp4"),
        "gptq": Scheme(int4, method="gptq"),
        "gptq, act_order": Scheme(int4, method="gptq", act_order=True),
        "gptq, int3, asymmetric": Scheme(
            NumberFormat(3, strategy="group", group_size=GROUP, symmetric=False), method="gptq"
        ),
    }


def batches(count: int = 5) -> list[Tensor]:
    return list(torch.randint(0, VOCAB, (count, 2, 6), generator=torch.Generator().manual_seed(1)))


def marked(model: Model, setting: Setting) -> Model:
    """Return the model with the layouts of a setting; with an axis "pp", each block is on its stage."""
    import meshwright as mw

    mesh = mw.ProcessMesh(torch.arange(setting.ranks).view(*setting.sizes.values()).tolist(), list(setting.sizes))
    if "pp" not in setting.sizes:
        return mw.shard_layer(model, mesh, lambda *given: _shard(setting, *given))  # pyright: ignore[reportReturnType]
    stages = [mesh["pp", 0], mesh["pp", 1]]
    parts = [(model.embed, stages[0]), *zip(model.blocks, stages, strict=True), (model.head, stages[1])]
    for part, stage in parts:
        mw.shard_layer(part, stage, lambda *given: _shard(setting, *given), _enter)
    return model


def _enter(inputs: Any, mesh: Any) -> Any:
    import meshwright as mw

    return tuple(mw.reshard(x, mesh, []) for x in inputs)


def _shard(setting: Setting, name: str, layer: nn.Module, mesh: Any) -> None:
    import meshwright as mw

    if isinstance(layer, Experts):
        for key, dims in (("up", setting.columns), ("down", setting.rows)):
            placements = [mw.Replicate() if dim is None else mw.Shard(dim + 1) for dim in dims]
            setattr(layer, key, mw.shard_tensor(layer.get_parameter(key), mesh, placements))
    last = name.rpartition(".")[2]
    dims = setting.columns if last in COLUMNS else setting.rows if last in ROWS else None
    if dims is not None and isinstance(layer, (nn.Linear, Conv1D)):
        is_transposed = isinstance(layer, Conv1D)
        placements = [mw.Replicate() if dim is None else mw.Shard(1 - dim if is_transposed else dim) for dim in dims]
        layer.weight = mw.shard_tensor(layer.weight, mesh, placements)  # pyright: ignore[reportAttributeAccessIssue]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole stored tensors of the quantized layers and experts; float8 as bytes."""
    import meshwright as mw
    from meshwright.quantize import QuantizedExperts, QuantizedLinear

    kinds = QuantizedLinear, QuantizedExperts
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
    found = {f"{n}.{key}": mw.unshard_dtensor(x) for n, layer in layers for key, x in layer.named_buffers()}
    return {name: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for name, x in found.items()}


def different(setting: Setting, make: Callable[[], nn.Module], ones: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    """Yield the name of each scheme and tensor that differs on some rank from one device."""
    import meshwright as mw

    def program() -> list[str]:
        found: list[str] = []
        for name, scheme in schemes().items():
            state = state_of(mw.quantize(marked(Model(make), setting), scheme, batches()))
            one = ones[name]
            found += [f"{name}, {t}" for t in one.keys() | state.keys() if not _equal(one.get(t), state.get(t))]
        return found

    for rank, found in enumerate(mw.simulate(program, setting.ranks)):
        yield from (f"rank {rank}: {each}" for each in found)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of tensors that differ."""
    import meshwright as mw

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    families = dict(list(FAMILIES.items())[: 1 if quick else None])
    names = ["tp 2", "rows, uneven", "ZeRO-3 x tp", "pp 2 x tp 2"] if quick else list(SETTINGS)
    found: list[str] = []
    tensors = 0
    try:
        for family, make in families.items():
            ones = {n: state_of(mw.quantize(Model(make), scheme, batches())) for n, scheme in schemes().items()}
            tensors += sum(map(len, ones.values())) * len(names)
            for name in names:
                found += [f"{family}, {name}, {each}" for each in different(SETTINGS[name], make, ones)]
    finally:
        torch.set_num_threads(threads)
    return {
        "name": "quantize_exact",
        "value": len(found),
        "goal": "0 tensors differ, for 12 schemes, 12 layouts and 8 families",
        "ok": not found,
        "details": {
            "schemes": len(schemes()),
            "layouts": names,
            "families": list(families),
            "tensors": tensors,
            "different": found[:20],
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
