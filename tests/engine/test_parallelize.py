"""Plans by module names: the numbers of one device on every mesh, with an existing optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StrategyError
from meshwright.layout import MeshError

WORDS, WIDTH, HEADS, LENGTH, ROWS, STEPS = 30, 16, 4, 8, 8, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A decoder whose head is its embedding, and which computes its loss itself."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


TENSOR: Mapping[str, Any] = {
    "words": mw.VocabParallel(),
    "blocks.*.attention.[qkv]": mw.ColwiseParallel(),
    "blocks.*.attention.o": mw.RowwiseParallel(),
    "blocks.*.up": mw.ColwiseParallel(),
    "blocks.*.down": mw.RowwiseParallel(),
}
SEQUENCE: Mapping[str, Any] = {
    "words": mw.VocabParallel(),
    **{name: style for name, style in TENSOR.items() if name != "words"},
    "blocks.*.norm*": mw.SequenceParallelEnable(),
    "blocks.*.attention": mw.SequenceParallelDisable(),
    "blocks.*.up": mw.ColwiseParallel(),
    "norm": mw.SequenceParallelEnd(),
}
CASES: dict[str, tuple[list[int], list[str], mw.Parallelism]] = {
    "dp": ([4], ["dp"], mw.Parallelism()),
    "tp": ([4], ["tp"], mw.Parallelism(TENSOR)),
    "dp × tp, ZeRO-1": ([2, 2], ["dp", "tp"], mw.Parallelism(TENSOR, zero=1)),
    "dp × tp, ZeRO-2": ([2, 2], ["dp", "tp"], mw.Parallelism(TENSOR, zero=2)),
    "dp × tp, ZeRO-3": ([2, 2], ["dp", "tp"], mw.Parallelism(TENSOR, zero=3)),
    "sp": ([2, 2], ["dp", "tp"], mw.Parallelism(SEQUENCE)),
    "cp": ([2, 2], ["dp", "cp"], mw.Parallelism(zero=3, zero_axes=("dp", "cp"))),
    "pp": ([2], ["pp"], mw.Parallelism()),
    "pp × tp": ([2, 2], ["pp", "tp"], mw.Parallelism(TENSOR, split=("blocks.2",))),
    "pp × dp, ZeRO-1": ([2, 2], ["pp", "dp"], mw.Parallelism(zero=1)),
    "pp × dp, ZeRO-3": ([2, 2], ["pp", "dp"], mw.Parallelism(zero=3)),
    "pp × dp × tp, ZeRO-2": ([2, 2, 2], ["pp", "dp", "tp"], mw.Parallelism(TENSOR, zero=2)),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=g)) for _ in range(STEPS)]


def train(case: str | None, microbatches: int = 0, static: bool = False, clip: bool = True) -> list[Any]:
    model = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    run: Any = model
    if case is not None:
        sizes, names, config = CASES[case]
        mesh = mw.ProcessMesh(torch.arange(torch.Size(sizes).numel()).reshape(sizes).numpy(), names)
        assert mw.parallelize(model, optimizer, mesh, config) == (model, optimizer)
        if microbatches:
            run = mw.microbatched(model, None, mesh, microbatches)
    losses: list[float] = []
    piped = {"enable": "pp" in CASES[case][1], "accumulate_steps": 2} if case else {}
    dist = mw.to_static(model, None, None, optimizer, mw.Strategy.of(pipeline=piped)) if static else None
    for tokens, labels in batches():
        if dist is not None:
            losses.append(dist(tokens, labels).item())
            continue
        loss = run(tokens, labels)
        if not (microbatches and case):
            loss.backward()
        losses.append(loss.item())
        if clip:
            mw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state) == len(list(model.parameters()))
    return [losses, {name: mw.unshard_dtensor(p.detach()) for name, p in model.state_dict().items()}]


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_device(case: str) -> None:
    expected = train(None)
    for found in mw.simulate(lambda: train(case), torch.Size(CASES[case][0]).numel()):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["pp", "pp × dp, ZeRO-3", "pp × dp × tp, ZeRO-2"])
def test_stages_take_microbatches(case: str) -> None:
    expected = train(None)
    for found in mw.simulate(lambda: train(case, 2), torch.Size(CASES[case][0]).numel()):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ["sp", "cp", "pp × dp, ZeRO-3"])
def test_static_mode_has_the_same_numbers(case: str) -> None:
    expected = train(None, clip=False)
    for found in mw.simulate(lambda: train(case, static=True), torch.Size(CASES[case][0]).numel()):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_a_weight_of_two_stages_is_one_parameter() -> None:
    def go() -> bool:
        model = Model()
        mw.parallelize(model, None, mw.ProcessMesh([0, 1], ["pp"]))
        return model.head.weight is model.words.weight and model.head.weight.mesh.process_ids == (0,)

    assert all(mw.simulate(go, 2))


def test_unknown_module_names_are_refused() -> None:
    with pytest.raises(StrategyError, match="blocks"):
        mw.parallelize(Model(), None, mw.ProcessMesh([0], ["tp"]), mw.Parallelism({"block.*.up": mw.ColwiseParallel()}))
    with pytest.raises(StrategyError, match="zero = 4"):
        mw.Parallelism(zero=4)


def test_a_plan_for_an_axis_that_the_mesh_lacks_leaves_the_layers_whole() -> None:
    def go() -> list[bool]:
        plan = TENSOR | {"norm": mw.SequenceParallelEnable(), "head": mw.ColwiseParallel(gather_output=True)}
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        model, _ = mw.parallelize(Model(), None, mesh, mw.Parallelism(plan))
        return [p.placements == (mw.Replicate(),) for p in model.parameters()]

    assert all(mw.simulate(go, 2)[0])


def test_a_misspelled_axis_is_refused() -> None:
    def go() -> None:
        plan = {"blocks.*.up": mw.ColwiseParallel(axis="tpp")}
        mw.parallelize(Model(), None, mw.ProcessMesh([0, 1], ["tp"]), mw.Parallelism(plan))

    with pytest.raises(MeshError, match="axis='tp'"):
        mw.simulate(go, 2)


def gradient_of_input(zero: int | None) -> list[Tensor]:
    """Return the gradient of a plain input, and those of a penalty on it; without `zero`, of one device."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(6, 3, requires_grad=True)
    if zero is not None:
        optimizer = torch.optim.SGD(model.parameters())
        mw.parallelize(model, optimizer, mw.ProcessMesh([0, 1], ["dp"]), mw.Parallelism(zero=zero))
    (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    inner.square().sum().backward()
    model(x).sum().backward()
    grads = [g for g in (x.grad, *(p.grad for p in model.parameters())) if g is not None]
    return grads if zero is None else [mw.unshard_dtensor(g) for g in grads]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_plain_input_gets_its_gradient(zero: int) -> None:
    for found in mw.simulate(lambda: gradient_of_input(zero), 2):
        torch.testing.assert_close(found, gradient_of_input(None))


@pytest.mark.parametrize(
    "options", [{"units": ("blocks.*",)}, {"units": ("blocks.*",), "zero": 2}, {"zero_axes": ("dp",)}]
)
def test_an_option_that_nothing_reads_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(mw.StrategyError, match=r"(?s)Parallelism\((units|zero_axes)=.*fix: +pass zero="):
        mw.Parallelism(**options)
