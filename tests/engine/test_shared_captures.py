"""Simulated ranks share a capture only if each would capture the same program: no kind of change is missed."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from benchmarks._stale_case import Case, Kind, Run, random_batch
from benchmarks._stale_kinds import KINDS
from meshwright.comm import current_communicator
from meshwright.engine.static import program_builder
from meshwright.graph import canonical_text_or_none, capture, captured_for

OFF, ON = 1.0, 2.0


def _captured(case: Case, model: nn.Module, loss: Any) -> Any:
    """Return the values that a rank with this model and loss captures itself; None for a model that is refused."""
    batch = random_batch(0)
    if case.strategy is not None or case.batch is not random_batch:
        return None
    try:
        return capture(model, lambda *given: loss(model(*given[:-1]), given[-1]), batch, others=(loss,))
    except (mw.MeshwrightError, TypeError, RuntimeError):
        return None


def _roots(case: Case) -> dict[str, Any]:
    return {"network": case.model, "call0": case.loss}


def _copied(case: Case) -> Any:
    """Return a copy of the objects that the training calls, as on another rank; None if Python cannot copy them."""
    try:
        return copy.deepcopy((case.model, case.loss))
    except Exception:  # any error
        return None


def _shared_wrongly(kind: Kind) -> tuple[bool, bool]:
    """Return whether the copy's capture is taken before a change, and whether it is taken wrongly after the change."""
    with Run((OFF, ON), kind.by_loss) as run:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        case = kind.build(run)
        twin = _copied(case)
        theirs = None if twin is None else _captured(case, *twin)
        if theirs is None:
            return False, False
        before = captured_for(theirs, case.model, _roots(case)) is not None
        case.change(ON)
        with case.around():
            if captured_for(theirs, case.model, _roots(case)) is None:
                return before, False
            mine = _captured(case, case.model, case.loss)
        return before, mine is not None and canonical_text_or_none(mine.program) != canonical_text_or_none(
            theirs.program
        )


class Scaled(nn.Module):
    """A model that multiplies by `scale()`, and by an attribute."""

    def __init__(self, scale: Callable[[], float], by: float = 1.0) -> None:
        super().__init__()
        self.scale, self.by, self.sizes = scale, by, {"table": [by, by]}
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale() * self.by * self.sizes["table"][-1]


_chosen: ContextVar[float] = ContextVar("chosen", default=1.0)
_local = threading.local()


def _by_context() -> float:
    return _chosen.get()


def _by_local() -> float:
    return _local.scale


def _by_thread() -> float:
    return float(threading.current_thread().native_id or 0) % 97


def _one() -> float:
    return 1.0


def _set_own() -> None:
    _chosen.set(float(current_communicator().rank))
    _local.scale = float(current_communicator().rank)


RANKED: dict[str, Callable[[], Scaled]] = {
    "rank": lambda: Scaled(lambda: float(mw.get_rank())),
    "thread": lambda: Scaled(_by_thread),
    "context variable": lambda: Scaled(_by_context),
    "thread's own object": lambda: Scaled(_by_local),
    "attribute": lambda: Scaled(_one, float(current_communicator().rank)),
    "closure": lambda: Scaled(partial(float, current_communicator().rank)),
}


@pytest.mark.parametrize("name", RANKED)
def test_values_of_one_rank_are_in_its_program(name: str) -> None:
    x = torch.ones(2, 4)

    def go() -> tuple[Tensor, Tensor]:
        _set_own()
        torch.manual_seed(0)
        model = RANKED[name]()
        static = mw.to_static(model)(x)
        with torch.no_grad():
            return static, model(x)

    for static, eager in mw.simulate(go, 3):
        torch.testing.assert_close(static, eager)


@pytest.mark.parametrize("marked", [False, True])
def test_equal_ranks_capture_once(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the hooks of `shard_layer` and `reshard`, which have other numbers on each rank."""
    ranks, mesh = list[int](), mw.ProcessMesh([0, 1, 2, 3], ["dp"])
    plain = program_builder.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        ranks.append(current_communicator().rank)
        return plain(*args, **kwargs)

    monkeypatch.setattr(program_builder, "capture", counted)

    def go() -> Any:
        model = Scaled(_one)
        if marked:
            mw.shard_layer(model, mesh, input_fn=lambda given, on: tuple(mw.reshard(x, on, ROWS) for x in given))
        return mw.to_static(model, None, F.mse_loss, torch.optim.AdamW(model.parameters()))(
            torch.ones(4, 4), torch.ones(4, 4)
        )

    mw.simulate(go, 4)
    assert len(ranks) == 1


ROWS = [mw.Shard(0)]


SHARED = {
    "classes": 16, "configs": 45, "containers": 51, "functions": 22, "globals": 14, "hooks": 24, "libraries": 8,
    "losses": 10, "methods": 16, "modules": 27, "objects": 40, "optimizers": 23, "process": 4, "strategies": 0,
    "tensors": 17, "torch_objects": 8, "values": 29,
}  # fmt: skip
"""Theme of `stale` → minimum number of its models that two ranks share before a change."""


def test_every_theme_is_compared() -> None:
    """The state of torch is compared separately from the capture, so its theme is left out."""
    assert {k.theme for k in KINDS.values()} == {*SHARED, "torch"}


@pytest.mark.parametrize("theme", SHARED)
def test_no_kind_of_change_between_ranks_is_missed(theme: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {k.name: mw.simulate(_shared_wrongly, 1, k)[0] for k in KINDS.values() if k.theme == theme}
    assert [name for name, (_, is_wrong) in found.items() if is_wrong] == []
    assert sum(is_shared for is_shared, _ in found.values()) >= SHARED[theme]
