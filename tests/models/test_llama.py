"""The Llama model: properties on one device, and the same numbers on a mesh from marks alone."""

from __future__ import annotations

import ast
import re
from math import log
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.models import Job, Llama, LlamaConfig, ModelError, batch, largest_difference, train, train_on_mesh
from meshwright.models import _llama as source
from meshwright.models._llama import Attention, rotate

README = Path(__file__).parents[2] / "README.md"
SMALL = LlamaConfig(hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=48)


def test_an_untrained_model_has_the_loss_of_chance() -> None:
    model = Llama(SMALL)
    loss = model(*batch(0, 4, 32, seed=0))
    assert loss.item() == pytest.approx(log(SMALL.vocab), rel=0.02)


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (Llama(SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["exit.head.weight"], other["exit.head.weight"])


def test_attention_is_causal() -> None:
    attention = Attention(SMALL)
    x_bsd = torch.randn(2, 6, SMALL.hidden)
    before = attention(x_bsd)
    x_bsd[:, 4:] += 1
    torch.testing.assert_close(attention(x_bsd)[:, :4], before[:, :4])


def test_heads_share_keys_and_values() -> None:
    shared, whole = Attention(SMALL), Attention(LlamaConfig(hidden=32, heads=4, kv_heads=4))
    whole.load_state_dict(shared.state_dict() | {name: repeated(shared, name) for name in ("k.weight", "v.weight")})
    x_bsd = torch.randn(2, 6, 32)
    torch.testing.assert_close(shared(x_bsd), whole(x_bsd))


def repeated(attention: Attention, name: str) -> torch.Tensor:
    """Repeat the rows of a weight for two heads: (k e) d -> (k 2 e) d."""
    weight = attention.get_parameter(name)
    return weight.unflatten(0, (-1, SMALL.head_size)).repeat_interleave(2, dim=0).flatten(0, 1)


def test_rotation_depends_only_on_the_distance() -> None:
    q, k = torch.randn(8), torch.randn(8)
    products = rotate(q.expand(9, 8)) @ rotate(k.expand(9, 8)).T
    for distance in range(9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"heads": 6, "hidden": 48, "kv_heads": 4}, {"hidden": 24, "heads": 8}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="fix:"):
        LlamaConfig(**sizes)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="each stage needs at least one layer"):
        Job(SMALL, mesh=(3, 1, 1))


def test_the_same_batches_for_any_split() -> None:
    tokens, targets = batch(step=3, size=8, length=16, seed=5)
    halves = [batch(step, 4, 16, seed=5) for step in (6, 7)]
    assert torch.equal(tokens, torch.cat([half[0] for half in halves]))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_training_lowers_the_loss() -> None:
    losses = train(Job(SMALL, steps=20, batch=8, sequence=64, warm_up=1, learning_rate=1e-2))
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)], ids=str)
def test_a_mesh_gives_the_losses_of_one_device(mesh: tuple[int, int, int]) -> None:
    job = Job(SMALL, mesh, steps=4, batch=4, sequence=16)
    losses = mw.simulate(train_on_mesh, job.ranks, job)
    assert all(other == losses[0] for other in losses)
    assert largest_difference(losses[0], train(job)) < 1e-5


def test_an_uneven_batch_gives_the_losses_of_one_device() -> None:
    job = Job(SMALL, mesh=(1, 2, 2), steps=3, batch=5, sequence=16)
    assert largest_difference(mw.simulate(train_on_mesh, job.ranks, job)[0], train(job)) < 1e-5


def test_the_readme_counts_the_marks() -> None:
    """All lines about a mesh, a placement or this library are together, at the end of the model file."""
    text = Path(source.__file__).read_text()
    code = code_lines(ast.parse(text))
    first = next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith("# The marks"))
    speaks = {
        n for n, line in enumerate(text.splitlines(), 1) if re.search(r"\bmw\.|\bmesh\b|\bstages?\b", line)
    } & code
    assert min(speaks) > first
    marks = {n for n in code if n > first}
    assert f"{len(marks)} of its {len(code)} lines" in README.read_text()


def code_lines(tree: ast.Module) -> set[int]:
    """Return every line that holds code: neither empty, nor a comment, nor part of a docstring."""
    texts = (ast.Expr, ast.Constant)
    docs = {
        line
        for node in ast.walk(tree)
        if isinstance(node, texts[0]) and isinstance(node.value, texts[1]) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    held = {n.lineno for n in ast.walk(tree) if hasattr(n, "lineno")}
    held |= {n.end_lineno for n in ast.walk(tree) if getattr(n, "end_lineno", None)}
    return held - docs
