"""A short training loop: steps, reports, evaluations, checkpoints, and the end of a run.

Write your own loop if you need another one: every line here calls a public function. This loop guarantees two things. A
run that was stopped resumes as if it had not been stopped, and gradients that are not finite are never applied.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint import current_world, hold_folder
from meshwright.cost import device_of, name_of_device
from meshwright.layout import TorchValue, device_name, platform_of
from meshwright.search import MeshPlan
from meshwright.tensor import DistTensor, tensors_in

from .._errors import BatchError, NonFiniteGradientError, TrainingError
from ..marks.tensors import unshard_dtensor
from ..static.to_static import DistModel
from .background_saves import ON_FAILED_SAVE, BackgroundSaves
from .clip_grad_norm import clip_to, gradient_norm
from .equal_options import check_equal_options
from .microbatches import Microbatches
from .state_checkpoint import latest_checkpoint
from .stop_signals import STOPPED, stop_signals
from .training_checkpoint import load_checkpoint, save_checkpoint
from .training_events import EventListener, StepEvent, Where, event_reporter

Loss = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Training:
    """The length of a run of `mw.train`, and its work beside the steps.

    `folder` holds checkpoints, one each `save_every` steps and one at the end, of which the latest `keep` stay. It also
    holds the log `log.jsonl`, unless `log` names another file. A failure to write a checkpoint is reported on all
    ranks. Then the run stops, or with `on_failed_save="continue"` goes on and tries the next one. `clip` is the largest
    total norm of the gradients. `flops` is the work of a step (default: 6 per parameter and token). `device` is a name
    that `meshwright.cost` knows. `plan` is shown in the banner: a result of `mw.plan`, or a line that says how the
    model is divided and why.

    Raises:
        TrainingError: a number of steps is less than 1, or checkpoints have no folder.
    """

    steps: int
    folder: Where | None = None
    save_every: int | None = None
    keep: int | None = 2
    resume: bool = True
    evaluate_every: int | None = None
    log: Where | None = None
    tensorboard: Where | None = None
    clip: float | None = None
    autocast: torch.dtype | None = None
    device: str | None = None
    flops: float | None = None
    plan: MeshPlan | str | None = None
    show: bool = True
    on_failed_save: str = "stop"

    def __post_init__(self) -> None:
        if self.on_failed_save not in ON_FAILED_SAVE:
            raise TrainingError(
                f"on_failed_save={self.on_failed_save!r}",
                "no such choice",
                "a run stops or continues after a failed save",
                'pass on_failed_save="stop" or "continue"',
            )
        every = {"steps": self.steps, "save_every": self.save_every, "evaluate_every": self.evaluate_every}
        wrong = next((name for name, n in every.items() if n is not None and n < 1), None)
        if wrong is not None:
            raise TrainingError(
                f"{wrong}={every[wrong]}",
                "a number below one",
                "the number of steps must be at least 1",
                f"pass {wrong}=100",
            )
        if self.save_every is not None and self.folder is None:
            raise TrainingError(
                f"save_every={self.save_every}",
                "no folder",
                "checkpoints are written to this folder",
                'pass folder="run"',
            )


_OPTIONS_OF_A_RANK = ("folder", "log", "tensorboard", "show", "device", "flops", "plan")
"""Options that may differ between ranks: paths, and what is shown."""


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """The end of a run: the step it began after, its losses, whether it was asked to stop, the last checkpoint."""

    begun: int
    losses: tuple[float, ...]
    stopped: bool
    checkpoint: Path | None

    @property
    def exit_code(self) -> int:
        """Return the code for `sys.exit`: 0, or 143 if SIGTERM had asked the run to stop."""
        return STOPPED if self.stopped else 0


def train(
    model: nn.Module | Microbatches,
    optimizer: Optimizer,
    data: Iterable[Any],
    training: Training,
    *,
    loss: Loss | None = None,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    evaluation: Iterable[Any] | None = None,
    tell: EventListener | None = None,
) -> TrainingEnd:
    """Train until step `training.steps`, from the latest checkpoint of the folder on; every rank makes the call.

    Batches are tuples or dicts of the model's arguments. `loss` gets the model's result and the last part of a batch.
    Without it, the model returns the loss, or an object with the attribute `loss`. `data` is iterated over repeatedly,
    and needs `state_dict` if there is a folder. `scheduler` is stepped once per step. Rank 0 reports events on its
    standard error, in the log, and by calling `tell` with each event. At SIGTERM, the step is finished and saved. With
    a `scaler`, for float16, all ranks skip an update with gradients that are not finite, and go on with a smaller
    scale.

    Raises:
        NonFiniteGradientError: gradients are not finite and there is no `scaler`; raised on all ranks before the
            update.
    """
    return _Run(model, optimizer, data, training, loss, scheduler, scaler, evaluation).go(tell)


class _Run:
    """The parts of a run, and its current step."""

    def __init__(
        self,
        model: nn.Module | Microbatches,
        optimizer: Optimizer,
        data: Iterable[Any],
        training: Training,
        loss: Loss | None,
        scheduler: Any,
        scaler: torch.amp.GradScaler | None,
        evaluation: Iterable[Any] | None,
    ) -> None:
        _check(model, data, training, scaler)
        if isinstance(model, Microbatches):
            model = model.under(training.autocast or model.autocast, scaler)
        self.model, self.optimizer, self.data, self.scheduler = model, optimizer, data, scheduler
        self.scaler = scaler if scaler is not None else torch.amp.GradScaler(enabled=False)
        self.network = model.model if isinstance(model, Microbatches) else model
        self.loss = model.loss if isinstance(model, Microbatches) else loss
        self.training, self.evaluation = training, evaluation
        self.step = 0
        self.device = next(self.network.parameters()).device.type
        self.peak = _peak(training.device, self.device)
        self.saves = BackgroundSaves(training.on_failed_save)

    def go(self, tell: EventListener | None) -> TrainingEnd:
        how, world_here = self.training, current_world()
        self._check_options()
        self._resume()
        begun, losses, stopped = self.step, list[float](), False
        with ExitStack() as stack:
            stop = stack.enter_context(stop_signals())
            say: EventListener = (
                stack.enter_context(event_reporter(*self._listeners(tell))) if world_here.rank == 0 else _silent
            )
            say(self._start())
            batches = _endless(self.data)
            while self.step < how.steps and not stopped:
                found, stopped = self._one(batches, stop, say)
                losses.append(found.loss)
                say(found.event)
                if self.evaluation is not None and _is_due(self.step, how.evaluate_every):
                    say({"event": "evaluation", "step": self.step, "loss": self._evaluated(self.evaluation)})
                if stopped or self.step == how.steps or _is_due(self.step, how.save_every):
                    self._save(say)
            self.saves.finish(self.step, say)
            say({"event": "end", "step": self.step, "stopped": stopped, "checkpoint": _text(self.saves.path)})
        return TrainingEnd(begun, tuple(losses), stopped, self.saves.path)

    def _listeners(
        self, tell: EventListener | None
    ) -> tuple[int, Where | None, Where | None, bool, EventListener | None]:
        training, log = self.training, self.training.log
        if log is None and training.folder is not None:
            log = Path(training.folder) / "log.jsonl"
        return training.steps, log, training.tensorboard, training.show, tell

    def _check_options(self) -> None:
        """Raise DisagreementError on all ranks if the options of the run differ between ranks."""
        names = [field.name for field in fields(Training) if field.name not in _OPTIONS_OF_A_RANK]
        check_equal_options("mw.train", {name: getattr(self.training, name) for name in names}, current_world())

    def _resume(self) -> None:
        if self.training.folder is None:
            return
        hold_folder(self.training.folder, current_world())
        found: str | None = current_world().gathered(_text(latest_checkpoint(self.training.folder)))[0]
        if found is None:
            return
        if not self.training.resume:
            raise TrainingError(
                f"a run in {self.training.folder} with resume=False",
                f"{found} from an earlier run",
                "checkpoints are never overwritten",
                "pass another folder, or resume=True to continue the run",
            )
        resumed = load_checkpoint(
            found, self.network, self.optimizer, self.scheduler, data=_CheckpointExtras(self.data, self.scaler)
        )
        self.step, self.saves.path = resumed.step, resumed.path

    def _start(self) -> dict[str, Any]:
        """Return the event of the banner."""
        meshes = dict.fromkeys(repr(p.mesh) for p in self.network.parameters() if isinstance(p, DistTensor))
        plan, schedule = self.training.plan, getattr(getattr(self.model, "schedule", None), "name", None)
        predicted = plan if isinstance(plan, MeshPlan) else None
        return {
            "event": "start",
            "step": self.step,
            "steps": self.training.steps,
            "goes_on_from": _text(self.saves.path),
            "ranks": current_world().size,
            "meshes": list(meshes),
            "schedule": schedule,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "plan": predicted.how if predicted else plan,
            "predicted_seconds": predicted.seconds if predicted else None,
            "predicted_bytes": predicted.nbytes if predicted else None,
        }

    def _one(self, batches: Iterator[Any], stop: Callable[[], bool], say: EventListener) -> tuple[StepEvent, bool]:
        """Run one step; return its numbers, and True if some rank was asked to stop."""
        start = perf_counter()
        batch = next(batches)
        if isinstance(self.model, Microbatches):
            loss = self.model(*_arguments(batch)[0])
        else:
            with self._autocast():
                loss = self._loss_of(batch)
            self.scaler.scale(loss).backward()
        value = unshard_dtensor(loss.detach()).item()
        norm = self._norm(value, say)
        rate = float(self.optimizer.param_groups[0]["lr"])
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1
        stopped, memory, failed = _largest(float(stop()), float(_peak_memory(self.device)), float(self.saves.failed))
        if failed:
            self.saves.finish(self.step, say)
        seconds, tokens = perf_counter() - start, _tokens(batch)
        devices = current_world().size
        found = StepEvent(
            self.step,
            value,
            norm,
            rate,
            seconds,
            tokens / seconds / devices,
            self._mfu(tokens, seconds * devices),
            int(memory),
            scale,
        )
        return found, bool(stopped)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.training.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device, dtype)

    def _norm(self, loss: float, say: EventListener) -> float:
        """Return the norm of all gradients, and clip them. Raises NonFiniteGradientError."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(parameters)
        if not norm.isfinite() and not self.scaler.is_enabled():
            say({"event": "error", "step": self.step + 1, "loss": loss, "gradient_norm": norm.item()})
            raise _non_finite(self.network, self.step + 1, loss, norm.item())
        if self.training.clip is not None:
            clip_to(parameters, self.training.clip, norm)
        return norm.item()

    def _mfu(self, tokens: int, device_seconds: float) -> float | None:
        if self.peak is None:
            return None
        flops = self.training.flops
        if flops is None:
            flops = 6.0 * tokens * sum(p.numel() for p in self.network.parameters())
        return flops / (device_seconds * self.peak(self.training.autocast or next(self.network.parameters()).dtype))

    def _loss_of(self, batch: TorchValue) -> Tensor:
        given, named = _arguments(batch)
        if self.loss is None:
            out = self.network(*given, **named)
            return out if isinstance(out, Tensor) else out.loss
        *inputs, labels = given
        return self.loss(self.network(*inputs), labels)

    def _evaluated(self, batches: Iterable[Any]) -> float:
        """Return the mean loss of all batches, with the model in evaluation mode."""
        was = self.network.training
        self.network.eval()
        with torch.no_grad(), self._autocast():
            losses = [unshard_dtensor(self._loss_of(batch)).item() for batch in batches]
        self.network.train(was)
        return sum(losses) / len(losses) if losses else float("nan")

    def _save(self, say: EventListener) -> None:
        folder = self.training.folder
        if folder is None:
            return
        self.saves.begin(
            self.step,
            lambda: save_checkpoint(
                folder,
                self.step,
                self.network,
                self.optimizer,
                self.scheduler,
                data=_CheckpointExtras(self.data, self.scaler),
                async_save=True,
                keep=self.training.keep,
            ),
            say,
        )


@dataclass(frozen=True, slots=True)
class _CheckpointExtras:
    """The part of a checkpoint beside model, optimizer and scheduler: the place in the data, and the loss scaler."""

    data: Any
    scaler: torch.amp.GradScaler

    def state_dict(self) -> object:
        place = self.data.state_dict()
        return {"data": place, "loss_scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else place

    def load_state_dict(self, state: Any) -> None:
        scale = state.get("loss_scaler") if isinstance(state, dict) else None
        self.data.load_state_dict(state if scale is None else state["data"])
        if scale is not None and self.scaler.is_enabled():
            self.scaler.load_state_dict(scale)


def _check(model: object, data: object, training: Training, scaler: object) -> None:
    """Raise TrainingError for a model or scaler that does not fit, BatchError for data that cannot resume."""
    if isinstance(model, Microbatches) and model.scaler not in (None, scaler):
        raise TrainingError(
            "mw.train of microbatches with their own scaler",
            "a training loop without this scaler",
            "the loop would take scaled gradients for unscaled ones",
            "pass the scaler to mw.train(..., scaler=scaler) instead",
        )
    if isinstance(model, DistModel):
        raise TrainingError(
            "mw.train of a static model",
            "a step that includes the update",
            "this loop checks the gradients before the update",
            "pass the model itself, or mw.microbatched(model, …) for a pipeline; or loop over dist_model(*batch)",
        )
    if training.folder is not None and not hasattr(data, "state_dict"):
        raise BatchError(
            f"a run in {training.folder} that can resume",
            f"a {type(data).__name__} without state_dict",
            "nothing records which samples were seen",
            "pass mw.shard_dataloader(DataLoader(data, batch_sampler=mw.GlobalSampler(data, batch)), mesh, axis)",
        )


def _non_finite(network: nn.Module, step: int, loss: float, norm: float) -> NonFiniteGradientError:
    """Return the error that names the parameters; every rank checks all of them."""
    of = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    wrong = [name for name, grad in of.items() if not unshard_dtensor(grad.isfinite().all()).item()]
    names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return NonFiniteGradientError(
        f"the update of step {step}",
        f"a gradient norm of {norm} and a loss of {loss:g}; not finite: {names}",
        "the update would write NaN into every parameter",
        "lower the learning rate, pass clip=1.0, or use other data. The parameters are those from before the step",
    )


def _endless(data: Iterable[Any]) -> Iterator[Any]:
    """Yield batches epoch after epoch; the first may be over already. Raises BatchError for two empty epochs."""
    empty = 0
    while empty < 2:
        empty += 1
        for batch in data:
            empty = 0
            yield batch
    raise BatchError(
        "the next batch",
        f"a {type(data).__name__} that yields no batch",
        "data are iterated over repeatedly",
        "pass a list or a DataLoader, not an iterator that ends",
    )


def _arguments(batch: TorchValue) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)), {}


def _tokens(batch: TorchValue) -> int:
    """Return the elements of the first input if they are integers, else its rows."""
    first = next(tensors_in(batch), None)
    if first is None or first.dim() == 0:
        return 1
    return first.shape[0] if first.is_floating_point() else first.numel()


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _largest(*numbers: float) -> list[float]:
    """Return the largest value over all ranks, for each of the numbers."""
    here = current_world()
    if here.communicator is None or here.size == 1:
        return list(numbers)
    found = here.communicator.all_reduce(torch.tensor(numbers, dtype=torch.float64, device="cpu"), "max", here.ranks)
    return found.tolist()


def _peak_memory(on: str) -> int:
    """Return the peak memory of this rank in bytes: of its device if that counts it, else of its process."""
    if platform_of(on).counts_memory:
        return torch.accelerator.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak(device: str | None, on: str) -> Callable[[torch.dtype], float] | None:
    """Return the peak operations per second by dtype of a device, given by name or found, if known."""
    reported = device_name(on) if device is None else None
    if reported is not None:
        device = name_of_device(reported)
    return None if device is None else device_of(device).peak


def _text(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _silent(_: object) -> None:
    """Ignore an event, on ranks other than 0."""
