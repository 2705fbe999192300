"""Build the program of this rank for a batch: capture the model, complete its layouts, record, and run all passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Any

from torch import Tensor

from meshwright.comm import current_communicator, is_compared
from meshwright.fixed_order import in_same_numbers, one_of_microbatches
from meshwright.graph import (
    BatchPredicate,
    Capture,
    Input,
    InspectedStep,
    Layouts,
    Pass,
    Program,
    RulePass,
    Run,
    StateKey,
    Value,
    apply_passes,
    capture,
    check_stages,
    compiled,
    copy_batch_inputs,
    join_programs,
    libraries_of,
    made_states,
    meshes_of,
    observed,
    record_forward,
    record_gradients,
    record_update,
    runner,
    runs_users_code,
    split_before_update,
    tensor_dtype,
    verify,
    with_stage_sends,
)
from meshwright.layout import Spec
from meshwright.passes import batch_axes, further_sharded_specs
from meshwright.tensor import leaves_in, stages_of

from ..eager.optimizer import refuse_master_weights
from ..recording.digest import checksums, digest_of
from ..recording.loss_scale import LossScale
from ..recording.memory_overlap import check_no_overlap, without_inputs
from ..recording.program_inputs import Fetch, apply_captured_layouts, fetch_of
from ..recording.recorded_model import Mode, RecordedModel
from ..recording.recording_progress import RecordingPhases
from ..recording.refuse_call import refuse_shared_new_layouts
from ..recording.setting import Roots, form_of
from ..recording.shared_recordings import (
    SteadyCalls,
    captured_once,
    completed_once,
    constant_numbers,
    constants_of,
    is_shared,
    laid_once,
    recorded_once,
    runner_once,
)
from ..recording.variants import Dynamic, sizes_of
from ..recording.without_gc import garbage_collection_paused
from .pipeline_step import PipelineStep, ScheduleChoice, SeparateBatches, pipeline_step
from .program_cache import ProgramCache
from .program_files import SavedProgram


@dataclass(slots=True)
class CompiledProgram:
    """A program, the function that runs it, and the functions that fetch its inputs; for a pipeline also its table.

    A program that is not `whole` runs more than its nodes say, and is never saved. This is the first asynchronous step
    of a pipeline if its later updates run another program than its first one.
    """

    program: Program
    run: Run
    inputs: tuple[Input, ...]
    fetch: tuple[Fetch, ...]
    writes: tuple[int, ...]
    """The inputs that get the values which `run` returns beside its outputs."""
    changes: tuple[int, ...]
    """The inputs that the program changes, `writes` and those that compiled kernels change in place."""
    table: Mapping[str, Any] | None = None
    whole: bool = True
    shared: bool = True
    """True if the program is also for other ranks: those with parts of the same shapes."""
    digest: str | None = None
    """A checksum of everything that determines the program of a recording; None if no checksum covers it."""
    captures: tuple[str, ...] = ()
    """Checksums of the calls that were captured for it."""
    constants: Mapping[int, int] = field(default_factory=dict[int, int])
    """Place of an input that is a constant of the captured calls → number of this constant in the calls."""
    apart: InspectedStep | None = None
    """The step with the update as a part of its own, if gradients are looked at before it."""
    addresses: list[int] = field(default_factory=list[int])
    """The addresses of the tensors that the last check showed to share no memory with what the program changes."""
    _batch: tuple[tuple[int, int], ...] = field(init=False)
    """The inputs that are leaves of the batch, with the numbers of the leaves."""
    _checked: tuple[bool, ...] = field(init=False)
    """For each input, True if its memory is checked. The batch counts if the program changes it."""

    def __post_init__(self) -> None:
        self._batch = tuple((at, i.source) for at, i in enumerate(self.inputs) if i.role == "batch")
        with_batch = any(self.inputs[at].role == "batch" for at in self.changes)
        self._checked = tuple(i.value.is_tensor and (i.role != "batch" or with_batch) for i in self.inputs)

    def check_apart(self, given: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Raise StaticError if an input that the program changes shares memory with another input.

        `given` are the tensors and numbers for the inputs; some of them are copies of the `leaves` of the batch.
        """
        if not self.changes:
            return
        held = list(given)
        for at, leaf in self._batch:
            held[at] = leaves[leaf]
        addresses = list(map(Tensor.data_ptr, compress(held, self._checked)))
        if addresses != self.addresses:
            checked = [x if is_checked else None for x, is_checked in zip(held, self._checked, strict=True)]
            check_no_overlap(self.inputs, checked, self.changes)
            self.addresses = addresses


@dataclass(slots=True)
class Builder:
    """Builder of the programs of a model. `homes` are the layouts of parameters and buffers, which stay once chosen."""

    model: RecordedModel
    mode: Mode
    loss_scale: LossScale | None = None
    homes: dict[str, Spec] = field(default_factory=dict[str, Spec])
    layouts: Layouts | None = None
    pipeline: ScheduleChoice | None = None
    loaded: list[tuple[str, SavedProgram]] = field(default_factory=list[Any])
    """Programs that were loaded, with their digests."""
    kept: ProgramCache = field(default_factory=ProgramCache)
    recordings: int = 0
    phases: RecordingPhases = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Measure the phases of a new program."""
        self.phases = RecordingPhases(f"{self.mode} program of {type(self.model.network).__name__}")

    def build(
        self, batch: Sequence[Any], dynamic: Dynamic, key: object
    ) -> tuple[CompiledProgram, BatchPredicate, Capture]:
        """Return the program for a batch, the test of other batches that it fits, and the captured call.

        Ranks with the same `key` share the program.
        """
        self._begin()
        with garbage_collection_paused():
            found = self._build_step(batch, dynamic, key)
        self.phases.tell()
        return found

    def _build_step(
        self, batch: Sequence[Any], dynamic: Dynamic, key: object
    ) -> tuple[CompiledProgram, BatchPredicate, Capture]:
        if self.mode == "train" and self.model.strategy.pipeline.enable:
            return self._build_pipeline(batch, key)
        strategy = self.model.strategy
        merge = strategy.merge if self.mode == "train" else None
        captured, layouts = self._captured(merge.piece(batch, 0) if merge else batch, dynamic)
        sizes = sizes_of(list(leaves_in(batch)))
        apart = self.model.lies_apart()
        digest = digest_of([captured], (key, dynamic, () if dynamic else sizes, apart), self.model)
        saved = self._saved(digest, batch, [captured])
        if saved is not None:
            self._apply_layouts(captured, layouts)
            return self._loaded(saved.of_call(self._constants([captured])), digest), saved.holds, captured
        depends_on = (key, dynamic, sizes, apart, strategy, self._states_lie(), type(self.model.optimizer))
        alike = self._records_alike
        program, fits = recorded_once(
            current_communicator(), captured, depends_on, lambda: self._recorded_with_passes(captured, batch), alike
        )
        self.recordings += 1
        self._apply_layouts(captured, layouts)
        ready = self._with_facts(self._ready(program), [captured], digest)
        return ready, fits, captured

    def _saved(self, digest: str | None, batch: Sequence[Any], captured: Sequence[Capture]) -> SavedProgram | None:
        """Return the loaded or kept program with this digest that takes the batch.

        A kept program may use operators of the libraries whose operators the captured calls use.
        """
        if digest is None:
            return None
        leaves, trains = list(leaves_in(batch)), self.mode == "train"
        libraries = libraries_of([node.op for each in captured for node in each.program.nodes])
        kept = self.kept.find(digest, self.model, libraries)
        found = chain((saved for at, saved in self.loaded if at == digest), kept)
        return next((saved for saved in found if saved.fits(leaves, self.model, trains)), None)

    @property
    def _records_alike(self) -> bool:
        """True if each rank makes the same tensors of Python numbers while it records."""
        return self.model.optimizer is None or not runs_users_code(self.model.optimizer)

    def _loaded(self, saved: SavedProgram, digest: str | None) -> CompiledProgram:
        """Return a program of a file, ready to run."""
        pipeline = saved.piped
        if pipeline is not None:
            found = self._ready_pipeline(pipeline)
        else:
            strategy = self.model.strategy
            lowered = saved.lowered(self.model.writes()) if strategy.compiler == "inductor" else None
            found = self._ready(saved.program, lowered)
        return replace(found, shared=saved.shared, digest=digest, captures=saved.captures, constants=saved.constants)

    def _captured(
        self, batch: Sequence[Any], dynamic: Dynamic, homes: Mapping[str, Spec] | None = None
    ) -> tuple[Capture, Layouts]:
        """Return the captured model after its passes, and its completed layouts.

        `homes` keep their layouts.
        """
        model, strategy = self.model, self.model.strategy
        with strategy.autocast(leaves_in(batch)), self.phases.phase("capture"):
            calls = () if model.loss is None else (model.loss,)
            roots = Roots(model.network, calls, model.optimizer if self.mode == "train" else None)
            steady = self._steady_calls()
            captured = captured_once(
                current_communicator(),
                batch,
                (self.mode, form_of(tuple(batch)), dynamic),
                roots,
                lambda: self._capture(batch, dynamic, roots, steady),
            )
        program = self._on_stages(copy_batch_inputs(captured.program))
        check_stages(program)
        given = {**_input_layouts_with_dtype(program, {**self.homes, **(homes or {})}), **(strategy.layouts or {})}
        with self.phases.phase("complete layouts"):
            layouts = completed_once(current_communicator(), program, given)
            if self.mode == "train" and (uncut := self._uncut(program, layouts, batch)):
                layouts = completed_once(current_communicator(), program, {**uncut, **given})
        forward = laid_once(current_communicator(), program, layouts)
        first = () if self._rules else strategy.passes_on("captured")
        captured = replace(captured, program=apply_passes(forward, first))
        refuse_shared_new_layouts(captured)
        return captured, layouts

    @property
    def _rules(self) -> tuple[Pass, ...]:
        """Return the passes for the captured model if all of them are rules; a stored program does not need these.

        Rules leave the inputs of the captured model as they are, and the digest covers the names of the passes.
        """
        passes = self.model.strategy.passes_on("captured")
        return passes if all(isinstance(p, RulePass) for p in passes) else ()

    def _rewritten(self, captured: Capture) -> Capture:
        """Return the captured model after the rules for it."""
        return replace(captured, program=apply_passes(captured.program, self._rules))

    def _capture(self, batch: Sequence[Any], dynamic: Dynamic, roots: Roots, steady: SteadyCalls) -> Capture:
        """Return the captured call of the model."""
        model = self.model
        captured = capture(
            model.network,
            lambda *leaves: model.call(self.mode, *leaves),
            batch,
            dynamic,
            others=roots.calls,
            is_known=steady.__contains__,
            beside=roots.beside,
        )
        steady.add(captured.checksum)
        return captured

    def _steady_calls(self) -> SteadyCalls:
        """Return the calls that were captured before for a program that is there."""
        loaded = (checksum for _, saved in self.loaded for checksum in saved.captures)
        return SteadyCalls(current_communicator(), (*loaded, *self.kept.captures(self.model)))

    def _on_stages(self, program: Program) -> Program:
        """Return the captured program; in a pipeline, each operand is sent to the stage that reads it."""
        meshes = meshes_of(program)
        in_stages = self.mode == "train" and self.model.strategy.pipeline.enable
        return (
            with_stage_sends(program) if len(meshes) > 1 and (in_stages or stages_of(meshes) is not None) else program
        )

    def _uncut(self, program: Program, layouts: Layouts, batch: Sequence[Any]) -> dict[str, Spec]:
        """Return layouts with whole rows for plain inputs of a batch that is split into pieces.

        There are none if all tensors of the batch are sharded along the same axes. Each rank takes pieces of its own
        parts, and these pieces must have the same rows in all tensors.
        """
        merge = self.model.strategy.merge or self.model.strategy.microbatches
        if merge is None:
            return {}
        cut = merge.leaves(list(leaves_in(batch)))
        specs = {i: layouts.specs.get(i.value.name) for i in program.inputs if i.role == "batch" and i.source in cut}
        if len({spec.layout.dims[0] if spec else () for spec in specs.values()}) <= 1:
            return {}
        plain = ((i.value.name, spec) for i, spec in specs.items() if spec is not None and i.spec is None)
        return {n: spec.with_layout(replace(spec.layout, dims=((), *spec.layout.dims[1:]))) for n, spec in plain}

    def _apply_layouts(self, captured: Capture, layouts: Layouts) -> None:
        """Convert parameters, buffers and states to the layouts that the program takes."""
        apply_captured_layouts(captured, self.model.optimizer)
        self.homes |= _state_layouts(captured, layouts)
        self.layouts = layouts

    def _build_pipeline(self, batch: Sequence[Any], key: object) -> tuple[CompiledProgram, BatchPredicate, Capture]:
        """Return the step of a pipeline, in which each action has a program, with its test and its captured call."""
        strategy = self.model.strategy
        microbatches = strategy.microbatches
        assert microbatches is not None
        firsts = batch.firsts if isinstance(batch, SeparateBatches) else [microbatches.piece(batch, 0)]
        captured, layouts = self._captured(firsts[0], {})
        homes = _state_layouts(captured, layouts)
        others = [self._captured(first, {}, homes)[0] for first in firsts[1:]]
        sizes = sizes_of(list(leaves_in(batch)))
        digest = digest_of([captured, *others], (key, sizes, self.model.lies_apart()), self.model)
        saved = self._saved(digest, batch, [captured, *others])
        if saved is not None:
            self._apply_layouts(captured, layouts)
            return self._loaded(saved.of_call(self._constants([captured, *others])), digest), saved.holds, captured
        captured, *others = map(self._rewritten, (captured, *others))
        self.recordings += 1
        parts = list(batch) if isinstance(batch, SeparateBatches) else firsts * microbatches.pieces
        with self.phases.phase("record"), one_of_microbatches(parts) if in_same_numbers() else nullcontext():
            found = pipeline_step([captured, *others], batch, strategy, lambda step: self._with_updates(captured, step))
        fits = captured.fits()
        self._apply_layouts(captured, layouts)
        with self.phases.phase("passes"):
            found = found.after(lambda part: apply_passes(part, self._last_passes(part)))
        ready = self._ready_pipeline(found)
        check_stages(ready.program)
        return self._with_facts(ready, [captured, *others], digest), fits, captured

    def _constants(self, captured: Sequence[Capture]) -> list[Tensor]:
        """Return the constants of the captured calls, then the optimizer's options that are tensors."""
        groups = self.model.optimizer.param_groups if self.mode == "train" and self.model.optimizer else ()
        options = [x for group in groups for x in group.values() if isinstance(x, Tensor)]
        return [*(x for each in captured for x in constants_of(each)), *options]

    def _with_facts(self, ready: CompiledProgram, captured: Sequence[Capture], digest: str | None) -> CompiledProgram:
        """Return the compiled program with the checksums and constants of its captured calls."""
        constants = self._constants(captured)
        return replace(
            ready,
            shared=is_shared(ready.program, constants, self._records_alike),
            digest=digest,
            captures=checksums(captured),
            constants=constant_numbers(ready.program, constants),
        )

    def _ready_pipeline(self, found: PipelineStep) -> CompiledProgram:
        """Return a pipeline's step with each part as a function, compiled if the strategy asks for it."""
        model = self.model

        changed: list[Value] = []

        def make(part: Program) -> tuple[Run, tuple[Value, ...]]:
            changed.extend(x for x, _ in part.writes)
            if model.strategy.compiler == "inductor":
                with self.phases.phase("compile"):
                    part = compiled(part, current_communicator(), writes=model.writes())
            return runner(part), tuple(x for x, _ in part.writes)

        self.pipeline = found.chosen
        run = found.runs(make, looks=is_compared() and model.strategy.compiler != "inductor")
        at = {given.value: n for n, given in enumerate(run.inputs)}
        slots = model.slots()
        merge = model.strategy.microbatches if found.intake.is_split else None
        fetch = tuple(fetch_of(given, slots, model.optimizer, self.loss_scale, merge) for given in run.inputs)
        program, table = found.end_to_end()
        writes = tuple(at[x] for x in run.writes)
        changes = tuple({at[x]: None for x in changed if x in at})
        apart, whole = run.looking if run.looks else None, found.again is None
        return CompiledProgram(program, run, tuple(run.inputs), fetch, writes, changes, table, whole, apart=apart)

    def _ready(self, program: Program, lowered: Program | None = None) -> CompiledProgram:
        """Return the program as a function, compiled if the strategy asks for it; `lowered` is compiled already."""
        model = self.model
        writes = {given.value: at for at, given in enumerate(program.inputs)}
        if lowered is None:
            lowered = program
            if model.strategy.compiler == "inductor":
                with self.phases.phase("compile"):
                    lowered = compiled(program, current_communicator(), writes=model.writes())
        slots, merge = model.slots(), model.strategy.merge if self.mode == "train" else None
        return CompiledProgram(
            program,
            runner_once(current_communicator(), lowered),
            program.inputs,
            tuple(fetch_of(given, slots, model.optimizer, self.loss_scale, merge) for given in program.inputs),
            tuple(writes[x] for x, _ in lowered.writes),
            tuple(writes[x] for x, _ in program.writes),
            apart=split_before_update(lowered) if self.mode == "train" and is_compared() else None,
        )

    def _recorded_with_passes(self, captured: Capture, batch: Sequence[Any]) -> Program:
        """Return the program of this rank, after all passes."""
        captured = self._rewritten(captured)
        with self.phases.phase("record"):
            program = verify(self._recorded(captured, batch)).with_changes(*captured.program.changes)
        with self.phases.phase("passes"):
            return apply_passes(program, self._last_passes(program))

    def _last_passes(self, program: Program) -> Sequence[Pass]:
        """Return the passes on a recorded program; without writes in place if inputs share memory."""
        passes = self.model.strategy.passes_on("recorded", program.device)
        return passes if self.model.lies_apart() else without_inputs(passes)

    def _states_lie(self) -> object:
        """Return the optimizer's states by key, with their specs or shapes; () outside of training."""
        if self.mode != "train":
            return ()
        return [(key, getattr(x, "_spec", getattr(x, "shape", x))) for key, x in self.model.states().items()]

    def _recorded(self, captured: Capture, batch: Sequence[Any]) -> Program:
        here, strategy = current_communicator(), self.model.strategy
        if self.mode != "train":
            return record_forward(captured, here.rank, here.size)
        step = record_gradients(captured, here.rank, here.size, self.loss_scale is not None)
        if strategy.merge is not None:
            step = strategy.merge.program(step, list(leaves_in(batch)))
        return self._with_update(captured, step)

    def _with_updates(self, captured: Capture, step: Program) -> list[Program]:
        """Return the step with the update; if the update creates states, also the later step that has them."""
        first = self._with_update(captured, step)
        made = made_states(first)
        if not (made and self.model.strategy.pipeline.asynchronous):
            return [first]
        return [first, self._with_update(captured, step, made)]

    def _with_update(self, captured: Capture, step: Program, made: Mapping[StateKey, Input] | None = None) -> Program:
        """Return the step, whose outputs are a loss and gradients, followed by the optimizer's update.

        The update reads the existing states and those that an earlier update has `made`.
        """
        optimizer, strategy, here = self.model.optimizer, self.model.strategy, current_communicator()
        assert optimizer is not None
        refuse_master_weights(optimizer)
        grads: Mapping[str, Any] = step.outputs["grads"]
        trained = [i for i in captured.program.inputs if i.role == "parameter" and i.name in grads]
        names = {id(s.tensor): s.name for s in captured.slots}
        sharding = strategy.sharding
        cut: Mapping[str, Spec] = {}
        if sharding.enable and sharding.stage < 3:
            cut = further_sharded_specs(trained, sharding.axes or batch_axes(captured.program), sharding.least)
        states, scaling = {**self.model.states(), **(made or {})}, strategy.amp.scaling
        captured.ran.before_update()
        with observed(captured.ran, runs_users_code(optimizer)):
            update = record_update(optimizer, names, trained, states, here.rank, here.size, cut, scaling)
        feeds = {i.value: grads[i.name] for i in update.inputs if i.role == "gradient"}
        return join_programs(step, update, feeds, lambda a, b: {"out": a["out"], **b})


def _input_layouts_with_dtype(program: Program, homes: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the layouts of inputs; those that were cast since have another dtype."""
    dtypes = {i.value.name: tensor_dtype(i.value) for i in program.inputs if i.value.is_tensor}
    return {
        name: Spec(spec.mesh, spec.layout, spec.shape, dtypes.get(name, spec.dtype), spec.strides)
        for name, spec in homes.items()
    }


def _state_layouts(captured: Capture, layouts: Layouts) -> dict[str, Spec]:
    """Return the layouts of parameters and buffers."""
    held = {i.value.name for i in captured.program.inputs if i.role in ("parameter", "buffer")}
    return {name: spec for name, spec in layouts.specs.items() if name in held}
