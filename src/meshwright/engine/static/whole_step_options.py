"""Options that need the whole step as one program, refused for a model in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.graph import Pass
from meshwright.layout import MeshwrightError
from meshwright.passes import Amp, Recompute, Regather, Release, SequenceParallel, ShardParameters

from .._errors import StaticError
from ..recording.strategy import Strategy


@dataclass(frozen=True, slots=True)
class _WholeStepOption:
    """An option, its test on a strategy, the equivalent passes, the reason for the refusal, and the alternative."""

    name: str
    asked: Callable[[Strategy], bool]
    passes: tuple[type[Pass], ...]
    why: str
    write: str


WHOLE_STEP_OPTIONS = (
    _WholeStepOption(
        "sharding", lambda s: s.sharding.enable, (ShardParameters, Regather),
        "the program that updates parameters gathers and scatters them, but here Python updates them",
        "mark parameters with mw.shard_tensor(p, mesh, [mw.Shard(0)])",
    ),
    _WholeStepOption(
        "gradient_merge", lambda s: s.merge is not None, (),
        "the program of a whole step splits its batch, but here no program has the whole batch",
        "loop over parts of the batch: call loss.backward() for each, then optimizer.step() once",
    ),
    _WholeStepOption(
        "pipeline", lambda s: s.pipeline.enable, (),
        "a schedule runs parts of one program of the whole step, but here Python runs between programs",
        "mark the stages and leave out pipeline",
    ),
    _WholeStepOption(
        "sp_optimization", lambda s: s.sp_optimization.enable, (SequenceParallel,),
        "the sequence stays sharded from one layer to the next, but here Python runs between layers",
        "call mw.reshard(x, mesh, [mw.Shard(1)]) in the forward pass",
    ),
    _WholeStepOption(
        "recompute", lambda s: s.recompute.enable, (Recompute,),
        "recomputation is planned in one program of forward and backward pass, but here they are two programs",
        "call torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) in the forward pass",
    ),
    _WholeStepOption(
        "amp.level = 'O2'", lambda s: s.amp.enable and s.amp.level != "O1", (),
        "the program casts parameters and batch once for all readers, but here Python reads them, too",
        'pass amp={"enable": True, "level": "O1"}, which is torch.autocast for programs and for Python',
    ),
    _WholeStepOption(
        "amp.dtype = 'float16'", lambda s: s.amp.scaling is not None, (),
        "the program that updates parameters scales the loss, but here Python updates them",
        'pass amp={"enable": True} for bfloat16, or use the model itself with torch.autocast and torch.amp.GradScaler',
    ),
    _WholeStepOption(
        "an Amp pass", lambda s: False, (Amp,),
        "the Python code between programs would compute in another dtype", 'pass amp={"enable": True}',
    ),
    _WholeStepOption(
        "release", lambda s: s.release, (Release,),
        "the program that updates parameters frees the gradients, but here Python updates them",
        "pass release=False",
    ),
    _WholeStepOption(
        "cuda_graph", lambda s: s.cuda_graph, (),
        "a device replays one program of the whole step, but here Python runs between programs",
        "pass cuda_graph=False",
    ),
    _WholeStepOption(
        "layouts", lambda s: s.layouts is not None, (),
        "layouts name the values of one program, but here are many programs",
        "use marks: mw.shard_tensor for parameters, mw.reshard in the forward pass",
    ),
)  # fmt: skip
"""The options, in the order in which they are refused."""


def refuse_whole_step_options(strategy: Strategy, reason: MeshwrightError) -> None:
    """Raise StaticError for an option that needs the whole step as one program; `reason` is why there is none."""
    for option in WHOLE_STEP_OPTIONS:
        own = next((p for p in strategy.passes if isinstance(p, option.passes)), None)
        if own is None and not option.asked(strategy):
            continue
        raise StaticError(
            f"{option.name if own is None else repr(own)} with Strategy(full_graph=False)",
            f"a model that runs in pieces: {reason.found} ({reason.asked})",
            option.why,
            f"{option.write}; or make the model one program: {reason.write}",
        )
