"""ZeRO-3 in units: few calls, at most two units whole at once, and the numbers of one device in every use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.engine import StrategyError
from meshwright.tensor.conversion.joint_gather import JointGather
from meshwright.tensor.conversion.joint_plan import JointPlan

from .block_net import INNER, WIDTH, Block, Net

ROWS = 12
BLOCK_BYTES = 4 * (2 * WIDTH + 2 * WIDTH * INNER + WIDTH + INNER)


def chain(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def sharing_blocks() -> nn.Module:
    net: Any = Net(3)
    net.blocks[2].up = net.blocks[0].up
    return net


def shard(model: nn.Module, ranks: int, units: Any = None) -> torch.optim.Optimizer:
    """Shard the model by ZeRO-3 over all ranks, and return its optimizer."""
    mw.shard_layer(model, mw.ProcessMesh(list(range(ranks)), ["dp"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return mw.shard_optimizer(optimizer, mw.ShardingStage3("dp", model, 1, units))


def rows(seed: int, ranks: int = 0) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return mw.shard_tensor(x, mw.ProcessMesh(list(range(ranks)), ["dp"]), [mw.Shard(0)]) if ranks else x


# --- calls and memory --------------------------------------------------------------------------------------------


def calls_of_steps(make: Callable[[], nn.Module], units: Any = None, steps: int = 3) -> list[tuple[int, int]]:
    """Return the numbers of all-gathers and reduce-scatters of each step."""

    def go() -> list[tuple[int, int]]:
        model = make()
        optimizer = shard(model, 2, units)
        found: list[tuple[int, int]] = []
        for step in range(steps):
            seen = current_communicator().seen
            seen.reset()
            model(rows(step, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((seen.calls.get("all_gather", 0), seen.calls.get("reduce_scatter", 0)))
        return found

    first, second = mw.simulate(go, 2)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("make", "units", "calls"),
    [
        pytest.param(lambda: chain(4), None, (7, 4), id="a chain"),
        pytest.param(lambda: Net(3), None, (7, 4), id="blocks and the rest"),
        pytest.param(lambda: Net(3), [], (1, 1), id="one unit"),
        pytest.param(lambda: Net(3), ["blocks.*", "last"], (9, 5), id="named units"),
        pytest.param(lambda: Net(4), [("blocks.0", "blocks.1"), ("blocks.[23]",)], (5, 3), id="groups of modules"),
        pytest.param(lambda: Net(3), ["blocks.*", "first", "last"], (8, 5), id="a unit that no gradient needs"),
        pytest.param(sharing_blocks, None, (7, 4), id="a module of two blocks"),
    ],
)
def test_a_step_gathers_each_unit_twice_and_the_last_one_once(
    make: Callable[[], nn.Module], units: Any, calls: tuple[int, int]
) -> None:
    assert calls_of_steps(make, units) == [calls] * 3


def checkpointed(where: str) -> nn.Module:
    net = Net(3)
    {"blocks": checkpoint_blocks(False), "reentrant": checkpoint_blocks(True), "inside": checkpoint_inside}[where](net)
    return net


@pytest.mark.parametrize("where", ["blocks", "reentrant", "inside"])
def test_a_block_that_runs_again_is_gathered_once_more(where: str) -> None:
    """The last block too, since the rest is the unit that stays whole."""
    found = calls_of_steps(lambda: checkpointed(where))
    assert found == [(7, 4)] * 3


@contextmanager
def watched_memory() -> Generator[list[int]]:
    """Yield a list with the bytes of whole tensors at each gather of a unit, of this process."""
    live, found, unpack = [0], list[int](), JointPlan.unpack

    def count(bytes_: int) -> None:
        live[0] += bytes_

    def watched(self: JointPlan, buffers: Tensor) -> list[Tensor]:
        whole = unpack(self, buffers)
        for x in whole:
            count(x.nbytes)
            weakref.finalize(x.untyped_storage(), count, -x.nbytes)
        found.append(live[0])
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointPlan, "unpack", watched)
        yield found
    found.append(live[0])


@pytest.mark.parametrize("training", [True, False])
def test_at_most_two_units_are_whole_at_once(training: bool) -> None:
    """One is used, and one is gathered ahead; what is in flight counts when it has arrived."""

    def go() -> None:
        model = chain(5)
        optimizer = shard(model, 2)
        for step in range(3):
            with nullcontext() if training else torch.no_grad():
                loss = model(rows(step, 2)).square().sum()
            if training:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    with watched_memory() as found:
        mw.simulate(go, 2)
    assert max(found) <= 2 * 2 * BLOCK_BYTES  # two units on each of two ranks
    assert found[-1] == 0


def test_a_backward_pass_to_the_input_alone_frees_units() -> None:
    def go() -> None:
        model = chain(5)
        shard(model, 2)
        for step in range(2):
            x = rows(step, 2).requires_grad_()
            torch.autograd.grad(model(x).square().sum(), x)

    with watched_memory() as found:
        mw.simulate(go, 2)
    assert max(found) <= 2 * 2 * BLOCK_BYTES
    assert found[-1] == 0


def test_the_next_unit_is_gathered_ahead() -> None:
    """In the second step each unit but the first one is started while the one before it is used."""
    log: list[str] = []

    def go() -> None:
        model = chain(3)
        shard(model, 2)
        model(rows(0, 2)).square().sum().backward()
        if current_communicator().rank == 0:
            with logged_units({id(p): name.split(".")[0] for name, p in model.named_parameters()}, log):
                model(rows(1, 2)).square().sum().backward()
        else:
            model(rows(1, 2)).square().sum().backward()

    mw.simulate(go, 2)
    assert log[:5] == ["start 1", "use 0", "start 2", "use 1", "use 2"]
    assert log[5:] == ["start 1", "reduce 2", "start 0", "reduce 1", "reduce 0"]


@contextmanager
def logged_units(names: dict[int, str], log: list[str]) -> Generator[None]:
    """Append what happens to units with parameters of these names to `log`."""

    def noted(word: str, method: Any) -> Any:
        def run(self: JointGather, *args: Any) -> Any:
            if id(self.parts[0]) in names:
                log.append(f"{word} {names[id(self.parts[0])]}")
            return method(self, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for word, method in (("start", "start"), ("use", "gathered"), ("reduce", "reduce")):
            patch.setattr(JointGather, method, noted(word, getattr(JointGather, method)))
        yield


# --- numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way to use a model: a change of the model before it is sharded, and the results of a step besides gradients."""

    step: Callable[[Any, Tensor], Sequence[Tensor] | None]
    prepare: Callable[[Any], None] = lambda _: None
    mesh: str = "dp"


def plain(net: Any, x: Tensor) -> None:
    net(x).square().mean().backward()


def twice(net: Any, x: Tensor) -> None:
    net.blocks[1](net.blocks[1](net(x)[:, :1] + net.blocks[0](x))).square().mean().backward()


def run_twice_inside(net: Any) -> None:
    net.blocks.append(net.blocks[0])
    net.blocks.append(net.blocks[0])


def leave_unused(net: Any) -> None:
    net.blocks[1].unused = nn.Linear(WIDTH, WIDTH)
    net.blocks.append(Block())
    net.blocks[-1].forward = lambda x: x


def checkpoint_blocks(reentrant: bool) -> Callable[[Any], None]:
    def prepare(net: Any) -> None:
        def forward(x: Tensor) -> Tensor:
            x = net.first(x)
            for block in net.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return net.last(x)

        net.forward = forward

    return prepare


def checkpoint_inside(net: Any) -> None:
    for block in net.blocks:
        block.forward = lambda x, b=block: (
            x + checkpoint(lambda y: b.down(torch.relu(b.up(b.norm(y)))), x, use_reentrant=False)
        )


def freeze(*names: str) -> Callable[[Any], None]:
    def prepare(net: Any) -> None:
        for name, p in net.named_parameters():
            p.requires_grad_(not name.startswith(names))

    return prepare


def tie(net: Any) -> None:
    net.blocks[0].up.weight = net.blocks[2].up.weight
    net.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
    net.blocks[1].square = nn.Linear(WIDTH, WIDTH)
    net.blocks[1].square.weight = net.first.weight
    net.blocks[1].register_forward_hook(lambda block, _, y: block.square(y))


def use_two_dtypes(net: Any) -> None:
    for block in net.blocks:
        block.up.to(torch.float64)
        block.up.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        block.up.register_forward_hook(lambda _, __, y: y.float())


def outside(net: Any, x: Tensor) -> None:
    (net(x).square().mean() + net.blocks[0].up.weight.square().sum() * net.last.bias.sum()).backward()


def parts_alone(net: Any, x: Tensor) -> None:
    y = net.blocks[0].down(net.blocks[0].up(net.first(x)))
    net.last(net.blocks[1](y)).square().mean().backward()


def read_in_block(net: Any) -> None:
    for block in net.blocks:
        block.forward = lambda x, b=block: (
            x + nn.functional.linear(torch.relu(nn.functional.linear(b.norm(x), b.up.weight, b.up.bias)), b.down.weight)
        )


def retained(net: Any, x: Tensor) -> None:
    loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def two_passes(net: Any, x: Tensor) -> None:
    first, second = net(x).square().mean(), net(x * 2).abs().mean()
    first.backward()
    (second * 2).backward()


def without_grad_between(net: Any, x: Tensor) -> list[Tensor]:
    y = net(x)
    with torch.no_grad():
        z = net(x * 2)
    with torch.inference_mode():
        w = net(x * 3).clone()
    y.square().mean().backward()
    return [z, w]


def of_input(net: Any, x: Tensor) -> Sequence[Tensor]:
    x = x.detach().requires_grad_()
    wanted: list[Tensor] = [x, net.blocks[1].up.weight, net.first.bias]
    return torch.autograd.grad(net(x).square().mean(), wanted)


def penalty(net: Any, x: Tensor) -> None:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
    (grad.square().sum() + net(x).mean()).backward()


def second_derivative(net: Any, x: Tensor) -> Sequence[Tensor]:
    weights: list[Tensor] = [net.blocks[0].up.weight, net.last.weight]
    one, other = torch.autograd.grad(net(x).square().mean(), weights, create_graph=True)
    return torch.autograd.grad(one.square().sum() + other.square().sum(), weights)


def with_hooks(net: Any, x: Tensor) -> Sequence[Tensor]:
    heard: list[Tensor] = []
    one = net.blocks[1].up.weight.register_hook(lambda g: g * 2)
    other = net.last.weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.detach().clone()))
    plain(net, x)
    one.remove()
    other.remove()
    return heard


def accumulated(net: Any, x: Tensor) -> Sequence[Tensor]:
    for part in (x, x * 2, x * 3):
        (net(part).square().mean() / 3).backward()
    return [nn.utils.clip_grad_norm_(net.parameters(), 0.1)]


def cleared_in_flight(net: Any, x: Tensor) -> None:
    plain(net, x)
    net.blocks[0].up.weight.grad = None
    net.last.zero_grad()
    plain(net, x * 2)


def autocast(net: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().mean()
    loss.backward()


def half_seen(net: Any, x: Tensor) -> None:
    """One run of a block reaches the loss, another one does not."""
    net.blocks[2](x)
    net.last(net.blocks[0](x)).square().mean().backward()


def functional(net: Any, x: Tensor) -> None:
    weights = {name: p * 0.5 for name, p in net.named_parameters()}
    torch.func.functional_call(net, weights, (x,)).square().mean().backward()


def of_a_copy(net: Any, x: Tensor) -> Sequence[Tensor]:
    plain(net, x)
    copy = deepcopy(net)
    copy.zero_grad()
    plain(copy, x * 2)
    return [p.grad for p in copy.parameters()]


def switch_gradients_on(net: Any) -> None:
    own = net.last.forward

    def forward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return own(x)

    net.last.forward = forward


def without_grad_outside(net: Any, x: Tensor) -> None:
    with torch.no_grad():
        y = net(x)
    y.square().mean().backward()


def switch_gradients_off(net: Any) -> None:
    own = net.first.forward

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return own(x)

    net.first.forward = forward


def write_while_running(net: Any) -> None:
    """Two layers shrink their weights before each use; one does so by `.data`, as codebooks do."""

    def shrink(up: nn.Linear, _: object) -> None:
        up.weight.data.mul_(0.9)

    def shrink_openly(last: nn.Linear, _: object) -> None:
        with torch.no_grad():
            last.weight.mul_(0.9)

    net.blocks[1].up.register_forward_pre_hook(shrink)
    net.last.register_forward_pre_hook(shrink_openly)


def written_in_all_modes(net: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = [net(x), net.blocks[1](x), net.last(x)]
    with torch.inference_mode():
        found.append(net(x).clone())
    plain(net, x)
    return found


def assign_while_running(net: Any) -> None:
    def halve(up: Any, _: object) -> None:
        up.weight = nn.Parameter(up.weight.detach() / 2)

    net.blocks[1].up.register_forward_pre_hook(halve)


def assign_data(net: Any) -> None:
    """A layer shrinks its weight while it runs, and a block that of the layer that follows, which is on its way."""

    def shrink(up: nn.Linear, _: object) -> None:
        up.weight.data = up.weight.data * 0.9

    net.blocks[1].up.register_forward_pre_hook(shrink)
    net.blocks[-1].register_forward_hook(lambda *_: shrink(net.last, None))


class Adjoint(torch.autograd.Function):
    """A call whose backward pass runs it again, as adjoint methods of differential equations do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.run(x), (x, *weights), grads, allow_unused=True)


def adjoint_block(net: Any) -> None:
    block = net.blocks[1]
    own = block.forward
    block.forward = lambda x: Adjoint.apply(own, x, *block.parameters())


CASES = {
    "plain": Case(plain),
    "dp x tp": Case(plain, mesh="dp x tp"),
    "a module outside of the model, twice": Case(twice),
    "a block in three places": Case(plain, run_twice_inside),
    "unused parameters": Case(plain, leave_unused),
    "checkpointed blocks": Case(plain, checkpoint_blocks(False)),
    "checkpointed blocks, reentrant": Case(plain, checkpoint_blocks(True)),
    "checkpoints inside blocks": Case(plain, checkpoint_inside),
    "a frozen block": Case(plain, freeze("blocks.1")),
    "partly frozen blocks": Case(plain, freeze("first", "blocks.0.up", "blocks.1.down.bias", "blocks.2.norm")),
    "all frozen but the first": Case(plain, freeze("blocks", "last")),
    "tied weights": Case(plain, tie),
    "two dtypes": Case(plain, use_two_dtypes),
    "parameters read outside": Case(outside),
    "parts of units alone": Case(parts_alone),
    "parameters read in the block": Case(plain, read_in_block),
    "a graph used twice": Case(retained),
    "two passes at once": Case(two_passes),
    "no gradients between": Case(without_grad_between),
    "gradients of some tensors": Case(of_input),
    "a penalty of gradients": Case(penalty),
    "second derivatives": Case(second_derivative),
    "hooks": Case(with_hooks),
    "accumulation and clipping": Case(accumulated),
    "gradients set to None": Case(cleared_in_flight),
    "autocast": Case(autocast),
    "a copy of the model": Case(of_a_copy),
    "a block that does not reach the loss": Case(half_seen),
    "other tensors for the parameters": Case(functional),
    "gradients switched on inside": Case(without_grad_outside, switch_gradients_on),
    "gradients switched off inside": Case(plain, switch_gradients_off),
    "writes while a module runs": Case(plain, write_while_running),
    "writes in all modes": Case(written_in_all_modes, write_while_running),
    "data assigned while modules run": Case(plain, assign_data),
    "an adjoint method": Case(plain, adjoint_block),
    "a parameter assigned while its module runs": Case(plain, assign_while_running),
}


def results(case: Case, ranks: int, units: Any = None, stage: int = 3) -> list[Any]:
    """Return what two steps of a case give, on one device or on each of some ranks."""
    net: Any = Net()
    case.prepare(net)
    mesh = mesh_of(case.mesh, ranks)
    if mesh is not None:
        mw.shard_layer(net, mesh, shard_columns)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    if mesh is not None:
        stage_2, stage_3 = mw.ShardingStage2("dp", net, 1), mw.ShardingStage3("dp", net, 1, units)
        mw.shard_optimizer(optimizer, stage_3 if stage == 3 else stage_2)
    found: list[Any] = []
    for step in range(2):
        x = rows(step)
        if mesh is not None:
            x = mw.shard_tensor(x, mesh, [mw.Shard(0) if a == "dp" else mw.Replicate() for a in mesh.dim_names])
        found += case.step(net, x) or []
        found += [p.grad for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [None if x is None else mw.unshard_dtensor(x.detach()) for x in [*found, *net.parameters()]]


def mesh_of(name: str, ranks: int) -> mw.ProcessMesh | None:
    if not ranks:
        return None
    if name == "dp":
        return mw.ProcessMesh(list(range(ranks)), ["dp"])
    return mw.ProcessMesh(torch.arange(ranks).view(2, -1).tolist(), ["dp", "tp"])


def shard_columns(name: str, layer: Any, mesh: mw.ProcessMesh) -> None:
    if name.endswith("up") and "tp" in mesh.dim_names:
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(0)])


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_device(name: str) -> None:
    case = CASES[name]
    expected = results(case, 0)
    ranks = 4 if case.mesh != "dp" else 3
    rtol, atol = (2e-2, 2e-3) if name == "autocast" else (2e-5, 2e-6)
    for found in mw.simulate(lambda: results(case, ranks), ranks):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "units", [[], ["blocks.*.up"], ["*", "*.*", "*.*.*"], [("first", "blocks.0"), ("blocks.2", "last")]]
)
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "checkpointed blocks",
        "a block in three places",
        "hooks",
        "gradients switched off inside",
        "an adjoint method",
    ],
)
def test_numbers_do_not_depend_on_the_units(name: str, units: Any) -> None:
    expected = results(CASES[name], 0)
    for found in mw.simulate(lambda: results(CASES[name], 2, units), 2):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    ["gradients switched on inside", "writes in all modes", "a parameter assigned while its module runs"],
)
def test_stage_2_has_the_numbers_of_one_device(name: str) -> None:
    expected = results(CASES[name], 0)
    for found in mw.simulate(lambda: results(CASES[name], 2, stage=2), 2):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_ranks_without_a_part() -> None:
    """With eight ranks, a dim of nine is divided into parts of two, one and no rows."""
    expected = results(CASES["plain"], 0)
    for found in mw.simulate(lambda: results(CASES["plain"], 8), 8):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def parallelize(model: nn.Module, ranks: int, units: Any) -> None:
    config = mw.Parallelism(zero=3, units=units)
    mw.parallelize(model, torch.optim.SGD(model.parameters()), mw.ProcessMesh(list(range(ranks)), ["dp"]), config)


@pytest.mark.parametrize("apply", [shard, parallelize])
def test_a_unit_that_no_module_has_is_refused(apply: Callable[[nn.Module, int, Any], Any]) -> None:
    with pytest.raises(StrategyError, match=r"the unit 'block\.\*'[\s\S]*write 'blocks"):
        mw.simulate(lambda: apply(Net(), 1, ["block.*"]), 1)


def test_a_write_between_the_passes_reaches_the_backward_pass() -> None:
    """As on one device for `.data`: the backward pass reads the new values."""

    def go(ranks: int) -> list[Tensor]:
        model: Any = chain(2)
        if ranks:
            shard(model, ranks)
        x: Any = rows(0, ranks).requires_grad_()
        loss = model(x).square().sum()
        model[1].up.weight.data.mul_(2)
        loss.backward()
        return [mw.unshard_dtensor(t.grad) for t in (x, *model.parameters())]

    for found in mw.simulate(go, 2, 2):
        torch.testing.assert_close(found, go(0))
