"""A static program has the results of eager mode and of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.graph import Input, Program, Value, runner

from .oracle import STYLES, compare, whole
from .static_oracle import Base, Batch, BatchNorm, Job, check, normed, numbers, same_as_eager

JOBS: dict[str, Job] = {"BatchNorm": Job(BatchNorm, normed)}


def texts(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (6, 5), generator=g)
    return ({"tokens": tokens, "rest": [tokens.roll(1, 1), 2.0]},)


def job(batch: Batch = numbers, **how: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def note(module: type[nn.Module]) -> type[nn.Module]:
        JOBS[module.__name__] = Job(module, batch, **how)
        return module

    return note


@job()
class Detached(Base):
    def between(self, x: Tensor) -> Tensor:
        return x * x.detach() + x.data.sin()


@job()
class WithoutGradients(Base):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
            with torch.enable_grad():
                x = x.tanh()
        return x / scale


@job()
class Dropouts(Base):
    def between(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3) + F.alpha_dropout(x, 0.2, training=True)
        return x + torch.rand_like(x) + torch.rand(8) * torch.randn(6, 1) + torch.randperm(8)


@job()
class Buffers(Base):
    """One buffer is written in parts, two are updated by foreach."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(3, 8))
        self.register_buffer("one", torch.zeros(8))
        self.register_buffer("two", torch.ones(4))

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
            self.seen[2:4] += (x > 0).sum(0)[2:4]
            self.rows[1].copy_(x[0])
            self.rows.view(-1)[:4].mul_(2).add_(1)
            torch._foreach_add_([self.one, self.two], 1.0)
            torch._foreach_mul_([self.one, self.two], [2.0, 3.0])
        return (x + self.rows.sum(0) * 0.01) * self.seen.clamp(max=2) + self.one * 0.01


@job(exact=False)  # eager mode gives the buffer the layout of its new value, a program keeps its layout
class BuffersSetAnew(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def between(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@job()
class BuffersThatChangePlaces(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(8))
        self.register_buffer("two", torch.ones(8))

    def between(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two, self.one
        return x * self.one + self.two


@job(exact=False)  # eager mode writes into parts in another layout
class WrittenViews(Base):
    def between(self, x: Tensor) -> Tensor:
        y = x.tanh() * 1
        left, right = y.narrow(1, 0, 4), y[:, 4:]
        left.mul_(2)
        y[:, 3] = right[:, 0] + 1
        y.t()[1].add_(right.t()[2])
        y.unflatten(1, (2, 4)).transpose(1, 2)[:, 0].mul_(3)
        y.diagonal().add_(1)
        z = torch.zeros_like(y)
        with torch.no_grad():
            first, *_ = z.unbind(1)
            first.add_(torch.add(x[:, 0], 1, out=z[:, 1]))
            z.split([3, 5], 1)[1].neg_()
            z.chunk(2, 1)[0].add_(0.1)
            torch.mul(z, 2, out=z[:, :8])
            z[x > 0] = 0.5
        z.masked_fill_(y < -1, 0.0)
        y = y.index_add(0, torch.tensor([0, 2]), y[:2])
        return z + y + right.sum()


@job(exact=False)  # eager mode accumulates gradients in another order
class WrittenComplex(Base):
    """Slices of complex numbers are written, along dims counted from either end."""

    def between(self, x: Tensor) -> Tensor:
        waves = torch.fft.fft(x)
        out = torch.zeros_like(waves)
        out[..., :4] = waves[..., 4:] * 2
        out[0, 4:] = waves[0, :4]
        out[-1].select(-1, 1).mul_(3)
        return torch.fft.ifft(out).real


@job(texts)
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, Any]) -> Tensor:
        tokens, (wanted, scale) = batch["tokens"], batch["rest"]
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), wanted.flatten()) * scale


@job()
class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.unused = nn.Linear(3, 3)


@job(close=0.01)
class Autocast(Base):
    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(x.relu())
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ self.b.weight
        return z


@job(exact=False)  # checkpoints accumulate gradients in another order
class Checkpointed(Base):
    def between(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: F.dropout(self.b(y) @ self.b.weight, 0.5), x, use_reentrant=False)
        return checkpoint(lambda y: F.dropout(self.b(y) @ self.b.weight, 0.5), x, use_reentrant=True)


class Squash(torch.autograd.Function):
    """A user-defined function whose gradient differs from that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        return x.clamp(-1, 1), x.abs()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale + grads[1] * 0.5, None


class Squared(torch.autograd.Function):
    """A user-defined function that saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0] * 3


class Twice(torch.autograd.Function):
    """A function that calls another one in its forward pass, and differentiable operators in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = Squared.apply(x)
        assert isinstance(y, Tensor)
        return y + torch.arange(x.shape[-1]) * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (x * torch.arange(x.shape[-1])).backward(grads[0])
        return x.grad + grads[0] * torch.ones(x.shape[-1])


squash = Squash.apply


@job()
class OwnFunction(Base):
    def between(self, x: Tensor) -> Tensor:
        y, z = Squash.apply(x, 3.0)
        return y + z.sin()


@job()
class FunctionInAFunction(Base):
    def between(self, x: Tensor) -> Tensor:
        y = Twice.apply(x)
        assert isinstance(y, Tensor)
        return y.tanh()


@job()
class OwnFunctionByAName(Base):
    """The called function got its name before the capture."""

    def between(self, x: Tensor) -> Tensor:
        y, z = squash(x, 3.0)
        return y + z.sin()


@job()
class AlongCutRows(Base):
    """A model in which a rank's treatment of its rows depends on their positions."""

    def between(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 0)
        return x.cumsum(0) * variance + mean * x.sigmoid().cumprod(0)


@job()
class SavesItsArgument(Base):
    def between(self, x: Tensor) -> Tensor:
        return Squared.apply(x)


@job()
class Padded(nn.Module):
    """A table with a row for padding, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6, padding_idx=5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x[:, :3].mul(10).long() % 8)).square().mean()


@job()
class OwnGradients(Base):
    """A penalty on gradients that the forward pass computes, and a hook on an activation."""

    def between(self, x: Tensor) -> Tensor:
        y = x.tanh()
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        y.register_hook(lambda grad: grad * 2)
        return y + g


@job()
class ParameterHooks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda grad: grad * 2)


@job()
class Accumulated(Base):
    """Gradients of several small batches are accumulated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Accumulated, self).forward(part) for part in x.chunk(3)]).mean()


@job(exact=False)
class Recurrent(Base):
    """torch's recurrent layers have lists of their own with their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(8, 8, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)])

    def between(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 4)).repeat(1, 1, 2)
        for layer in self.layers:
            x = layer(x)[0]
        return x.mean(1)


@job(exact=False)
class Slopes(Base):
    """A loss of the derivatives of a network: a saved weight is a view that the user did not make."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.b(self.a(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (bend[:, 0] + slope[:, 1] - y[:, 0]).square().mean()


@pytest.mark.parametrize("name", JOBS)
def test_static_is_eager_is_one_device(name: str) -> None:
    check(JOBS[name], STYLES["grid"])


class Halves(mw.LocalLayer):
    """A layer on parts of the batch, with a parameter of its own."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__([(mesh, [mw.Shard(0)])], out_shapes=[(6, 8)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, *, own: Tensor) -> Tensor:
        return x * self.scale + own


class LocalParts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = STYLES["rows"].mesh
        self.halves = Halves(self.mesh)

    def between(self, x: Tensor) -> Tensor:
        rows = [mw.Shard(0)]
        total = mw.local_map(lambda part: part.sum(0), [[mw.Partial()]], [rows], self.mesh, reshard_inputs=True)(x)
        laid = mw.reshard(x + total, self.mesh, rows)
        return self.halves(laid, own=laid.sin())


def test_functions_of_local_parts() -> None:
    same_as_eager(Job(LocalParts, numbers))


class RowsOfImages(Base):
    """Convolutions of images with sharded rows: a rank needs its neighbours' rows, those at the ends need zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = STYLES["rows"].mesh
        self.inner = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1))

    def between(self, x: Tensor) -> Tensor:
        images = mw.reshard(x.unflatten(1, (1, 4, 2)).repeat(1, 1, 2, 2), self.mesh, [mw.Shard(2)])
        return self.inner(images).mean((1, 3))


def test_images_with_sharded_rows() -> None:
    same_as_eager(Job(RowsOfImages, numbers))


class Flat(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 6))


def test_a_batch_that_is_not_contiguous() -> None:
    def go() -> tuple[float, float]:
        module = mw.shard_layer(Flat(), STYLES["rows"].mesh)
        x = mw.shard_tensor(torch.randn(8, 6, 2), STYLES["rows"].mesh, [mw.Shard(0)]).transpose(1, 2)
        return mw.to_static(module, loss=lambda out, x: out)(x, x).item(), module(x).item()

    assert all(static == eager for static, eager in mw.simulate(go, 4))


@pytest.mark.parametrize("source", ["counter", "rank"])
def test_other_sources_of_random_numbers(source: Any) -> None:
    same_as_eager(JOBS["Dropouts"], source=source)


def test_a_program_may_exchange_two_buffers() -> None:
    a, b = Value("a", (2,), torch.float32), Value("b", (2,), torch.float32)
    inputs = tuple(Input(v, "buffer", v.name) for v in (a, b))
    run = runner(Program(inputs, (), None, ((a, b), (b, a))))
    x, y = torch.zeros(2), torch.ones(2)
    for tensor, value in zip((x, y), run(x, y)[1], strict=True):
        tensor.copy_(value)
    assert (x.tolist(), y.tolist()) == ([1.0, 1.0], [0.0, 0.0])


class Views(nn.Module):
    """Views in lists: the reduction of one must not use the memory of the other."""

    def forward(self, x: Tensor) -> object:
        return x.unbind(0), x.split([1, 5]), torch.broadcast_tensors(x, x[:1]), torch.atleast_3d(x)


def test_lists_of_views_of_pending_sums() -> None:
    def go() -> None:
        style = STYLES["terms"]
        (x,) = numbers(0)
        terms = mw.reshard(mw.shard_tensor(x, style.mesh, []), style.mesh, style.placements)
        compare(whole(mw.to_static(Views())(terms)), whole(Views()(x)), {})

    mw.simulate(go, 2)
