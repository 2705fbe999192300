"""Run a model that cannot be one program: modules that can be captured run as programs, the rest as Python.

Everything that a piece depends on beside its arguments is compared with its present value at each call, as for whole
models. The strategy's passes run on a piece's captured programs and on the rank's programs. Mixed precision is
`torch.autocast` around everything, so that programs and Python agree on the dtypes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import current_communicator
from meshwright.graph import (
    Capture,
    CaptureError,
    ModelPiece,
    Node,
    Pass,
    Program,
    Run,
    SideEffectError,
    Value,
    apply_passes,
    capture,
    compiled,
    complete,
    map_values,
    record_piece,
    runner,
    with_layouts,
)
from meshwright.layout import TorchValue
from meshwright.passes import InPlace
from meshwright.tensor import leaves_in, local_parts, transforming

from ..recording.memory_overlap import share_no_memory, without_inputs
from ..recording.program_inputs import apply_captured_layouts, fetch_of
from ..recording.refuse_call import refuse_shared_new_layouts
from ..recording.setting import Roots, Setting
from ..recording.strategy import MixedPrecision, Strategy
from ..recording.variants import Dynamic, ProgramVariant, Variants, sizes_of
from .piece_call import CompiledPiece, OutputTree, autocast_off, run_piece
from .piece_checks import check_arguments_left_alone, check_mappings, check_plain, form_of_call
from .whole_step_options import refuse_whole_step_options

aten = torch.ops.aten
_Operator: type[Any] = type(aten.clone.default)


@dataclass(slots=True)
class _Known:
    """The programs of one module."""

    network: nn.Module
    variants: Variants[CompiledPiece]
    latest: CompiledPiece | None = None

    def key(self, args: Sequence[Any], leaves: Sequence[Any]) -> object:
        """Return the key that two calls must share, beside sizes, to use one program."""
        asked = tuple(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return (torch.is_grad_enabled(), asked, form_of_call(args))


class ModelPieces:
    """The modules below `root` that run as programs; `eager` maps the others to the reason.

    `reason` says why the whole model is no program.

    Raises:
        StaticError: the strategy has an option that only a whole program supports.
    """

    def __init__(self, root: nn.Module, strategy: Strategy, reason: CaptureError) -> None:
        refuse_whole_step_options(strategy, reason)
        self.root, self.amp = root, strategy.amp
        self.strategy = replace(strategy, amp=MixedPrecision())
        self.eager: dict[str, str] = {}
        self._known: dict[str, _Known] = {}
        self._placed: dict[nn.Module, Callable[..., Any]] = {}

    @property
    def compiled(self) -> tuple[str, ...]:
        """Return the paths of the modules that run as programs."""
        return tuple(path for path in self._known if path not in self.eager)

    @property
    def programs(self) -> Mapping[str, tuple[Program, ...]]:
        """Return, for each module, the programs that it ran last: forward, and backward if there are gradients."""
        latest = {path: self._known[path].latest for path in self.compiled}
        both = {path: (found.piece.forward, found.piece.backward) for path, found in latest.items() if found}
        return {path: tuple(p for p in pair if p is not None) for path, pair in both.items()}

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Run the modules that can be captured as programs, inside the block."""
        try:
            self._replace_forward("", self.root)
            with self._autocast():
                yield
        finally:
            for module in self._placed:
                module.__dict__.pop("forward", None)
            self._placed.clear()

    @contextmanager
    def _autocast(self) -> Generator[None]:
        """Run programs and Python in the dtypes of mixed precision, inside the block."""
        held = [*self.root.parameters(), *self.root.buffers()]
        device = held[0].device.type if held else "cpu"
        with torch.autocast(device, torch.bfloat16) if self.amp.enable else nullcontext():
            yield

    def _replace_forward(self, path: str, module: nn.Module) -> None:
        if module in self._placed:
            return
        if "forward" in module.__dict__:
            self.eager[path] = "its forward is an attribute that was assigned to the instance"
        if path in self.eager or type(module).forward is nn.Module.forward:  # a list of modules is not called
            self._replace_forwards_inside(path, module)
            return
        module.__dict__["forward"] = self._placed[module] = self._running(path, module)

    def _replace_forwards_inside(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            self._replace_forward(f"{path}.{name}".lstrip("."), child)

    def _running(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return the function that replaces the module's own `forward`."""

        def forward(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
            found = None if kwargs or path in self.eager or transforming() else self._find(path, module, args)
            if found is not None:
                return run_piece(found, list(leaves_in(args)))
            if self._placed.pop(module, None) is not None:
                del module.__dict__["forward"]
            self._replace_forwards_inside(path, module)
            return module.forward(*args, **kwargs)

        return forward

    @contextmanager
    def _bare(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Restore the modules' own `forward` inside the block."""
        taken = [m for m in modules if m in self._placed and "forward" in m.__dict__]
        for m in taken:
            del m.__dict__["forward"]
        try:
            yield
        finally:
            for m in taken:
                m.__dict__["forward"] = self._placed[m]

    def _find(self, path: str, module: nn.Module, args: Sequence[Any]) -> CompiledPiece | None:
        """Return the programs of the call, recorded now if there are none; None for a call that must run as Python."""
        leaves = list(leaves_in(args))
        try:
            check_plain(leaves, "given", module)
            with self._bare(module.modules()):
                known = self._known_of(path, module)
                known.latest = self._recorded(known, args, leaves)
        except CaptureError as error:
            self.eager[path] = str(error)
            return None
        self._known[path] = known
        return known.latest

    def _known_of(self, path: str, module: nn.Module) -> _Known:
        """Return the programs of the module; a new record if another module was at this path before."""
        known = self._known.get(path)
        if known is None or known.network is not module:
            known = _Known(module, Variants[CompiledPiece](self.strategy.max_programs))
        return known

    def _recorded(self, known: _Known, args: Sequence[Any], leaves: Sequence[Any]) -> CompiledPiece:
        key = known.key(args, leaves)
        found = known.variants.find(key, leaves)
        if found is None:
            dynamic = known.variants.open_sizes(key, leaves)
            dynamic = {} if self.strategy.compiler == "inductor" else dynamic  # kernels are compiled for fixed sizes
            try:
                found = self._made_for(known, key, args, leaves, dynamic)
            except (SideEffectError, TypeError):
                if not dynamic:
                    raise
                found = self._made_for(known, key, args, leaves, {})
                known.variants.fixed.add(key)
        return found

    def _made_for(
        self, known: _Known, key: object, args: Sequence[Any], leaves: Sequence[Any], dynamic: Dynamic
    ) -> CompiledPiece:
        """Record the programs for the call, and keep them for later calls."""
        with _unhooked(), self._bare(self._placed):
            captured, form = self._captured(known.network, args, dynamic)
            found = self._compiled_piece(type(known.network).__name__, captured, form, leaves)
        refuse_shared_new_layouts(captured, self.root)
        apply_captured_layouts(captured, None)
        setting = Setting.of(Roots(known.network), replace(captured, places=None))  # hooks are back since
        known.variants.add(key, leaves, ProgramVariant(found, sizes_of(leaves), dynamic, captured.fits(), setting))
        return found

    def _captured(self, module: nn.Module, args: Sequence[Any], dynamic: Dynamic) -> tuple[Capture, OutputTree]:
        """Return the captured program of the module's call, which outputs tensors, and the form of its output.

        The strategy's passes on captured programs have run.

        Raises:
            CaptureError: the module cannot be a program, or cannot be part of an autograd graph.
        """
        form = OutputTree()

        def call(*args: TorchValue) -> TorchValue:
            out = module.forward(*args)
            check_plain(leaves_in(out), "returning", module)
            check_mappings(out, module)
            return form.taken_apart(out)

        try:
            captured = capture(module, call, args, dynamic)
        except RuntimeError as error:  # Python raises it too, or runs operators that fake tensors do not support
            raise CaptureError(
                f"capturing {type(module).__name__}",
                str(error).split("\n")[0],
                "torch cannot run it on tensors without data",
                "use operators that torch.compile supports",
            ) from error
        check_arguments_left_alone(captured.program, module)
        program = with_layouts(captured.program, complete(captured.program))
        return replace(captured, program=apply_passes(program, self.strategy.passes_on("captured"))), form

    def _compiled_piece(self, name: str, captured: Capture, form: OutputTree, leaves: Sequence[Any]) -> CompiledPiece:
        """Return the programs of this rank after all passes, with the functions that run them."""
        here, grad = current_communicator(), torch.is_grad_enabled()
        asked = [at for at, x in enumerate(leaves) if grad and isinstance(x, Tensor) and x.requires_grad]
        taken = replace(captured, program=_reading_copies(captured.program))
        with autocast_off():
            piece = self._passed(captured, record_piece(taken, asked, here.rank, here.size))
        forward, backward = piece.forward, piece.backward
        at = {given.value: n for n, given in enumerate(forward.inputs)}
        return CompiledPiece(
            name,
            piece,
            self._runner(forward),
            None if backward is None else self._runner(backward),
            tuple(fetch_of(given, captured.slots) for given in forward.inputs),
            tuple(at[v] for v in piece.trained),
            form,
        )

    def _passed(self, captured: Capture, piece: ModelPiece) -> ModelPiece:
        """Return the piece after all passes, with the changes that passes made to the captured program."""
        passes = self.strategy.passes_on("recorded", piece.forward.device)
        with local_parts():
            apart = share_no_memory(s.tensor for s in captured.slots)
        forward = piece.forward.with_changes(*captured.program.changes)
        forward = apply_passes(forward, passes if apart else without_inputs(passes))
        backward = piece.backward and apply_passes(piece.backward, _for_saved_sizes(passes, piece.backward))
        return replace(piece, forward=forward, backward=backward)

    def _runner(self, program: Program) -> Run:
        """Return the program as a function, compiled if the strategy asks for it."""
        return runner(
            compiled(program, current_communicator(), writes=False) if self.strategy.compiler == "inductor" else program
        )


def _reading_copies(program: Program) -> Program:
    """Return the captured program; operators read copies of what it writes, since autograd may keep their inputs."""
    read = {v for n in program.nodes if isinstance(n.op, _Operator) for v in n.ins}
    copies = {x: Value(f"{x.name}_before", x.shape, x.dtype, x.device) for x, _ in program.writes if x in read}

    def copy(v: Value) -> Value:
        return copies.get(v, v)

    made = [Node(aten.clone.default, (x,), {}, c) for x, c in copies.items()]
    nodes = [replace(n, args=map_values(copy, n.args), kwargs=map_values(copy, n.kwargs)) for n in program.nodes]
    writes = tuple((x, copy(v)) for x, v in program.writes)
    return replace(program, nodes=(*made, *nodes), outputs=map_values(copy, program.outputs), writes=writes)


def _for_saved_sizes(passes: Sequence[Pass], backward: Program) -> Sequence[Pass]:
    """Return the passes that do not need the sizes that the forward pass hands to `backward`."""
    sizes = any(not i.value.is_tensor for i in backward.inputs)
    return [p for p in passes if not (sizes and isinstance(p, InPlace))]


@contextmanager
def _unhooked() -> Generator[None]:
    """Switch off, inside the block, the hooks of saved tensors: a recording is not a run."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield
