"""Options that need the whole step as one program, refused for a model in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.graph import Pass
from meshwright.layout import MeshwrightError
from meshwright.passes import Amp, Recompute, Regather, Release, SequenceParallel, ShardParameters

from ._errors import StaticError
from ._strategy import Strategy


@dataclass(frozen=True, slots=True)
class _Option:
    """An option, its test on a strategy, the equivalent passes, the reason for the refusal, and the alternative."""

    name: str
    asked: Callable[[Strategy], bool]
    passes: tuple[type[Pass], ...]
    why: str
    write: str


OF_THE_WHOLE = (
    _Option(
        "sharding", lambda s: s.sharding.enable, (ShardParameters, Regather),
        "what is cut is gathered and scattered by the program that updates parameters, and here Python updates them",
        "parameters marked by mw.shard_tensor(p, mesh, [mw.Shard(0)])",
    ),
    _Option(
        "gradient_merge", lambda s: s.merge is not None, (),
        "the program of a whole step takes its batch in parts, and here no program has the whole batch",
        "a loop over parts of the batch, loss.backward() for each, one optimizer.step()",
    ),
    _Option(
        "pipeline", lambda s: s.pipeline.enable, (),
        "a schedule runs parts of one program of a whole step, and here Python lies between programs",
        "stages as they are marked, without pipeline, or a model that is one program",
    ),
    _Option(
        "sp_optimization", lambda s: s.sp_optimization.enable, (SequenceParallel,),
        "the sequence stays cut from one layer to the next, and Python lies between layers",
        "mw.reshard(x, mesh, [mw.Shard(1)]) in the forward pass",
    ),
    _Option(
        "recompute", lambda s: s.recompute.enable, (Recompute,),
        "layers and bytes are chosen in a program that runs forward and backward, and here those are two",
        "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) in the forward pass",
    ),
    _Option(
        "amp.level = 'O2'", lambda s: s.amp.enable and s.amp.level != "O1", (),
        "parameters and batch are cast once for all that reads them, and what is Python reads them, too",
        'amp={"enable": True, "level": "O1"}, which is torch.autocast for programs and for Python',
    ),
    _Option(
        "amp.dtype = 'float16'", lambda s: s.amp.scaling is not None, (),
        "the program that updates parameters is the one that scales, and here Python updates them",
        'amp={"enable": True} in bfloat16, or the model itself with torch.autocast and torch.amp.GradScaler',
    ),
    _Option(
        "an Amp pass", lambda s: False, (Amp,),
        "Python between programs would compute in another dtype than they", 'amp={"enable": True}',
    ),
    _Option(
        "release", lambda s: s.release, (Release,),
        "gradients are let go by the program that updates parameters, and here Python updates them",
        "release=False",
    ),
    _Option(
        "layouts", lambda s: s.layouts is not None, (),
        "layouts go by the names of one program's values, and here are many programs",
        "marks: mw.shard_tensor for parameters, mw.reshard in the forward pass",
    ),
)  # fmt: skip
"""The options, in the order in which they are refused."""


def refuse_of_the_whole(strategy: Strategy, reason: MeshwrightError) -> None:
    """Raise StaticError for an option that needs the whole step as one program; `reason` is why there is none."""
    for option in OF_THE_WHOLE:
        own = next((p for p in strategy.passes if isinstance(p, option.passes)), None)
        if own is None and not option.asked(strategy):
            continue
        raise StaticError(
            f"{option.name if own is None else repr(own)} with Strategy(full_graph=False)",
            f"a model that falls into pieces: {reason.found} ({reason.asked})",
            option.why, f"{option.write}; or a model that is one program, by {reason.write}",
        )  # fmt: skip
