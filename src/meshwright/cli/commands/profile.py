"""`meshwright profile`: measure this machine, and write a cluster file for `plan`, `predict` and `explain`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.cli.commands.profile_products import measure_products
from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder, write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cli.ranks.measure import MESSAGES, measurements, sizes_for
from meshwright.comm import launch
from meshwright.cost import DEVICES, cluster
from meshwright.layout import (
    CPU,
    MeshwrightError,
    device_types,
    platform_of,
    read_json,
    read_text_file,
    write_dtype,
    write_toml,
)

START = 10.0
"""Seconds until processes have imported torch and are connected."""


def profile(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print or write the cluster. Returns 1 if the ranks fail."""
    if settings.products:
        return measure_products(settings)
    check_folder(settings.out)
    device = device_types()[-1]
    there = (os.cpu_count() or 1) if device == CPU else torch.accelerator.device_count()
    ranks = settings.ranks or there
    if device != CPU and ranks > there:
        raise UsageError(f"meshwright profile: {ranks} ranks on {there} devices\n  fix: pass --ranks {there}")
    if settings.dry_run:
        if settings.json:
            what = [{"what": w, "dtype": dtype, "size": size} for w, dtype, size in measurements(ranks, device)]
            print_json({"ranks": ranks, "device": device, "measurements": what})
        else:
            print_text(_measurement_plan(ranks, device, settings.seconds))
        return OK
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        if launch(["-m", "meshwright.cli.ranks.measure", str(path), str(settings.seconds)], ranks) != 0:
            print_text("meshwright profile: the measuring ranks failed\n  fix: run meshwright doctor", file=sys.stderr)
            return FAILED
        measured: dict[str, Any] = read_json(read_text_file(path))
        toml = cluster_text(measured)
        read = Path(folder) / "cluster.toml"
        read.write_text(toml)
        try:
            machines = cluster(str(read))
        except MeshwrightError as error:
            print_text(error, file=sys.stderr)
            return FAILED
    _answer(settings, measured, toml, repr(machines))
    return OK


def _answer(settings: argparse.Namespace, measured: Mapping[str, Any], toml: str, machines: str) -> None:
    if settings.out:
        write_text(settings.out, toml)
    if settings.json:
        print_json({**measured, "cluster": machines})
    elif settings.out:
        print_text(f"{settings.out}: {machines}\n  meshwright plan CONFIG --cluster {settings.out} …")
    else:
        print_text(toml, end="")


def _measurement_plan(ranks: int, device: str, seconds: float) -> str:
    """Return the description of the measurements that would be made."""
    what = measurements(ranks, device)
    sizes = f"matrix products of {', '.join(map(str, sizes_for(device).products))}"
    sizes += f" in {', '.join(map(write_dtype, platform_of(device).product_dtypes))}"
    rows = [f"{ranks} concurrent processes, each with {'one thread' if device == CPU else 'a device'}", f"  {sizes}"]
    rows += ["  memory bandwidth, and the launch overhead of an operator"]
    if ranks > 1:
        rows.append(f"  all-reduces of {', '.join(f'{n:,}' for n in MESSAGES)} bytes")
    return "\n".join([*rows, f"{len(what)} measurements, about {START + len(what) * 1.5 * seconds:.0f} s"])


UNITS = "memory in GB, bandwidth in GB/s, overhead and start in microseconds, flops in TFLOP/s"


def cluster_text(measured: Mapping[str, Any]) -> str:
    """Return the cluster file: the closest known device, with the measured numbers."""
    device, inside, ranks = measured["device"], measured.get("inside"), measured["ranks"]
    rates = {
        "source": "meshwright profile",
        "reach": 1.0,  # the rates are measured, and not those of a data sheet
    }
    tables: dict[str, object] = {
        "cluster": f"{ranks}x{known_device(measured['name'])}, {ranks} per node",
        "device": rates
        | {
            "name": measured["name"],
            "memory": _rounded(device["memory"] / 1e9),
            "bandwidth": _rounded(device["bandwidth"] / 1e9),
            "overhead": _rounded(device["overhead"] * 1e6),
            "flops": {name: _rounded(rate / 1e12) for name, rate in device["flops"].items()},
        },
    }
    if inside is not None:
        tables["inside"] = rates | {
            "name": f"between {ranks} processes",
            "bandwidth": _rounded(inside["bandwidth"] / 1e9),
            "start": _rounded(inside["start"] * 1e6),
            "latency": 0.0,
        }
    origin = f"measured by `meshwright profile`, torch {measured['torch']}, {measured['name']}"
    return write_toml(tables, [origin, UNITS])


def _rounded(number: float) -> float:
    """Return a number with four digits, which is more than a measurement has."""
    return float(f"{number:.4g}")


def known_device(name: str) -> str:
    """Return the known device whose name is part of `name`, word by word; else "A100" for NVIDIA, or "cpu core".

    >>> [known_device(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-40GB", "Intel(R) Xeon(R)", "NVIDIA T4")]
    ['H200', 'A100-40GB', 'cpu core', 'A100']
    """
    words = set(name.replace("-", " ").split())
    fitting = [device for device in DEVICES if set(device.split("-")) <= words]
    return max(fitting, key=len) if fitting else "A100" if "NVIDIA" in name else "cpu core"
