"""`meshwright checkpoint`: inspect or verify a checkpoint, compare two, or convert one to another format."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.checkpoint import Catalogue, convert, format_of, open_checkpoint, read_whole, verify
from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.layout import MeshwrightError, write_dtype

PATHS = {"inspect": 1, "verify": 1, "diff": 2, "convert": 2}


def checkpoint(settings: argparse.Namespace, argv: list[str]) -> int:
    """Return 0 on success; 1 if a checkpoint is damaged or missing, or if two differ."""
    if len(settings.paths) != PATHS[settings.action]:
        paths = " ".join(["PATH", "OTHER"][: PATHS[settings.action]])
        raise UsageError(
            f"meshwright checkpoint {settings.action}: {len(settings.paths)} paths\n"
            f"  fix: run meshwright checkpoint {settings.action} {paths}"
        )
    try:
        return _ACTIONS[settings.action](settings, *settings.paths)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC) and error.filename is None:  # the output: its reader is gone
            raise
        print_text(f"meshwright checkpoint: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED


def _inspect(settings: argparse.Namespace, path: str) -> int:
    told = checkpoint_data(open_checkpoint(path))
    if settings.json:
        print_json(told)
        return OK
    print_text(
        f"{told['path']}: {told['kind']}, {told['count']} tensors, {told['bytes']} bytes, {len(told['files'])} files"
    )
    for name, entry in told["tensors"].items():
        pieces = f"in {entry['pieces']} piece{'s' if entry['pieces'] > 1 else ''}"
        print_text(f"  {name:40} {entry['lies']:30} {pieces}" + (f" on {entry['mesh']}" if entry["mesh"] else ""))
    for name, value in told["values"].items():
        print_text(f"  {name:40} {value}")
    return OK


def checkpoint_data(catalogue: Catalogue) -> dict[str, Any]:
    """Return the description of a checkpoint for programs."""
    return {
        "path": str(catalogue.folder),
        "kind": catalogue.kind,
        **catalogue.about,
        "count": len(catalogue.entries),
        "bytes": sum(entry.nbytes for entry in catalogue.entries.values()),
        "files": {name: {"bytes": f.nbytes, "sha256": f.sha256} for name, f in catalogue.files.items()},
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": write_dtype(entry.dtype),
                "lies": entry.lies or f"{write_dtype(entry.dtype)}{list(entry.shape)}",
                "mesh": repr(entry.mesh) if entry.mesh is not None else None,
                "pieces": len(entry.pieces),
            }
            for name, entry in catalogue.entries.items()
        },
        "values": {name: _short(value) for name, value in catalogue.values.items()},
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _verify(settings: argparse.Namespace, path: str) -> int:
    catalogue = verify(path)
    said = {"path": str(catalogue.folder), "kind": catalogue.kind, "tensors": len(catalogue.entries), "ok": True}
    has_checksums = any(facts.sha256 is not None for facts in catalogue.files.values())
    checked = "checked by SHA-256" if has_checksums else "without checksums"
    if settings.json:
        print_json(said)
    else:
        print_text(f"{catalogue.folder}: complete; {len(catalogue.entries)} tensors, {checked}")
    return OK


def _diff(settings: argparse.Namespace, path: str, other: str) -> int:
    found = list(differences(open_checkpoint(path), open_checkpoint(other), settings.tolerance))
    if settings.json:
        print_json({"same": not found, "differences": found})
    else:
        print_text("\n".join(f"{d['name']}: {d['what']}" for d in found) or "the same")
    return FAILED if found else OK


def differences(one: Catalogue, other: Catalogue, tolerance: float) -> Iterator[dict[str, Any]]:
    """Yield every tensor or value that differs between the two; layouts are not compared."""
    for name in dict.fromkeys([*one.entries, *other.entries]):
        if name not in one.entries or name not in other.entries:
            yield {
                "name": name,
                "what": f"a tensor only in the {'first' if name in one.entries else 'second'} checkpoint",
            }
            continue
        a, b = one.entries[name], other.entries[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield {"name": name, "what": f"{a.dtype} of shape {a.shape} and {b.dtype} of shape {b.shape}"}
        elif told := _largest_difference(read_whole(one, name), read_whole(other, name), tolerance):
            yield {"name": name, **told}
    for name in dict.fromkeys([*one.values, *other.values]):
        a, b = one.values.get(name), other.values.get(name)
        if repr(a) != repr(b):
            yield {"name": name, "what": f"{_short(a)} and {_short(b)}"}


def _largest_difference(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> dict[str, Any] | None:
    """Return the number of elements of two tensors that differ, and the largest difference; None if none differ."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).abs().masked_fill(same, 0.0)
    count = int((~same & ~(apart <= tolerance)).sum())
    if not count:
        return None
    largest = float(apart.nan_to_num(nan=float("inf")).max())
    return {
        "what": f"{count} of {a.numel()} elements differ, by at most {largest:.3g}",
        "count": count,
        "largest": str(largest),
    }


def _convert(settings: argparse.Namespace, path: str, other: str) -> int:
    source = open_checkpoint(path)
    written = convert(source, other, format_of(settings.to), settings.only)
    left = len(source.values) if settings.only else 0
    told = {
        "path": str(written),
        "format": settings.to,
        "tensors": len(open_checkpoint(written).entries),
        "left_out": left,
    }
    if settings.json:
        print_json(told)
    else:
        print_text(f"{written}: {told['tensors']} tensors in the format {settings.to}")
    return OK


_ACTIONS = {"inspect": _inspect, "verify": _verify, "diff": _diff, "convert": _convert}
