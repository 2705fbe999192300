"""A bad value in any part of a training checkpoint raises an error on all ranks, and nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint import current_world
from meshwright.engine.training import training_checkpoint
from meshwright.layout import MeshwrightError

from .test_training import Data

OBJECTS = ("data", "scheduler", "model._extra_state")
"""Values that objects load, each on its rank."""
BAD = [None, 7, "x", [], {}, {"other": 1}, [1, 2], {"at": "x", "last_epoch": None, "scale": "x"}]


class Counting(nn.Linear):
    """A layer that has a number beside its tensors."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"] + 0


class Run:
    """A run of a few steps, with everything that a checkpoint holds."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(steps)
        self.net = Counting(3, 2)
        self.net.count = steps
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1 * steps)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.data = Data()
        for _ in range(steps):
            self.net(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.data.at += 1

    def save(self, folder: Path) -> None:
        mw.save_checkpoint(folder, 1, self.net, self.optimizer, self.scheduler, data=self.data)

    def load(self, folder: Path) -> None:
        mw.load_checkpoint(folder, self.net, self.optimizer, self.scheduler, data=self.data)

    def held(self) -> list[Any]:
        """Return a copy of the whole state."""
        scheduler = {k: v for k, v in vars(self.scheduler).items() if not callable(v) and k != "optimizer"}
        states = [self.optimizer.state[p] for p in self.net.parameters()]
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return deepcopy([self.net.state_dict(), states, options, scheduler, self.data.at, torch.get_rng_state()])


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        for key, value in x.items():
            yield key
            yield from leaves(value)
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from leaves(each)
    else:
        yield x.tolist() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_value_is_refused_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    Run(3).save(tmp_path)
    real = training_checkpoint.open_together
    every = sorted(real(tmp_path).values)
    assert {"data", "scheduler", "step", "optimizer.groups", "model._extra_state"} <= set(every)
    refused: dict[str, int] = {}

    def load_with() -> bool:
        run = Run(1)
        before = list(leaves(run.held()))
        try:
            run.load(tmp_path)
        except MeshwrightError:
            assert list(leaves(run.held())) == before, "half of it was loaded"
            return True
        return False

    def loaded(name: str, bad: Any) -> list[bool]:
        """Return for each rank whether it refused the load; on the last rank alone, an object refuses its value."""

        def opened(path: Any) -> Any:
            found = real(path)
            is_bad = name not in OBJECTS or current_world().rank == ranks - 1
            return replace(found, values={**found.values, name: bad}) if is_bad else found

        monkeypatch.setattr(training_checkpoint, "open_together", opened)
        return mw.simulate(load_with, ranks)

    for name in every:
        for bad in BAD:
            told = loaded(name, bad)
            assert len(set(told)) == 1, f"{name}={bad}: {told}"
            refused[name] = refused.get(name, 0) + told[0]
    assert all(refused[name] > 3 for name in (*OBJECTS, "optimizer.groups")), refused
