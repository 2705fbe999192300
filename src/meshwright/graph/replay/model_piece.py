"""Recording of a part of a model as two programs: forward, which saves values, and backward, which reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, tensors_in

from ..captures.capture import Capture
from ..program.node import Value, map_values
from ..program.program import Input, Program
from .recorder import Recorder, replay, write_back


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model as two programs. `forward` returns "out" and "saved"; `backward` takes the saved values.

    The inputs of `backward` are the "saved" values in order, then a "gradient" for each result number in `wanted`. Its
    output has a gradient, or None, for each input of `forward` in `trained`. `specs` are the specs of the results.
    """

    forward: Program
    backward: Program | None
    trained: tuple[Value, ...]
    wanted: tuple[int, ...]
    specs: tuple[Spec | None, ...]


def record_piece(captured: Capture, differentiable: Collection[int], rank: int, size: int) -> Piece:
    """Return the programs of a captured call that is part of a larger training step.

    `differentiable` are the leaves of the batch whose gradients are wanted, in addition to those of parameters.
    """
    recorder = Recorder(rank, size, captured)
    wanted = {s.name for s in captured.slots if s.is_parameter and s.tensor.requires_grad}
    inputs = captured.program.inputs
    asks = [i for i in inputs if i.name in wanted or (i.role == "batch" and i.source in differentiable)]
    with recorder.recording_as("forward"):
        given = {i.value: recorder.add(i, i in asks) for i in inputs}
        known = replay(captured.program, given, recorder)
        out = map_values(lambda v: known[v], captured.program.outputs)
        results = list(tensors_in(out))
        with torch.no_grad():
            write_back(captured.program, given, known)
    at = tuple(n for n, x in enumerate(results) if x.requires_grad)
    specs = tuple(x.spec if isinstance(x, DistTensor) else None for x in results)
    grads: tuple[Any, ...] = ()
    if at and asks:
        with recorder.recording_as("backward"):
            seeds = [recorder.add(_seed(n, results[n])) for n in at]
            leaves = [given[i.value] for i in asks]
            grads = torch.autograd.grad([results[n] for n in at], leaves, seeds, allow_unused=True)
    whole_program = recorder.finish({"out": out, "grads": list(grads)})
    of = {i.name: i.value for i in whole_program.inputs}
    return _cut(whole_program, tuple(of[i.name] for i in asks), at, specs)


def _seed(number: int, x: Tensor) -> Input:
    spec = x.spec.dual() if isinstance(x, DistTensor) else None
    return Input(Value(f"out_{number}_grad", tuple(x.shape), x.dtype, str(x.device)), "gradient", f"out_{number}", spec)


def _cut(
    program: Program, trained: tuple[Value, ...], wanted: tuple[int, ...], specs: tuple[Spec | None, ...]
) -> Piece:
    """Split the program into a forward part and a backward part, which reads the values that the forward part saves."""
    ahead = tuple(n for n in program.nodes if n.origin.phase == "forward")
    behind = tuple(n for n in program.nodes if n.origin.phase != "forward")
    grads: list[Value | None] = program.outputs["grads"]
    seeds = tuple(i for i in program.inputs if i.role == "gradient")
    first = tuple(i for i in program.inputs if i.role != "gradient")
    there = {i.value for i in first} | {v for n in ahead for v in n.outs}
    read = dict.fromkeys([v for n in behind for v in n.ins] + [v for v in grads if v is not None])
    saved = tuple(v for v in read if v in there)
    forward = replace(program, inputs=first, nodes=ahead, outputs={"out": program.outputs["out"], "saved": list(saved)})
    if not grads:
        return Piece(forward, None, trained, wanted, specs)
    kept = tuple(Input(v, "saved", v.name) for v in saved)
    backward = replace(program, inputs=(*kept, *seeds), nodes=behind, outputs=grads, writes=())
    return Piece(forward, backward, trained, wanted, specs)
