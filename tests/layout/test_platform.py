"""Platforms: the built-in ones, registration, and entry points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.process.device_choice import default_transport
from meshwright.layout import (
    PlatformError,
    Transport,
    _accelerator,
    check_transport_methods,
    device_types,
    generator_state,
    platform_of,
    set_generator_state,
)
from meshwright.layout._platform import BUILT_IN, TRANSPORT_METHODS


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registrations of a test end with it."""
    monkeypatch.setattr(_accelerator, "_registered", {})
    caches = _accelerator._platform, _accelerator._is_available
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@dataclass(frozen=True)
class Entry:
    """An entry point of a package that is not installed."""

    load: Callable[[], object]
    name: str = "vdev"
    value: str = "vendor:PLATFORM"
    dist: EntryPoint | None = None


def install(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(_accelerator, "entry_points", lambda group: entries if group == "meshwright.platforms" else ())
    monkeypatch.setattr(_accelerator, "_entry_points", _accelerator._EntryPoints())


def test_a_transport_has_seven_methods() -> None:
    assert {name for name in vars(Transport) if not name.startswith("_")} == set(TRANSPORT_METHODS)


def test_a_transport_that_lacks_a_method_is_refused() -> None:
    whole = type("Whole", (), dict.fromkeys(TRANSPORT_METHODS, lambda self: None))
    check_transport_methods(whole())
    for name in TRANSPORT_METHODS:
        part = type("Part", (), {**vars(whole), name: None})
        with pytest.raises(PlatformError, match=f"no method {name}"):
            check_transport_methods(part())


WRONG_FIELDS: list[tuple[str, object]] = [
    *(("device_type", wrong) for wrong in ("", None, "cuda:0", torch.device("cuda"))),
    ("transport", 3),
    *(("reductions", wrong) for wrong in ({"su": (torch.int64,)}, {"sum": 1}, {"sum": ("int64",)}, ["sum"])),
    ("nondeterministic", "aten.index_add"),
    *((field.name, 3) for field in fields(mw.Platform) if "Callable" in str(field.type)),
]


@pytest.mark.parametrize(("field", "wrong"), WRONG_FIELDS)
def test_a_wrong_field_is_refused(field: str, wrong: object) -> None:
    values: dict[str, Any] = {"device_type": "vdev", field: wrong}
    with pytest.raises(PlatformError, match=rf"the field {field} of a platform(.|\n)*fix:"):
        mw.Platform(**values)


def test_only_a_platform_is_registered() -> None:
    for wrong in ("vdev", mw.Platform):
        not_a_platform: Any = wrong
        with pytest.raises(PlatformError, match="to register a platform"):
            mw.register_platform(not_a_platform)


def test_a_platform_can_be_a_key() -> None:
    assert {mw.Platform("vdev"): 1}[mw.Platform("vdev")] == 1


def test_the_built_in_platforms_name_their_transports() -> None:
    named = {each.device_type: each.transport for each in BUILT_IN}
    assert named == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mps": None}


def test_a_device_that_is_not_here_has_no_streams() -> None:
    for kind in ("cuda", "xpu", "npu", "mtia"):
        assert kind not in device_types()
        assert platform_of(kind) == replace(
            next((each for each in BUILT_IN if each.device_type == kind), mw.Platform(kind)), has_streams=False
        )


def test_a_registered_platform_replaces_a_built_in_one() -> None:
    assert platform_of("xpu").pins_memory
    mw.register_platform(mw.Platform("xpu", pins_memory=False))
    assert not platform_of("xpu:3").pins_memory


def test_a_second_platform_for_a_type_is_refused() -> None:
    mw.register_platform(mw.Platform("vdev"))
    mw.register_platform(mw.Platform("vdev"))
    with pytest.raises(PlatformError, match="a type of device has one platform"):
        mw.register_platform(mw.Platform("vdev", pins_memory=False))


def test_an_entry_point_registers_its_platform_at_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def load() -> mw.Platform:
        asked.append(len(device_types()))  # a vendor's package may ask, too
        return mw.Platform("mtia", counts_memory=False)

    install(monkeypatch, Entry(load))
    assert not platform_of("mtia").counts_memory
    platform_of("cpu")
    assert len(asked) == 1


def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise ImportError("no module vendor")

    for each, why in ((Entry(load), "cannot be imported"), (Entry(lambda: mw.Platform), "must be a Platform")):
        install(monkeypatch, each)
        for _ in range(2):
            with pytest.raises(PlatformError, match=rf"vendor:PLATFORM(.|\n)*{why}"):
                device_types()


def test_a_platform_gives_and_sets_the_state_of_a_generator() -> None:
    state = generator_state()
    first = torch.rand(3)
    set_generator_state(state)
    assert torch.equal(torch.rand(3), first)
    states = {"mtia:1": torch.tensor([1])}
    mine = mw.Platform(
        "mtia",
        generator_state=lambda device: states[str(device)],
        set_generator_state=lambda state, device: states.update({str(device): state}),
    )
    mw.register_platform(mine)
    set_generator_state(torch.tensor([2]), "mtia:1")
    assert generator_state("mtia:1").tolist() == [2]


def test_an_accelerator_without_a_device_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA build of torch names CUDA on a machine without a GPU, too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_types() == ("cpu",)
    assert not platform_of("cuda").has_streams
    assert default_transport() == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _accelerator._is_available.cache_clear()
    assert device_types() == ("cpu", "cuda")
    assert default_transport() == "nccl"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_gpu_without_a_driver_has_no_signal() -> None:
    make = next(each.signal for each in BUILT_IN if each.device_type == "cuda")
    assert make is None or make(torch.device("cuda")) is None


def test_the_page_has_every_field_of_a_platform() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "bring-your-device.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [each.name for each in fields(mw.Platform) if not any(f"`{each.name}`" in row for row in rows)] == []
