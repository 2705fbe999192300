"""`meshwright quantize`: quantize a language model, write it, and report errors, sizes and perplexity."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.commands.run import is_one_rank
from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder, write_text
from meshwright.cli.console.language_model import build_model, files_beside, read_batches
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cli.console.user_function import FunctionFailed

if TYPE_CHECKING:
    from meshwright.cli.ranks.quantize import Job, Outcome
    from meshwright.quantize import Outline, Scheme

WORST = 5
"""Layers with the largest errors that are printed."""


def quantize(settings: argparse.Namespace, argv: list[str]) -> int:
    """Quantize a model, or show its sizes with `--dry-run`. Returns 1 if the model, the scheme or the data fails."""
    scheme = _scheme(settings)
    _check_settings(settings, scheme)
    from meshwright.layout import MeshwrightError

    try:
        return _quantize(settings, argv, scheme)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED


def _scheme(settings: argparse.Namespace) -> Scheme:
    """Return the scheme of the command line. Raises UsageError if there is none."""
    from meshwright.quantize import QuantizeError, Scheme

    try:
        found = Scheme.preset(settings.scheme, group_size=settings.group_size)
        return replace(found, ignore=(*found.ignore, *(settings.ignore or ())))
    except QuantizeError as error:
        fix = "leave out --group-size" if "group_size" in error.write else error.write.replace("'", "")
        raise UsageError(f"meshwright quantize: {error.asked}\n  why: {error.why}\n  fix: {fix}") from error


def _check_settings(settings: argparse.Namespace, scheme: Scheme) -> None:
    """Raise UsageError, before anything runs, for options that are missing or cannot be met."""
    check_folder(settings.html)
    if settings.dry_run and settings.html:
        raise UsageError(
            "meshwright quantize: --html with --dry-run\n"
            "  why: the page shows the errors of quantized layers, and a dry run quantizes nothing\n"
            "  fix: leave out --html, or --dry-run"
        )
    if settings.dry_run:
        return
    if not settings.out:
        raise UsageError("meshwright quantize: the folder of the result is missing\n  fix: pass --out DIR or --dry-run")
    if os.path.lexists(settings.out):
        raise UsageError(f"meshwright quantize: {settings.out} exists already\n  fix: pass --out with a new folder")
    if scheme.weights.type == "nf":
        raise UsageError(
            f"meshwright quantize: compressed-tensors has no {settings.scheme}\n"
            "  fix: pass --scheme w4a16, or call mw.quantize and mw.save_state_dict in a program"
        )
    if scheme.is_calibrated and not settings.data:
        raise UsageError(
            f"meshwright quantize: {settings.scheme} needs calibration data\n"
            "  fix: pass --data with a text like those that the model will read"
        )
    if settings.resume is not None:
        _check_resume(settings, scheme)


def _check_resume(settings: argparse.Namespace, scheme: Scheme) -> None:
    """Raise UsageError for a folder of calibrated blocks that cannot be used."""
    folder, out = Path(settings.resume).absolute(), Path(settings.out).absolute()
    if not scheme.is_calibrated:
        raise UsageError(
            f"meshwright quantize: --resume with {settings.scheme}\n"
            "  why: the folder has calibrated blocks, and this scheme is not calibrated\n"
            "  fix: leave out --resume"
        )
    if folder == out or out in folder.parents:
        raise UsageError(
            f"meshwright quantize: --resume {settings.resume} in --out {settings.out}\n"
            "  why: the folder of the result must be new when the result is written\n"
            "  fix: pass --resume with a folder beside --out"
        )
    if settings.resume == "" or (os.path.lexists(folder) and not folder.is_dir()):
        raise UsageError(f"meshwright quantize: --resume {settings.resume} is no folder\n  fix: pass another name")


def _check_disk(out: str, nbytes: int) -> None:
    """Raise UsageError, before anything runs, for a folder that cannot be made or a disk that is too full."""
    from meshwright.search import size

    folder = next(parent for parent in Path(out).absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"meshwright quantize: {folder} is no folder that can be written\n"
            "  fix: pass --out with a folder that can be written"
        )
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UsageError(
            f"meshwright quantize: {folder} has {size(free)} free, and the quantized model takes {size(nbytes)}\n"
            "  fix: pass --out with a folder on a larger disk"
        )


def _quantize(settings: argparse.Namespace, argv: list[str], scheme: Scheme) -> int:
    from meshwright.cli.ranks.quantize import Job, check_tokens
    from meshwright.quantize import outline

    model = build_model(settings.model, empty=True)
    found = outline(model, scheme)
    if settings.dry_run:
        _answer(settings, _told(settings, scheme, found, None))
        return OK
    _check_disk(settings.out, found.after)
    batches = read_batches(settings) if settings.data else []
    check_tokens(model, batches)
    del model
    files = files_beside(settings.model)
    job = Job(
        settings.model, scheme, list(found.layers), batches, settings.samples, settings.out, files, settings.resume
    )
    if settings.processes and not is_one_rank():
        from meshwright.comm import launch

        return launch(["-m", "meshwright", *argv], settings.ranks)
    outcome = _run(settings, job)
    if outcome is not None:
        _answer(settings, _told(settings, scheme, found, outcome))
    return OK


def _run(settings: argparse.Namespace, job: Job) -> Outcome | None:
    """Return the outcome of a job; None on all processes but that of rank 0."""
    from meshwright.cli.ranks.quantize import quantize_on_rank
    from meshwright.comm import current_communicator, init_process, simulate
    from meshwright.layout import MeshwrightError

    def on_rank() -> Outcome:
        is_first = settings.ranks == 1 or current_communicator().rank == 0
        try:
            return quantize_on_rank(job, settings.ranks, _print_progress if is_first else _no_progress)
        except MeshwrightError:
            raise
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            fix = "pass --data with batches that the model takes as model(batch)"
            raise FunctionFailed(f"meshwright: the model of {job.model} raised {why}\n  fix: {fix}") from error

    if not settings.processes:
        return on_rank() if settings.ranks == 1 else simulate(on_rank, settings.ranks)[0]
    rank = init_process().rank
    outcome = on_rank()
    return outcome if rank == 0 else None


def _print_progress(text: str) -> None:
    print_text(text, file=sys.stderr)
    sys.stderr.flush()


def _no_progress(text: str) -> None:
    pass


def _told(settings: argparse.Namespace, scheme: Scheme, found: Outline, outcome: Outcome | None) -> dict[str, Any]:
    """Return the result for programs; without an outcome, that of a dry run."""
    told: dict[str, Any] = {
        "model": settings.model,
        "scheme": settings.scheme,
        "numbers": repr(scheme),
        "layers": len(found.layers),
        "left_out": found.left_out,
        "bytes": {"before": found.before, "after": found.after, "not_quantized": found.others},
    }
    if outcome is None:
        return told | {"sizes": found.layers}
    measured = {"before": outcome.before, "after": outcome.after}
    return told | {"out": settings.out, "errors": outcome.errors, "perplexity": measured}


def _answer(settings: argparse.Namespace, told: dict[str, Any]) -> None:
    if settings.html and not settings.dry_run:
        from meshwright.cli.console.quantize_page import page

        write_text(settings.html, page(told))
    if settings.json:
        print_json(told)
    else:
        print_text(_text(told))


def _text(told: dict[str, Any]) -> str:
    """Return the result as text: sizes, layers that are left out, perplexity, and the largest errors."""
    from meshwright.search import share, size

    sizes = told["bytes"]
    lines = [
        f"{told['scheme']}: {told['numbers']}",
        f"{told['layers']} layers, {size(sizes['before'])} before, {size(sizes['after'])} after "
        f"({share(sizes['after'], sizes['before'])})",
        *(f"left out: {name}: {reason}" for name, reason in told["left_out"].items()),
        f"not quantized: {size(sizes['not_quantized'])}",
    ]
    if "errors" not in told:
        return "\n".join(lines)
    measured = told["perplexity"]
    if measured["before"] is not None:
        lines.append(f"perplexity: {measured['before']:.4f} before, {measured['after']:.4f} after")
    blocks: dict[float, list[str]] = {}
    for name, error in told["errors"].items():
        blocks.setdefault(error, []).append(name)  # the layers of a calibrated block have one error
    worst = sorted(blocks, reverse=True)[:WORST]
    lines += ["largest relative errors:", *(f"  {_common_name(blocks[error])}: {error:.3g}" for error in worst)]
    return "\n".join([*lines, told["out"]])


def _common_name(layers: list[str]) -> str:
    """Return the name of the module that holds these layers.

    >>> _common_name(["layers.1.up", "layers.1.down"]), _common_name(["head"])
    ('layers.1', 'head')
    """
    return os.path.commonpath([name.replace(".", "/") for name in layers]).replace("/", ".") or "the model"
