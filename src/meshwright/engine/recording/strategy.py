"""The options of static programs, in one typed place, which is read from and written to TOML.

Names are those of `paddle.distributed.Strategy` if it has the option. Every option has an effect on the program, or is
refused with a reason; `program.changes` lists the effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from math import inf
from typing import Any, Literal, get_type_hints

import torch

from meshwright.graph import Pass, Scaling, registered_passes
from meshwright.layout import JsonValue, Spec
from meshwright.passes import (
    Amp,
    Bucket,
    Cancel,
    Foreach,
    FuseAccumulation,
    FuseActivation,
    FuseAttention,
    FuseLoss,
    FuseNorm,
    InPlace,
    Linear,
    Merge,
    Recompute,
    Regather,
    Release,
    Scatter,
    SequenceParallel,
    ShardParameters,
    Share,
    Tidy,
)

from .._errors import StrategyError
from .default_overlap import with_overlap

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names in `amp.dtype` → dtypes."""

FUSED: Mapping[str, type[Pass]] = {p.name: p for p in (FuseNorm, FuseAttention, FuseActivation, FuseLoss)}
"""Names in `fused_passes_list` → passes."""


@dataclass(frozen=True)
class Sharding:
    """ZeRO: states (stage 1), gradients (2) and parameters (3) sharded along the axes that shard the batch.

    `axes` names other mesh axes; tensors of fewer than `least` elements stay whole. In stage 3 parameters are gathered
    again for the backward pass, unless `regather` is off; in a pipeline they are gathered once per step.
    """

    enable: bool = False
    stage: int = 1
    axes: tuple[str, ...] | None = None
    least: int = 1024
    regather: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise StrategyError(
                f"sharding.stage = {self.stage}",
                "no such stage",
                "ZeRO has the stages 1, 2 and 3",
                "set stage = 1 to shard states, 2 for gradients too, 3 for parameters too",
            )


@dataclass(frozen=True)
class MixedPrecision:
    """Mixed precision: operators in half precision, parameters and states as they are (O1), or nearly everything (O2).

    O1 is as `torch.autocast`. In float16 the loss is scaled as by `torch.amp.GradScaler`. The scale begins at
    `init_loss_scaling`. It is multiplied by `decr_ratio` after a step whose gradients are not all finite on all ranks,
    which no rank applies. It is multiplied by `incr_ratio` after `incr_every_n_steps` steps without such gradients.
    `DistModel.loss_scale` holds the scale.
    """

    enable: bool = False
    dtype: str = "bfloat16"
    level: str = "O1"
    init_loss_scaling: float = 65536.0
    incr_every_n_steps: int = 2000
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.level not in ("O1", "O2"):
            raise StrategyError(
                f"amp.dtype = {self.dtype!r}, amp.level = {self.level!r}",
                "an unknown dtype or level",
                "dtype is bfloat16 or float16, and level is O1 or O2",
                'set dtype = "bfloat16", level = "O1"',
            )
        if not (0 < self.init_loss_scaling < inf and self.incr_every_n_steps >= 1):
            raise StrategyError(
                f"amp.init_loss_scaling = {self.init_loss_scaling:g}, incr_every_n_steps = {self.incr_every_n_steps}",
                "a scale or a number of steps that is out of range",
                "the scale must be positive and finite, the number of steps at least 1",
                "set init_loss_scaling = 65536.0, incr_every_n_steps = 2000",
            )
        if not 0 < self.decr_ratio < 1 < self.incr_ratio < inf:
            raise StrategyError(
                f"amp.incr_ratio = {self.incr_ratio:g}, amp.decr_ratio = {self.decr_ratio:g}",
                "a loss scale that would not fall after an overflow, or not grow again",
                "decr_ratio must be between 0 and 1, and incr_ratio above 1",
                "set incr_ratio = 2.0, decr_ratio = 0.5",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def scaling(self) -> Scaling | None:
        """Return the rules of the loss scale, or None if the loss is not scaled."""
        scaled = self.enable and self.dtype == "float16"
        return Scaling(self.incr_ratio, self.decr_ratio, self.incr_every_n_steps) if scaled else None


@dataclass(frozen=True)
class GradientMerge:
    """Gradient accumulation: the batch in `k_steps` pieces, and one update for all of them.

    The gradients of the pieces are summed, or averaged with `avg`. With `fused`, the matrix products that compute a
    piece's gradients add them to those of the earlier pieces.
    """

    enable: bool = False
    k_steps: int = 1
    avg: bool = True
    fused: bool = True

    def __post_init__(self) -> None:
        if self.k_steps < 1:
            raise StrategyError(
                f"gradient_merge.k_steps = {self.k_steps}",
                "a number below one",
                "a batch needs at least one piece",
                "set k_steps = 4",
            )


@dataclass(frozen=True)
class Recomputing:
    """Activations that are recomputed in the backward pass: those of matching layers, or enough to fit a `budget`.

    `layers` are patterns of module paths ("blocks.*"); `budget` is the fraction of activations that may be kept.
    """

    enable: bool = False
    layers: tuple[str, ...] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.enable and bool(self.layers) == (self.budget is not None):
            raise StrategyError(
                "recompute.enable = true",
                f"layers = {list(self.layers)}, budget = {self.budget}",
                "recomputation is selected either by layers or by a budget",
                'set layers = ["blocks.*"], or budget = 0.5',
            )


@dataclass(frozen=True)
class FusedPasses:
    """Replacement of operators written out by hand by fused ones: all kinds, or those in `fused_passes_list`."""

    enable: bool = False
    fused_passes_list: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.fused_passes_list if name not in FUSED]
        if unknown:
            raise StrategyError(
                f"fused_passes.fused_passes_list with {unknown[0]!r}",
                "no such pass",
                f"the passes are {', '.join(FUSED)}",
                f"use one of {list(FUSED)}",
            )


@dataclass(frozen=True)
class DpOptimization:
    """Reductions of gradients in buckets of `fuse_grad_size_in_MB`, and one reduction for a sum of reductions."""

    enable: bool = True
    fuse_grad_size_in_MB: int = 25
    gradient_sync_after_accumulate: bool = True


@dataclass(frozen=True)
class MpOptimization:
    """Layout conversions: equal ones shared, inverse ones cancelled, reduce-scatter for reductions before a slice."""

    enable: bool = True


@dataclass(frozen=True)
class SpOptimization:
    """Sequence parallelism: between layers sharded along `axis`, each of its ranks works on its part of dim `dim`."""

    enable: bool = False
    axis: str = "tp"
    dim: int = 1


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: the batch in `accumulate_steps` microbatches that run through the stages by a schedule.

    `schedule_mode` is a name ("1F1B", "ZB-H1": `meshwright schedule list`) or the text of a table. "auto" takes the
    shortest known schedule for the work of the model's chunks, and `DistModel.pipeline` has the reason. With "auto",
    `capacity` is the most pairs (chunk, microbatch) that a rank may hold from their forward to their backward pass.
    Stages are the meshes to which marks move values. Losses and gradients are means over the microbatches.

    `asynchronous` accepts schedules that update weights while microbatches are in flight ("PipeDream",
    "PipeDream-2BW"). A step is then several updates, with gradients of older weights, which changes the meaning of the
    optimizer.
    """

    enable: bool = False
    schedule_mode: str = "auto"
    accumulate_steps: int = 1
    capacity: float | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.capacity is not None and self.schedule_mode != "auto":
            raise StrategyError(
                f"pipeline.capacity = {self.capacity:g}, schedule_mode = {self.schedule_mode.splitlines()[0]!r}",
                "a fixed schedule",
                "capacity limits the schedules that a search may choose",
                'set schedule_mode = "auto", or leave out capacity',
            )
        if self.asynchronous and self.schedule_mode == "auto":
            raise StrategyError(
                'pipeline.asynchronous = true, schedule_mode = "auto"',
                "a schedule search",
                "the search chooses only synchronous schedules",
                'set schedule_mode = "PipeDream-2BW"',
            )
        if self.accumulate_steps < 1:
            raise StrategyError(
                f"pipeline.accumulate_steps = {self.accumulate_steps}",
                "a number below one",
                "a batch needs at least one microbatch",
                "set accumulate_steps = 8",
            )


@dataclass(frozen=True)
class Strategy:
    """The options of `to_static`; `passes` run after the passes of the options, but before the one for writes in place.

    `foreach` updates all parameters by few operators. `release` updates each parameter as soon as its gradient exists,
    and replaces `foreach`. `max_programs` bounds the number of recordings of a model. Without `full_graph`, a model
    that cannot be one program runs in pieces, and options of the whole step are then refused. With Inductor, which
    groups updates itself, `inplace` selects whether kernels write parameters and states in place. With `cuda_graph`, a
    device replays training steps as one graph (`torch.accelerator.Graph`) once their addresses and numbers stay the
    same; a step that needs the host is refused.

    Raises:
        StrategyError: an option has no such value, or two options exclude each other.
    """

    sharding: Sharding = field(default_factory=Sharding)
    amp: MixedPrecision = field(default_factory=MixedPrecision)
    recompute: Recomputing = field(default_factory=Recomputing)
    gradient_merge: GradientMerge = field(default_factory=GradientMerge)
    fused_passes: FusedPasses = field(default_factory=FusedPasses)
    pipeline: Pipeline = field(default_factory=Pipeline)
    dp_optimization: DpOptimization = field(default_factory=DpOptimization)
    mp_optimization: MpOptimization = field(default_factory=MpOptimization)
    sp_optimization: SpOptimization = field(default_factory=SpOptimization)
    compiler: Literal["none", "inductor"] = "none"
    full_graph: bool = True
    max_programs: int = 16
    foreach: bool = True
    release: bool = False
    inplace: bool = True
    cuda_graph: bool = False
    passes: tuple[Pass, ...] = ()
    layouts: Mapping[str, Spec] | None = None

    def __post_init__(self) -> None:
        if self.compiler not in ("none", "inductor"):
            raise StrategyError(
                f"compiler = {self.compiler!r}",
                "no such compiler",
                "programs run node by node or through Inductor",
                'set compiler = "none" or "inductor"',
            )
        if self.cuda_graph:
            self._check_graph()
        if self.amp.scaling is not None and self.release:
            raise StrategyError(
                'amp.dtype = "float16", release = true',
                "updates as soon as each gradient exists",
                "float16 decides on the update when all gradients exist",
                "set release = false",
            )
        if any(isinstance(p, Amp) and p.dtype == torch.float16 for p in self.passes):
            raise StrategyError(
                "Amp(torch.float16) among passes",
                "no loss scale",
                "gradients in float16 underflow without a loss scale",
                'set amp = {"enable": True, "dtype": "float16"}',
            )
        if self.pipeline.enable and self.release:
            raise StrategyError(
                "pipeline.enable = true, release = true",
                "updates as soon as each gradient exists",
                "the gradients of a pipeline exist only after the last microbatch",
                "set release = false",
            )
        if self.pipeline.enable and self.pipeline.asynchronous and self.amp.scaling is not None:
            raise StrategyError(
                'pipeline.asynchronous = true, amp.dtype = "float16"',
                "several updates in a step, and a loss scale",
                "each update would have its own scale, and gradients in flight another one",
                'set dtype = "bfloat16"',
            )
        if self.pipeline.enable and self.gradient_merge.enable:
            raise StrategyError(
                "pipeline.enable = true, gradient_merge.enable = true",
                "two options that split the batch",
                "a pipeline already adds up the gradients of its microbatches",
                "use pipeline.accumulate_steps alone",
            )

    def _check_graph(self) -> None:
        """Raise StrategyError for an option with which a step needs the host, so that no device can replay it."""
        if self.compiler == "inductor":
            raise StrategyError(
                'cuda_graph = true, compiler = "inductor"',
                "compiled kernels that read numbers from the host",
                "a replay would read them while the host writes those of the next step",
                'set compiler = "none"',
            )
        if self.amp.scaling is not None:
            raise StrategyError(
                'cuda_graph = true, amp.dtype = "float16"',
                "updates that are skipped if a gradient is not finite",
                "the host reads whether an update was skipped",
                'set dtype = "bfloat16"',
            )

    @property
    def merge(self) -> Merge | None:
        """Return how a batch is split for gradient accumulation, or None."""
        merge = self.gradient_merge
        return Merge(merge.k_steps, merge.avg) if merge.enable and merge.k_steps > 1 else None

    @property
    def microbatches(self) -> Merge | None:
        """Return how a pipeline splits a batch, or None without a pipeline."""
        return Merge(self.pipeline.accumulate_steps) if self.pipeline.enable else None

    @classmethod
    def of(cls, **options: Any) -> Strategy:
        """Return the strategy with these options, sections as mappings, as in a TOML file.

        Raises:
            StrategyError: a key is unknown (the message names the closest match), or a value has another type.

        >>> Strategy.of(sharding={"enable": True, "stage": 2}).sharding.stage
        2
        """
        passes = tuple(p if isinstance(p, Pass) else _pass(p) for p in options.pop("passes", ()))
        return _built(cls, {**options, "passes": passes}, "")

    def passes_on(
        self, program: Literal["captured", "step", "recorded"], device: torch.device = CPU
    ) -> tuple[Pass, ...]:
        """Return all passes for the captured or the recorded program, in their order.

        A recorded program of a device with streams also has `OverlapSchedule`, with the numbers of that device. In a
        pipeline, the passes for the "step" of one microbatch run before the step is taken apart; the others run after.
        """
        if program == "step":
            return tuple(self._recomputing())
        own = [p for p in self.passes if p.on == program]
        if program == "captured":
            return (*self._captured(), *own)
        own = with_overlap(own, device)
        return (*self._recorded(), *own, *([InPlace()] if self.inplace and self.compiler == "none" else []))

    def autocast(self, batch: Iterable[Any]) -> AbstractContextManager[Any]:
        """Return the autocast context for the capture, so that the model sees the dtypes of the program."""
        amp = next((p for p in self.passes_on("captured") if isinstance(p, Amp)), None)
        kinds = [x.device.type for x in batch if isinstance(x, torch.Tensor) and x.device.type != "meta"]
        device = kinds[0] if kinds else torch.get_default_device().type
        return nullcontext() if amp is None else torch.autocast(device, amp.dtype)

    def _captured(self) -> Iterator[Pass]:
        if self.fused_passes.enable:
            chosen = self.fused_passes.fused_passes_list or tuple(FUSED)
            yield from (FUSED[name]() for name in chosen)
        if self.amp.enable:
            yield Amp(self.amp.torch_dtype, "O1" if self.amp.level == "O1" else "O2")
        if self.sp_optimization.enable:
            yield SequenceParallel(self.sp_optimization.axis, self.sp_optimization.dim)
        if self.sharding.enable and self.sharding.stage == 3:
            yield ShardParameters(self.sharding.axes, self.sharding.least)

    def _recomputing(self) -> Iterator[Pass]:
        if self.recompute.enable:
            yield Recompute(policy=self.recompute.layers, budget=self.recompute.budget)

    def _sharded(self) -> Iterator[Pass]:
        """Yield the passes that shard gradients, and gather parameters again."""
        sharding = self.sharding
        scatters = sharding.stage > 1 if sharding.enable else self.mp_optimization.enable
        if scatters:
            yield Scatter()
        if sharding.enable and sharding.stage == 3 and sharding.regather and not self.pipeline.enable:
            yield Regather()

    def _reducing(self) -> Iterator[Pass]:
        """Yield the passes that bundle the reductions of gradients."""
        if self.dp_optimization.enable:
            if self.dp_optimization.gradient_sync_after_accumulate:
                yield Linear()
            yield Bucket(self.dp_optimization.fuse_grad_size_in_MB * 2**20)

    def _recorded(self) -> Iterator[Pass]:
        yield Tidy()
        if self.mp_optimization.enable:
            yield Share()
            yield Cancel()
        yield from self._sharded()
        if not self.pipeline.enable:
            yield from self._recomputing()
        if self.merge is not None and self.gradient_merge.fused:
            yield FuseAccumulation()
        yield from self._reducing()
        if self.release:
            yield Release()
        elif self.foreach and self.compiler == "none":
            yield Foreach()


def _built(kind: type[Any], given: Mapping[str, Any], path: str) -> Any:
    hints, known = get_type_hints(kind), {f.name for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise _unknown(path + key, known)
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            values[key] = _built(hints[key], value, f"{path}{key}.")  # pyright: ignore[reportArgumentType] - keys of a TOML table are str
        else:
            values[key] = _checked(value, hints[key], path + key)
    return kind(**values)


def _checked(value: JsonValue, hint: object, path: str) -> JsonValue:
    value = tuple(value) if isinstance(value, list) else value
    wanted = _ACCEPTED.get(hint)
    wrong = wanted is not None and (not isinstance(value, wanted) or (hint is not bool and isinstance(value, bool)))
    if wrong or is_dataclass(hint):
        raise StrategyError(
            f"{path} = {value!r}",
            type(value).__name__,
            f"the option is of type {getattr(hint, '__name__', hint)}",
            f"set {path} to a value of that type",
        )
    return value


_ACCEPTED: Mapping[object, type | tuple[type, ...]] = {int: int, bool: bool, float: (int, float), str: str}
"""Type of an option → the types of the values that it accepts; a bool is accepted only for a bool."""


def _pass(entry: Mapping[str, Any]) -> Pass:
    name, known = entry.get("name", ""), registered_passes()
    if name not in known:
        raise _unknown(f"passes.name = {name!r}", set(known))
    return _built(known[name], {k: v for k, v in entry.items() if k != "name"}, f"passes.{name}.")


def _unknown(path: str, known: set[str]) -> StrategyError:
    near = get_close_matches(path.split(".")[-1].split("'")[-2 if "'" in path else -1], known, 1)
    return StrategyError(
        f"the option {path}",
        "no such option",
        f"the known names are {', '.join(sorted(known))}",
        f"write {near[0]}" if near else "write one of these names",
    )
