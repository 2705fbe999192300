"""A captured forward pass in slices of its sequence: the same loss and gradients, and no slice uses later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.graph import Program, capture, to_fx
from meshwright.pipeline import StageError, slice_sequence

B, S, D, WORDS = 2, 6, 8, 11
CUTS = [(3, 3), (4, 2), (1, 2, 3)]


class Model(nn.Module):
    """A model with an embedding, the layers of a test, and a loss."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.places = nn.Embedding(S, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.norm = nn.LayerNorm(D)
        self.exit = nn.Linear(D, WORDS)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.body = body

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.body(self, self.embed(tokens), tokens, labels)


def attend(m: Model, x: Tensor, heads: int = 2, **options: Any) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v, **({"is_causal": True} | options))
    return out.transpose(1, 2).flatten(2)


def token_loss(m: Model, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(m.exit(x).flatten(0, 1), labels.flatten(), **options)


def gpt(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    x = x + m.places(torch.arange(tokens.shape[1]))
    x = x + attend(m, m.norm(x))
    return token_loss(m, x * m.scale, labels)


def by_view(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    b, s, d = x.shape
    q, k, v = m.qkv(x).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
    x = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2).reshape(b, s, d)
    return F.cross_entropy(m.exit(x).transpose(1, 2), labels)


def shared_heads(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    q = m.qkv(x)[..., :D].unflatten(-1, (4, -1)).transpose(1, 2)
    k = v = q[:, :2]
    x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return token_loss(m, x.transpose(1, 2).flatten(2), labels)


def sequence_first(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    x = attend(m, x).transpose(0, 1)
    return token_loss(m, x.tanh(), labels.t())


def shifted(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = m.exit(attend(m, x))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def padded(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    labels = labels.masked_fill(tokens < 4, -100)
    return token_loss(m, x, labels, weight=m.scale.detach().repeat(2)[:WORDS], label_smoothing=0.1)


def some_ignored(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, attend(m, x), labels, ignore_index=3)


def shares(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.exit(x).flatten(0, 1), F.one_hot(labels.flatten(), WORDS).float())


def by_hand(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != 0).float()
    each = F.cross_entropy(m.exit(x).transpose(1, 2), labels, reduction="none")
    return (each * mask).sum() / mask.sum() + 0.01 * m.exit(x).logsumexp(-1).square().mean()


def regression(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    wanted = labels.unsqueeze(-1).expand(-1, -1, D).float()
    return F.mse_loss(x, wanted) + F.smooth_l1_loss(attend(m, x), wanted, reduction="sum")


def masked(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    x = torch.where((tokens > 3).unsqueeze(-1), x, 0.0) + x.new_zeros(D)
    return token_loss(m, F.dropout(attend(m, x), 0.0), labels)


def last_position(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.exit(attend(m, x)[:, -1]), labels[:, 0])


def pooled(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.exit(attend(m, x).mean(1).relu()), labels[:, 0])


def broadcast(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    x, scale = torch.broadcast_tensors(attend(m, x), m.scale)
    return token_loss(m, x * scale, labels)


RIGHT = [
    gpt, by_view, shared_heads, sequence_first, shifted, padded, some_ignored, shares, by_hand, regression, masked,
    last_position, pooled, broadcast,
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, WORDS, (B, S), generator=g), torch.randint(0, WORDS, (B, S), generator=g)


def made(body: Callable[..., Tensor]) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(body)
    return model, capture(model, model, batch())


def run(program: Program, model: Model) -> list[Tensor]:
    tensors = dict(model.named_parameters())
    leaves = batch()
    sources = {
        "parameter": lambda i: tensors[i.name],
        "batch": lambda i: leaves[i.source],
        "constant": lambda i: i.source,
    }
    loss, _ = to_fx(program)(*(sources[i.role](i) for i in program.inputs))
    grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return [loss.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.parametrize("body", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_slices_have_the_same_numbers(body: Callable[..., Tensor], lengths: tuple[int, ...]) -> None:
    model, captured = made(body)
    program = slice_sequence(captured.program, lengths)
    for found, expected in zip(run(program, model), run(captured.program, model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    made_in = {v: node.origin.slice for node in program.nodes for v in node.outs}
    assert all(made_in.get(v, 0) <= node.origin.slice for node in program.nodes for v in node.ins)
    assert set(made_in.values()) == set(range(len(lengths)))


def test_slices_share_the_work() -> None:
    """Each slice has its own products: none is left to the last slice."""
    _, captured = made(gpt)
    program = slice_sequence(captured.program, (3, 3))
    for op in ("aten.linear.default", "aten.scaled_dot_product_attention.default"):
        where = [node.origin.slice for node in program.nodes if str(node.op) == op]
        assert where.count(0) == where.count(1) > 0


def both_ways(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, attend(m, x, is_causal=False), labels)


def with_a_mask(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, attend(m, x, is_causal=False, attn_mask=torch.ones(S, S).tril() > 0), labels)


def drops(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, F.dropout(x.flatten(0, 1), 0.5).unflatten(0, (-1, S)), labels)


def centred(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, x - x.mean(1, keepdim=True), labels)


def over_positions(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, x.softmax(1), labels)


def running(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, x.cumsum(1), labels)


def neighbours(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, F.conv1d(x.mT, torch.ones(D, D, 3), padding=1).mT, labels)


def mixed(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, x @ x.mT @ x, labels)


def mixed_with_bias(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return values with a bias that counts once for the sum over all positions, not once for each slice."""
    return F.cross_entropy(m.exit(F.linear(x.mT, m.places.weight.t(), m.scale).mean(1)), labels[:, 0])


def backwards(m: Model, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return token_loss(m, x.flip(1), labels)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (both_ways, "scaled_dot_product_attention"),
        (with_a_mask, "mask"),
        (drops, "one dim"),
        (centred, "of the later slice"),
        (over_positions, "softmax"),
        (running, "cumsum"),
        (neighbours, "conv1d"),
        (mixed, "matmul"),
        (mixed_with_bias, "linear"),
        (backwards, "flip"),
    ],
)
def test_models_that_read_later_positions_are_refused(body: Callable[..., Tensor], says: str) -> None:
    _, captured = made(body)
    with pytest.raises(StageError, match=says):
        slice_sequence(captured.program, (3, 3))


def test_the_error_names_the_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(running)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.inner(tokens, labels)

    model = Outer()
    captured = capture(model, model, batch())
    with pytest.raises(StageError, match=r"cumsum.* in inner"):
        slice_sequence(captured.program, (3, 3))


def test_a_batch_without_sequences_is_refused() -> None:
    _, captured = made(gpt)
    with pytest.raises(StageError, match="dim 1"):
        slice_sequence(captured.program, (3, 2))


def test_buffers_that_a_batch_updates_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, S), nn.BatchNorm1d(S), nn.Flatten(), nn.Linear(S * S, 1))
    captured = capture(model, lambda x: model(x).mean(), batch()[:1])
    with pytest.raises(StageError, match="updates"):
        slice_sequence(captured.program, (3, 3))
