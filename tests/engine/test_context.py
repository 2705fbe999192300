"""Context parallelism: attention along a sharded sequence, by each name, with the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.cost import Cluster, cluster
from meshwright.engine import suggest
from meshwright.graph import communication, live_memory
from meshwright.models import Llama, LlamaConfig
from meshwright.search import MeshPlan, parse_mesh_plan

Tensors = list[Tensor]
NAMES = ("gather", "ring", "ulysses")
BATCH, HEADS, CHANNELS = 2, 4, 8
LENGTHS = {2: (24, 18, 13), 3: (24, 20, 13), 4: (24, 20, 18, 13)}
"""Ranks → lengths that leave different remainders when they are divided into one or two parts for each rank."""


def tensors(length: int, key_heads: int = HEADS, out: int = CHANNELS) -> Tensors:
    """Return queries, keys, values, and the factor of the result in the loss."""
    g = torch.Generator().manual_seed(0)
    shapes = [(HEADS, CHANNELS), (key_heads, CHANNELS), (key_heads, out), (HEADS, out)]
    return [torch.randn(BATCH, heads, length, channels, generator=g) for heads, channels in shapes]


def line(ranks: int) -> mw.ProcessMesh:
    return mw.ProcessMesh(range(ranks), ["cp"])


def cut(x: Tensor, mesh: mw.ProcessMesh) -> Tensor:
    return mw.shard_tensor(x, mesh, [mw.Shard(2)])


def attended(given: Tensors, **options: Any) -> Tensors:
    """Return the result, and the gradients of queries, keys and values."""
    *qkv, weight = given
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*qkv, enable_gqa=qkv[0].shape[1] != qkv[1].shape[1], **options)
    (out * weight).sum().backward()
    return [out.detach(), *[x.grad for x in qkv if x.grad is not None]]


def whole(found: Tensors) -> Tensors:
    return [mw.unshard_dtensor(x) for x in found]


def close(found: Tensors, wanted: Tensors) -> None:
    for x, goal in zip(found, wanted, strict=True):
        assert (x - goal).abs().max() <= 1e-5 * goal.abs().max()


def told(work: Callable[[], Tensors], name: Any) -> tuple[str, Tensors]:
    """Return the form of attention that ran, and its results."""
    with mw.context_parallel(name):
        found = mw.explain(work)
    (how,) = [call.how for call in found.calls if "attention" in call.name]
    return how, whole(found.result)


def forms_of_all_ranks(ranks: int, name: str, given: Tensors, **options: Any) -> set[str]:
    """Return the forms that ran on these ranks, after a comparison of their numbers with one device."""
    goal = attended(given, **options)

    def go() -> str:
        here = {k: mw.shard_tensor(v, line(ranks)) if isinstance(v, Tensor) else v for k, v in options.items()}
        how, found = told(lambda: attended([cut(x, line(ranks)) for x in given], **here), name)
        close(found, goal)
        return how

    return set(mw.simulate(go, ranks))


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_has_the_numbers_of_one_device(name: str, causal: bool) -> None:
    """On two to four ranks; with heads that share a key; if a name does not fit, the call runs in its usual form."""
    for ranks, lengths in LENGTHS.items():
        for length in lengths:
            for key_heads in (HEADS, 2):
                fits = {
                    "gather": False,
                    "ring": True,
                    "ulysses": HEADS % ranks == 0 and key_heads % ranks == 0,
                }[name]
                how = forms_of_all_ranks(ranks, name, tensors(length, key_heads, 6), is_causal=causal)
                assert how == {name if fits else "local"}, (ranks, length, key_heads)


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_masks_scales_and_few_dims(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    seen = torch.rand(BATCH, 1, 12, 12, generator=g) > 0.5
    seen[..., 0] = True
    for mask in (seen, torch.randn(12, 12, generator=g), seen[:, :, :1], torch.randn(BATCH, 1, 1, 12, generator=g)):
        assert forms_of_all_ranks(2, name, tensors(12), attn_mask=mask) == {name}
        assert forms_of_all_ranks(3, "ring", tensors(12, 2), attn_mask=mask) == {"ring"}
    per_head = torch.randn(1, HEADS, 12, 12, generator=g)
    assert forms_of_all_ranks(2, name, tensors(12, 2), attn_mask=per_head) == {"ring" if name == "ring" else "local"}
    assert forms_of_all_ranks(2, name, tensors(12), scale=0.7) == {name}
    assert forms_of_all_ranks(2, name, tensors(12), is_causal=True, scale=0.7) == {name}


def test_a_fully_masked_row_gives_zeros() -> None:
    """By a ring, and by gathered queries with sharded keys."""
    seen = torch.ones(12, 12, dtype=torch.bool)
    seen[3] = False
    assert forms_of_all_ranks(2, "ring", tensors(12), attn_mask=seen) == {"ring"}
    for mask in (seen, seen[:, :1], torch.where(seen, 0.0, float("-inf"))):
        assert forms_of_all_ranks(3, "gather", tensors(12), attn_mask=mask) == {"local"}
    assert forms_of_all_ranks(2, "ring", tensors(12), attn_mask=seen[:, :1]) == {"local"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_row_of_large_negative_masks_gives_the_mean(ranks: int) -> None:
    """A log-sum has no digits for the number of keys there."""
    terms = torch.zeros(12, 12)
    terms[3], terms[7] = -1e9, torch.finfo(torch.float32).min
    assert forms_of_all_ranks(ranks, "ring", tensors(12), attn_mask=terms) == {"ring"}


@pytest.mark.parametrize("name", ["gather", "ring"])
@pytest.mark.parametrize(("shape", "at"), [((1, HEADS), 0), ((1, HEADS), 2), ((BATCH, 1), 2)], ids=str)
def test_broadcast_batches_and_heads(name: str, shape: tuple[int, int], at: int) -> None:
    given = tensors(12)
    given[at] = given[at][: shape[0], : shape[1]].contiguous()
    assert forms_of_all_ranks(2, name, given) == {"local"}


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_a_mask_has_a_gradient(name: str) -> None:
    given, bias = tensors(12), torch.randn(12, 12, generator=torch.Generator().manual_seed(2))

    def run(given: Tensors, bias: Tensor) -> Tensors:
        bias = bias.detach().requires_grad_()
        found = attended(given, attn_mask=bias)
        assert bias.grad is not None
        return [*found, bias.grad]

    goal = run(given, bias)

    def here() -> Tensors:
        return run([cut(x, line(2)) for x in given], mw.shard_tensor(bias, line(2)))

    for how, found in mw.simulate(lambda: told(here, name), 2):
        assert how == name
        close(found, goal)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_gradients_have_gradients(causal: bool) -> None:
    def run(given: Tensors) -> Tensors:
        *qkv, weight = given
        qkv = [x.detach().requires_grad_() for x in qkv]
        out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
        grads = torch.autograd.grad((out * weight).sum(), qkv, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), qkv))

    given = tensors(8)
    with sdpa_kernel(SDPBackend.MATH):  # the setting is global for all threads
        goal = run(given)
        everyone = mw.simulate(lambda: told(lambda: run([cut(x, line(2)) for x in given]), "ring"), 2)
    for how, found in everyone:
        assert how == "ring"
        close(found, goal)


def test_a_cached_call_uses_the_current_name() -> None:
    """Plans are cached by signature, and all ranks share them."""
    given = tensors(16)

    def sent(name: Any) -> tuple[str, ...]:
        parts = [cut(x, line(2)) for x in given[:3]]
        with mw.context_parallel("gather" if name == "ulysses" else "ulysses"), mw.context_parallel(name):
            with current_communicator().seen.record_calls() as calls:
                F.scaled_dot_product_attention(*parts)
        return tuple(call.kind for call in calls)

    def go() -> list[tuple[str, ...]]:
        return [sent(name) for name in (*NAMES, *NAMES[::-1])]

    for found in mw.simulate(go, 2):
        assert found == found[::-1]
        assert found[1:3] == [("exchange",), ("all_to_all",) * 4]
        assert "exchange" not in found[0]


def received(name: str, ranks: int, causal: bool) -> list[tuple[int, int]]:
    """Return the bytes that each rank receives in a forward and in a backward pass, none of them by gathering."""

    def go() -> tuple[int, int]:
        qkv = [cut(x, line(ranks)).detach().requires_grad_() for x in tensors(48)[:3]]
        seen = current_communicator().seen
        with mw.context_parallel(name):
            before = seen.total_received
            out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
            between = seen.total_received
            out.backward(torch.ones_like(out))
            assert set(seen.calls) <= {"exchange", "all_to_all"}
        return between - before, seen.total_received - between

    return mw.simulate(go, ranks)


def test_a_ring_sends_the_expected_bytes() -> None:
    """Keys and values p - 1 times, their gradients back; remote chunks there and back."""
    one = tensors(48)[0].nbytes
    for ranks in (2, 3, 4):
        part = one // ranks
        there, back = 2 * part * (ranks - 1), 2 * part * (ranks - 1) + 2 * part * ranks
        assert received("ring", ranks, causal=False) == [(there, back)] * ranks
        away = [len({i, 2 * ranks - 1 - i} - {2 * i, 2 * i + 1}) for i in range(ranks)]
        extra = [4 * part * n // 2 for n in away]
        assert received("ring", ranks, causal=True) == [(there + n, back + n) for n in extra]
    part = one // 2
    assert received("ulysses", 2, causal=True) == [(4 * part // 2, 4 * part // 2)] * 2


CONFIG = LlamaConfig(vocab=40, hidden=32, layers=1, heads=4, kv_heads=2, feed_forward=48)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 40, (4, 16), generator=g), torch.randint(0, 40, (4, 16), generator=g)


class Published(nn.Module):
    """A model from a library."""

    def __init__(self) -> None:
        super().__init__()
        hf = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation="sdpa"))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


class Checkpointed(Llama):
    """Blocks whose forward passes run again in the backward pass, outside of the model's forward."""

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        x = self.entry(tokens_bs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.exit(x, targets_bs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: Llama(CONFIG),
    "published": Published,
    "checkpointed": lambda: Checkpointed(CONFIG),
}


def losses(model: nn.Module, config: mw.Parallelism | None = None, static: bool = False) -> tuple[list[float], Any]:
    """Return the losses of three steps, and the calls of the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    if config is not None:
        mw.parallelize(model, optimizer, mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "cp"]), config)
    step = mw.to_static(model, None, None, optimizer) if static else None
    found: list[float] = []
    for seed in range(3):
        if step is not None:
            found.append(step(*tokens(seed)).item())
            continue
        loss = model(*tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, dict(current_communicator().seen.calls) if config else None


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize(("model", "name"), [("ours", "ring"), ("ours", "ulysses"), ("published", "ring")])
def test_training_has_the_losses_of_one_device(model: str, name: Any, static: bool) -> None:
    goal, _ = losses(MODELS[model]())
    for found, seen in mw.simulate(lambda: losses(MODELS[model](), mw.Parallelism(context=name), static), 4):
        assert found == pytest.approx(goal, rel=1e-5)
        assert ("exchange" if name == "ring" else "all_to_all") in seen


def test_checkpoints_recompute_with_the_same_name() -> None:
    goal, _ = losses(MODELS["checkpointed"]())
    for found, seen in mw.simulate(lambda: losses(MODELS["checkpointed"](), mw.Parallelism(context="ring")), 4):
        assert found == pytest.approx(goal, rel=1e-5)
        assert "exchange" in seen


class Attend(nn.Module):
    """Attention alone, of a long sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.gain).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()


def test_a_ring_uses_less_memory() -> None:
    """Bytes at the peak of a step, from its program: scores of two parts at a time."""

    def peak(name: Any) -> int:
        net = Attend()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mw.parallelize(net, optimizer, line(4), mw.Parallelism(context=name))
        step = mw.to_static(net, None, None, optimizer)
        with mw.context_parallel("gather"):
            step(torch.ones(1, 256, 4))
        return live_memory(step.program).peak

    gathered, ring = mw.simulate(lambda: (peak("gather"), peak("ring")), 4)[0]
    assert 3 * ring < gathered


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("length", [24, 22, 13])
def test_steps_along_an_uneven_sequence(length: int, static: bool) -> None:
    x = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(0))

    def losses(ranks: int) -> list[float]:
        net = Attend()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        if ranks:
            mw.parallelize(net, optimizer, line(ranks), mw.Parallelism(context="ring"))
        step = mw.to_static(net, None, None, optimizer) if ranks and static else None
        found: list[float] = []
        for _ in range(3):
            if step is not None:
                found.append(step(x).item())
                continue
            loss = net(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if ranks:
            assert "exchange" in current_communicator().seen.calls
        return found

    for found in mw.simulate(losses, 4, 4):
        assert found == pytest.approx(losses(0), rel=1e-5)


def test_a_static_model_keeps_the_name_of_its_capture() -> None:
    """Another name is another setting, for which a new program is recorded; a known one is reused."""

    def go() -> list[bool]:
        net = Attend()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        mw.parallelize(net, optimizer, line(2))
        step, found = mw.to_static(net, None, None, optimizer), list[bool]()
        for name in ("ring", "gather", "ring"):
            with mw.context_parallel(name):
                step(torch.ones(1, 8, 4))
            found.append(any("Exchange" in repr(node.op) for node in communication(step.program)))
        return found

    assert mw.simulate(go, 2)[0] == [True, False, True]


def slow(text: str) -> Cluster:
    """Return a cluster so slow that it is worth while to divide the computation of a test."""
    usual = cluster(text)
    device = replace(
        usual.device,
        flops={t: f / 1e4 for t, f in usual.device.flops.items()},
        bandwidth=usual.device.bandwidth / 1e4,
        overhead=0.0,
    )
    inside, outside = usual.inside, usual.outside or usual.inside
    inside = replace(inside, latency=0.0, start=0.0, bandwidth=inside.bandwidth / 3e4)
    return replace(
        usual, device=device, inside=inside, outside=replace(outside, latency=0.0, bandwidth=outside.bandwidth / 1e3)
    )


CLUSTER = slow("4xA100-40GB, 1 per node, 25G")


@pytest.mark.parametrize(
    ("kv_heads", "context", "said"), [(4, "ulysses", "all-to-all shards heads"), (2, "gather", "queries are sharded")]
)
def test_one_long_sequence_is_sharded_along_its_length(kv_heads: int, context: str, said: str) -> None:
    tokens = torch.randint(0, 32, (1, 256), generator=torch.Generator().manual_seed(0))

    def train(plan: MeshPlan | None = None) -> tuple[list[float], str]:
        torch.manual_seed(0)
        model = Llama(LlamaConfig(vocab=32, hidden=16, layers=2, heads=8, kv_heads=kv_heads, feed_forward=16))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
        if plan is not None:
            step = mw.auto(model, [(tokens, tokens)], optimizer=optimizer, plan=plan)
            losses = [step(tokens, tokens).item() for _ in range(2)]
            return losses, str(step.program)
        for _ in range(2):
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, ""

    model = Llama(LlamaConfig(vocab=32, hidden=16, layers=2, heads=8, kv_heads=kv_heads, feed_forward=16))
    plan, *_ = mw.plan(model, [tokens, tokens], cluster=CLUSTER, ranks=4)
    assert plan.context == context
    assert repr(plan.layouts["batch_0"]) == "i64[1, 256@tp]"
    assert f"context parallel: in 2 attentions, {said}" in plan.explain()
    assert parse_mesh_plan(plan.text()) == plan
    told = suggest(model, [tokens, tokens], cluster=CLUSTER, ranks=4)
    assert told.config.context == context
    assert ("context='ulysses'" in told.text()) == (context == "ulysses")
    wanted, _ = train()
    for losses, program in mw.simulate(lambda: train(plan), 4):
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert ("all_to_all" in program) == (context == "ulysses")
        assert ("all_gather" in program) == (context == "gather")
