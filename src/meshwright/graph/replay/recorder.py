"""Recording of the program of a rank: a captured program is replayed with distributed fake tensors.

The replay uses the rules, decisions and conversions of eager mode and is recorded below autograd. The program contains
the forward pass, the backward pass of local autograd and the optimizer's step, with explicit communication. Only inputs
of the role "number" depend on the rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.layout import ProcessMesh, Spec, TorchValue, axes_of
from meshwright.reshard import ConversionPlan, Exchange, Relabel
from meshwright.tensor import (
    RandomSource,
    ReshardMark,
    absent,
    as_part,
    current_random_source,
    full_tensor,
    leaves_in,
    map_tensors,
    random_source,
    recording_parts,
    using_attention,
)

from .._errors import CaptureError
from ..captures.capture import Capture
from ..captures.capture_environment import called
from ..captures.external_writes import ExternalTensors, check_buffers, real_view, takes_view
from ..captures.interception import UserFunction
from ..guards import is_trusted, observed, unobserved, unobserved_if_torchs
from ..program.draft import Draft
from ..program.node import Conversion, Node, Origin, Phase, Value, map_values, tensor_dtype
from ..program.program import Input, Program
from ..program.rank_numbers import Offset, RankNumber, RankPlace, end_ranks, is_everywhere
from ..recording.recording import Recording, written_by
from ..torch_hooks import (
    METADATA,
    FakeMode,
    FakeTensor,
    Modes,
    Operator,
    conditions,
    interception_off,
    new_sizes,
    next_gradient_number,
    running_gradient_number,
    symbolic_count,
    symbolic_float,
    symbolic_int,
    unrecorded,
    without_onednn,
)
from .loss_scale import scale_input


class RecordingCommunicator(PeerlessCommunicator):
    """Communicator of rank `rank` of `size` that records conversions as nodes of a program."""

    def __init__(self, rank: int, size: int, recorder: Recorder) -> None:
        super().__init__(rank, size)
        self._recorder = recorder

    def offset(self, spec: Spec, dim: int) -> int:
        size, axes = spec.shape[dim], axes_of(spec.layout.dims[dim])
        if axes and not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic: equal parts
            return self.place(spec.mesh, axes) * (size // prod(spec.mesh.sizes[a] for a in axes))
        if is_everywhere(spec.mesh, lambda rank: spec.offset(rank, dim)):
            return spec.offset(self.rank, dim)
        return self._recorder.add_rank_number(Offset(spec, dim), spec.offset(self.rank, dim))

    def place(self, mesh: ProcessMesh, axes: Sequence[str]) -> int:
        number = RankPlace(mesh, tuple(axes))
        return self._recorder.add_rank_number(number, super().place(mesh, axes)) if axes else 0

    def convert(self, way: ConversionPlan, x: Tensor) -> Tensor:
        for step, spec in way.walk():
            if isinstance(step, Relabel) or (self.rank not in spec.mesh and not isinstance(step, Exchange)):
                continue
            x = self._recorder.carry(Conversion(step, spec), x)
        return x


class Recorder(Modes):
    """Mode that records every operator on local fake tensors."""

    def __init__(self, rank: int, size: int, captured: Capture | None = None) -> None:
        super().__init__()
        fresh = captured is None
        self.mode = FakeMode(allow_non_fake_inputs=True, shape_env=new_sizes()) if fresh else captured.mode
        self._symbols = {} if fresh else captured.symbols
        self.recording = Recording(origin=self._origin)
        self._note = unobserved(self.recording.note)
        self.outside = ExternalTensors(self.mode)
        self._run_outside = unobserved(self.outside.run)
        self.communicator = RecordingCommunicator(rank, size, self)
        self.origin = Origin()
        self._forward: list[tuple[int, Origin]] = []
        self._backward: dict[tuple[Origin, Origin], Origin] = {}
        self.source: RandomSource = current_random_source()
        self._scalars: set[Any] = set()
        self._rank_numbers: dict[RankNumber, Any] = {}
        self._rank_symbols: dict[Any, RankNumber] = {}

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        if func in METADATA and isinstance(args[0], FakeTensor):
            return METADATA[func](args)
        with interception_off():
            out = self._run(func, args, kwargs or {})
            self._note(func, args, kwargs or {}, out)
        return out

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchValue:
        if isinstance(func, Operator):
            self.outside.note(written_by(func, args, kwargs), self.recording.made)
            if self.outside.stands_in(func, (args, kwargs)):
                return self._run_outside(func, args, kwargs)
            if takes_view(func, args):
                return real_view(func, args, kwargs)
        return unobserved_if_torchs(func)(*args, **kwargs)

    def replaying(self, origin: Origin) -> None:
        """Set the origin of the captured node that is replayed next."""
        self.origin = origin
        self._forward.append((next_gradient_number(), origin))

    def _origin(self) -> Origin:
        """Return the origin for a new node. A backward node has the layer, line and chunk of its forward node."""
        number = running_gradient_number() if self._forward and self.origin.phase == "backward" else None
        if number is None:
            return self.origin
        at = bisect_right(self._forward, number, key=itemgetter(0)) - 1
        forward = self._forward[at][1] if at >= 0 else Origin()
        key = self.origin, forward
        if key not in self._backward:
            inherited = {name: getattr(forward, name) for name in ("layer", "where", "chunk", "edge")}
            self._backward[key] = replace(self.origin, **inherited)
        return self._backward[key]

    @contextmanager
    def recording_as(self, phase: Phase) -> Generator[None]:
        """Record the operators called inside the context as part of `phase`."""
        self.origin = Origin(phase)
        with ExitStack() as stack:
            stack.enter_context(using_communicator(self.communicator))
            # on an accelerator, backward passes run in another thread, which would find the process's communicator
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(random_source(self.source))
            stack.enter_context(recording_parts(self.opaque))
            stack.enter_context(without_onednn())
            stack.enter_context(self.mode)
            stack.enter_context(self)
            yield

    def carry(self, op: Conversion, x: Tensor) -> Tensor:
        """Record a conversion step and return its result as a fake tensor."""
        with unrecorded(), self.mode, interception_off():
            out = torch.empty(self.communicator.local_shape(op.dst), dtype=x.dtype, device=x.device)
            self.recording.note(op, (x,), {}, out)
        return out

    def opaque(self, op: Callable[..., Any], args: tuple[Any, ...], shown: Callable[[], Any]) -> TorchValue:
        """Record a call on local tensors as one node; `shown()` returns its result as fake tensors."""
        with unrecorded(), self.mode, interception_off():
            out = shown()
            self.recording.note(op, args, {}, out)
        return out

    def _local_tensor(self, given: Input) -> Tensor:
        """Return a fake local tensor for an input, in the memory format of its spec."""
        v, spec = given.value, given.spec
        if spec is None:
            return torch.empty(v.shape, dtype=tensor_dtype(v), device=v.device)
        shape = self.communicator.local_shape(spec)
        if spec.new.order is None:
            return torch.empty(shape, dtype=tensor_dtype(v), device=v.device)
        strides = spec.local_strides(self.communicator.rank)
        return torch.empty_strided(shape, strides, dtype=tensor_dtype(v), device=v.device)

    def unknown(self, like: Tensor) -> Tensor:
        """Return an unrecorded fake tensor. Recording an operator that reads it raises CaptureError."""
        with unrecorded(), self.mode:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def add(self, given: Input, requires_grad: bool = False, written: bool = False) -> TorchValue:
        """Add an input to the program. Return its fake tensor (a DistTensor if it has a spec), or the symbol of a size.

        Code that runs later, such as hooks, may use the real constant for this input, unless it is `written`.
        """
        v = given.value
        if given.role == "size":
            self.recording.add_number(self._symbols[v], "size", given.name, given.source)
            return self._symbols[v]
        with unrecorded(), self.mode:
            x = self._local_tensor(given)
        x.requires_grad_(requires_grad)
        self.recording.add_input(x, given.role, given.name, given.spec, given.source)
        if given.role == "constant" and not written:
            with interception_off():
                self.recording.stand_for(x, given.source)
        if given.spec is None:
            return x
        out = (as_part if self.communicator.rank in given.spec.mesh else absent)(x, given.spec)
        if given.role == "parameter":
            out._is_param = True
        return out

    def add_number(self, name: str, number: float, source: object) -> TorchValue:
        """Add a Python number as an input of the program, and return its symbol."""
        if isinstance(number, float):
            symbol = symbolic_float(self.mode, name, number)
        else:
            symbol = (symbolic_count if number > 0 else symbolic_int)(self.mode, name, number)
        self._scalars.add(symbol.node.expr)
        self.recording.add_number(symbol, "scalar", name, source)
        return symbol

    def scalars(self) -> set[Any]:
        """Return the symbols of the inputs that are Python numbers, which may change in the next call."""
        return self._scalars

    def add_rank_number(self, number: RankNumber, here: int) -> TorchValue:
        """Return the symbol of a number that depends on the rank, an input of the program; `here` is its value here."""
        if number not in self._rank_numbers:
            name = f"rank_number_{len(self._rank_numbers)}"
            symbol = self._rank_numbers[number] = symbolic_int(self.mode, name, here)
            self._rank_symbols[symbol.node.expr] = number  # later, `symbol.node.expr` may be the constant of a guard
            self.recording.add_number(symbol, "number", name, number)
        return self._rank_numbers[number]

    def finish(self, outputs: TorchValue, writes: Sequence[tuple[Tensor, Tensor]] = ()) -> Program:
        """Return the recorded program. `writes` are pairs of an input and the tensor whose value it takes.

        Raises CaptureError if Python code branched on a number that differs between ranks.
        """
        self._check_ranks()
        with interception_off():
            tree = self.recording.tree_of(outputs)
            new = [(self.recording.input_of(x), self.recording.value_of(v)) for x, v in writes]
            done = dict(self.recording.written()) | dict(new)
        program = Program(
            tuple(self.recording.inputs),
            tuple(self.recording.nodes),
            tree,
            tuple(done.items()),
            rank=self.communicator.rank,
            specs=self.recording.specs(),
        )
        return Draft(program).finish()

    def _check_ranks(self) -> None:
        """Raise CaptureError if Python code branched on a number that gives another decision on another rank."""
        numbers = self._rank_symbols
        asked = [g for g in dict.fromkeys(conditions(self.mode)) if g.free_symbols and g.free_symbols <= set(numbers)]
        for rank in _ranks_to_check(self._rank_numbers) if asked else ():
            there = PeerlessCommunicator(rank, self.communicator.size)
            values = {symbol: number(there) for symbol, number in numbers.items()}
            found = next((g for g in asked if not g.subs(values)), None)
            if found is not None:
                raise CaptureError(
                    "recording what every rank runs",
                    f"the code branches on {found}, which is false on rank {rank}",
                    "every rank runs the same program, with the branch that the recording rank took",
                    "use torch.where on a tensor of the number, in the form of the rule",
                )


_MOST_RANKS = 64


def _ranks_to_check(numbers: Iterable[RankNumber]) -> list[int]:
    """Return the ranks to check: all ranks of small meshes, and the ranks at the ends of the axes of large ones."""
    meshes = {n.mesh if isinstance(n, RankPlace) else n.spec.mesh for n in numbers}
    found: set[int] = set()
    for mesh in meshes:
        found |= set(mesh.process_ids) if mesh.size <= _MOST_RANKS else end_ranks(mesh)
    return sorted(found)


def replay(program: Program, given: Mapping[Value, Tensor], recorder: Recorder) -> dict[Value, Any]:
    """Run the captured program on distributed fake tensors; return the tensor or number of each value."""
    known: dict[Value, Any] = dict(given)
    for node in program.nodes:
        recorder.replaying(node.origin)
        with _modes_of(node.origin):
            args, kwargs = node.mapped_arguments(known.__getitem__)
            out = node.op(*args, **kwargs)  # pyright: ignore[reportCallIssue] - captured programs have no steps
        found = (x for x in leaves_in(out) if x is not None)
        for v, t in zip(node.outs, found, strict=True):
            known[v] = t
            _check_shape(node, v, t)
    return known


def _check_shape(node: Node, v: Value, found: object) -> None:
    """Raise CaptureError if a function of local tensors returns another shape than was captured."""
    if isinstance(node.op, Operator) or not isinstance(found, Tensor) or tuple(found.shape) == tuple(v.shape):
        return
    raise CaptureError(
        f"recording {node.op!r} {node.origin.where}".rstrip(),
        f"a result of shape {tuple(found.shape)}, but {tuple(v.shape)} was captured",
        "the layouts of its arguments were unknown when the model was captured",
        "pass in_placements=[...] with reshard_inputs=True, or out_shapes=[...]",
    )


@contextmanager
def _modes_of(origin: Origin) -> Generator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(origin.grad))
        stack.enter_context(using_attention(origin.context))
        if origin.autocast is not None:
            stack.enter_context(torch.autocast(*origin.autocast))
        yield


def record_gradients(captured: Capture, rank: int, size: int, scaled: bool = False) -> Program:
    """Return the program of the captured call, whose output is the loss, and of its gradients.

    Outputs are `{"out": loss, "grads": {parameter: gradient}}`. The loss is replicated on every rank. A gradient has
    the dual of its parameter's spec. With `scaled`, gradients are those of the loss times the loss scale, a state of
    the program.

    Raises:
        CaptureError: the call does not return one number that requires gradients.
    """
    recorder, program, names = Recorder(rank, size, captured), captured.program, trained_names(captured)
    ran, users, written = captured.ran, _has_users_code(captured), dict(program.writes)
    with recorder.recording_as("forward"), observed(ran, users):
        given = {i.value: recorder.add(i, i.name in names, i.value in written) for i in program.inputs}
        known = replay(program, given, recorder)
        loss = _checked_loss(map_values(known.__getitem__, program.outputs))
        root = _times_scale(program, recorder, loss) if scaled else loss
    trained = {i.name: given[i.value] for i in program.inputs if i.name in names}
    _register_hooks(captured, trained)
    with recorder.recording_as("backward"), observed(ran, users):
        grads = called(lambda: torch.autograd.grad(root, list(trained.values()), allow_unused=True), ())
        with torch.no_grad():
            write_back(program, given, known)
            out = full_tensor(loss.detach())
    found = {name: g for name, g in zip(trained, grads, strict=True) if g is not None}
    step = recorder.finish({"out": out, "grads": found})
    _check_written_buffers(captured, step)
    return step


def trained_names(captured: Capture) -> set[str]:
    """Return the names of the parameters that require gradients."""
    return {slot.name for slot in captured.slots if slot.is_parameter and slot.tensor.requires_grad}


def _register_hooks(captured: Capture, trained: Mapping[str, Tensor]) -> None:
    """Register the hooks of the real parameters on the fake ones."""
    for slot in captured.slots:
        for hook in (slot.tensor._backward_hooks or {}).values() if slot.name in trained else ():
            with interception_off():  # such a hook takes the local tensor
                trained[slot.name].register_hook(hook)


def _check_written_buffers(captured: Capture, step: Program) -> None:
    """Raise CaptureError if a hook uses a buffer that the captured call writes to."""
    written = dict(captured.program.writes)
    names = {i.name for i in captured.program.inputs if i.value in written}
    check_buffers(step, {id(slot.tensor): slot.name for slot in captured.slots if slot.name in names})


def _has_users_code(captured: Capture) -> bool:
    """True if the user's functions run while the gradients of the captured call are recorded."""
    hooked = any(slot.tensor._backward_hooks for slot in captured.slots)
    return hooked or not all(_is_own(node.op) for node in captured.program.nodes)


def _is_own(op: object) -> bool:
    """True for an operator, a mark of `reshard`, and an autograd function of torch or of this library."""
    return isinstance(op, (Operator, ReshardMark)) or (isinstance(op, UserFunction) and is_trusted(op.function))


def record_forward(captured: Capture, rank: int, size: int) -> Program:
    """Return the program of the captured call without gradients; its output `{"out": ...}` is whole on all ranks."""
    recorder = Recorder(rank, size, captured)
    with recorder.recording_as("forward"), torch.no_grad():
        given = {i.value: recorder.add(i) for i in captured.program.inputs}
        known = replay(captured.program, given, recorder)
        write_back(captured.program, given, known)
        out = map_tensors(full_tensor, map_values(known.__getitem__, captured.program.outputs))
    return recorder.finish({"out": out})


def _times_scale(program: Program, recorder: Recorder, loss: Tensor) -> Tensor:
    """Return the loss times its scale. The product has the origin of the node that computes the loss."""
    maker = program.producers.get(program.outputs)
    if maker is not None:
        recorder.replaying(maker.origin)
    return loss * recorder.add(scale_input("scale", loss.device))


def _checked_loss(out: object) -> Tensor:
    if isinstance(out, Tensor) and out.numel() == 1 and out.requires_grad:
        return out
    found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise CaptureError(
        "a training step",
        f"the forward pass returns {found}",
        "gradients need a loss: one number that depends on parameters",
        "pass loss=a function of the model's output and the labels that returns a mean or a sum",
    )


def write_back(program: Program, given: Mapping[Value, Tensor], known: Mapping[Value, Any]) -> None:
    """Copy the final values of the captured program's writes into their inputs, all at once."""
    new = [(given[x], known[v].clone() if v in given else known[v]) for x, v in program.writes]
    for x, value in new:
        x.copy_(value)
