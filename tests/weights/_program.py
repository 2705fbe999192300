"""One process of the test: `_program.py FOLDER` trains on dp, samples on tp, and streams the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import meshwright as mw
from tests.weights.models import PROMPTS, equal, marked, train, wholes


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
    values = wholes(trainer)
    for name, x, _ in mw.weights.stream(sampler, whole=True):
        assert torch.equal(x, values[name])
    (folder / str(mw.get_rank())).touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
