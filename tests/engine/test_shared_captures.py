"""Simulated ranks share a capture only if each would capture the same program: no kind of change is missed."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from benchmarks._stale_case import Case, Kind, Run, random_batch
from benchmarks._stale_kinds import KINDS
from meshwright.comm import current
from meshwright.graph import capture, captured_for, meaning_or_none

OFF, ON = 1.0, 2.0


def _captured(case: Case, model: nn.Module, loss: Any) -> Any:
    """Return what a rank with this model and loss captures of its own; None for a model that is refused."""
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
    """Return a copy of what the training calls, as another rank has; None if Python cannot copy it."""
    try:
        return copy.deepcopy((case.model, case.loss))
    except Exception:  # of any kind
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
        return before, mine is not None and meaning_or_none(mine.program) != meaning_or_none(theirs.program)


def test_no_kind_of_change_between_ranks_is_missed() -> None:
    """The state of torch, and hooks of tensors, count beside the capture; their kinds are left out."""
    kinds = [k for k in KINDS.values() if k.theme not in ("torch",)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {k.name: mw.simulate(_shared_wrongly, 1, k)[0] for k in kinds}
    wrong = [name for name, (_, is_wrong) in found.items() if is_wrong]
    assert not wrong, wrong
    shared = sum(before for before, _ in found.values())
    print(shared, len(found))
    assert shared > len(found) // 3
