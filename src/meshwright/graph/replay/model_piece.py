"""Recording of a part of a model as two programs: forward, which saves values, and backward, which reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, tensors_in

from ..captures.capture import Capture
from ..program.node import Value, map_values, values_in
from ..program.program import Input, Program
from .recorder import Recorder, replay, trained_names, write_back

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """A part of a model as two programs. `forward` returns "out" and "saved"; `backward` takes the saved values.

    The inputs of `backward` are the "saved" values in order, then a "gradient" for each result number in `wanted`. Its
    output has a gradient, or None, for each input of `forward` in `trained`. `specs` are the specs of the results.
    """

    forward: Program
    backward: Program | None
    trained: tuple[Value, ...]
    wanted: tuple[int, ...]
    specs: tuple[Spec | None, ...]


def record_piece(captured: Capture, differentiable: Collection[int], rank: int, size: int) -> ModelPiece:
    """Return the programs of a captured call that is part of a larger training step.

    `differentiable` are the leaves of the batch whose gradients are wanted, in addition to those of parameters.
    """
    recorder, program = Recorder(rank, size, captured), captured.program
    trained = _trained_inputs(captured, differentiable)
    with recorder.recording_as("forward"):
        given = {i.value: recorder.add(i, i in trained) for i in program.inputs}
        known = replay(program, given, recorder)
        out = map_values(known.__getitem__, program.outputs)
        with torch.no_grad():
            write_back(program, given, known)
    results = list(tensors_in(out))
    wanted = tuple(n for n, x in enumerate(results) if x.requires_grad)
    grads = _recorded_gradients(recorder, {n: results[n] for n in wanted}, [given[i.value] for i in trained])
    whole_program = recorder.finish({"out": out, "grads": grads})
    values = {i.name: i.value for i in whole_program.inputs}
    forward, backward = _forward_and_backward(whole_program)
    return ModelPiece(forward, backward, tuple(values[i.name] for i in trained), wanted, tuple(map(_spec_of, results)))


def _trained_inputs(captured: Capture, differentiable: Collection[int]) -> list[Input]:
    """Return the parameters that require gradients, and the leaves of the batch in `differentiable`."""
    names = trained_names(captured)
    inputs = captured.program.inputs
    return [i for i in inputs if i.name in names or (i.role == "batch" and i.source in differentiable)]


def _recorded_gradients(
    recorder: Recorder, results: Mapping[int, Tensor], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Record the backward pass from the results by number; return the gradient of each leaf."""
    if not results or not leaves:
        return []
    with recorder.recording_as("backward"):
        seeds = [recorder.add(_seed(number, x)) for number, x in results.items()]
        return list(torch.autograd.grad(list(results.values()), leaves, seeds, allow_unused=True))


def _seed(number: int, x: Tensor) -> Input:
    spec = x.spec.dual() if isinstance(x, DistTensor) else None
    return Input(Value.of(f"out_{number}_grad", x), "gradient", f"out_{number}", spec)


def _spec_of(x: Tensor) -> Spec | None:
    return x.spec if isinstance(x, DistTensor) else None


def _forward_and_backward(program: Program) -> tuple[Program, Program | None]:
    """Split the program into a forward part, and a backward part that reads the values which the forward part saves.

    Without gradients there is no backward part.
    """
    forward_nodes, backward_nodes = _partition(program.nodes, lambda node: node.origin.phase == "forward")
    seeds, inputs = _partition(program.inputs, lambda given: given.role == "gradient")
    forward = replace(program, inputs=inputs, nodes=forward_nodes)
    grads, known = program.outputs["grads"], set(forward.all_values())
    read = dict.fromkeys([*(v for node in backward_nodes for v in node.ins), *values_in(grads)])
    saved = [v for v in read if v in known]
    forward = replace(forward, outputs={"out": program.outputs["out"], "saved": saved})
    if not grads:
        return forward, None
    kept = [Input(v, "saved", v.name) for v in saved]
    return forward, replace(program, inputs=(*kept, *seeds), nodes=backward_nodes, outputs=grads, writes=())


def _partition(items: Sequence[Item], condition: Callable[[Item], bool]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return the items that meet the condition, and the others."""
    return tuple(x for x in items if condition(x)), tuple(x for x in items if not condition(x))
