"""Modules, optimizers and torch's tools for them have the results of one device on a mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.tensor import DistTensor

from .oracle import STYLES, Lay, Program, check

PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 4))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def step(lay: Lay, make: Any, steps: int = 3, **settings: Any) -> Any:
    model = lay.module(mlp())
    x, y = lay(torch.randn(5, 6)), lay(torch.randn(5, 4))
    optimizer = make(model.parameters(), **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()["state"]


@program
def sgd(lay: Lay) -> Any:
    return step(lay, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


@program
def adam(lay: Lay) -> Any:
    return step(lay, torch.optim.Adam, lr=0.01)


@program
def adamw(lay: Lay) -> Any:
    return step(lay, torch.optim.AdamW, lr=0.01, amsgrad=True)


@program
def adamw_over_lists(lay: Lay) -> Any:
    return step(lay, torch.optim.AdamW, lr=0.01, foreach=True)


@program
def rmsprop_and_adagrad(lay: Lay) -> Any:
    return step(lay, torch.optim.RMSprop, lr=0.01)[0], step(lay, torch.optim.Adagrad, lr=0.01)[0]


@program
def clipped_gradients(lay: Lay) -> Any:
    model = lay.module(mlp())
    model(lay(torch.randn(5, 6))).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return norm, gradients(model)


@program
def gradient_accumulation(lay: Lay) -> Any:
    model = lay.module(mlp())
    for _ in range(2):
        model(lay(torch.randn(5, 6))).square().mean().backward()
    return gradients(model)


@program
def gradient_scaling(lay: Lay) -> Any:
    model = lay.module(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(lay(torch.randn(5, 6))).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model.state_dict(), scaler.get_scale()


@program
def learning_rate_schedule(lay: Lay) -> Any:
    model = lay.module(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        model(lay(torch.ones(5, 6))).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.state_dict(), schedule.get_last_lr()


@program
def a_copied_module(lay: Lay) -> Any:
    model = lay.module(mlp())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    other(lay(torch.randn(5, 6))).sum().backward()
    return model.state_dict(), other.state_dict(), gradients(model), gradients(other)


@program
def a_copied_gradient(lay: Lay) -> Any:
    model = lay.module(mlp())
    model(lay(torch.randn(5, 6))).square().mean().backward()
    return gradients(copy.deepcopy(model))


@program
def a_state_that_is_loaded(lay: Lay) -> Any:
    model, other = lay.module(mlp()), lay.module(mlp())
    other.load_state_dict(model.state_dict())
    plain = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(plain)
    return other.state_dict(), model.state_dict()


@program
def hooks_of_modules(lay: Lay) -> Any:
    model, seen = lay.module(mlp()), []
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].square().sum()))
    model[3].register_full_backward_pre_hook(lambda m, go: seen.append(go[0].square().sum()))
    model[4].register_forward_hook(lambda m, i, o: o * 2)
    model(lay(torch.randn(5, 6), grad=True)).square().mean().backward()
    return seen, gradients(model)


@program
def a_module_moved_to_another_dtype(lay: Lay) -> Any:
    model = lay.module(mlp()).double()
    model(lay(torch.randn(5, 6).double())).sum().backward()
    return gradients(model)


@program
def frozen_parameters(lay: Lay) -> Any:
    model = lay.module(mlp())
    model[0].requires_grad_(False)
    model(lay(torch.randn(5, 6))).square().mean().backward()
    return gradients(model)


@program
def batch_norm_with_buffers(lay: Lay) -> Any:
    model = lay.module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    x = lay(torch.randn(5, 6))
    model(x).square().mean().backward()
    trained = gradients(model)
    return trained, model.state_dict(), model.eval()(x)


@program
def tied_weights(lay: Lay) -> Any:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 6), "head": nn.Linear(6, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    model = lay.module(model)
    assert model["head"].weight is model["embed"].weight
    tokens = torch.tensor([[1, 2, 6], [0, 3, 1]])
    F.cross_entropy(model["head"](model["embed"](tokens)).flatten(0, 1), tokens.flatten()).backward()
    return gradients(model), [name for name, _ in model.named_parameters()]


@program
def multi_head_attention(lay: Lay) -> Any:
    model = lay.module(nn.MultiheadAttention(8, 2, batch_first=True))
    x = lay(torch.randn(4, 5, 8), grad=True)
    out, weights = model(x, x, x)
    out.square().mean().backward()
    return out, weights, x.grad, gradients(model)


@program
def a_transformer_layer(lay: Lay) -> Any:
    model = lay.module(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = lay(torch.randn(4, 5, 8), grad=True)
    model(x).square().mean().backward()
    return x.grad, gradients(model)


@program
def a_recurrent_layer(lay: Lay) -> Any:
    model = lay.module(nn.LSTM(6, 5))
    out, (h, c) = model(lay(torch.randn(3, 4, 6)))
    (out.sum() + h.sum() + c.sum()).backward()
    return out, h, c, gradients(model)


@program
def recurrent_layers_with_dropout_between(lay: Lay) -> Any:
    """Return the output of layers made of smaller operators that write in place to pieces of one tensor."""
    model = lay.module(nn.LSTM(6, 5, num_layers=2, dropout=1e-9))
    out, (h, c) = model(lay(torch.randn(3, 4, 6)))
    (out.sum() + h.sum() + c.sum()).backward()
    return out, h, c, gradients(model)


@program
def convolutions(lay: Lay) -> Any:
    model = lay.module(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()))
    x = lay(torch.randn(4, 2, 6, 8), grad=True)
    model(x).square().mean().backward()
    return x.grad, gradients(model)


@program
def checkpoints_without_reentry(lay: Lay) -> Any:
    model, x = lay.module(mlp(0.5)), lay(torch.randn(5, 6), grad=True)
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    return x.grad, gradients(model)


@program
def checkpoints_with_reentry(lay: Lay) -> Any:
    model, x = lay.module(mlp(0.5)), lay(torch.randn(5, 6), grad=True)
    checkpoint(model, x, use_reentrant=True).square().mean().backward()
    return x.grad, gradients(model)


@program
def functional_calls(lay: Lay) -> Any:
    model = lay.module(mlp())
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, doubled, (lay(torch.randn(5, 6)),))
    out.square().mean().backward()
    return out, gradients(model)


# --- randomness ----------------------------------------------------------------------------------------------------


@program
def dropout(lay: Lay) -> Any:
    x = lay(torch.randn(5, 6), grad=True)
    y = F.dropout(x, 0.4)
    y.sum().backward()
    return y, x.grad, F.dropout(x, 0.4, training=False), torch.rand(3)


@program
def initial_values(lay: Lay) -> Any:
    weight = lay(torch.zeros(5, 6), grad=True)
    values = []
    for init in (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
    ):
        init(weight)
        values.append(weight.detach().clone())
    return values


@program
def random_tensors(lay: Lay) -> Any:
    x = lay(torch.randn(5, 6))
    return (
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randint_like(x, 9),
        torch.bernoulli(x.sigmoid()),
        torch.multinomial(x.softmax(1), 2),
        x.clone().uniform_(),
        torch.randperm(6),
        torch.normal(x, 1.0),
    )


@program
def modules_with_dropout(lay: Lay) -> Any:
    model = lay.module(mlp(0.3))
    model(lay(torch.randn(5, 6))).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_the_results_of_one_device(name: str, style: str) -> None:
    check(PROGRAMS[name], STYLES[style], rtol=2e-4, atol=2e-5)


def on_two(fn: Any) -> list[Any]:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    return mw.simulate(fn, 2, mesh)


def test_a_parameter_stays_a_parameter() -> None:
    def go(mesh: mw.ProcessMesh) -> bool:
        weight = mw.shard_tensor(nn.Parameter(torch.ones(4, 3)), mesh, [mw.Shard(0)])
        again = mw.shard_tensor(weight, mesh, [mw.Shard(1)])
        kinds = [isinstance(w, nn.Parameter) and w.is_leaf and w.requires_grad for w in (weight, again)]
        layer = nn.Linear(3, 4)
        layer.weight = again
        return all(kinds) and [name for name, _ in layer.named_parameters()] == ["weight", "bias"]

    assert on_two(go) == [True, True]


def test_hooks_and_gradients_are_distributed() -> None:
    def go(mesh: mw.ProcessMesh) -> list[str]:
        x = mw.shard_tensor(torch.ones(4, 3), mesh, [mw.Shard(0)], requires_grad=True)
        seen: list[Any] = []
        y = x * 2
        y.register_hook(seen.append)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        y.sum().backward()
        return [repr(g.spec) for g in [*seen, x.grad] if isinstance(g, DistTensor)]

    assert on_two(go) == [["f32[4@x, 3]"] * 3] * 2


def test_printing_does_not_communicate() -> None:
    def go(mesh: mw.ProcessMesh) -> str | None:
        from meshwright.comm import current_communicator

        x = mw.shard_tensor(torch.arange(6.0).reshape(3, 2), mesh, [mw.Shard(0)])
        calls = current_communicator().seen.total_calls
        text = repr(x) if mw.get_rank() == 0 else None  # one rank alone: a collective would never end
        assert current_communicator().seen.total_calls == calls
        return text

    assert on_two(go)[0] == (
        "DistTensor(f32[3@x, 2] on ProcessMesh([x=2]); rank 0 holds [0:2, 0:2]\n"
        "  tensor([[0., 1.],\n        [2., 3.]]))"
    )


def test_a_distributed_tensor_can_be_printed_after_its_ranks_have_ended() -> None:
    tensors = on_two(lambda mesh: mw.shard_tensor(torch.ones(3, 2), mesh, [mw.Shard(0)]))
    assert "f32[3@x, 2]" in repr(tensors)


def test_a_faster_generator_can_be_chosen() -> None:
    def go(mesh: mw.ProcessMesh) -> Tensor:
        x = mw.shard_tensor(torch.zeros(4, 6), mesh, [mw.Shard(0)])
        torch.manual_seed(0)
        with mw.random_source("rank"):
            return torch.rand_like(x).to_local()

    torch.manual_seed(0)
    expected = torch.rand(2, 6)
    assert all(torch.equal(part, expected) for part in on_two(go))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("cut", [0, 1])
def test_sparse_gradients_become_dense(kind: Any, cut: int) -> None:
    """`sparse=True`: the gradient of a sharded table has all its rows, because the parts are summed."""
    mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])

    def go(on_mesh: bool) -> Tensor:
        torch.manual_seed(0)
        table, ids = kind(10, 4, sparse=True), torch.randint(0, 10, (4, 3))
        if on_mesh:
            table.weight = mw.shard_tensor(table.weight, mesh, [mw.Replicate(), mw.Shard(cut)])
            ids = mw.shard_tensor(ids, mesh, [mw.Shard(0)])
        sgd = torch.optim.SGD(table.parameters(), 0.1)
        for _ in range(2):
            (table(ids).sin() * torch.arange(4.0)).sum().backward()
            sgd.step()
            sgd.zero_grad()
        return mw.unshard_dtensor(table.weight).detach()

    wanted = go(False)
    for found in mw.simulate(go, 4, True):
        torch.testing.assert_close(found, wanted)
