"""Accesses to the memory of a distributed tensor that silently use this rank's part; each must be right or raise.

    python -m benchmarks escapes                   every way in every layout
    python -m benchmarks.escapes --only numpy      the ways whose name has "numpy", printed one by one
    python -m benchmarks.escapes --page            the table of docs/concepts/escapes.md

A way is silent if a rank gets no error and another result than one device. `_escape_ways` and `_escape_collectives`
enumerate the ways.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import meshwright as mw
from benchmarks._escape_collectives import collectives, one_process_group
from benchmarks._escape_ways import Lay, Way, memory, plainly, ways
from meshwright.comm import current_communicator

ALIKE, RAISES, SILENT, UNCLEAR = "whole", "raises", "silent", "raises another error"
"""Outcomes of a way: the result of the whole tensor, a clear error, another result, an unclear error."""


@dataclass(frozen=True)
class Setting:
    """A mesh, and a placement for each of its axes."""

    name: str
    sizes: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def ranks(self) -> int:
        return int(np.prod(self.sizes))

    def lay(self, x: Tensor) -> Tensor:
        """Return `x` in the layout; placements of dims that `x` lacks replicate, and pending terms add up to `x`."""
        mesh = mw.ProcessMesh(np.arange(self.ranks).reshape(self.sizes).tolist(), ["a", "b"][: len(self.sizes)])
        placements = [_fitting(p, x) for p in self.placements]
        if not any(p.is_partial() for p in placements):
            return mw.shard_tensor(x, mesh, placements)
        axes = [axis for axis, p in zip(mesh.sizes, placements, strict=True) if p.is_partial()]
        is_first = all(mesh.coordinate(current_communicator().rank)[axis] == 0 for axis in axes)
        terms = int(np.prod([mesh.sizes[axis] for axis in axes]))
        share = 1.0 if terms == 1 else 0.25 if is_first else 0.75 / (terms - 1)
        cut = [mw.Replicate() if p.is_partial() else p for p in placements]
        local = (mw.shard_tensor(x.detach(), mesh, cut) * share).to_local()
        return mw.dtensor_from_local(local, mesh, placements, shape=x.shape).clone().requires_grad_(x.requires_grad)


def _fitting(placement: Any, x: Tensor) -> Any:
    if placement.is_partial():
        return placement if x.is_floating_point() else mw.Replicate()
    return placement if not placement.is_shard() or placement.dim < x.dim() else mw.Replicate()


SETTINGS = [
    Setting("Shard(0), uneven", (2,), (mw.Shard(0),)),
    Setting("Shard(1)", (2,), (mw.Shard(1),)),
    Setting("Shard(0), a rank without a part", (4,), (mw.Shard(0),)),
    Setting("Partial", (2,), (mw.Partial(),)),
    Setting("Replicate", (2,), (mw.Replicate(),)),
    Setting("two axes", (2, 2), (mw.Shard(1), mw.Shard(0))),
    Setting("an axis of size 1", (1,), (mw.Shard(0),)),
    Setting("Partial and Shard(0)", (2, 2), (mw.Partial(), mw.Shard(0))),
]


PAGE_SETTINGS = ("Shard(0), uneven", "Partial", "Replicate")
"""The columns of the page's table."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a way in a setting, and the difference from the result of one device."""

    way: Way
    setting: Setting
    does: str
    told: str = ""


def examine(way: Way, setting: Setting) -> Finding | None:
    """Return the outcome of the way; None if one device gives another result each time."""
    wanted = _result(way, plainly)
    if not same(wanted, _result(way, plainly)):
        return None
    try:
        found = mw.simulate(lambda: _result(way, setting.lay), setting.ranks)
    except Exception as error:  # from one rank, or from the simulation
        found = [error]
    return Finding(way, setting, *_compared(found, wanted))


def _result(way: Way, lay: Lay) -> Any:
    """Return the result as plain values, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain_values(way.call(lay))
        except Exception as error:  # `_judged` decides
            return error


def _compared(found: Sequence[Any], wanted: Any) -> tuple[str, str]:
    """Return the outcome, and the first error or the first result that differs from that of one device."""
    errors = [f for f in found if isinstance(f, Exception)]
    if errors and all(isinstance(e, mw.MeshwrightError) or _is_read_only(e) for e in errors):
        return RAISES, f"{type(errors[0]).__name__}"
    if errors and isinstance(wanted, Exception):
        return RAISES, f"{type(wanted).__name__}, as on one device"
    if errors:
        return UNCLEAR, f"{type(errors[0]).__name__}: {str(errors[0])[:150]}"
    wrong = next((f for f in found if not same(f, wanted)), None)
    return (ALIKE, "") if wrong is None else (SILENT, f"{wrong!r:.200} in place of {wanted!r:.200}")


def _is_read_only(error: Exception) -> bool:
    """True for NumPy's error on a write to a read-only array, such as a gathered copy."""
    return isinstance(error, ValueError) and "read-only" in str(error)


def plain_values(found: Any) -> Any:
    """Return a result as arrays, numbers and names of types, which can be compared."""
    if isinstance(found, Tensor):
        return _tensor_values(found)
    if isinstance(found, np.ndarray):
        return ("array", found.shape, str(found.dtype), found.tolist())
    if isinstance(found, torch.UntypedStorage):
        return ("storage", found.tolist())
    if isinstance(found, torch.TypedStorage):
        return ("typed storage", str(found.dtype), found.tolist())
    if isinstance(found, (list, tuple)):
        return tuple(plain_values(f) for f in found)
    if isinstance(found, dict):
        return {str(key): plain_values(f) for key, f in found.items()}
    if isinstance(found, (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)):
        return found
    return _exported(found) if type(found).__name__ == "PyCapsule" else type(found).__name__


def _exported(capsule: Any) -> Any:
    return plain_values(torch.from_dlpack(capsule)) if '"dltensor"' in repr(capsule) else "capsule"


def _tensor_values(x: Tensor) -> Any:
    x = mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x
    x = x.detach()
    if x.is_nested:
        return ("nested", tuple(_tensor_values(part) for part in x.unbind()))
    if x.is_quantized:
        x = x.dequantize()
    if x.layout is not torch.strided:
        x = x.to_dense()
    values = x.resolve_conj().resolve_neg()
    return ("tensor", tuple(x.shape), str(x.dtype), values.tolist() if x.device.type == "cpu" else str(x.device))


def same(a: Any, b: Any) -> bool:
    """True for equal results; numbers may differ by rounding, and NaN equals NaN."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        return type(a) is type(b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (float, complex)) and isinstance(b, (int, float, complex)):
        return bool(np.isclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
    return bool(type(a) is type(b) and a == b)


def findings(chosen: Iterable[Way], settings: Iterable[Setting] = SETTINGS) -> Iterator[Finding]:
    """Yield the outcome of each way in each setting."""
    chosen = list(chosen)
    for setting in settings:
        found = (examine(way, setting) for way in chosen)
        yield from (f for f in found if f is not None)


def every_way() -> list[Way]:
    return [*ways(), *collectives()]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of silent ways over all settings, or over two settings if `quick`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with one_process_group():
        chosen = every_way()
        found = list(findings(chosen, SETTINGS[:4:3] if quick else SETTINGS))
    silent, unclear = ([str(f.way) for f in found if f.does == kind] for kind in (SILENT, UNCLEAR))
    return {
        "value": len(set(silent)),
        "goal": "0 silent",
        "ok": not silent,
        "details": {
            "ways": len(chosen),
            "cases": len(found),
            "what they do": dict(Counter(f.does for f in found)),
            "silent": sorted(set(silent)),
            "raise another error": sorted(set(unclear)),
        },
    }


def page() -> str:
    """Return the table of `docs/concepts/escapes.md`, with a row for each way that has its own name."""
    with one_process_group():
        named = [*memory(), *(way for way in collectives() if "functional" not in way.name)]
        found = list(findings(named, [s for s in SETTINGS if s.name in PAGE_SETTINGS]))
    lines = ["| way | Shard(0) | Partial | Replicate |", "|---|---|---|---|"]
    for way in named:
        does = [f"{f.does}: {f.told}" if f.does == RAISES else f.does for f in found if f.way is way]
        if does:
            lines.append(f"| `{way.name}` | {' | '.join(does)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a way's name")
    parser.add_argument("--setting", default="", help="part of a setting's name")
    parser.add_argument("--page", action="store_true", help="print the table of the page")
    parser.add_argument("--all", action="store_true", help="also print ways that are right")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if chosen.page:
        print(page())
        return
    settings = [s for s in SETTINGS if chosen.setting in s.name]
    with one_process_group():
        for f in findings((w for w in every_way() if chosen.only in str(w)), settings):
            if chosen.all or f.does in (SILENT, UNCLEAR):
                print(f"{f.setting.name:32} {f.does:8} {f.way}\n    {f.told}")


if __name__ == "__main__":
    main()
