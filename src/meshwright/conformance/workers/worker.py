"""The process that runs checks: `python -m meshwright.conformance.workers.worker FOLDER`.

For several ranks, the first process starts one more process for each rank, which runs the same module.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO

import torch

from meshwright.comm import Check as CallCheck
from meshwright.comm import init_process, launch
from meshwright.layout import CPU, PlatformError, device_name, device_types

from ..results.check import Check, NotRun, Target, WrongResult
from ..results.result import NOT_RUN, OK, RAISED, WRONG, Facts
from .messages import Record, Request, read_request, trace_path
from .traces import error_text, shortened

MODULE = "meshwright.conformance.workers.worker"
START_LIMIT = 120.0
"""Seconds to import torch and the modules of a vendor, and to start the device."""
DEADLOCK_LIMIT = 10.0
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def main(folder: Path) -> int:
    """Run the checks that the folder asks for; return 1 if the worker could not start."""
    _end_with_parent()
    request = read_request(folder)
    if request.processes > 1 and "RANK" not in os.environ:
        return launch(["-m", MODULE, str(folder)], request.processes)
    rank = int(os.environ.get("RANK", "0"))
    record, trace = Record(folder, rank), trace_path(folder, rank).open("w")
    faulthandler.enable(trace, all_threads=False)
    faulthandler.dump_traceback_later(START_LIMIT, exit=True, file=trace)
    try:
        checks, target = _start(request)
    except Exception as error:
        record.append({"failed": error_text(error)})
        return 1
    record.append({"facts": _facts(target, request.through_host)})
    for key in request.checks:
        if not _run(checks[key], target, record, trace):
            os._exit(0)  # other ranks may be inside the check, or the device is in an unknown state
    faulthandler.cancel_dump_traceback_later()
    return 0


def _end_with_parent() -> None:
    """End this process when the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="watch the parent", daemon=True).start()


def _start(request: Request) -> tuple[Mapping[str, Check], Target]:
    """Return the checks by key, and the device, after the imports of the request."""
    for name in request.imports:
        import_module(name)
    if request.processes > 1:
        init_process("gloo" if request.through_host else None, check=CallCheck(limit=DEADLOCK_LIMIT))
    torch.backends.cudnn.allow_tf32 = False  # the checks compare with the CPU, which has no such products
    module, _, name = request.table.partition(":")
    checks: tuple[Check, ...] = getattr(import_module(module), name)
    return {check.key: check for check in checks}, _target(request)


def _target(request: Request) -> Target:
    """Return the device of this rank. Raises PlatformError if torch cannot use it."""
    here = device_types()
    kind = request.device or here[-1]
    count = torch.accelerator.device_count() if kind in here[1:] else 1
    device = _usable_device(kind, int(os.environ.get("LOCAL_RANK", "0")) % count)
    dtypes = tuple(each for each in FLOATING if _has(device, each))
    return Target(device, count, dtypes, Path(request.folder), request.through_host)


def _usable_device(kind: str, at: int) -> torch.device:
    try:
        device = torch.device(kind) if kind == CPU else torch.device(kind, at)
        float(torch.ones(2, device=device).sum().cpu())
    except Exception as error:  # the class depends on the device
        raise PlatformError(
            f"to check devices of type {kind!r}",
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            f"torch cannot compute on such a device; types in this process: {', '.join(device_types())}",
            "correct --device, or name the module that adds the device to torch with --import",
        ) from error
    return device


def _has(device: torch.device, dtype: torch.dtype) -> bool:
    """True if tensors of this type can be on the device."""
    try:
        torch.ones(2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):  # the class depends on the device
        return False
    return True


def _facts(target: Target, through_host: bool) -> dict[str, object]:
    device = target.device
    found = Facts(
        device=device.type,
        count=target.count,
        dtypes=tuple(str(each).removeprefix("torch.") for each in target.dtypes),
        name=device_name(device) or platform.machine(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.system(),
        through_host=through_host,
    )
    return {key: getattr(found, key) for key in Facts.__slots__}


def _run(check: Check, target: Target, record: Record, trace: IO[str]) -> bool:
    """Run one check within its time limit; return False if this process should run no other check."""
    record.append({"begun": check.key})
    faulthandler.dump_traceback_later(check.limit, exit=True, file=trace)
    start = time.perf_counter()
    state, detail = _outcome(check, target)
    seconds = time.perf_counter() - start
    record.append({"key": check.key, "state": state, "detail": detail, "seconds": seconds, "at": time.time()})
    if state in (OK, NOT_RUN):
        return True
    return check.processes == 1 and _is_usable(target.device)


def _outcome(check: Check, target: Target) -> tuple[str, str]:
    """Return the state and the detail of a check; the device has finished its work."""
    try:
        detail = check.run(target) or ""
        _finish(target.device)
    except NotRun as reason:
        return NOT_RUN, shortened(str(reason))
    except WrongResult as found:
        return WRONG, shortened(str(found))
    except Exception as error:
        return RAISED, error_text(error)
    return OK, detail


def _finish(device: torch.device) -> None:
    """Wait for the device, so that an error of queued work belongs to the check that queued it."""
    torch.ones(1, device=device).cpu()


def _is_usable(device: torch.device) -> bool:
    """False if the device refuses every call after an error, as CUDA does after a failed kernel."""
    try:
        _finish(device)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
