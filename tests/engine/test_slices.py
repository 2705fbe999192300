"""Slices of sequences in a pipeline: the numbers of one device under every table, and the memory of a rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.engine import StrategyError
from meshwright.engine.recording.program_inputs import apply_captured_layouts, fetch_of
from meshwright.graph import capture, complete, copy_batch_inputs, record_gradients, with_layouts
from meshwright.models import Llama, LlamaConfig
from meshwright.pipeline import (
    Action,
    ActionKind,
    PipelineRun,
    Schedule,
    StageError,
    check_schedule,
    joint_epilogue,
    peaks,
    slice_sequence,
    split_batch,
    split_stages,
    split_step,
    with_epilogue,
)
from meshwright.tensor import local_parts

WORDS, WIDTH, STEPS = 13, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)).relu()


class GPT(nn.Module):
    """Learned positions, one tied table at both ends, and a loss that ignores some labels."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=2)


def llama(layers: int) -> nn.Module:
    return Llama(LlamaConfig(WORDS, 16, layers, 4, 2, 24))


def batch(step: int, rows: int, length: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.randint(0, WORDS, (rows, length), generator=g) for _ in range(2)]


def train_on_one_device(model: nn.Module, microbatches: int, length: int) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for step in range(STEPS):
        pieces = zip(*(x.chunk(microbatches) for x in batch(step, 2 * microbatches, length)), strict=True)
        loss = sum(model(*piece) / microbatches for piece in pieces)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, {name: p.detach() for name, p in model.named_parameters()}]


def piped(model: nn.Module, mesh: mw.ProcessMesh, microbatches: int, length: int, **options: Any) -> list[Any]:
    mw.split_pipeline(model, mesh, batch=[mw.Shard(0)] if "dp" in mesh.dim_names else ())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": microbatches, **options})
    dist = mw.to_static(model, None, None, optimizer, strategy).train()
    losses = [dist(*batch(step, 2 * microbatches, length)).item() for step in range(STEPS)]
    return [losses, {name: mw.unshard_dtensor(x.detach()) for name, x in dist.state_dict("param").items()}]


def compare(found: Sequence[Any], expected: Sequence[Any]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for name, x in found[1].items():
        torch.testing.assert_close(x, expected[1][name], rtol=1e-4, atol=2e-6, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize(
    ("make", "p", "name", "slices", "microbatches", "length"),
    [
        (llama, 2, "Seq1F1B", 2, 2, 8),
        (llama, 2, "TeraPipe", (3, 2, 1), 1, 6),
        (GPT, 2, "Seq1F1B", 4, 2, 9),
        (GPT, 3, "Seq1F1B", 2, 2, 5),
    ],
)
def test_numbers_are_those_of_one_device(
    make: Any, p: int, name: str, slices: Any, microbatches: int, length: int
) -> None:
    def train() -> list[Any]:
        mesh = mw.ProcessMesh(list(range(p)), ["pp"])
        return piped(make(p), mesh, microbatches, length, schedule_mode=name, slices=slices)

    expected = train_on_one_device(make(p), microbatches, length)
    for found in mw.simulate(train, p):
        compare(found, expected)


def test_slices_with_data_parallelism() -> None:
    """Reductions over ranks stay after all microbatches, once for all slices."""

    def train() -> list[Any]:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
        return piped(llama(2), mesh, 2, 6, schedule_mode="Seq1F1B", slices=2)

    expected = train_on_one_device(llama(2), 2, 6)
    for found in mw.simulate(train, 4):
        compare(found, expected)


class Dropping(GPT):
    """A model with dropout after the embedding and after each block."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens) + self.places(torch.arange(tokens.shape[1])), 0.2)
        for block in self.blocks:
            x = F.dropout(block(x), 0.3)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=2)


@pytest.mark.parametrize(("name", "slices"), [("Seq1F1B", 3), ("TeraPipe", (4, 3))])
def test_slices_drop_the_same_elements_as_one_device(name: str, slices: Any) -> None:
    def train() -> list[Any]:
        model, mesh = Dropping(2), mw.ProcessMesh([0, 1], ["pp"])
        torch.manual_seed(7)
        return [*piped(model, mesh, 2, 7, schedule_mode=name, slices=slices), torch.rand(1).item()]

    model = Dropping(2)
    torch.manual_seed(7)
    expected = [*train_on_one_device(model, 2, 7), torch.rand(1).item()]
    for found in mw.simulate(train, 2):
        compare(found, expected)
        assert found[2] == expected[2]


def test_a_table_in_text_has_its_slices() -> None:
    text = """\
        by hand: 2 microbatches, 2 slices a sequence
        way: 0 1
        0: F0.0 F1.0 B1.0 B0.0 W0.0 W1.0
        1: F0.1 F1.1 BW1.1 BW0.1"""

    def train() -> list[Any]:
        table = "\n".join(line.strip() for line in text.splitlines())
        return piped(GPT(2), mw.ProcessMesh([0, 1], ["pp"]), 1, 5, schedule_mode=table)

    expected = train_on_one_device(GPT(2), 1, 5)
    for found in mw.simulate(train, 2):
        compare(found, expected)


def random_table(sequences: int, slices: int, rng: random.Random) -> Schedule:
    """Return a schedule from a random walk through a V of four chunks on two ranks; ranks run any possible action."""
    way, m = (0, 1, 1, 0), sequences * slices
    done: set[tuple[ActionKind, int, int]] = set()
    rows: list[list[Action]] = [[], []]
    f, b, w = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

    def can(kind: ActionKind, n: int, c: int) -> bool:
        if (kind, n, c) in done:
            return False
        if kind is f:
            return (c == 0 or (f, n, c - 1) in done) and (n % slices == 0 or (f, n - 1, c) in done)
        if kind is w:
            return (b, n, c) in done
        behind = (n + 1) % slices == 0 or (b, n + 1, c) in done
        return (f, n, c) in done and behind and (c == 3 or (b, n, c + 1) in done)

    while len(done) < 3 * m * len(way):
        kind, n, c = rng.choice([(k, n, c) for k in (f, b, w) for n in range(m) for c in range(4) if can(k, n, c)])
        done.add((kind, n, c))
        rows[way[c]].append(Action(kind, n, c))
    return Schedule("random", (way,), m, tuple(map(tuple, rows)), slices=slices)


class Peak:
    """A counter of the slices in chunks with values in memory that a forward made for a backward."""

    def __init__(self, parts: Any) -> None:
        self.most = 0
        late = (program for place, program in parts.programs.items() if place.part in ("B", "W"))
        read = {i.value for program in late for i in program.inputs}
        self.made = [{*program.outputs} & read for place, program in parts.programs.items() if place.part == "F"]

    def __call__(self, held: Sequence[dict[Any, Any]]) -> None:
        self.most = max(self.most, sum(1 for known in held for made in self.made if made & known.keys()))


@pytest.mark.parametrize("lengths", [(3, 3, 1), (7,)], ids=str)
def test_random_tables_give_the_same_gradients(lengths: tuple[int, ...]) -> None:
    """Any order that the checker accepts gives the same gradients and the predicted memory, also with W in any order.

    The tied table is in two chunks of one rank, whose Ws come in any order.
    """
    slices, sequences, length = len(lengths), 2, sum(lengths)

    def work() -> None:
        model, mesh = GPT(4), mw.ProcessMesh([0, 1], ["pp"])
        mw.split_pipeline(model, mesh, way=(0, 1, 1, 0))
        captured = capture(model, model, batch(0, 2, length))
        program = slice_sequence(copy_batch_inputs(captured.program), lengths)
        program, stages = split_stages(with_layouts(program, complete(program, {})))
        step = record_gradients(replace(captured, program=program), current_communicator().rank, 2)
        apply_captured_layouts(replace(captured, program=program), None)
        (parts,) = with_epilogue(
            (split_step(step, stages, slices=slices),),
            joint_epilogue((split_step(step, stages, slices=slices),), sequences),
        )
        forward = [program for place, program in parts.programs.items() if place.part == "F"]
        joined = {v for f in forward for node in f.nodes if str(node.op) == "aten.cat.default" for v in node.outs}
        assert len(joined) == 2 * 2 * (slices - 1)  # keys and values of two blocks
        assert not any(joined & {*f.outputs} for f in forward)  # no backward pass keeps them
        rng = random.Random(1)
        for _ in range(12):
            table = random_table(sequences, slices, rng)
            check_schedule(table)
            peak = Peak(parts)
            run = PipelineRun(
                [parts], table, current_communicator().rank, split_batch([parts], table, {0, 1}), watch=peak
            )
            leaves = batch(0, 2 * sequences, length)
            with local_parts():
                outputs, _ = run(*(fetch_of(i, captured.slots)(leaves) for i in run.inputs))
            for name, grad in outputs["grads"].items():
                if grad.shape == expected[name].shape:  # on the rank that has it
                    torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
            assert peak.most == peaks(table)[current_communicator().rank]

    model = GPT(4)
    pieces = zip(*(x.chunk(sequences) for x in batch(0, 2 * sequences, length)), strict=True)
    sum(model(*piece) / sequences for piece in pieces).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    mw.simulate(work, 2)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"schedule_mode": "1F1B", "slices": 2}, StrategyError, "slices = 2"),
        ({"schedule_mode": "auto", "slices": 2}, Exception, "auto"),
        ({"schedule_mode": "Seq1F1B", "slices": (4, 4)}, StageError, "5 positions"),
        ({"schedule_mode": "Seq1F1B", "slices": 6}, StageError, "5 positions"),
        ({"schedule_mode": "Seq1F1B", "slices": 0}, StrategyError, "below one"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        mw.simulate(lambda: piped(GPT(2), mw.ProcessMesh([0, 1], ["pp"]), 1, 5, **options), 2)


def test_recomputation_is_refused() -> None:
    with pytest.raises(StrategyError, match="slices = 2"):
        mw.Strategy.of(pipeline={"enable": True, "slices": 2}, recompute={"enable": True, "budget": 0.5})
