"""`meshwright parallelize`: suggest a plan by module names for a model, from the search."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from torch import Tensor

from meshwright.cli.console.exit_codes import FAILED, OK
from meshwright.cli.console.files import check_folder, read_object, write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cli.console.user_function import FunctionFailed, call_function, names_function
from meshwright.engine import style_code, suggest
from meshwright.layout import MeshwrightError

WRITE = "  fix: pass file.py:function, where the function returns the module and a batch, or a model's config.json"


def parallelize(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print the lines to put into a program. Returns 1 if no plan fits or the model's file fails."""
    if settings.mesh is None and settings.ranks is None:
        raise UsageError(
            "meshwright parallelize: the number of ranks is missing\n  fix: pass --mesh dp=2,tp=4, or --ranks 8"
        )
    check_folder(settings.out)
    try:
        model, batch, loss = _model(settings)
        found = suggest(model, batch, loss, mesh=settings.mesh, cluster=settings.cluster, ranks=settings.ranks)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        fix = "return a module, and a batch that it takes as module(*batch), or a loss"
        raise FunctionFailed(f"meshwright: the model of {settings.model} raised {why}\n  fix: {fix}") from error
    if settings.out:
        write_text(settings.out, f"import meshwright as mw\n\n{found.text()}\n")
    if settings.json:
        styles = {pattern: style_code(style) for pattern, style in found.config.plan.items()}
        lies: dict[str, Any] = {"batch": found.config.batch, "sequence": found.config.sequence}
        if found.searched.pipeline is not None:
            lies["pipeline"] = asdict(found.searched.pipeline)
        told = {"seconds": found.searched.seconds, "bytes": found.searched.nbytes, "left_out": found.left_out}
        print_json({"mesh": found.mesh.sizes, "plan": styles, **lies, **told})
        return OK
    print_text(found.text())
    return OK


def _model(settings: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the module, a batch, and the loss if there is one."""
    if names_function(settings.model):
        made = call_function(settings.model)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not hasattr(made[0], "named_modules"):
            raise UsageError(f"meshwright parallelize: {settings.model} returns a {type(made).__name__}\n{WRITE}")
        model, batch, *loss = made
        return model, [batch] if isinstance(batch, Tensor) else batch, loss[0] if loss else None
    return _of_config(read_object(settings.model, WRITE.strip().removeprefix("fix: ")), settings)


def _of_config(config: dict[str, Any], settings: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return a model of transformers on the meta device, a batch and the loss; module names are those of its code."""
    import torch

    if "model_type" not in config:
        raise UsageError(f"meshwright parallelize: {settings.model} has no model_type\n{WRITE}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            "meshwright parallelize: the package transformers, which defines the modules, is missing\n"
            "  fix: run pip install 'meshwright[hf]', or pass file.py:function"
        ) from error
    told: dict[str, Any] = dict(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(told.pop("model_type"), **told))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"meshwright parallelize: {settings.model}: {said}\n{WRITE}") from error
    tokens = torch.empty(settings.batch, settings.sequence, dtype=torch.long, device="meta")
    return model, (tokens, tokens), _next_token


def _next_token(out: Any, labels: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(out.logits.flatten(0, 1), labels.flatten())
