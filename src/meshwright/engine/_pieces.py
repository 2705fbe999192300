"""A model that cannot be one program: what can be captured runs as programs, the rest as Python, module by module."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import current
from meshwright.graph import (
    CaptureError,
    Piece,
    Run,
    Value,
    apply_passes,
    capture,
    complete,
    map_values,
    record_piece,
    runner,
    with_layouts,
)
from meshwright.tensor import local_parts, stamp

from ._inputs import Fetch, fetch_of, lay_as_captured, leaves_in
from ._strategy import Strategy
from ._variants import Variants


@dataclass(slots=True)
class _Compiled:
    """A piece, the functions that run it, and where the inputs of its forward pass come from."""

    piece: Piece
    forward: Run
    backward: Run | None
    fetch: tuple[Fetch, ...]
    asks: tuple[int, ...]
    """Which inputs of the forward pass get gradients."""
    writes: tuple[tuple[Value, Value], ...]


class Pieces:
    """The modules below `root` that run as programs; those that cannot are `eager`, with the reason."""

    def __init__(self, root: nn.Module, strategy: Strategy) -> None:
        self.root, self.strategy = root, strategy
        self.eager: dict[str, str] = {}
        self._known: dict[str, Variants[_Compiled]] = {}

    @property
    def compiled(self) -> tuple[str, ...]:
        """The modules that run as programs."""
        return tuple(self._known)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the modules that can be captured run as programs."""
        put: list[nn.Module] = []
        try:
            self._put("", self.root, put)
            yield
        finally:
            for module in put:
                module.__dict__.pop("forward", None)

    def _put(self, path: str, module: nn.Module, put: list[nn.Module]) -> None:
        if path in self.eager:
            for name, child in module.named_children():
                self._put(f"{path}.{name}".lstrip("."), child, put)
            return
        if "forward" in module.__dict__:
            return
        module.__dict__["forward"] = self._running(path, module, put)
        put.append(module)

    def _running(self, path: str, module: nn.Module, put: list[nn.Module]) -> Callable[..., Any]:
        """What runs instead of the module's own `forward`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = None if kwargs else self._find(path, module, args)
            if found is not None:
                return _run(found, list(leaves_in(args)))
            module.__dict__.pop("forward", None)
            for name, child in module.named_children():
                self._put(f"{path}.{name}".lstrip("."), child, put)
            return module.forward(*args, **kwargs)

        return forward

    def _find(self, path: str, module: nn.Module, args: Sequence[Any]) -> _Compiled | None:
        leaves = list(leaves_in(args))
        key = (
            module.training,
            torch.is_grad_enabled(),
            tuple(isinstance(x, Tensor) and x.requires_grad for x in leaves),
        )
        variants = self._known.get(path) or Variants[_Compiled](self.strategy.max_programs)
        found = variants.find(key, leaves)
        if found is not None:
            return found
        dynamic = variants.open_sizes(key, leaves)
        own = module.__dict__.pop("forward", None)
        try:
            captured = capture(module, module.forward, args, dynamic)
        except CaptureError as error:
            self.eager[path] = str(error)
            return None
        finally:
            if own is not None:
                module.__dict__["forward"] = own
        layouts = complete(captured.program, self.strategy.layouts)
        captured = replace(captured, program=with_layouts(captured.program, layouts))
        lay_as_captured(captured, None)
        here = current()
        asked = [at for at, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        piece = record_piece(captured, asked if torch.is_grad_enabled() else [], here.rank, here.size)
        found = self._compiled(captured.slots, piece)
        variants.add(key, leaves, found, dynamic, captured.fits())
        self._known[path] = variants
        return found

    def _compiled(self, slots: Any, piece: Piece) -> _Compiled:
        passes = self.strategy.passes_on("recorded")
        forward = apply_passes(piece.forward, passes)
        backward = None if piece.backward is None else apply_passes(piece.backward, passes)
        at = {given.value: n for n, given in enumerate(forward.inputs)}
        fetch = tuple(fetch_of(given, slots) for given in forward.inputs)
        asks = tuple(at[v] for v in piece.trained)
        back = None if backward is None else runner(backward)
        return _Compiled(piece, runner(forward), back, fetch, asks, forward.writes)


def _run(found: _Compiled, leaves: Sequence[Any]) -> Any:
    """What the module gives, as part of the caller's autograd graph."""
    with local_parts():
        given = [fetch(leaves) for fetch in found.fetch]
        flat = _Piece.apply(found, *given)
        specs = [None if s is None else s.of_part(x.shape) for x, s in zip(flat, found.piece.specs, strict=True)]
    results = [x if spec is None else stamp(x, spec) for x, spec in zip(flat, specs, strict=True)]
    left = iter(results)
    return map_values(lambda _: next(left), found.piece.forward.outputs["out"])


class _Piece(torch.autograd.Function):
    """The two programs of a piece, as one differentiable function of the rank's parts."""

    @staticmethod
    def forward(ctx: Any, found: _Compiled, *given: Any) -> Any:
        outputs, written = found.forward(*given)
        inputs = {x.value: t for x, t in zip(found.piece.forward.inputs, given, strict=True)}
        for (x, _), value in zip(found.writes, written, strict=True):
            inputs[x].copy_(value)
        ctx.found, ctx.count = found, len(given)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in outputs["saved"]]
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in outputs["saved"]])
        flat = [x for x in leaves_in(outputs["out"]) if isinstance(x, Tensor)]
        mine = {id(x) for x in given}
        flat = [x.view_as(x) if id(x) in mine else x for x in flat]
        ctx.mark_non_differentiable(*[x for n, x in enumerate(flat) if n not in found.piece.wanted])
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found: _Compiled = ctx.found
        back: list[Any] = [None] * (ctx.count + 1)
        if found.backward is None:
            return tuple(back)
        saved = [n if x is None else x for x, n in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        with local_parts(), torch.no_grad():
            out, _ = found.backward(*saved, *[grads[n] for n in found.piece.wanted])
        for at, grad in zip(found.asks, out, strict=True):
            back[at + 1] = grad
        return tuple(back)
