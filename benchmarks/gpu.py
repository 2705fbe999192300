"""First hour on an accelerator: conformance, rates, eager and compiled blocks, training beside FSDP2, the prediction.

    python -m benchmarks gpu [--quick]                   the accelerator, or else the CPU in small sizes
    python -m benchmarks.gpu --device mesh --parts norm  some parts, on another type of device

Each part is a process with a limit, so a crash or hang costs one part. Only results of an accelerator are published:
the figure of the CPU says "never run on an accelerator".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = {"rates": 120, "eager": 120, "norm": 240, "blocks": 420, "processes": 240, "llama": 600}
"""Name of each part -> its limit in seconds. Before them, `conformance` runs its levels side by side."""
CONFORMANCE = "conformance"
CONFORMANCE_LIMIT = 600
LEVELS = ("0", "1", "2", "3-4")
GOALS = {"RMSNorm, composed / ours": 4.0, "RMSNorm, F.rms_norm / ours": 1.14, "Llama inference, eager / ours": 1.36}
GOALS |= {"Stable Diffusion inference, eager / ours": 1.30}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure of the accelerator, or of the CPU with `ok` None."""
    return measured(_default_device(), quick, (CONFORMANCE, *PARTS))


def measured(device: str, quick: bool, parts: Sequence[str]) -> dict[str, Any]:
    """Return the figure of these parts on a type of device."""
    return figure({name: _part(name, device, quick) for name in parts}, device, _machine(device), quick)


def figure(found: dict[str, Any], device: str, machine: dict[str, str], quick: bool) -> dict[str, Any]:
    """Return the figure of the results by part."""
    reached = _reached(found)
    is_accelerator = device not in ("cpu", "mesh")
    return {
        "name": "gpu",
        "value": {**reached, CONFORMANCE: _counts(found)} if is_accelerator else "never run on an accelerator",
        "goal": "; ".join(f"{name} at least {goal}" for name, goal in GOALS.items())
        + "; no check of conformance failed",
        "ok": _is_reached(reached) and not _failed(found) and not _broken(found) if is_accelerator else None,
        "details": {"machine": machine, "quick": quick, **found},
    }


def _default_device() -> str:
    from meshwright.layout import device_types

    return device_types()[-1]


def _machine(device: str) -> dict[str, str]:
    import torch

    module = torch.get_device_module(device) if device != "mesh" else None
    name = getattr(module, "get_device_name", None)
    return {"device": device if name is None else str(name()), "torch": torch.__version__}


def _part(name: str, device: str, quick: bool) -> Any:
    start = time.perf_counter()
    if name == CONFORMANCE:
        found = _conformance(device, quick)
    else:
        words = [f"benchmarks._gpu_{name}", "--device", device, *(["--quick"] if quick else [])]
        found = _result(_started(words), PARTS[name])
    seconds = time.perf_counter() - start
    print(f"# {name}: {seconds:.0f} s: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def _started(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _result(process: subprocess.Popen[str], limit: float) -> Any:
    """Return the object in the last line that the process prints, or what became of the process."""
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return f"HUNG: no result after {limit:g} s"
    lines = output.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return f"DIED: exit code {process.returncode}"


def _conformance(device: str, quick: bool) -> dict[str, Any]:
    """Return counts and failures of all levels but the last one, whose speeds would be disturbed."""
    imports = ["--import", "tests.device.registered"] if device == "mesh" else []
    command = ["meshwright", "conformance", "--json", "--device", device, "--through-host", *imports, "--level"]
    started = {level: _started([*command, level]) for level in (LEVELS[:1] if quick and device == "cpu" else LEVELS)}
    reports = {level: _result(process, CONFORMANCE_LIMIT) for level, process in started.items()}
    counts: dict[str, int] = {}
    failed: list[str] = [f"level {level}: {report}" for level, report in reports.items() if isinstance(report, str)]
    for report in reports.values():
        for each in report["results"] if isinstance(report, dict) else ():
            counts[each["state"]] = counts.get(each["state"], 0) + 1
            if each["state"] not in ("ok", "not run"):
                failed.append(f"{each['name']}: {each['state']} {each['detail']}")
    return {"counts": counts, "failed": failed}


def _failed(found: dict[str, Any]) -> list[str]:
    told = found.get(CONFORMANCE)
    return told["failed"] if isinstance(told, dict) else []


def _broken(found: dict[str, Any]) -> list[str]:
    """Return the parts that died, hung or were not measured."""
    return [name for name, result in found.items() if not isinstance(result, dict)]


def _counts(found: dict[str, Any]) -> str:
    counts = found.get(CONFORMANCE, {}).get("counts", {})
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _reached(found: dict[str, Any]) -> dict[str, float | None]:
    """Return the ratios that have goals, as far as their parts have results."""
    norm = [f"norm/means/bf16/{name}" for name in ("composed", "F.rms_norm")]
    blocks = [f"blocks/{name}, inference/ratio to ours/eager" for name in ("llama", "unet")]
    return {name: _at(found, path) for name, path in zip(GOALS, norm + blocks, strict=True)}


def _at(found: Any, path: str) -> float | None:
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _is_reached(reached: dict[str, float | None]) -> bool:
    return all((reached[name] or 0.0) >= goal for name, goal in GOALS.items())


def main() -> None:
    """Print the figure of some parts on a type of device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", nargs="*", choices=(CONFORMANCE, *PARTS), default=(CONFORMANCE, *PARTS))
    given = parser.parse_args()
    print(json.dumps(measured(given.device or _default_device(), given.quick, given.parts)))


if __name__ == "__main__":
    main()
