"""One rank of `meshwright quantize`: build a model, shard it, quantize it, and save it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.cli.console.language_model import build_model
from meshwright.cli.console.parser import UsageError
from meshwright.engine import shard_tensor, unshard_dtensor
from meshwright.layout import ProcessMesh, Shard
from meshwright.quantize import QuantizedExperts, QuantizedLinear, Scheme, quantize, save_quantized

HELD_OUT = 32
"""Most batches whose perplexity is measured."""


@dataclass(frozen=True)
class Job:
    """A model, its quantization, and the folder of the result."""

    model: str
    scheme: Scheme
    layers: Sequence[str]
    batches: Sequence[Any]
    samples: int
    out: str
    files: Mapping[str, bytes]
    resume: str | None = None
    """The folder of calibrated blocks."""

    @property
    def held_out(self) -> Sequence[Any]:
        """Return the batches whose perplexity is measured: the last eighth; they are not used for calibration."""
        count = len(self.batches)
        return self.batches[count - min(max(1, count // 8), HELD_OUT) :] if count else ()

    @property
    def calibration(self) -> Sequence[Any]:
        """Return the batches for calibration."""
        return self.batches[: len(self.batches) - len(self.held_out)][: self.samples]


@dataclass(frozen=True)
class Outcome:
    """The relative error of each layer, and the perplexity before and after; None if it could not be measured."""

    errors: dict[str, float]
    before: float | None
    after: float | None


def quantize_on_rank(job: Job, ranks: int, progress: Callable[[str], None]) -> Outcome:
    """Quantize and save the model on this rank of several.

    The first dim of each weight that is quantized is sharded, so each rank computes its share of the products.
    """
    model = build_model(job.model).eval()
    if ranks > 1:
        _shard_first_dims(model, job.layers, ranks)
    before = perplexity(model, job.held_out)
    model = quantize(model, job.scheme, job.calibration or None, progress=progress, resume=job.resume)
    after = perplexity(model, job.held_out)
    errors = _errors(model)
    save_quantized(model, job.out, files=job.files)
    return Outcome(errors, before, after)


def _shard_first_dims(model: nn.Module, layers: Iterable[str], ranks: int) -> None:
    """Shard the weights of layers, and the experts that are named by their parameter."""
    mesh = ProcessMesh(list(range(ranks)), ["ranks"])
    modules = dict(model.named_modules())
    for name in layers:
        owner, _, key = (name, "", "weight") if name in modules else name.rpartition(".")
        setattr(modules[owner], key, shard_tensor(modules[owner].get_parameter(key), mesh, [Shard(0)]))


def _errors(model: nn.Module) -> dict[str, float]:
    """Return the relative error of each quantized layer, and of the experts by the name of their parameter."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            found[name or "the model"] = module.error or 0.0
        if isinstance(module, QuantizedExperts):
            found |= {f"{name}.{key}": told.error or 0.0 for key, told in module.stored_experts.items()}
    return found


def check_tokens(model: nn.Module, batches: Iterable[Any]) -> None:
    """Raise UsageError if a token is larger than the model's first embedding."""
    table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    tokens = [x for x in map(_tokens_of, batches) if x is not None]
    if table is None or not tokens:
        return
    largest = max(int(x.max()) for x in tokens)
    if largest >= table.num_embeddings:
        raise UsageError(
            f"meshwright quantize: the data has the token {largest}\n"
            f"  why: the model has {table.num_embeddings} tokens; without a tokenizer, bytes are tokens\n"
            "  fix: pass a folder with the model's tokenizer, or --data file.py:function"
        )


def _tokens_of(batch: Any) -> Tensor | None:
    """Return the tokens of a batch: its first tensor, if it holds integers."""
    first: Any = batch
    if isinstance(batch, Mapping):
        first = batch.get("input_ids")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    elif isinstance(batch, (tuple, list)) and batch:
        first = batch[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(first, Tensor) or first.dim() != 2 or first.dtype not in (torch.int64, torch.int32):
        return None
    return first


@torch.no_grad()
def perplexity(model: nn.Module, batches: Iterable[Any]) -> float | None:
    """Return exp of the mean loss over all tokens; None if there is no batch, or the model gives no loss.

    The result of the model is the loss of a batch, logits of shape [batch, sequence, vocabulary], or an object that has
    `logits`. The loss of logits is that of predicting each token from those before it.
    """
    total, count = 0.0, 0
    for batch in batches:
        found = _loss(_result(model, batch), _tokens_of(batch))
        if found is None:
            return None
        total, count = total + found[0] * found[1], count + found[1]
    return exp(min(total / count, 700.0)) if count else None


def _result(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss(result: Any, tokens: Tensor | None) -> tuple[float, int] | None:
    """Return the mean loss of a batch, and the number of predicted tokens."""
    found = getattr(result, "logits", result)
    if not isinstance(found, Tensor):
        return None
    whole = unshard_dtensor(found)
    if whole.dim() == 0:
        return float(whole), 1 if tokens is None else tokens.numel()
    if tokens is None or whole.shape[:-1] != tokens.shape or tokens.shape[1] < 2:
        return None
    loss = torch.nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    return float(loss), tokens[:, 1:].numel()
