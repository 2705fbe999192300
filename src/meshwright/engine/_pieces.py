"""A model that cannot be one program: what can be captured runs as programs, the rest as Python, module by module.

What a piece takes for granted beside its arguments is compared with what is there now, as it is for whole models. Of a
piece's programs, those of the captured call and those of the rank go through the strategy's passes; mixed precision is
`torch.autocast` around all of it, so that programs and Python agree on the dtypes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import current
from meshwright.graph import (
    Capture,
    CaptureError,
    Node,
    Pass,
    Piece,
    Program,
    Run,
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
from meshwright.passes import InPlace
from meshwright.tensor import leaves_in, local_parts, map_leaves, stamp

from ._apart import lie_apart, without_inputs
from ._errors import StaticError
from ._in_pieces import refuse_of_the_whole
from ._inputs import Fetch, fetch_of, lay_as_captured
from ._setting import Settings, form_of
from ._strategy import MixedPrecision, Strategy
from ._variants import Dynamic, Variants

aten = torch.ops.aten
_Operator: type[Any] = type(aten.clone.default)
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What goes in and out of a piece beside tensors: it is compared from call to call, and does not change by itself."""


@dataclass(slots=True)
class _Form:
    """What a module gives: a tree, with numbers in the place of its leaves, and what no tensor is, by those numbers."""

    tree: Any = None
    plain: dict[int, Any] = field(default_factory=dict[int, Any])

    def taken_apart(self, out: Any) -> list[Tensor]:
        """The tensors of `out`, whose form this is from now on."""
        leaves, number = list(leaves_in(out)), count()
        self.tree = map_leaves(lambda _: next(number), out)
        self.plain = {at: x for at, x in enumerate(leaves) if not isinstance(x, Tensor)}
        return [x for x in leaves if isinstance(x, Tensor)]

    def put_together(self, tensors: Iterable[Any]) -> Any:
        """The tree of these tensors."""
        left = iter(tensors)
        return map_leaves(lambda at: self.plain[at] if at in self.plain else next(left), self.tree)


@dataclass(slots=True)
class _Compiled:
    """A piece, the functions that run it, and where the inputs of its forward pass come from."""

    name: str
    piece: Piece
    forward: Run
    backward: Run | None
    fetch: tuple[Fetch, ...]
    asks: tuple[int, ...]
    """Which inputs of the forward pass get gradients."""
    form: _Form


@dataclass(slots=True)
class _Known:
    """The programs of one module, and the settings that it was in."""

    settings: Settings
    variants: Variants[_Compiled]
    latest: _Compiled | None = None

    def key(self, args: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """What two calls must share, beside sizes, to be runs of one program."""
        asked = tuple(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return (self.settings.number(False), torch.is_grad_enabled(), asked, _form_of(args))


class Pieces:
    """The modules below `root` that run as programs; those that cannot are `eager`, with the reason.

    `reason` tells why the whole is no program. Raises StaticError, which names its line, for a strategy that asks for
    what only a whole program has.
    """

    def __init__(self, root: nn.Module, strategy: Strategy, reason: CaptureError) -> None:
        refuse_of_the_whole(strategy, reason)
        self.root, self.amp = root, strategy.amp
        self.strategy = replace(strategy, amp=MixedPrecision())
        self.eager: dict[str, str] = {}
        self._known: dict[str, _Known] = {}
        self._placed: dict[nn.Module, Callable[..., Any]] = {}

    @property
    def compiled(self) -> tuple[str, ...]:
        """The modules that run as programs."""
        return tuple(path for path in self._known if path not in self.eager)

    @property
    def programs(self) -> Mapping[str, tuple[Program, ...]]:
        """Module → the programs that it ran last: forward, and backward where there are gradients."""
        latest = {path: self._known[path].latest for path in self.compiled}
        both = {path: (found.piece.forward, found.piece.backward) for path, found in latest.items() if found}
        return {path: tuple(p for p in pair if p is not None) for path, pair in both.items()}

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the modules that can be captured run as programs."""
        try:
            self._put("", self.root)
            with self._autocast():
                yield
        finally:
            for module in self._placed:
                module.__dict__.pop("forward", None)
            self._placed.clear()

    @contextmanager
    def _autocast(self) -> Generator[None]:
        """Inside, what is captured and what runs as Python computes in the dtypes of mixed precision."""
        held = [*self.root.parameters(), *self.root.buffers()]
        device = held[0].device.type if held else "cpu"
        with torch.autocast(device, torch.bfloat16) if self.amp.enable else nullcontext():
            yield

    def _put(self, path: str, module: nn.Module) -> None:
        if module in self._placed:
            return
        if "forward" in module.__dict__:
            self.eager[path] = "its forward is an attribute of its own, put there by who made the model"
        if path in self.eager or type(module).forward is nn.Module.forward:  # a list of modules is not called
            self._put_parts(path, module)
            return
        module.__dict__["forward"] = self._placed[module] = self._running(path, module)

    def _put_parts(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            self._put(f"{path}.{name}".lstrip("."), child)

    def _running(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """What runs instead of the module's own `forward`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = None if kwargs or path in self.eager else self._find(path, module, args)
            if found is not None:
                return _run(found, list(leaves_in(args)))
            if self._placed.pop(module, None) is not None:
                del module.__dict__["forward"]
            self._put_parts(path, module)
            return module.forward(*args, **kwargs)

        return forward

    @contextmanager
    def _bare(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Inside, the modules have the `forward` that is theirs."""
        taken = [m for m in modules if m in self._placed and "forward" in m.__dict__]
        for m in taken:
            del m.__dict__["forward"]
        try:
            yield
        finally:
            for m in taken:
                m.__dict__["forward"] = self._placed[m]

    def _find(self, path: str, module: nn.Module, args: Sequence[Any]) -> _Compiled | None:
        """The programs of the call, recorded now if there are none; None for a call that must be Python."""
        leaves = list(leaves_in(args))
        try:
            _check_plain(leaves, "given", module)
            with self._bare(module.modules()):
                known = self._known_of(path, module)
                known.latest = self._recorded(known, args, leaves)
        except CaptureError as error:
            self.eager[path] = str(error)
            return None
        self._known[path] = known
        return known.latest

    def _known_of(self, path: str, module: nn.Module) -> _Known:
        """What is known of the module, which may have taken the place of another."""
        known = self._known.get(path)
        if known is None or known.settings.network is not module:
            known = _Known(Settings(module, None), Variants[_Compiled](self.strategy.max_programs))
        return known

    def _recorded(self, known: _Known, args: Sequence[Any], leaves: Sequence[Any]) -> _Compiled:
        key = known.key(args, leaves)
        found = known.variants.find(key, leaves)
        if found is None:
            dynamic = known.variants.open_sizes(key, leaves)
            dynamic = {} if self.strategy.compiler == "inductor" else dynamic  # kernels are made for known sizes
            with _unhooked(), self._bare(self._placed):
                captured, form = self._captured(known.settings.network, args, dynamic)
                found = self._made(type(known.settings.network).__name__, captured, form, leaves)
            lay_as_captured(captured, None)
            key = known.key(args, leaves)  # tensors may lie otherwise by now
            known.variants.add(key, leaves, found, dynamic, captured.fits())
        return found

    def _captured(self, module: nn.Module, args: Sequence[Any], dynamic: Dynamic) -> tuple[Capture, _Form]:
        """The module's call as a program that gives its tensors, after the passes on captured programs; and its form.

        Raises CaptureError for what cannot be part of an autograd graph beside what can be no program at all.
        """
        form = _Form()

        def call(*args: Any) -> Any:
            out = module.forward(*args)
            _check_plain(leaves_in(out), "giving", module)
            _check_mappings(out, module)
            return form.taken_apart(out)

        try:
            captured = capture(module, call, args, dynamic)
        except RuntimeError as error:  # Python says the same, or can do what fake tensors cannot
            raise CaptureError(
                f"to capture {type(module).__name__}", str(error).split("\n")[0],
                "torch refuses it on tensors that hold nothing", "operators that torch.compile takes",
            ) from error  # fmt: skip
        _check_arguments_left_alone(captured.program, module)
        program = with_layouts(captured.program, complete(captured.program))
        return replace(captured, program=apply_passes(program, self.strategy.passes_on("captured"))), form

    def _made(self, name: str, captured: Capture, form: _Form, leaves: Sequence[Any]) -> _Compiled:
        """The programs of this rank, after all passes, and what runs them."""
        here, grad = current(), torch.is_grad_enabled()
        asked = [at for at, x in enumerate(leaves) if grad and isinstance(x, Tensor) and x.requires_grad]
        taken = replace(captured, program=_reading_copies(captured.program))
        with _autocast_off():
            piece = self._passed(captured, record_piece(taken, asked, here.rank, here.size))
        forward, backward = piece.forward, piece.backward
        at = {given.value: n for n, given in enumerate(forward.inputs)}
        return _Compiled(
            name,
            piece,
            self._runner(forward),
            None if backward is None else self._runner(backward),
            tuple(fetch_of(given, captured.slots) for given in forward.inputs),
            tuple(at[v] for v in piece.trained),
            form,
        )

    def _passed(self, captured: Capture, piece: Piece) -> Piece:
        """The piece after all passes, with the changes of those that the captured program went through."""
        passes = self.strategy.passes_on("recorded")
        with local_parts():
            apart = lie_apart(s.tensor for s in captured.slots)
        forward = piece.forward.with_changes(*captured.program.changes)
        forward = apply_passes(forward, passes if apart else without_inputs(passes))
        backward = piece.backward and apply_passes(piece.backward, _for_saved_sizes(passes, piece.backward))
        return replace(piece, forward=forward, backward=backward)

    def _runner(self, program: Program) -> Run:
        """The program as a function, compiled where the strategy asks for it."""
        return runner(compiled(program, current(), writes=False) if self.strategy.compiler == "inductor" else program)


def _check_plain(leaves: Iterable[Any], how: str, module: nn.Module) -> None:
    """Raises CaptureError for an object that could change without being seen, or hide tensors."""
    strange = next((x for x in leaves if not isinstance(x, (Tensor, *_PLAIN))), None)
    if strange is not None:
        raise CaptureError(
            f"to capture {type(module).__name__}, {how} {type(strange).__name__}",
            "what is no tensor, and not the same in each call",
            "a program would hold it as it was when it was recorded", "tensors, in tuples, lists and dicts",
        )  # fmt: skip


def _form_of(args: Sequence[Any]) -> Any:
    """How the arguments are built. Raises CaptureError for what cannot be compared from call to call."""
    try:
        return form_of(args)
    except StaticError as error:
        raise CaptureError(error.asked, error.found, error.why, error.write) from error


def _check_mappings(out: Any, module: nn.Module) -> None:
    """Raises CaptureError for results in mappings of other types than dict, which programs do not make."""
    if isinstance(out, Mapping) and type(out) is not dict:
        raise CaptureError(
            f"to capture {type(module).__name__}", f"results in a {type(out).__name__}",
            "what a program gives lies in tuples, lists and dicts", "a dict",
        )  # fmt: skip
    if isinstance(out, (tuple, list, dict)):
        for item in out.values() if isinstance(out, dict) else out:
            _check_mappings(item, module)


def _check_arguments_left_alone(program: Program, module: nn.Module) -> None:
    """Raises CaptureError for a module that writes to its arguments: autograd must see who wrote."""
    written = {x for x, _ in program.writes}
    if any(i.value in written for i in program.inputs if i.role == "batch"):
        raise CaptureError(
            f"to capture {type(module).__name__}", "that it writes to its argument",
            "the argument has a past in autograd, and a program cannot write a new one", "a result of its own",
        )  # fmt: skip


def _reading_copies(program: Program) -> Program:
    """The captured program, whose operators read copies of what is written: autograd may keep what they read."""
    read = {v for n in program.nodes if isinstance(n.op, _Operator) for v in n.ins}
    copies = {x: Value(f"{x.name}_before", x.shape, x.dtype, x.device) for x, _ in program.writes if x in read}

    def copy(v: Value) -> Value:
        return copies.get(v, v)

    made = [Node(aten.clone.default, (x,), {}, c) for x, c in copies.items()]
    nodes = [replace(n, args=map_values(copy, n.args), kwargs=map_values(copy, n.kwargs)) for n in program.nodes]
    writes = tuple((x, copy(v)) for x, v in program.writes)
    return replace(program, nodes=(*made, *nodes), outputs=map_values(copy, program.outputs), writes=writes)


def _for_saved_sizes(passes: Sequence[Pass], backward: Program) -> Sequence[Pass]:
    """The passes that need not know what the sizes are that the forward pass hands over."""
    sizes = any(not i.value.is_tensor for i in backward.inputs)
    return [p for p in passes if not (sizes and isinstance(p, InPlace))]


@contextmanager
def _unhooked() -> Generator[None]:
    """Inside, what autograd saves is nobody else's business: what is recorded is not what runs."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


@contextmanager
def _autocast_off() -> Generator[None]:
    """Inside, operators run in the dtypes that they are given: a program has its casts."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _run(found: _Compiled, leaves: Sequence[Any]) -> Any:
    """What the module gives, as part of the caller's autograd graph."""
    with local_parts(), _autocast_off():
        given = [fetch(leaves) for fetch in found.fetch]
        flat = _Piece.apply(found, *given)
        specs = [None if s is None else s.of_part(x.shape) for x, s in zip(flat, found.piece.specs, strict=True)]
    return found.form.put_together([x if s is None else stamp(x, s) for x, s in zip(flat, specs, strict=True)])


class _Piece(torch.autograd.Function):
    """The two programs of a piece, as one differentiable function of the rank's parts."""

    @staticmethod
    def forward(ctx: Any, found: _Compiled, *given: Any) -> Any:
        outputs, written = found.forward(*given)
        targets = _targets(found.piece.forward, given)
        flat, saved = (_apart_from(targets, outputs[key]) for key in ("out", "saved"))
        for x, value in zip(targets, written, strict=True):
            x.copy_(value)
        ctx.found, ctx.count = found, len(given)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in saved])
        flat = _each_its_own(flat, given)
        wanted = found.piece.wanted
        ctx.mark_non_differentiable(*[x for n, x in enumerate(flat) if isinstance(x, Tensor) and n not in wanted])
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found: _Compiled = ctx.found
        if torch.is_grad_enabled():
            raise StaticError(
                f"create_graph=True through {found.name}", "a piece whose backward pass is a program",
                "it was recorded once, and its gradients have no past of their own",
                "the model itself in the place of mw.to_static(model), for gradients of gradients",
            )  # fmt: skip
        back: list[Any] = [None] * (ctx.count + 1)
        if found.backward is None:
            return tuple(back)
        saved = [n if x is None else x for x, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        with local_parts(), _autocast_off(), torch.no_grad():
            out, _ = found.backward(*saved, *[grads[n] for n in found.piece.wanted])
        for at, grad in zip(found.asks, out, strict=True):
            back[at + 1] = grad
        return tuple(back)


def _targets(forward: Program, given: Sequence[Any]) -> list[Tensor]:
    """The tensors that are written to, in the order of the program's writes."""
    at = {i.value: x for i, x in zip(forward.inputs, given, strict=True)}
    return [at[x] for x, _ in forward.writes]


def _apart_from(targets: Sequence[Tensor], values: Sequence[Any]) -> list[Any]:
    """The values, copied where they look at what is to be written: they stay what they were."""
    taken = {x.untyped_storage().data_ptr() for x in targets}

    def apart(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in taken else x

    return [apart(x) for x in values] if taken else list(values)


def _each_its_own(values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The values, none of them an argument or another value: autograd gives each tensor one past."""
    seen = {id(x) for x in given}
    found: list[Any] = []
    for x in values:
        found.append(x.view_as(x) if isinstance(x, Tensor) and id(x) in seen else x)
        seen.add(id(x))
    return found
