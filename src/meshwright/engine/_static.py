"""One call from a module to programs: `to_static` gives a model whose steps are captured, recorded and run as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current
from meshwright.graph import (
    Capture,
    CaptureError,
    Fits,
    Layouts,
    Pass,
    Program,
    Run,
    Slot,
    StateKey,
    Value,
    apply_passes,
    capture,
    compiled,
    complete,
    joined,
    note_step,
    record_forward,
    record_gradients,
    record_update,
    runner,
    slots_of,
    spread,
    verify,
    with_layouts,
)
from meshwright.layout import Spec
from meshwright.passes import data_axes, shards
from meshwright.search import MeshPlan
from meshwright.tensor import leaves_in, local_parts, map_tensors, stamp, whole

from ._apart import lie_apart, without_inputs
from ._errors import StaticError
from ._inputs import Fetch, fetch_of, lay_as_captured
from ._loss_scale import LossScale
from ._optimizer import refuse_master_weights
from ._pieces import Pieces
from ._pipeline import Chosen, Piped, Separate, piped, sequences_cut
from ._program_files import Model, Saved, Shelf, load_programs, save_programs
from ._setting import Settings, form_of
from ._shared import recorded_once
from ._strategy import Strategy
from ._variants import Dynamic, Variants, sizes_of

Mode = Literal["train", "eval", "predict"]


@dataclass(slots=True)
class Compiled:
    """A program, the function that runs it, and where each of its inputs comes from; of a pipeline also its table."""

    program: Program
    run: Run
    fetch: tuple[Fetch, ...]
    writes: tuple[int, ...]
    table: Mapping[str, Any] | None = None


def to_static(
    layer: nn.Module,
    loader: Iterable[Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """`layer`, whose training step (forward, loss, backward, update) runs as one program recorded for every rank.

    Programs are recorded at the first call for a batch of new shapes. `layer` and `optimizer` stay what they are and
    share their tensors with the programs: going on eagerly is a matter of calling them.
    """
    return DistModel(layer, loader, loss, optimizer, strategy or Strategy())


class DistModel:
    """What `to_static` gives: call it with a batch.

    In training it makes a step and gives the loss of the whole batch; in evaluation it gives the loss, in prediction
    what the network gives. It trains where there are a loss and an optimizer, and predicts where there is none.
    """

    def __init__(
        self,
        network: nn.Module,
        loader: Iterable[Any] | None,
        loss: Callable[..., Tensor] | None,
        optimizer: Optimizer | None,
        strategy: Strategy,
    ) -> None:
        self.strategy = strategy
        self.network, self.loader, self.loss, self.optimizer = network, loader, loss, optimizer
        self._variants: Variants[Compiled] = Variants(strategy.max_programs)
        self._settings = Settings(network, optimizer)
        self._shelf = Shelf()
        self._latest: Compiled | None = None
        self._homes: dict[str, Spec] = {}
        self.plan: MeshPlan | None = None
        """How the model is divided, where that was chosen and not marked (`auto`)."""
        self.before: list[Callable[[Sequence[Any]], None]] = []
        """Is called with the leaves of each batch that is trained on, and may refuse it."""
        self.pieces: Pieces | None = None
        """The modules that run as programs, where the whole could not be one."""
        self.pipeline: Chosen | None = None
        """The schedule of the microbatches, and why it is that one; once a pipeline was called."""
        scaling = strategy.amp.scaling
        self.loss_scale = None if scaling is None else LossScale(strategy.amp.init_loss_scaling, scaling)
        """The factor of the loss in training with `amp` in float16, which the steps change; None without."""
        self.layouts: Layouts | None = None
        """How the values of the captured model lie, once it was called."""
        self._mode: Mode = "train" if optimizer is not None else "eval" if loss is not None else "predict"

    @property
    def mode(self) -> Mode:
        return self._mode

    def train(self) -> DistModel:
        """From now on calls make training steps. Raises StaticError where there is no optimizer."""
        if self.optimizer is None:
            raise StaticError(
                "dist_model.train()", "a model made without an optimizer", "a training step updates parameters",
                "mw.to_static(model, loader, loss, optimizer)",
            )  # fmt: skip
        self._mode = "train"
        self.network.train()
        return self

    def eval(self) -> DistModel:
        """From now on calls give the loss and change nothing."""
        self._mode = "eval"
        self.network.eval()
        return self

    def predict(self) -> DistModel:
        """From now on calls give what the network gives."""
        self._mode = "predict"
        self.network.eval()
        return self

    def __call__(self, *batch: Any) -> Any:
        """The loss of the whole batch, the same on every rank; what the network gives in prediction."""
        leaves = list(leaves_in(batch))
        for check in self.before if self._mode == "train" else ():
            check(leaves)
        if self.pieces is None:
            try:
                found = self._found(batch, leaves)
            except CaptureError as error:
                if self.strategy.full_graph:
                    raise
                self.pieces = Pieces(self.network, self.strategy, error)
            else:
                return self._run(found, leaves)
        return self._run_pieces(batch)

    def accumulate(self, batches: Iterable[Sequence[Any]]) -> Tensor:
        """A training step whose microbatches are these batches, each with sizes of its own; gives their mean loss.

        There are as many as the pipeline has microbatches, and each counts as much as any other. Each new row of sizes
        is recorded anew. Raises StaticError without a pipeline, and for another number.
        """
        separate = Separate(batches)
        self._check_separate(separate)
        leaves = list(leaves_in(tuple(separate)))
        return self._run(self._found(separate, leaves), leaves)

    def _check_separate(self, batches: Separate) -> None:
        options = self.strategy.pipeline
        asked = f"dist_model.accumulate({len(batches)} batches)"
        if self._mode != "train" or not options.enable:
            raise StaticError(
                asked, "no pipeline that trains", "its microbatches are what is given one by one",
                'mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 8}), and dist_model.train()',
            )  # fmt: skip
        if len(batches) != options.accumulate_steps or len({form_of(tuple(b)) for b in batches}) != 1:
            raise StaticError(
                asked, f"pipeline.accumulate_steps = {options.accumulate_steps}",
                "there is one batch for each microbatch, and all are built alike",
                f"{options.accumulate_steps} batches of the same number of tensors",
            )  # fmt: skip

    def compile(self, *batch: Any) -> Program:
        """The program for such a batch, recorded and not run; tensors may be on the meta device."""
        return self._found(batch, list(leaves_in(batch))).program

    def _found(self, batch: Sequence[Any], leaves: Sequence[Any]) -> Compiled:
        """The program that takes the batch, recorded now if there is none."""
        key = self._key(batch)
        found = self._variants.find(key, leaves) or self._loaded(key, leaves)
        if found is None:
            dynamic = self._variants.open_sizes(key, leaves)
            if self._is_of_one_size:
                dynamic = {}
            found, fits = self._compile(batch, dynamic)
            self._variants.add(self._key(batch), leaves, found, dynamic, fits)  # tensors may lie otherwise by now
        self._latest = found
        return found

    @property
    def _is_of_one_size(self) -> bool:
        """True where a program is right for the sizes that it was recorded with: of kernels, and of pieces."""
        in_pieces = self.strategy.merge is not None or self.strategy.pipeline.enable
        return self.strategy.compiler == "inductor" or (in_pieces and self._mode == "train")

    @property
    def program(self) -> Program:
        """The program that ran last. Raises StaticError before the first call."""
        if self._latest is None:
            raise StaticError(
                "dist_model.program", "a model that was not called yet",
                "programs are recorded for the shapes of a batch",
                "dist_model(*batch) first",
            )  # fmt: skip
        return self._latest.program

    @property
    def recordings(self) -> int:
        """How many programs were recorded so far; those that were loaded do not count."""
        return self._variants.count - self._shelf.taken

    def save(self, folder: str | os.PathLike[str], kernels: bool = False) -> None:
        """Writes every program recorded so far into a folder, each rank its own; `load` takes them from there.

        Parameters and states are no part of it. With `kernels`, programs in which ranks do not communicate are compiled
        ahead of time for `Strategy(compiler="inductor")`. Raises ProgramFileError for programs that no file can hold.
        """
        save_programs(folder, self._model, self._variants, self._settings, kernels)

    def load(self, folder: str | os.PathLike[str]) -> DistModel:
        """From now on the programs that such a model saved are used, and not recorded again; gives the model itself.

        Parameters, buffers and states are laid as the programs take them. Raises StaticError for programs of another
        model, another loss, optimizer or strategy, or of another number of ranks, and ProgramFileError for files that
        hold none.
        """
        self._homes |= load_programs(folder, self._model, self._shelf, self._settings)
        return self

    @property
    def _model(self) -> Model:
        return Model(self.network, self.loss, self.optimizer, self.strategy)

    def _loaded(self, key: Any, leaves: Sequence[Any]) -> Compiled | None:
        """The loaded program that takes the batch, ready to run."""
        slots = slots_of(self.network)
        taken = self._shelf.take(key, leaves, self._settings, lambda: self._apart(slots))
        if taken is None:
            return None
        found = self._ready_saved(taken.program, slots)
        self._variants.add(key, leaves, found, taken.dynamic, taken.holds)
        return found

    def _ready_saved(self, saved: Saved, slots: Sequence[Slot]) -> Compiled:
        if saved.piped is not None:
            return self._ready_piped(saved.piped, slots)
        lowered = saved.lowered(self._writes(slots)) if self.strategy.compiler == "inductor" else None
        return self._ready(saved.program, slots, lowered)

    def state_dict(self, mode: Literal["all", "param", "opt"] = "all") -> dict[str, Any]:
        """Parameters and buffers by name, and the optimizer's states by "parameter.key"."""
        found: dict[str, Any] = {}
        if mode in ("all", "param"):
            found |= {slot.name: slot.tensor for slot in slots_of(self.network)}
        if mode in ("all", "opt") and self.optimizer is not None:
            found |= {f"{name}.{key}": value for (name, key), value in self._states().items()}
        return found

    def _run(self, found: Compiled, leaves: Sequence[Any]) -> Any:
        step = current().seen.doing("program", f"{self._mode} {type(self.network).__name__}")
        with local_parts(), torch.no_grad(), step:
            given = [fetch(leaves) for fetch in found.fetch]
            outputs, written = found.run(*given)
            for at, value in zip(found.writes, written, strict=True):
                given[at].copy_(value)
        if "state" in outputs and self.optimizer is not None:
            note_step(self.optimizer)
        made = outputs.get("state", {})
        if made and not ("skipped" in outputs and bool(outputs["skipped"])):
            self._keep_states(made, found.program)
        return outputs["out"]

    def _run_pieces(self, batch: Sequence[Any]) -> Any:
        """The step in Python, with programs in the place of the modules that could be captured."""
        assert self.pieces is not None
        with self.pieces.in_place(), torch.set_grad_enabled(self._mode == "train"):
            out = self._call(*batch)
        if self._mode == "train" and self.optimizer is not None:
            out.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return map_tensors(lambda x: whole(x.detach()), out)

    def _keep_states(self, states: Mapping[StateKey, Any], program: Program) -> None:
        """The optimizer's states that the first step made."""
        if self.optimizer is None:
            return
        parameters = {slot.name: slot.tensor for slot in slots_of(self.network)}
        for (name, key), value in states.items():
            made = program.outputs["state"][name, key]
            spec = program.specs.get(made) if isinstance(made, Value) else None
            self.optimizer.state[parameters[name]][key] = value if spec is None else stamp(value, spec)

    def _options(self) -> Any:
        """What a program holds as constants: the optimizer's options beside learning rates."""
        if self._mode != "train" or self.optimizer is None:
            return ()
        plain = (int, float, bool, str, tuple, type(None))
        return tuple(
            (at, key, value)
            for at, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if key not in ("lr", "initial_lr", "params") and isinstance(value, plain)
        )

    def _key(self, batch: Sequence[Any]) -> Any:
        """What two calls must share, beside the sizes of their batches, to be runs of one program."""
        return (self._mode, self._settings.number(self._mode == "train"), self._options(), form_of(batch))

    def _states(self) -> dict[StateKey, Any]:
        assert self.optimizer is not None
        names = {id(s.tensor): s.name for s in slots_of(self.network)}
        return {(names[id(p)], k): v for p, state in self.optimizer.state.items() for k, v in state.items()}

    def _compile(self, batch: Sequence[Any], dynamic: Dynamic) -> tuple[Compiled, Fits]:
        if self._mode == "train" and self.strategy.pipeline.enable:
            return self._compile_pipeline(batch)
        merge = self.strategy.merge if self._mode == "train" else None
        captured, layouts = self._captured(merge.piece(batch, 0) if merge else batch, dynamic)
        how = (
            self._key(batch),
            dynamic,
            self.strategy,
            self._states_lie(),
            type(self.optimizer),
            sizes_of(list(leaves_in(batch))),
            self._apart(captured.slots),
        )
        program, fits = recorded_once(current(), captured, how, lambda: self._made(captured, batch))
        self._lay(captured, layouts)
        return self._ready(program, captured.slots), fits

    def _captured(
        self, batch: Sequence[Any], dynamic: Dynamic, homes: Mapping[str, Spec] | None = None
    ) -> tuple[Capture, Layouts]:
        """The captured model, its layouts completed, after the passes on captured programs; `homes` lie as they are."""
        with self.strategy.autocast(leaves_in(batch)):
            captured = capture(self.network, self._call, batch, dynamic)
        program = spread(captured.program)
        if self._mode == "train" and self.strategy.pipeline.enable:
            program = sequences_cut(program, self.strategy.pipeline)
        given = {**self._homes, **(homes or {}), **(self.strategy.layouts or {})}
        layouts = complete(program, given)
        if self._mode == "train" and (uncut := self._uncut(program, layouts, batch)):
            layouts = complete(program, {**uncut, **given})
        forward = with_layouts(program, layouts)
        return replace(captured, program=apply_passes(forward, self.strategy.passes_on("captured"))), layouts

    def _uncut(self, program: Program, layouts: Layouts, batch: Sequence[Any]) -> dict[str, Spec]:
        """Whole rows for what a batch in pieces has plain, where its tensors would be cut along different axes.

        A rank takes a piece of its own part, and those must be the same rows in all tensors.
        """
        how = self.strategy.merge or self.strategy.microbatches
        if how is None:
            return {}
        cut = how.leaves(list(leaves_in(batch)))
        specs = {i: layouts.specs.get(i.value.name) for i in program.inputs if i.role == "batch" and i.source in cut}
        if len({spec.layout.dims[0] if spec else () for spec in specs.values()}) <= 1:
            return {}
        plain = ((i.value.name, spec) for i, spec in specs.items() if spec is not None and i.spec is None)
        return {n: spec.with_layout(replace(spec.layout, dims=((), *spec.layout.dims[1:]))) for n, spec in plain}

    def _lay(self, captured: Capture, layouts: Layouts) -> None:
        """Parameters, buffers and states lie from now on as the program takes them."""
        lay_as_captured(captured, self.optimizer)
        self._homes |= _homes(captured, layouts)
        self.layouts = layouts

    def _compile_pipeline(self, batch: Sequence[Any]) -> tuple[Compiled, Fits]:
        """The actions of a pipeline's microbatches, each with a program."""
        how = self.strategy.microbatches
        assert how is not None
        firsts = batch.firsts if isinstance(batch, Separate) else [how.piece(batch, 0)]
        captured, layouts = self._captured(firsts[0], {})
        homes = _homes(captured, layouts)
        others = [self._captured(first, {}, homes)[0] for first in firsts[1:]]
        found = piped([captured, *others], batch, self.strategy, lambda step: self._with_update(captured, step))
        fits = captured.fits()
        self._lay(captured, layouts)
        passes = self._last_passes(captured.slots)
        return self._ready_piped(found.after(lambda part: apply_passes(part, passes)), captured.slots), fits

    def _ready_piped(self, found: Piped, slots: Sequence[Slot]) -> Compiled:
        """A pipeline's step, each part compiled where the strategy asks for it."""

        def make(part: Program) -> tuple[Run, tuple[Value, ...]]:
            if self.strategy.compiler == "inductor":
                part = compiled(part, current(), writes=self._writes(slots))
            return runner(part), tuple(x for x, _ in part.writes)

        self.pipeline = found.chosen
        run = found.runs(make)
        at = {given.value: n for n, given in enumerate(run.inputs)}
        fetch = tuple(fetch_of(given, slots, self.optimizer, self.loss_scale) for given in run.inputs)
        program, table = found.end_to_end()
        return Compiled(program, run, fetch, tuple(at[x] for x in run.writes), table)

    def _ready(self, program: Program, slots: Sequence[Slot], lowered: Program | None = None) -> Compiled:
        """The program, compiled where the strategy asks for it and it is not yet, with what fetches its inputs."""
        writes = {given.value: at for at, given in enumerate(program.inputs)}
        if lowered is None:
            lowered = program
            if self.strategy.compiler == "inductor":
                lowered = compiled(program, current(), writes=self._writes(slots))
        return Compiled(
            program,
            runner(lowered),
            tuple(fetch_of(given, slots, self.optimizer, self.loss_scale) for given in program.inputs),
            tuple(writes[x] for x, _ in lowered.writes),
        )

    def _made(self, captured: Capture, batch: Sequence[Any]) -> Program:
        """The program of this rank, after all passes."""
        program = verify(self._recorded(captured, batch)).with_changes(*captured.program.changes)
        return apply_passes(program, self._last_passes(captured.slots))

    def _last_passes(self, slots: Sequence[Slot]) -> Sequence[Pass]:
        """The passes on what is recorded; inputs that look at one memory are not written over."""
        passes = self.strategy.passes_on("recorded")
        return passes if self._apart(slots) else without_inputs(passes)

    def _apart(self, slots: Sequence[Slot]) -> bool:
        """True where each parameter, buffer and state lies in memory of its own."""
        states = self._states().values() if self.optimizer is not None else ()
        with local_parts():
            return lie_apart((*(s.tensor for s in slots), *states))

    def _writes(self, slots: Sequence[Slot]) -> bool:
        """True where kernels may write parameters, buffers and states in place."""
        return self.strategy.inplace and self._apart(slots)

    def _states_lie(self) -> Any:
        """Which states there are, and how they lie."""
        if self._mode != "train":
            return ()
        return [(key, getattr(x, "_spec", getattr(x, "shape", x))) for key, x in self._states().items()]

    def _call(self, *batch: Any) -> Any:
        if self._mode == "predict" or self.loss is None:
            return self.network(*batch)
        *inputs, labels = batch
        return self.loss(self.network(*inputs), labels)

    def _recorded(self, captured: Capture, batch: Sequence[Any]) -> Program:
        here = current()
        if self._mode != "train":
            return record_forward(captured, here.rank, here.size)
        step = record_gradients(captured, here.rank, here.size, self.loss_scale is not None)
        if self.strategy.merge is not None:
            step = self.strategy.merge.program(step, list(leaves_in(batch)))
        return self._with_update(captured, step)

    def _with_update(self, captured: Capture, step: Program) -> Program:
        """The step, whose outputs are a loss and gradients, and the optimizer's step behind it."""
        assert self.optimizer is not None
        refuse_master_weights(self.optimizer)
        here = current()
        grads: Mapping[str, Any] = step.outputs["grads"]
        trained = [i for i in captured.program.inputs if i.role == "parameter" and i.name in grads]
        names = {id(s.tensor): s.name for s in captured.slots}
        sharding = self.strategy.sharding
        cut: Mapping[str, Spec] = {}
        if sharding.enable and sharding.stage < 3:
            cut = shards(trained, sharding.axes or data_axes(captured.program), sharding.least)
        scaling = self.strategy.amp.scaling
        update = record_update(self.optimizer, names, trained, self._states(), here.rank, here.size, cut, scaling)
        feeds = {i.value: grads[i.name] for i in update.inputs if i.role == "gradient"}
        return joined(step, update, feeds, lambda a, b: {"out": a["out"], **b})


def _homes(captured: Capture, layouts: Layouts) -> dict[str, Spec]:
    """How parameters and buffers lie."""
    held = _slot_values(captured.program)
    return {name: spec for name, spec in layouts.specs.items() if name in held}


def _slot_values(program: Program) -> set[str]:
    """Names of the values of parameters and buffers."""
    return {i.value.name for i in program.inputs if i.role in ("parameter", "buffer")}
