"""Every access to the memory of a distributed tensor gives the result of the whole tensor, or raises an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import DeviceContext

import meshwright as mw
from benchmarks import escapes
from benchmarks._escape_collectives import collectives, one_process_group
from benchmarks._escape_ways import Way, attributes, functions, memory, setters

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "escapes.md"
CHEAP = [s for s in escapes.SETTINGS if s.name in ("Shard(0), uneven", "Partial", "two axes")]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def silent(chosen: Iterator[Way], settings: list[escapes.Setting]) -> list[str]:
    found = escapes.findings(chosen, settings)
    return [f"{f.setting.name}: {f.way}: {f.told}" for f in found if f.does == escapes.SILENT]


@pytest.mark.parametrize("ways", [attributes, setters, memory], ids=lambda ways: ways.__name__)
def test_nothing_is_silent(ways: type) -> None:
    assert not silent(ways(), CHEAP)


@pytest.fixture(scope="module")
def every_function() -> list[Way]:
    return list(functions())


@pytest.mark.parametrize("first", range(3))
def test_no_function_without_torch_function_is_silent(first: int, every_function: list[Way]) -> None:
    assert not silent(iter(every_function[first::3]), CHEAP[:1])


def test_no_collective_is_silent() -> None:
    with one_process_group():
        assert not silent(collectives(), CHEAP[:2])


def test_the_page_has_the_outcome_of_each_way() -> None:
    said = {line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    does = set(escapes.page().splitlines()[2:])
    assert does <= said, "python -m benchmarks.escapes --page makes the table anew:\n" + "\n".join(sorted(does - said))


def test_one_rank_alone_cannot_gather() -> None:
    mesh = mw.ProcessMesh([0, 1], ["a"])

    def go() -> None:
        x = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)])
        if mw.get_rank() == 0:
            x.numpy()

    with pytest.raises(mw.MeshwrightError, match="rank 1 ended"):
        mw.simulate(go, 2)


def test_a_new_member_of_tensor_cannot_return_a_local_part() -> None:
    """A function that records no operator and returns more than shapes and dtypes is refused."""
    mesh = mw.ProcessMesh([0, 1], ["a"])

    def go() -> object:
        x = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)])
        return torch.overrides.handle_torch_function(address, (x,), x)

    def address(x: torch.Tensor) -> object:
        return x.untyped_storage()

    with pytest.raises(mw.MeshwrightError, match="reads memory"):
        mw.simulate(go, 2)


def test_a_backward_pass_releases_memory() -> None:
    mesh = mw.ProcessMesh([0, 1], ["a"])

    def go() -> tuple[bool, bool]:
        x = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)]).requires_grad_()
        x.data_ptr()
        (kept,) = x.to_local().untyped_storage().__dict__["_meshwright_kept"].values()
        before = kept.whole is not None
        (x * x).sum().backward()
        return before, kept.whole is None

    assert mw.simulate(go, 2) == [(True, True)] * 2


def test_the_address_of_a_view_made_by_keyword_is_in_the_memory_of_its_base() -> None:
    def go() -> int:
        x = mw.shard_tensor(torch.ones(4, 4), mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)])
        return x.diagonal(offset=2).data_ptr() - x.data_ptr()

    assert mw.simulate(go, 2) == [2 * torch.float32.itemsize] * 2


def test_questions_about_memory_are_refused_for_keyword_arguments() -> None:
    def go() -> None:
        torch.get_device(input=mw.shard_tensor(torch.ones(4), mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)]))

    with pytest.raises(mw.MeshwrightError, match="reads memory"):
        mw.simulate(go, 2)


def test_constructors_make_tensors_on_the_device_of_the_context() -> None:
    """A mode is called with torch's own function, or, in a trace of `torch.compile`, with its replacement."""
    makers: list[Any] = [torch.tensor, torch.as_tensor, torch.asarray]
    context = DeviceContext(torch.device("meta"))
    with context:
        assert [make([1.0]).device.type for make in makers] == ["meta"] * 3
    assert [context.__torch_function__(make, (), ([1.0],)).device.type for make in makers] == ["meta"] * 3


def test_shard_tensor_in_a_transform_takes_constants_only() -> None:
    def gradient(constant: bool) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            mw.shard_tensor(x.detach() if constant else x, mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)])
            return x.sum()

        return torch.func.grad(fn)(torch.ones(4))

    assert all(g.eq(1).all() for g in mw.simulate(lambda: gradient(True), 2))
    with pytest.raises(mw.MeshwrightError, match="inside a transform"):
        mw.simulate(lambda: gradient(False), 2)
