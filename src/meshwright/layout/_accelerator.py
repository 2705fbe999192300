"""The devices of this process: the platforms of their types, their autocast, and the states of their generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

import torch
from torch import Tensor

from ._errors import PlatformError
from ._platform import BUILT_IN, CPU, Platform

ENTRY_POINTS = "meshwright.platforms"
"""The group of entry points that name platforms."""
_built_in = {each.device_type: each for each in BUILT_IN}
_registered: dict[str, Platform] = {}


def register_platform(platform: Platform) -> None:
    """Set the platform of a type of device. It takes the place of a built-in platform of that type.

    Call this before the first distributed tensor. A platform equal to the registered one changes nothing.

    A package can name its platform in the entry point group `meshwright.platforms` instead.

    Raises:
        PlatformError: another platform was registered for the type, or the value is no `Platform`.
    """
    _check_is_platform(platform)
    other = _registered.get(platform.device_type)
    if other is not None and other != platform:
        raise PlatformError(
            f"a platform for devices of type {platform.device_type!r}",
            "another platform of that type, which was registered before",
            "a type of device has one platform",
            "register one of the two, or uninstall the package of the other one",
        )
    _registered[platform.device_type] = platform
    _platform.cache_clear()


def _check_is_platform(found: object) -> None:
    if not isinstance(found, Platform):
        raise PlatformError(
            "to register a platform",
            f"{found!r}",
            "a platform is a value of the class Platform",
            'write mw.register_platform(mw.Platform("vdev"))',
        )


def platform_of(device: str | torch.device) -> Platform:
    """Return the platform of the device's type; for a type without one, the platform of a usual accelerator.

    Programs can be recorded for devices that this process does not have. Nothing can be queued on such a device, so
    `has_streams` is False.

    >>> platform_of("cpu").has_streams
    False
    """
    kind = device.partition(":")[0] if isinstance(device, str) else device.type
    return _platform(kind, device_types())


@lru_cache(16)
def _platform(kind: str, here: tuple[str, ...]) -> Platform:
    found = _registered.get(kind) or _built_in.get(kind) or Platform(kind)
    return found if kind in here else replace(found, has_streams=False)


class _EntryPoints:
    """The entry points of platforms, which are read once; the packages that they load may ask for platforms."""

    is_read = False

    def read(self) -> None:
        if self.is_read:
            return
        self.is_read = True
        try:
            _register_entry_points()
        except PlatformError:
            self.is_read = False
            raise


_entry_points = _EntryPoints()


def _register_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        found = _loaded(entry)
        if not isinstance(found, Platform):
            raise _entry_error(entry, f"a {type(found).__name__}", "an entry point of this group must be a Platform")
        register_platform(found)


def _loaded(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:
        why = "the package of the platform cannot be imported"
        raise _entry_error(entry, f"{type(error).__name__}: {error}", why) from error


def _entry_error(entry: EntryPoint, found: str, why: str) -> PlatformError:
    package = "the package" if entry.dist is None else f"the package {entry.dist.name!r}"
    return PlatformError(
        f"the platform {entry.name!r} from the entry point {entry.value!r}",
        found,
        why,
        f"correct or uninstall {package}",
    )


def device_types() -> tuple[str, ...]:
    """Return "cpu", and the type of the accelerator if there is one; registers the platforms of entry points."""
    _entry_points.read()
    accelerator = torch.accelerator.current_accelerator()
    return (CPU,) if accelerator is None or not _is_available(accelerator.type) else (CPU, accelerator.type)


@lru_cache(4)
def _is_available(kind: str) -> bool:
    """True if this machine has a device: torch also names the accelerator that it was only compiled for."""
    return bool(getattr(torch.get_device_module(kind), "is_available", _true)())


def autocast_modes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the types of devices for which autocast is on in this thread, each with its dtype."""
    types = _autocast_types(device_types())
    return tuple((each, torch.get_autocast_dtype(each)) for each in types if torch.is_autocast_enabled(each))


@lru_cache(2)
def _autocast_types(here: tuple[str, ...]) -> tuple[str, ...]:
    """Return the built-in types that torch knows, with a device or without: programs are recorded for them."""
    return tuple(each for each in dict.fromkeys((*_built_in, *here)) if _has_autocast(each))


def _has_autocast(kind: str) -> bool:
    try:
        torch.is_autocast_enabled(kind)
    except RuntimeError:  # a type whose package is not imported
        return False
    return True


def device_name(device: str | torch.device) -> str | None:
    """Return the product name of an accelerator, such as "NVIDIA H100 80GB HBM3"; None if torch does not say it."""
    device = torch.device(device)
    name_of = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return None if name_of is None or device.type == CPU else str(name_of(device))


def generator_state(device: str | torch.device = CPU) -> Tensor:
    """Return the state of the default random generator of a device."""
    device = torch.device(device)
    return platform_of(device).generator_state(device)


def set_generator_state(state: Tensor, device: str | torch.device = CPU) -> None:
    """Set the state of the default random generator of a device."""
    device = torch.device(device)
    platform_of(device).set_generator_state(state, device)


def generator_states() -> dict[str, Tensor]:
    """Return the states of the default generators by device: of the CPU, and of an accelerator that is initialized."""
    return {device: generator_state(device) for device in (CPU, *accelerators_in_use())}


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Set the states of the default generators of these devices."""
    for device, state in states.items():
        set_generator_state(state, device)


def accelerators_in_use() -> tuple[str, ...]:
    """Return the names of all devices of the accelerator; none before it is initialized."""
    kind = device_types()[-1]
    if kind == CPU or not getattr(torch.get_device_module(kind), "is_initialized", _true)():
        return ()
    return tuple(f"{kind}:{at}" for at in range(torch.accelerator.device_count()))


def _true() -> bool:
    return True
