"""Small calls move their data in the frames that compare them, with the results of a transport."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _small_calls_program as program

from meshwright.comm import CommCall, launch
from meshwright.comm.communicators.reductions import reduce_terms
from meshwright.comm.process.small_calls import MOST_BYTES, is_small
from meshwright.comm.transport.ring_buffer import RING

pytestmark = pytest.mark.usefixtures("forked_processes")

Results = dict[int, list[list[Tensor]]]


@pytest.fixture(scope="module", params=["on", "off"], ids=["shared memory", "connections"])
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder, env = tmp_path_factory.mktemp("four"), {"MESHWRIGHT_SHARED_MEMORY": request.param}
    assert launch([program.__file__, str(folder)], program.RANKS, env, timeout=120) == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(program.RANKS)]


def same(a: list[Tensor], b: list[Tensor], what: Any) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=str(what))


def test_frames_give_the_results_of_a_transport_on_every_rank(four: list[Results]) -> None:
    for case in program.cases():
        first = four[case.group[0]][case.number][0]
        for rank in case.group:
            in_frames, by_transport = four[rank][case.number]
            same(in_frames, by_transport, case)
            same(in_frames, first, case)


def test_terms_are_combined_in_the_order_of_the_group(four: list[Results]) -> None:
    for case in program.cases():
        terms = [program.operand(case, place) for place in range(len(case.group))]
        goal = [reduce_terms(terms, case.op)] if case.op else terms
        same(four[case.group[0]][case.number][0], goal, case)


def reduction(elements: int, dtype: torch.dtype = torch.float32) -> CommCall:
    return CommCall("all_reduce", "sum", dtype, ((elements,),), ((elements,),), (0, 1))


def test_a_call_is_small_by_the_longest_tensor_of_a_rank() -> None:
    assert [is_small(reduction(MOST_BYTES // 4 + more)) for more in (0, 1)] == [True, False]
    assert is_small(reduction(MOST_BYTES // 4 + 1, torch.bfloat16))
    shapes = ((MOST_BYTES // 4,), (MOST_BYTES // 4 + 1,))
    gathers = [CommCall("all_gather", "", torch.float32, (mine,), shapes, (0, 1)) for mine in shapes]
    assert not any(map(is_small, gathers))  # both ranks give the same answer


def test_a_frame_fits_into_a_ring_behind_the_frames_of_calls_that_lag() -> None:
    from meshwright.comm.checking import call_frames, call_guard
    from meshwright.comm.transport import ring_buffer
    from meshwright.comm.transport.control_links import Frame

    longest = len(Frame(0, 0, 0, 0, 0, bytes(call_guard._LONGEST_TEXT)).packed())
    assert RING % 4096 == 0
    assert (call_frames._MOST + 2) * longest + MOST_BYTES <= ring_buffer._ROOM
