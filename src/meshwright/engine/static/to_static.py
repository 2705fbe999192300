"""`to_static`: a model whose steps are captured, recorded and run as programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current_communicator, is_compared
from meshwright.fixed_order import in_same_numbers, only_recordings
from meshwright.graph import CaptureError, Layouts, Program, SideEffectError, StateKey, Value, note_step
from meshwright.layout import TorchValue
from meshwright.search import MeshPlan
from meshwright.tensor import (
    as_part,
    collectives_of_call,
    full_tensor,
    input_numbers,
    leaves_in,
    local_parts,
    map_tensors,
    values_equal_on_ranks,
)

from .._errors import StaticError
from ..checks import StaticChecks
from ..recording.digest import common_part
from ..recording.fixed_sums import check_fixed_sums
from ..recording.loss_scale import LossScale
from ..recording.recorded_model import Mode, RecordedModel
from ..recording.refuse_call import refuse_call, refuse_shared
from ..recording.setting import Roots, Setting, first_marks, form_of
from ..recording.strategy import Strategy
from ..recording.variants import ProgramVariant, Variants, kind_of, sizes_of
from .pieces import ModelPieces
from .pipeline_step import ScheduleChoice, SeparateBatches
from .program_builder import Builder, CompiledProgram
from .program_files import TrustedCode, load_programs, save_programs
from .replayed_step import calls_of, with_replays


def to_static(
    model: nn.Module,
    loader: Iterable[Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """Return a model whose training step (forward, loss, backward, update) runs as one program on every rank.

    Programs are recorded at the first call with a batch of new shapes. `model` and `optimizer` are not changed and
    share their tensors with the programs, so they can still be called in the eager mode.
    """
    return DistModel(model, loader, loss, optimizer, strategy or Strategy())


class DistModel:
    """A model whose steps run as programs; `to_static` creates it, and it is called with a batch.

    In training mode a call makes a step and returns the loss of the whole batch. In evaluation mode it returns the
    loss, and in prediction mode the network's result. The first mode is training if there is an optimizer, evaluation
    if there is only a loss, and prediction otherwise.
    """

    def __init__(
        self,
        network: nn.Module,
        loader: Iterable[Any] | None,
        loss: Callable[..., Tensor] | None,
        optimizer: Optimizer | None,
        strategy: Strategy,
    ) -> None:
        self.loader = loader
        self._variants: Variants[CompiledProgram] = Variants(strategy.max_programs)
        self._roots = Roots(network, () if loss is None else (loss,), optimizer)
        self._marks: dict[str, str] = {}
        self._latest: CompiledProgram | None = None
        self._runs = 0
        self._unchanged: dict[object, CompiledProgram] | None = None
        self._checks = StaticChecks(self.state_dict)
        mode: Mode = "train" if optimizer is not None else "eval" if loss is not None else "predict"
        scaling = strategy.amp.scaling
        scale = None if scaling is None else LossScale(strategy.amp.init_loss_scaling, scaling)
        self._builder = Builder(RecordedModel(network, loss, optimizer, strategy), mode, scale)
        self.plan: MeshPlan | None = None
        """The plan that `auto` has chosen; None for a marked model."""
        self.before: list[Callable[[Sequence[Any]], None]] = []
        """Functions that get the leaves of each training batch, and may raise an error."""
        self.pieces: ModelPieces | None = None
        """The modules that run as programs, if the whole model cannot be one program."""

    @property
    def network(self) -> nn.Module:
        return self._builder.model.network

    @property
    def loss(self) -> Callable[..., Tensor] | None:
        return self._builder.model.loss

    @property
    def optimizer(self) -> Optimizer | None:
        return self._builder.model.optimizer

    @property
    def strategy(self) -> Strategy:
        return self._builder.model.strategy

    @property
    def layouts(self) -> Layouts | None:
        """Return the layouts of the captured model's values; None before the first call."""
        return self._builder.layouts

    @property
    def pipeline(self) -> ScheduleChoice | None:
        """Return the schedule of the microbatches and the reason for it; None before the first call of a pipeline."""
        return self._builder.pipeline

    @property
    def loss_scale(self) -> LossScale | None:
        """Return the factor of the loss, which the steps change; None without `amp` in float16."""
        return self._builder.loss_scale

    @property
    def mode(self) -> Mode:
        return self._builder.mode

    def train(self) -> DistModel:
        """Make calls training steps from now on. Raises StaticError without an optimizer."""
        if self.optimizer is None:
            raise StaticError(
                "dist_model.train()",
                "a model without an optimizer",
                "a training step updates parameters",
                "call mw.to_static(model, loader, loss, optimizer)",
            )
        self._builder.mode = "train"
        self.network.train()
        return self

    def eval(self) -> DistModel:
        """Make calls return the loss from now on, and change nothing."""
        self._builder.mode = "eval"
        self.network.eval()
        return self

    def predict(self) -> DistModel:
        """Make calls return the network's result from now on."""
        self._builder.mode = "predict"
        self.network.eval()
        return self

    def __call__(self, *batch: TorchValue) -> TorchValue:
        """Return the loss of the whole batch, equal on every rank; the network's result in prediction mode."""
        leaves = list(leaves_in(batch))
        for check in self.before if self.mode == "train" else ():
            check(leaves)
        refuse_shared(self.network)
        if self.pieces is None:
            refuse_call(self.optimizer if self.mode == "train" else None)
            try:
                found = self._program_for(batch, leaves)
            except CaptureError as error:
                if self.strategy.full_graph:
                    raise
                self.pieces = ModelPieces(self.network, self.strategy, error)
            else:
                return self._run_program(found, leaves)
        return self._run_pieces(batch)

    def accumulate(self, batches: Iterable[Sequence[Any]]) -> Tensor:
        """Make a training step with these batches as microbatches, whose sizes may differ; return their mean loss.

        The number of batches must be that of the pipeline's microbatches, and all have the same weight. Each new
        sequence of sizes is recorded. Raises StaticError without a pipeline, and for another number of batches.
        """
        separate = SeparateBatches(batches)
        self._check_separate(separate)
        refuse_shared(self.network)
        leaves = list(leaves_in(tuple(separate)))
        return self._run_program(self._program_for(separate, leaves), leaves)

    def _check_separate(self, batches: SeparateBatches) -> None:
        options = self.strategy.pipeline
        asked = f"dist_model.accumulate({len(batches)} batches)"
        if self.mode != "train" or not options.enable:
            raise StaticError(
                asked,
                "no pipeline in training mode",
                "each batch is one microbatch of a pipeline",
                'pass mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 8}), and call dist_model.train()',
            )
        if len(batches) != options.accumulate_steps or len({form_of(tuple(b)) for b in batches}) != 1:
            raise StaticError(
                asked,
                f"pipeline.accumulate_steps = {options.accumulate_steps}",
                "there must be one batch for each microbatch, all with the same structure",
                f"pass {options.accumulate_steps} batches with the same structure",
            )

    def compile(self, *batch: TorchValue) -> Program:
        """Return the program for a batch, recorded but not run; tensors may be on the meta device."""
        return self._program_for(batch, list(leaves_in(batch))).program

    def has_program(self, *batch: TorchValue) -> bool:
        """True if a program for a batch was recorded in the present setting, so that a call records nothing."""
        leaves = list(leaves_in(batch))
        return self._known_program(self._key(batch), leaves) is not None

    def _program_for(self, batch: Sequence[Any], leaves: Sequence[Any]) -> CompiledProgram:
        """Return the program for the batch, recorded now if there is none."""
        key = self._key(batch)
        self._latest = self._known_program(key, leaves) or self._record_program(batch, key, leaves)
        return self._latest

    def _known_program(self, key: object, leaves: Sequence[Any]) -> CompiledProgram | None:
        """Return the program that was recorded for such a batch in the present setting, or None."""
        known = self._unchanged
        if known is None:
            return self._variants.find(key, leaves)
        kind = key, tuple(map(kind_of, leaves)), sizes_of(leaves)
        found = known.get(kind) or self._variants.find(key, leaves)
        if found is not None:
            known[kind] = found
        return found

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Compare the setting of each program with the present one only once inside.

        The caller promises that nothing changes there which the programs depend on: attributes, layouts, modes, hooks.
        Values of parameters and buffers may change.
        """
        self._unchanged = {}
        try:
            yield
        finally:
            self._unchanged = None

    def _record_program(self, batch: Sequence[Any], key: object, leaves: Sequence[Any]) -> CompiledProgram:
        """Return a new program for the batch, from a file or recorded now.

        Raises SameNumbersError for options that change the order of sums inside `same_numbers`.
        """
        if in_same_numbers():
            check_fixed_sums(self.strategy)
        with only_recordings():
            return self._record_variant(batch, key, leaves)

    def _record_variant(self, batch: Sequence[Any], key: object, leaves: Sequence[Any]) -> CompiledProgram:
        open_sizes = self._variants.open_sizes(key, leaves)
        dynamic = {} if self._is_of_one_size else open_sizes
        self._marks = self._marks or first_marks(self.network)
        before = self.recordings
        try:
            found, fits, captured = self._builder.build(batch, dynamic, key)
        except (SideEffectError, TypeError):
            if not dynamic:
                raise
            dynamic = {}  # the code needs sizes as numbers: as keys of a dict, or for a table that it keeps
            found, fits, captured = self._builder.build(batch, dynamic, key)
            self._variants.fixed.add(key)
        if self.strategy.cuda_graph and self.mode == "train":
            found = with_replays(found, calls_of(found.program, self.strategy.pipeline.enable))
        variant = ProgramVariant(found, sizes_of(leaves), dynamic, fits, Setting.of(self._now, captured), found.digest)
        self._variants.add(key, leaves, variant)
        if self.recordings > before:
            self._builder.kept.add(self._builder.model, self._marks, variant)
        return found

    @property
    def _is_of_one_size(self) -> bool:
        """True if a program fits only the sizes that it was recorded with.

        Compiled kernels, split batches, replays, and sums whose pieces depend on sizes need fixed sizes.
        """
        in_pieces = self.strategy.merge is not None or self.strategy.pipeline.enable
        trains_alike = self.mode == "train" and (in_pieces or self.strategy.cuda_graph)
        return self.strategy.compiler == "inductor" or trains_alike or in_same_numbers()

    @property
    def program(self) -> Program:
        """Return the program that ran last. Raises StaticError before the first call."""
        if self._latest is None:
            raise StaticError(
                "dist_model.program",
                "a model that has not been called",
                "a program is recorded for the shapes of a batch",
                "call dist_model(*batch) first",
            )
        return self._latest.program

    @property
    def recordings(self) -> int:
        """Return the number of programs recorded so far; loaded ones do not count."""
        return self._builder.recordings

    def save(self, folder: str | os.PathLike[str], kernels: bool = False) -> None:
        """Write every program recorded so far into a folder, from which `load` reads them; ranks share the folder.

        Every rank makes the call, which returns when the folder is complete. Among ranks with parts of the same shapes,
        the first one writes. Parameters and states are not written. With `kernels`, programs in which ranks do not
        communicate are compiled ahead of time for `Strategy(compiler="inductor")`.

        Raises ProgramFileError for programs that cannot be saved.
        """
        save_programs(folder, self._builder.model, self._variants, self._marks, kernels)

    def load(self, folder: str | os.PathLike[str], kernels: bool = False, operators: Collection[str] = ()) -> DistModel:
        """Use the programs in a folder from now on instead of recording them again; return the model itself.

        The model is still captured at the first call for a kind of batch. A program is used if it was recorded from an
        equal capture. A file may name operators of torch that are functions of tensors only; `operators` names further
        ones of other libraries, such as "mylib" or "mylib.scale". With `kernels`, compiled kernels of the folder are
        used. They are native code, so set it only for files that you trust.

        Raises StaticError for programs of another model, loss, optimizer or strategy, or of another number of ranks,
        and ProgramFileError for files without programs.
        """
        self._builder.loaded += load_programs(folder, self._builder.model, TrustedCode(kernels, frozenset(operators)))
        return self

    @property
    def _now(self) -> Roots:
        """Return the objects that are called in this mode."""
        return self._roots if self.mode == "train" else replace(self._roots, optimizer=None)

    def state_dict(self, mode: Literal["all", "param", "opt"] = "all") -> dict[str, Any]:
        """Return parameters and buffers by name, and the optimizer's states by "parameter.key"."""
        found: dict[str, Any] = {}
        model = self._builder.model
        if mode in ("all", "param"):
            found |= {slot.name: slot.tensor for slot in model.slots()}
        if mode in ("all", "opt"):
            found |= {f"{name}.{key}": value for (name, key), value in model.states().items()}
        return found

    def _run_program(self, found: CompiledProgram, leaves: Sequence[Any]) -> TorchValue:
        step = current_communicator().seen.doing("program", f"{self.mode} {type(self.network).__name__}")
        self._runs += 1
        alike = values_equal_on_ranks(self.optimizer if self.mode == "train" else None)
        inputs = input_numbers(leaves, self._runs) if is_compared() else ()
        what = collectives_of_call(
            f"{self.mode} of {type(self.network).__name__}",
            numbers=(common_part(found.digest), self._runs, *alike, *inputs),
        )
        with local_parts(), torch.set_grad_enabled(False), step, what:
            given = [fetch(leaves) for fetch in found.fetch]
            found.check_apart(given, leaves)
            trains = self.mode == "train"
            outputs, written = self._checks.run(found, given) if trains else found.run(*given)
            if written is None:
                return outputs["out"]
            for at, value in zip(found.writes, written, strict=True):
                given[at].copy_(value)
        if "state" in outputs and self.optimizer is not None:
            note_step(self.optimizer)
        made = outputs.get("state", {})
        if made and not ("skipped" in outputs and bool(outputs["skipped"])):
            self._keep_states(made, found.program)
        return outputs["out"]

    def _run_pieces(self, batch: Sequence[Any]) -> TorchValue:
        """Run the step in Python, with programs in place of the modules that can be captured."""
        assert self.pieces is not None
        with self.pieces.in_place(), torch.set_grad_enabled(self.mode == "train"):
            out = self._builder.model.call(self.mode, *batch)
        if self.mode == "train" and self.optimizer is not None:
            out.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return map_tensors(lambda x: full_tensor(x.detach()), out)

    def _keep_states(self, states: Mapping[StateKey, Any], program: Program) -> None:
        """Store the optimizer's states that the first step created."""
        if self.optimizer is None:
            return
        parameters = {slot.name: slot.tensor for slot in self._builder.model.slots()}
        for (name, key), value in states.items():
            made = program.outputs["state"][name, key]
            spec = program.specs.get(made) if isinstance(made, Value) else None
            self.optimizer.state[parameters[name]][key] = value if spec is None else as_part(value, spec)

    def _key(self, batch: Sequence[Any]) -> object:
        """Return the key that two calls must share, beside the sizes of their batches, to use one program."""
        constants = self._builder.model.constants() if self.mode == "train" else ()
        return (self.mode, constants, form_of(batch))
