"""Part of `gpu`: a Llama block and a UNet block on one device, inference and training: eager, `torch.compile`, ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.models import LlamaConfig
from meshwright.models._llama import Block

from ._gpu_device import Setting, attempt, in_turns_ms, main_of, ratios

DTYPE = torch.bfloat16
STRATEGY = mw.Strategy(compiler="inductor")
TOLERANCE = 3e-2


class UNetBlock(nn.Module):
    """A block of Stable Diffusion's UNet: a residual block with the time, then attention to the image and the text.

    Shapes: images [b, c, h, w], embedding of the time [b, t], embedding of the text [b, s, k].
    """

    def __init__(self, channels: int, time: int, text: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(time, channels)
        self.attentions = nn.ModuleList(CrossAttention(channels, width, heads) for width in (channels, text))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.up, self.down = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        h = self.convolutions[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + self.convolutions[1](F.silu(self.norms[1](h)))
        rows = self.norms[2](x).flatten(2).transpose(1, 2)
        normed = self.layer_norms[0](rows)
        rows = rows + self.attentions[0](normed, normed)
        rows = rows + self.attentions[1](self.layer_norms[1](rows), text)
        value, gate = self.up(self.layer_norms[2](rows)).chunk(2, -1)
        rows = rows + self.down(value * F.gelu(gate))
        return x + rows.transpose(1, 2).unflatten(2, x.shape[2:])


class CrossAttention(nn.Module):
    """Attention of [b, n, c] to [b, s, k]."""

    def __init__(self, channels: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(channels, channels, bias=False), nn.Linear(channels, channels)
        self.k, self.v = (nn.Linear(width, channels, bias=False) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self._projections(x, context))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _projections(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(context), self.v(context)


def llama(setting: Setting) -> tuple[nn.Module, list[Tensor]]:
    """Return a block of Llama 8B, or a small one, and its input."""
    config, shape = LlamaConfig(256, 64, 1, 4, 2, 176), (2, 16, 64)
    if setting.is_large:
        config, shape = LlamaConfig(256, 4096, 1, 32, 8, 14336), (2, 2048, 4096)
    return Block(config), [torch.randn(shape)]


def unet(setting: Setting) -> tuple[nn.Module, list[Tensor]]:
    """Return the widest block of Stable Diffusion 1.5 on 64 x 64 latents, or a small one, and its inputs."""
    channels, time, text, heads, side, batch = (320, 1280, 768, 8, 64, 4) if setting.is_large else (32, 16, 16, 4, 4, 2)
    inputs = [torch.randn(batch, channels, side, side), torch.randn(batch, time), torch.randn(batch, 77, text)]
    return UNetBlock(channels, time, text, heads), inputs


MODELS: Mapping[str, Callable[[Setting], tuple[nn.Module, list[Tensor]]]] = {"llama": llama, "unet": unet}
Calls = dict[str, Callable[[], Tensor]]


def blocks(setting: Setting) -> dict[str, Any]:
    """Return milliseconds, ratios to ours, and GiB of peak memory, by model and kind of step."""
    return {
        f"{name}, {kind}": attempt(lambda m=model, c=calls: mw.simulate(lambda: _case(m, c, setting), 1)[0])
        for name, model in MODELS.items()
        for kind, calls in (("inference", inference), ("training", training))
    }


def _case(
    model: Callable[[Setting], tuple[nn.Module, list[Tensor]]],
    calls_of: Callable[[nn.Module, list[Tensor]], Calls],
    setting: Setting,
) -> dict[str, Any]:
    torch.manual_seed(0)
    module, inputs = model(setting)
    calls = calls_of(module.to(setting.device, DTYPE), [x.to(setting.device, DTYPE) for x in inputs])
    expected = calls["eager"]().float()
    for name, call in calls.items():
        error = float((call().float() - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            raise ValueError(f"{name} differs from eager by {error:.2g}")
    peaks = {name: _peak(call, setting) for name, call in calls.items()}
    ms = in_turns_ms(calls, setting)
    work = {name: attempt(lambda c=call: _work(c, setting)) for name, call in calls.items()}
    return {"ms": ms, "ratio to ours": ratios(ms, "ours"), "peak GiB": peaks, "device": work}


def _peak(call: Callable[[], Tensor], setting: Setting) -> float | None:
    call()
    setting.reset_peak()
    call()
    setting.finish()
    return setting.peak_gib()


def _work(call: Callable[[], Tensor], setting: Setting) -> dict[str, float] | None:
    """Return the number of kernels of a call and the milliseconds that the device works; None without a profiler.

    A call that takes longer than its kernels is limited by the host.
    """
    if setting.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        setting.finish()
    kernels = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    seconds = sum(event.time_range.elapsed_us() for event in kernels) / 1e3
    return {"kernels": len(kernels), "ms": round(seconds, 4)}


def inference(model: nn.Module, inputs: list[Tensor]) -> Calls:
    """Return functions that call the model without gradients."""
    model.eval()
    compiled = torch.compile(model, dynamic=False)
    ours = mw.to_static(copy.deepcopy(model), strategy=STRATEGY)
    ours.eval()

    def without_gradients(call: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return call(*inputs)

        return run

    return {
        "eager": without_gradients(model),
        "torch.compile": without_gradients(compiled),
        "ours": without_gradients(ours),
    }


def training(model: nn.Module, inputs: list[Tensor]) -> Calls:
    """Return functions that make a training step with AdamW and return the loss."""
    models = {"eager": model, "torch.compile": copy.deepcopy(model), "ours": copy.deepcopy(model)}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True) for name, m in models.items()}
    models["torch.compile"].compile(dynamic=False)
    ours = mw.to_static(_WithLoss(models["ours"]), optimizer=optimizers["ours"], strategy=STRATEGY)
    plain = {name: _step(_WithLoss(models[name]), optimizers[name], inputs) for name in ("eager", "torch.compile")}
    return {**plain, "ours": lambda: ours(*inputs)}


class _WithLoss(nn.Module):
    """A model whose result is the mean square of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).float().square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main_of(blocks)
