"""A call that an earlier start made twice is made once, unless it changes its arguments' state."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshwright.graph import SideEffectError, capture
from meshwright.graph.captures import capture as passes

TEXT = """
def scaled(x, seen):
    seen["shape"] = x.shape
    return x * 2
"""


def _scaled(text: str = TEXT) -> Any:
    """Return a function of an installed package, whose code may change its arguments."""
    place = Path(sysconfig.get_paths()["purelib"]) / "not_there" / "scaling.py"
    found: dict[str, Any] = {"__name__": "not_there.scaling"}
    exec(compile(text, str(place), "exec"), found)
    return found["scaled"]


class Net(nn.Module):
    def __init__(self, counts: bool = False, text: str = TEXT) -> None:
        super().__init__()
        self.calls, self.counts, self.scaled = 0, counts, _scaled(text)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return self.scaled(x, {})


def test_a_program_that_is_only_read_takes_one_pass() -> None:
    with mock.patch.object(passes, "_capture_once", wraps=passes._capture_once) as made:
        read = capture(net := Net(), net, [torch.ones(2)], is_run=False)
        assert made.call_count == 1
    assert read.program.text() == capture(net, net, [torch.ones(2)]).program.text()


def _passes(net: Net, known: set[str]) -> int:
    """Return the number of passes of a capture, and add its checksum to the known calls."""
    with mock.patch.object(passes, "_capture_once", wraps=passes._capture_once) as made:
        captured = capture(net, net, [torch.ones(2)], is_known=known.__contains__)
    known |= {captured.checksum or ""}
    return made.call_count


def test_a_known_call_takes_one_pass() -> None:
    known = set[str]()
    assert [_passes(Net(), known) for _ in "12"] == [2, 1]


@pytest.mark.parametrize("other", [TEXT.replace("2", "3"), TEXT.replace('seen["shape"]', 'seen["size"]')])
def test_other_code_or_another_program_takes_two_passes(other: str) -> None:
    known = set[str]()
    assert [_passes(net, known) for net in (Net(), Net(text=other))] == [2, 2]


def test_a_call_that_counts_is_refused_even_if_its_program_is_known() -> None:
    known = set[str]()
    _passes(Net(), known)
    with pytest.raises(SideEffectError, match="calls was 0, and is 1"):
        _passes(Net(counts=True), known)
