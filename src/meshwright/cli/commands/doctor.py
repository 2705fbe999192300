"""`meshwright doctor`: check this machine for missing parts, and compare two ranks with one device."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from time import perf_counter

from meshwright.cli.commands.doctor_devices import (
    conformance_finding,
    driver_findings,
    topology_findings,
    transport_version,
)
from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.finding import Finding
from meshwright.cli.console.output import print_json, print_text

PYTHON = (3, 11)
LEFT_OUT = {"dev"}
"""Extras that users do not need."""
ENOUGH_SHARED = 64 * 2**20
_REQUIREMENT = re.compile(r'([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;\s*extra\s*==\s*"([\w-]+)")?')
_BOUND = re.compile(r"(<=|>=|==|!=|<|>|~=)\s*([\d.]+)")


def doctor(settings: argparse.Namespace, argv: list[str]) -> int:
    """Return 1 if something needed is missing, or if two ranks differ from one device; else 0."""
    found = [*_packages(), *_installed_torch()]
    if not settings.no_check and all(f.good for f in found if f.needed):
        found += _comparisons()
    good = all(f.good for f in found if f.needed)
    if settings.json:
        print_json({"ok": good, "findings": [{**asdict(f), "state": f.state} for f in found]})
    else:
        print_text(findings_text(found))
    return OK if good else FAILED


def findings_text(findings: list[Finding]) -> str:
    """Return the findings for people: one line each, and instructions for the missing parts."""
    width = max(len(f.name) for f in findings)
    lines = [f"{f.state:<8} {f.name:<{width}}  {f.found}" for f in findings]
    missing = [f for f in findings if not f.good]
    if missing:
        lines += ["", "install or change:", *map(_instruction, missing)]
    return "\n".join([*lines, "", _verdict(sum(f.needed for f in missing))])


def _instruction(missing: Finding) -> str:
    return f"  {missing.name}: {missing.write}" + ("" if missing.needed else "  (optional)")


def _verdict(required: int) -> str:
    """Return the last line, for so many required parts that are missing."""
    return f"{required} required part{'s' if required > 1 else ''} missing" if required else "ready"


def _packages() -> Iterator[Finding]:
    """Yield the findings for Python, and for the packages that this version of Meshwright needs or can use."""
    python = platform.python_version()
    yield Finding("python", python, sys.version_info[:2] >= PYTHON, write="install Python 3.11 or later")
    try:
        asked = requires("meshwright") or []
    except PackageNotFoundError:
        yield Finding("meshwright", "its metadata is missing", False, write="pip install meshwright")
        return
    yield Finding("meshwright", version("meshwright"))
    for line in asked:
        found = _REQUIREMENT.match(line)
        if found is not None and found[3] not in LEFT_OUT:
            yield package_finding(found[1], found[2].strip(), found[3])


def package_finding(name: str, bounds: str, extra: str | None) -> Finding:
    """Return the finding for a package, which should be installed in a version between its bounds.

    >>> package_finding("torch", ">=999", None).write
    "pip install 'torch>=999'"
    """
    there = _version(name)
    good = there is not None and satisfies_bounds(there, bounds)
    asked = f"{name} ({extra})" if extra else name
    said = there or "not installed"
    write = f"pip install 'meshwright[{extra}]'" if extra else f"pip install '{name}{bounds}'"
    return Finding(asked, said if good else f"{said}; {bounds or 'any version'}", good, extra is None, write)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def satisfies_bounds(there: str, bounds: str) -> bool:
    """True if a version satisfies all bounds. Only numbers are compared; suffixes such as "+cpu" are ignored.

    >>> [satisfies_bounds(version, ">=2.11,<2.16") for version in ("2.13.0+cpu", "2.16.0", "2.9")]
    [True, False, False]
    """
    return all(_satisfies_bound(_numbers(there), kind, _numbers(bound)) for kind, bound in _BOUND.findall(bounds))


def _satisfies_bound(there: tuple[int, ...], kind: str, bound: tuple[int, ...]) -> bool:
    length = max(len(there), len(bound))
    a, b = (x + (0,) * (length - len(x)) for x in (there, bound))
    compare: dict[str, bool] = {
        "<": a < b,
        "<=": a <= b,
        ">": a > b,
        ">=": a >= b,
        "==": a == b,
        "!=": a != b,
        "~=": a >= b and a[: len(bound) - 1] == b[: len(bound) - 1],
    }
    return compare[kind]


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _installed_torch() -> Iterator[Finding]:
    """Yield the findings for torch, the devices it sees, and the means of communication between processes."""
    try:
        from torch import distributed
    except ImportError as error:
        yield Finding("import torch", str(error).splitlines()[0], False, write="pip install --force-reinstall torch")
        return
    from meshwright.layout import PlatformError, device_types

    try:
        yield _devices()
    except PlatformError as error:
        yield Finding("platforms", f"{error.asked}: {error.found}", False, write=error.write)
        return
    kinds = device_types()
    yield from driver_findings(has_accelerator=len(kinds) > 1)
    yield from topology_findings()
    there = distributed.is_available()
    gloo = there and distributed.is_gloo_available()
    yield Finding("gloo", _availability(gloo), gloo, write="install a build of torch with Gloo: pip install torch")
    yield from _transport(there)
    yield from _between_processes()
    yield _compiler_finding()
    yield conformance_finding(kinds[-1])


def _transport(has_distributed: bool) -> Iterator[Finding]:
    """Yield the finding for the transport between accelerators, if there is an accelerator."""
    from torch import distributed

    from meshwright.layout import device_types, platform_of

    accelerator = device_types()[1:]
    name = platform_of(accelerator[0]).transport if accelerator else None
    if isinstance(name, str):
        good = has_distributed and distributed.is_backend_available(name)
        write = f"install a build of torch with {name.upper()}, or the package that registers it"
        version = transport_version(accelerator[0], name) if good else ""
        yield Finding(name, f"{_availability(good)} {version}".rstrip(), good, write=write)


def _availability(there: bool) -> str:
    return "available" if there else "not in this build of torch"


def _devices() -> Finding:
    import torch

    from meshwright.layout import device_name, device_types

    names = [f"{os.cpu_count() or 1} CPU cores, torch uses {torch.get_num_threads()}"]
    for kind in device_types()[1:]:
        count = torch.accelerator.device_count()
        names += [device_name(f"{kind}:{at}") or f"{kind}:{at}" for at in range(count)]
        names += _peer_links(kind, count)
    return Finding("devices", "; ".join(names))


def _peer_links(kind: str, count: int) -> list[str]:
    """Return the text about pairs of devices that reach each other's memory, if there are pairs and torch says it."""
    import torch

    can_reach = getattr(torch.get_device_module(kind), "can_device_access_peer", None)
    pairs = [(a, b) for a in range(count) for b in range(a)]
    if can_reach is None or not pairs:
        return []
    return [f"{sum(can_reach(a, b) for a, b in pairs)} of {len(pairs)} pairs of devices with peer access"]


def _between_processes() -> Iterator[Finding]:
    """Yield the findings for loopback and for shared memory."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("loopback", "127.0.0.1 accepts connections")
    except OSError as error:
        yield Finding("loopback", f"127.0.0.1: {error.strerror}", False, write="enable the network interface lo")
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    good = free >= ENOUGH_SHARED
    said = f"{free / 1e9:.1f} GB free in {folder}" if folder.is_dir() else f"no {folder}"
    yield Finding(
        "shared memory",
        said,
        good,
        False,
        "enlarge it (docker run --shm-size=1g); without it, processes on one host use sockets",
    )


def _compiler_finding() -> Finding:
    """Return the finding for the C++ compiler, which compiles CPU kernels."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    return Finding(
        "C++ compiler",
        found or f"none of {', '.join(names)}",
        found is not None,
        False,
        "install g++ or clang++, or set CXX to its path; Strategy(compiler='inductor') needs one, and samplers can be "
        "faster with one",
    )


def _comparisons() -> Iterator[Finding]:
    """Yield the comparisons of two ranks with one device: simulated, and as processes."""
    from meshwright.cli.ranks.self_check import check_simulated
    from meshwright.comm import launch

    def processes() -> str:
        code = launch(["-m", "meshwright.cli.ranks.self_check"], 2, timeout=60)
        return "" if code == 0 else f"exit code {code}"

    yield _timed("two simulated ranks", check_simulated)
    yield _timed("two processes", processes)


def _timed(name: str, check: Callable[[], str]) -> Finding:
    start, wrong = perf_counter(), "the check did not finish"
    with suppress(KeyboardInterrupt):
        try:
            wrong = check()
        except Exception as error:
            wrong = str(error).splitlines()[0]
    took = f"in {perf_counter() - start:.1f} s"
    if not wrong:
        return Finding(name, f"forward and backward equal one device, {took}")
    return Finding(name, f"{wrong}, {took}", False, write="open an issue with the output of `meshwright doctor --json`")
