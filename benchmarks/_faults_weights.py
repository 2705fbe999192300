"""Row 26: tokens of a sampler whose trainer has made a step after the last sync of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._fault_runs import Verdict, mark_fault, run_ranks


class Next(nn.Module):
    """Logits of the next token from an embedding of the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens))


def marked(axis: str) -> nn.Module:
    model = Next()
    mw.parallelize(model, None, mw.ProcessMesh([0, 1], [axis]), mw.Parallelism({"head": mw.ColwiseParallel()}))
    return model


def sample_after_a_step(folder: str, when_stale: str) -> None:
    """Train on dp, sample on tp: sync, make a step, and ask for tokens."""
    mw.init_process()
    trainer, sampler = marked("dp"), mw.sampler(marked("tp"))
    optimizer = torch.optim.SGD(trainer.parameters(), 0.5)
    mw.weights.sync(trainer, sampler, when_stale="sync" if when_stale == "sync" else "error")
    mark_fault(folder)
    trainer(torch.tensor([[1, 2], [3, 4]])).square().mean().backward()
    optimizer.step()
    found = sampler.generate([[1], [2, 3]], 4, seed=0)
    wanted = mw.sampler(trainer).generate([[1], [2, 3]], 4, seed=0)
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.weight_version == wanted.weight_version == 2
    print("the trainer's tokens")


def stale_weights() -> Verdict:
    """Tokens of stale weights are refused on all ranks, or are those of the trainer, as asked."""
    refused = run_ranks("benchmarks._faults_weights:sample_after_a_step", 2, arguments=["error"])
    synced = run_ranks("benchmarks._faults_weights:sample_after_a_step", 2, arguments=["sync"])
    raised = all(e.status > 0 and "StaleWeightsError" in e.output for e in refused)
    equal = all(e.status == 0 and "the trainer's tokens" in e.output for e in synced)
    return Verdict(
        raised and equal,
        f"both ranks refused: {raised}; with when_stale='sync' both had the trainer's tokens: {equal}",
        max(e.seconds for e in refused),
    )


ROWS: dict[int, Callable[[], Verdict]] = {26: stale_weights}
