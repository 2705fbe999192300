"""One process of the test: `_program.py FOLDER` trains on dp, samples on tp, and streams the weights."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from tests.weights.models import PROMPTS, Decoder, equal, marked, train, wholes


def tokens_in_same_numbers() -> None:
    """Messages between processes are no computation, so the block does not refuse them."""
    torch.manual_seed(0)
    one_device = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
    model, _ = mw.parallelize(deepcopy(one_device), None, mw.ProcessMesh([1], ["tp"]))
    with mw.same_numbers():
        found, wanted = (mw.sampler(each).generate(PROMPTS, 3, seed=1) for each in (model, one_device))
    assert torch.equal(found.log_probs, wanted.log_probs)


def main(folder: Path) -> None:
    mw.init_process()
    trainer, sampler = marked(mw.ProcessMesh([0, 1], ["dp"])), mw.sampler(marked(mw.ProcessMesh([0, 1], ["tp"]), True))
    apart = marked(mw.ProcessMesh([1], ["tp"]))
    mw.weights.sync(trainer, sampler)
    train(trainer)
    with pytest.raises(mw.errors.StaleWeightsError):
        sampler.generate(PROMPTS, 2)
    for model in (sampler.model, apart):
        assert mw.weights.sync(trainer, model, memory_cap=2000).version == 2
        assert equal(trainer, model)
    assert sampler.generate(PROMPTS, 2).weight_version == 2
    alone = marked(mw.ProcessMesh([0], ["tp"]))
    mw.weights.sync(alone, mw.sampler(apart), when_stale="keep")
    for _ in range(3):
        train(alone)  # on rank 0, while rank 1 generates
        found = mw.sampler(apart).generate(PROMPTS, 12, seed=1)
    assert torch.equal(found.tokens, mw.sampler(Decoder()).generate(PROMPTS, 12, seed=1).tokens)
    tokens_in_same_numbers()
    values = wholes(trainer)
    for name, x, _ in mw.weights.stream(sampler, whole=True):
        assert torch.equal(x, values[name])
    (folder / str(mw.get_rank())).touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
