"""Level 0: copies, streams, events, random generators, memory, autocast and equal bits of repeated work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.layout import generator_state, platform_of, set_generator_state

from ..results.check import Check, NotRun, Target
from ..torch_hooks import CalledOperators
from .comparison import expect, expect_all_equal, expect_close, expect_equal

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers on the CPU, the same in each call; all of them have few bits."""
    whole = torch.arange(torch.Size(shape).numel(), device="cpu").mul(7).remainder(11).sub(5).reshape(shape)
    if dtype in (torch.bool, torch.uint8):
        whole = whole.abs().remainder(2 if dtype == torch.bool else 11)
    return whole.to(dtype)


# ---- copies ----


def copy_of_dtype(dtype: torch.dtype, target: Target) -> None:
    """Copy to the device, on it, and back."""
    x = numbers(5, 4, dtype=dtype)
    try:
        y = x.to(target.device)
    except TypeError as error:  # torch's class for a dtype that a device lacks
        raise NotRun(f"the device has no {dtype}") from error
    expect_equal(y, x, "copy to the device and back")
    expect_equal(torch.empty_like(y).copy_(y), x, "copy on the device")
    expect(y.dtype == dtype and y.device.type == target.device.type, f"the copy is on {y.device} in {y.dtype}")


def copies_of_views(target: Target) -> None:
    x = numbers(6, 8)
    for name, view in {
        "transposed": x.t(),
        "with steps": x[::2, 1::3],
        "expanded": x[:1].expand(4, 8),
        "one number": x[0, 0],
        "empty": x[:0],
    }.items():
        expect_equal(view.to(target.device), view, f"a copy of a tensor that is {name}")
    whole = x.to(target.device)
    whole[:2].t().copy_(numbers(8, 2).to(target.device))
    expect_equal(whole[:2], numbers(8, 2).t(), "a copy into a transposed part")
    expect_equal(whole[2:], x[2:], "the other part")


def conversions_of_dtypes(target: Target) -> None:
    x = numbers(5, 4)
    for dtype in (*target.dtypes, torch.int64, torch.int32, torch.bool):
        expect_equal(x.to(target.device).to(dtype), x.to(dtype), f"a conversion to {dtype} on the device")
        expect_equal(x.to(target.device, dtype), x.to(dtype), f"a copy to the device as {dtype}")


def copy_without_wait(target: Target) -> None:
    if not platform_of(target.device).pins_memory:
        raise NotRun("no pinned memory")
    source = numbers(1024).pin_memory()
    there = source.to(target.device, non_blocking=True)
    back = torch.empty(1024, pin_memory=True, device="cpu").copy_(there * 2, non_blocking=True)
    torch.Event(target.device).record()
    there.sum().item()
    expect_equal(back, source * 2, "a copy to and from pinned memory")


def copies_between_devices(target: Target) -> None:
    if target.count < 2:
        raise NotRun(f"needs 2 devices, found {target.count}")
    x = numbers(6, 8).to(torch.device(target.device.type, 0))
    there = x.to(torch.device(target.device.type, 1))
    expect_equal(there, x, "a copy to another device")
    expect_equal((there * 2).to(x.device), x * 2, "a copy back")


def in_place_and_views(target: Target) -> None:
    x = numbers(4, 6)
    y = x.to(target.device)
    for each in (x, y):
        each.t()[1].add_(1)
        each.view(-1)[-3:].fill_(5)
        each[1:3, ::2] = 7
        torch.mul(each[:2], 2, out=each[2:])
    expect_equal(y, x, "writes to views")
    expect(y.t()._is_view() and y.view(-1).data_ptr() == y.data_ptr(), "a view has other memory")


def mixed_devices_are_refused(target: Target) -> None:
    if target.device.type == "cpu":
        raise NotRun("the CPU is the only device")
    x = numbers(3)
    try:
        torch.add(x, x.to(target.device))
    except RuntimeError:
        expect_equal(x.to(target.device) + torch.tensor(1.0, device="cpu"), x + 1, "a sum with a number on the CPU")
        return
    expect(False, "a sum of tensors on two devices raised no error")


def deep_copies(target: Target) -> None:
    """Copies of tensors that share memory share memory too."""
    x = numbers(4, 3).to(target.device)
    whole, part = copy.deepcopy((x, x[1:]))
    expect(whole.device == x.device, f"a copy is on {whole.device}")
    part.add_(1)
    expect_all_equal([whole[:1], whole[1:]], [x[:1], x[1:] + 1], "copies that share memory")


# ---- streams and events ----


def order_of_streams(target: Target) -> None:
    """Work on another stream waits for an event, and the current stream waits for that work."""
    if not platform_of(target.device).has_streams:
        raise NotRun("the device has no streams")
    side, here = torch.Stream(target.device), torch.accelerator.current_stream(target.device)
    x = numbers(256, 256).to(target.device)
    expected = x
    for _ in range(20):
        x = (x @ x).clamp(-2, 2)
        expected = (on_cpu_product(expected)).clamp(-2, 2)
    ready = here.record_event()
    side.wait_event(ready)
    with side:
        y = x * 2 + 1
    here.wait_stream(side)
    y.record_stream(here)
    expect_equal(y + 1, expected * 2 + 2, "work on two streams")


def on_cpu_product(x: Tensor) -> Tensor:
    """Return the product of a matrix of small integers with itself, which is exact in any order."""
    return x.cpu() @ x.cpu()


def events_of_a_stream(target: Target) -> None:
    if not platform_of(target.device).has_streams:
        raise NotRun("the device has no streams")
    first, last = (torch.Event(target.device, enable_timing=True) for _ in range(2))
    first.record()
    x = numbers(128, 128).to(target.device)
    for _ in range(10):
        x = (x @ x).clamp(-1, 1)
    last.record()
    last.synchronize()
    expect(last.query(), "an event that was waited for is not complete")
    expect(first.elapsed_time(last) >= 0, "the time between two events is negative")


def wait_of_a_stream_for_the_host(target: Target) -> None:
    """A stream waits for a number of the host, which raises it after more work has been queued."""
    make = platform_of(target.device).signal
    signal = None if make is None else make(target.device)
    if signal is None:
        raise NotRun("the device has no signal")
    side = torch.Stream(target.device)
    source, there = torch.zeros(64, pin_memory=True, device="cpu"), torch.empty(64, device=target.device)
    for number in (1, 2):
        side.wait_stream(torch.accelerator.current_stream(target.device))
        signal.wait(side, number)
        with side:
            there.copy_(source, non_blocking=True)
        source.fill_(number)
        signal.reach(number)
        torch.accelerator.current_stream(target.device).wait_stream(side)
        expect_equal(there, torch.full((64,), float(number), device="cpu"), "a copy behind a wait for the host")


def gradients_on_a_stream(target: Target) -> None:
    """A backward pass runs on the streams of the forward pass."""
    if not platform_of(target.device).has_streams:
        raise NotRun("the device has no streams")
    x = numbers(64, 64).to(target.device).requires_grad_()
    side, here = torch.Stream(target.device), torch.accelerator.current_stream(target.device)
    side.wait_stream(here)
    with side:
        loss = (x * x).sum()
    here.wait_stream(side)
    loss.backward()
    assert x.grad is not None
    expect_equal(x.grad, 2 * numbers(64, 64), "a gradient of work on another stream")


# ---- random numbers ----

DRAWS: dict[str, Callable[[torch.device], Tensor]] = {
    "rand": lambda d: torch.rand(40, device=d),
    "randn": lambda d: torch.randn(40, device=d),
    "randint": lambda d: torch.randint(0, 100, (40,), device=d),
    "randperm": lambda d: torch.randperm(40, device=d),
    "bernoulli": lambda d: torch.full((40,), 0.4, device=d).bernoulli(),
    "uniform_": lambda d: torch.empty(40, device=d).uniform_(-1, 1),
    "normal_": lambda d: torch.empty(40, device=d).normal_(1, 2),
    "exponential_": lambda d: torch.empty(40, device=d).exponential_(),
    "multinomial": lambda d: torch.multinomial(torch.ones(3, 10, device=d), 4),
    "dropout": lambda d: F.dropout(torch.ones(40, device=d), 0.3),
    "rand_like": lambda d: torch.rand_like(torch.ones(5, 8, device=d)),
    "trunc_normal_": lambda d: nn.init.trunc_normal_(torch.empty(5, 8, device=d)),
    "kaiming_uniform_": lambda d: nn.init.kaiming_uniform_(torch.empty(5, 8, device=d)),
}


def equal_draws(draw: Callable[[torch.device], Tensor], target: Target) -> None:
    """Equal seeds and equal states give equal numbers, and the generator advances."""
    torch.manual_seed(3)
    first = draw(target.device)
    state = generator_state(target.device)
    second = draw(target.device)
    expect(not torch.equal(first.cpu(), second.cpu()), "two draws gave the same numbers")
    set_generator_state(state, target.device)
    expect_equal(draw(target.device), second, "a draw after the state was set")
    torch.manual_seed(3)
    expect_equal(draw(target.device), first, "a draw after the same seed")


def separate_generators(target: Target) -> None:
    generator = torch.Generator(target.device).manual_seed(5)
    before = generator_state(target.device)
    first = torch.rand(8, device=target.device, generator=generator)
    expect_equal(generator_state(target.device), before, "the default generator")
    again = torch.rand(8, device=target.device, generator=generator.manual_seed(5))
    expect_equal(again, first, "numbers of a generator")


def generator_of_each_device(target: Target) -> None:
    if target.count < 2:
        raise NotRun(f"needs 2 devices, found {target.count}")
    one, other = (torch.device(target.device.type, at) for at in range(2))
    torch.manual_seed(3)
    before = generator_state(other)
    torch.rand(8, device=one)
    expect_equal(generator_state(other), before, "the generator of another device")
    torch.manual_seed(3)
    expect_equal(torch.rand(8, device=other), torch.rand(8, device=one), "the numbers of two devices")


# ---- memory ----


def memory_statistics(target: Target) -> None:
    """The allocator counts what is allocated, freed, and the peak."""
    if not platform_of(target.device).counts_memory:
        raise NotRun("the platform counts no memory")
    torch.accelerator.reset_peak_memory_stats(target.device)
    before = torch.accelerator.memory_allocated(target.device)
    x = torch.zeros(2**20, device=target.device)
    with_x = torch.accelerator.memory_allocated(target.device)
    expect(with_x - before >= 2**22, f"4 MiB were counted as {with_x - before} bytes")
    del x
    after = torch.accelerator.memory_allocated(target.device)
    expect(after <= with_x - 2**22, f"{with_x - after} bytes were freed of 4 MiB")
    peak = torch.accelerator.max_memory_allocated(target.device)
    expect(peak >= with_x, f"the peak of {peak} bytes is less than the {with_x} bytes in use")


def freed_memory(target: Target) -> None:
    """Memory of freed tensors is used again without damage to others."""
    kept = numbers(64, 64).to(target.device)
    for at in range(50):
        torch.full((64, 64), float(at), device=target.device)
    expect_equal(kept, numbers(64, 64), "a tensor that was kept")


# ---- numbers ----


def autocast(dtype: torch.dtype, target: Target) -> None:
    if dtype not in target.dtypes:
        raise NotRun(f"the device has no {dtype}")
    if dtype not in platform_of(target.device).autocast_dtypes:
        raise NotRun(f"the platform has no autocast in {dtype}")
    x, w = numbers(8, 8).to(target.device), numbers(8, 8).to(target.device)
    with torch.autocast(target.device.type, dtype=dtype):
        product = x @ w
        expect(product.dtype == dtype, f"a product is in {product.dtype}")
        expect(F.softmax(product.float(), 0).dtype == torch.float32, "a softmax is not in float32")
    expect_close(product.float(), numbers(8, 8) @ numbers(8, 8), "a product")


def special_numbers(target: Target) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.4e38], device="cpu")
    y = x.to(target.device)
    expect_equal(y.isnan().int() + y.isinf().int(), x.isnan().int() + x.isinf().int(), "isnan and isinf")
    expect_equal(torch.maximum(y, y.flip(0)).isnan(), torch.maximum(x, x.flip(0)).isnan(), "NaN in a maximum")
    expect_equal(y[:5].sum(), x[:5].sum(), "a sum with NaN")
    expect(bool(torch.signbit(y[3]).item()), "the sign of zero is lost")


def _backward(work: Callable[[Tensor], Tensor], target: Target) -> list[Tensor]:
    x = torch.linspace(-2, 2, 2 * 4 * 32 * 16, device="cpu").sin().view(2, 4, 32, 16).to(target.device)
    x.requires_grad_()
    out = work(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach().cpu(), x.grad.cpu()]


REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix product": lambda x: x @ x.mT,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, [16]),
    "sum": lambda x: x.sum((0, 2)),
    "cumulative sum": lambda x: x.cumsum(2),
    "convolution": lambda x: F.conv2d(x, x[:, :, :3, :3].detach()),
    "sort": lambda x: x.sort(-1).values,
    "activation": lambda x: F.gelu(x) + F.silu(x),
}


def same_bits_twice(work: Callable[[Tensor], Tensor], target: Target) -> None:
    """Equal inputs give equal bits, forward and backward, unless the platform names one of the operators."""
    with CalledOperators() as called:
        first = _backward(work, target)
    varying = called.names & platform_of(target.device).nondeterministic
    if varying:
        raise NotRun(f"the platform says that {', '.join(sorted(varying))} may give other bits")
    for _ in range(3):
        expect_all_equal(_backward(work, target), first, "the same work again")


def _checks() -> Iterator[tuple[str, Callable[[Target], str | None]]]:
    for dtype in DTYPES:
        yield f"copy of {str(dtype).removeprefix('torch.')}", partial(copy_of_dtype, dtype)
    yield "copies of views", copies_of_views
    yield "conversions of dtypes", conversions_of_dtypes
    yield "copies from and to pinned memory", copy_without_wait
    yield "copies between devices", copies_between_devices
    yield "writes in place and views", in_place_and_views
    yield "tensors on two devices are refused", mixed_devices_are_refused
    yield "deep copies", deep_copies
    yield "order of streams", order_of_streams
    yield "a wait of a stream for the host", wait_of_a_stream_for_the_host
    yield "events", events_of_a_stream
    yield "gradients on another stream", gradients_on_a_stream
    for name, draw in DRAWS.items():
        yield f"equal draws of {name}", partial(equal_draws, draw)
    yield "generators of the user", separate_generators
    yield "a generator for each device", generator_of_each_device
    yield "memory statistics", memory_statistics
    yield "freed memory", freed_memory
    for dtype in (torch.bfloat16, torch.float16):
        yield f"autocast in {str(dtype).removeprefix('torch.')}", partial(autocast, dtype)
    yield "NaN and infinity", special_numbers
    for name, work in REPEATED.items():
        yield f"equal bits of repeated work: {name}", partial(same_bits_twice, work)


DEVICE = tuple(Check(0, name, run) for name, run in _checks())
