"""Calibration: observe the inputs of layers, stage by stage, and choose the numbers of their weights.

Each rank runs its pieces of the batches, with the whole weights of one stage. Sums over batches are joined as a fixed
tree, so the numbers do not depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, tensors_in

from ._batches import calls_of, piece
from ._errors import CalibrationError
from ._gptq import PANEL, factor, round_rows
from ._layers import Layers
from ._one_device import Call, in_evaluation, run_whole, whole, whole_state
from ._quantized_linear import QuantizedLinear
from ._ranks import Ranks, TreeSum
from ._rounding import scales_of
from ._scheme import Scheme
from ._stages import Chain, calls_of_blocks, container_of, find_chain, inside, put_in_place
from ._stored_weight import placed_like, store

Group = tuple[str, ...]
"""Names of layers that get the same input."""
Calls = dict[int, Call]
"""Number of a batch → the call of a module; those of this rank."""
Progress = Callable[[str], None]


@dataclass(slots=True)
class Observed:
    """The inputs of the layers of a stage on this rank: sums of xᵀx by group, and the outputs of the stage."""

    sums: dict[Group, TreeSum] = field(default_factory=dict[Group, TreeSum])
    outputs: dict[int, TorchValue] = field(default_factory=dict[int, TorchValue])


class Calibration:
    """The calibration of a model; `run` returns the quantized layers, and leaves the model as it is."""

    def __init__(self, model: nn.Module, layers: Layers, scheme: Scheme, progress: Progress | None) -> None:
        self.model, self.layers, self.scheme = model, layers, scheme
        self.ranks = Ranks(alone=not any(isinstance(x, DistTensor) for x in model.state_dict(keep_vars=True).values()))
        self.found: dict[str, QuantizedLinear] = {}
        self.plain: dict[str, QuantizedLinear] = {}
        """The new layers with whole tensors, of the stage that is calibrated."""
        self.progress = progress or (lambda text: None)

    def run(self, calibration: Iterable[TorchValue]) -> dict[str, QuantizedLinear]:
        """Return the quantized layers by name."""
        with in_evaluation(self.model):
            calls = self.ranks.agreed(lambda: calls_of(calibration))
            self.count = len(calls)
            mine = {i: calls[i] for p in self.ranks.pieces_of(self.ranks.rank) for i in piece(p, self.count)}
            if not self._run_chain(calls[0], mine):
                self._run_stage("", mine, whole_state(self.model), {name: name for name in self.layers})
        return {name: self.found[name] for name in self.layers}

    def _run_chain(self, first: Call, mine: Calls) -> bool:
        """Calibrate the blocks of the model's chain, and then the layers outside; False if there is no chain."""
        names = container_of(self.model, self.layers)
        if not names:
            return False
        blocks = [self.model.get_submodule(name) for name in names]
        outside, state = whole_state(self.model, blocks), whole_state(blocks[0])
        chain = self.ranks.agreed(lambda: find_chain(self.model, self.layers, outside, state, first))
        if chain is None:
            return False
        calls = self.ranks.agreed(lambda: {i: self._blocks(chain, outside, call) for i, call in mine.items()})
        given = {i: calls[i][0] for i in mine}
        for at, name in enumerate(names):
            state = state if at == 0 else whole_state(blocks[at])
            outputs = self._run_stage(name, given, state, {n: n[len(name) + 1 :] for n in inside(name, self.layers)})
            following = {i: calls[i][at + 1] for i in mine} if at + 1 < len(names) else given
            given = {i: chain.with_output(outputs[i], following[i]) for i in mine}
        self._run_rest(chain, outside, mine, given)
        return True

    def _blocks(self, chain: Chain, outside: Mapping[str, Tensor], call: Call) -> list[Call]:
        found = calls_of_blocks(self.model, chain, outside, call)
        if found is None:
            raise CalibrationError(
                "calibrate a model block by block",
                "a batch for which blocks do not pass their first argument on",
                "the first batch took another path through the model",
                "use batches of one kind",
            )
        return found

    def _run_rest(self, chain: Chain, outside: Mapping[str, Tensor], mine: Calls, given: Calls) -> None:
        """Calibrate the layers outside of the chain, given the output of its last block for each batch."""
        rest = {name: name for name in self.layers if name not in self.found}
        if not rest:
            return

        def run(_: nn.Module, __: Mapping[str, Tensor], i: int) -> None:
            calls_of_blocks(self.model, chain, outside, mine[i], given[i][0][0])

        self._choose(rest, outside, self.ranks.agreed(lambda: self._observe(self.model, outside, rest, mine, run)))
        self.progress(f"{len(rest)} layers outside of the blocks")

    def _run_stage(
        self, name: str, calls: Calls, state: Mapping[str, Tensor], layers: Mapping[str, str]
    ) -> dict[int, TorchValue]:
        """Calibrate the layers of a stage (full name → name inside), and return its outputs with quantized layers."""
        module = self.model.get_submodule(name)
        run = lambda m, s, i: run_whole(m, s, calls[i])  # noqa: E731
        seen = self.ranks.agreed(lambda: self._observe(module, state, layers, calls, run))
        if not layers:
            return seen.outputs
        self._choose(layers, state, seen)
        outputs = self.ranks.agreed(lambda: self._outputs(module, state, layers, calls))
        error = self._error(seen.outputs, outputs)
        for each in layers:
            self.found[each].error = error
        self.progress(f"{name or 'the model'}: {len(layers)} layers, relative error {error:.2g}")
        return outputs

    def _observe(
        self,
        module: nn.Module,
        state: Mapping[str, Tensor],
        layers: Mapping[str, str],
        calls: Calls,
        run: Callable[[nn.Module, Mapping[str, Tensor], int], TorchValue],
    ) -> Observed:
        """Run this rank's batches through a module, and sum the inputs of its layers, piece by piece."""
        seen = Observed()
        inputs: dict[int, tuple[Tensor, list[str]]] = {}
        hooks = [
            module.get_submodule(inner).register_forward_pre_hook(partial(_note, inputs, name))
            for name, inner in layers.items()
        ]
        try:
            for p in self.ranks.pieces_of(self.ranks.rank):
                sums: dict[Group, Tensor] = {}
                for i in piece(p, self.count):
                    inputs.clear()
                    seen.outputs[i] = run(module, state, i)
                    _add_inputs(sums, inputs)
                for group in seen.sums.keys() | sums.keys():
                    self._tree(seen, group, p).add(p, sums.get(group))
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def _tree(self, seen: Observed, group: Group, p: int) -> TreeSum:
        """Return the tree of a group; pieces before its first input are empty."""
        if group not in seen.sums:
            seen.sums[group] = TreeSum()
            for earlier in range(self.ranks.pieces_of(self.ranks.rank).start, p):
                seen.sums[group].add(earlier, None)
        return seen.sums[group]

    def _choose(self, layers: Mapping[str, str], state: Mapping[str, Tensor], seen: Observed) -> None:
        """Choose the numbers of the layers' weights, with one Hessian for the layers of a group."""
        weights = {name: state[f"{inner}.weight" if inner else "weight"] for name, inner in layers.items()}
        groups = self._groups(layers, seen)
        sizes = [self.layers[group[0]].in_features for group in groups]
        owners = self.ranks.owners([float(size) ** 3 for size in sizes])
        device = next((x.device for out in seen.outputs.values() for x in tensors_in(out)), torch.device("cpu"))
        tasks = list(zip(groups, sizes, owners, strict=True))
        totals = [
            self.ranks.tree_sum(seen.sums.get(group, TreeSum()), (k, k), owner, device) for group, k, owner in tasks
        ]
        made = self.ranks.agreed(lambda: [self._factor(g, total) for g, total in zip(groups, totals, strict=True)])
        self.plain = {}
        for (group, k, owner), pair in zip(tasks, made, strict=True):
            upper = self.ranks.broadcast(None if pair is None else pair[0], (k, k), torch.float32, owner)
            diagonal = self.ranks.broadcast(None if pair is None else pair[1], (k,), torch.float32, owner)
            for name in group:
                self._round(name, weights[name], upper, diagonal)

    def _groups(self, layers: Mapping[str, str], seen: Observed) -> list[Group]:
        """Return the groups of all ranks. Raises CalibrationError if they differ, or a layer has no input."""
        told = {tuple(group) for rank in self.ranks.gathered([list(g) for g in seen.sums]) for group in rank}
        groups = sorted(told, key=lambda group: list(layers).index(group[0]))
        named = [name for group in groups for name in group]
        missing = [name for name in layers if name not in named]
        if missing or len(set(named)) != len(named):
            found = f"no input of {missing[0]}" if missing else "layers that share an input in some batches only"
            raise CalibrationError(
                f"quantize {len(layers)} layers by {self.scheme.method}",
                found,
                "the method needs the inputs of each layer",
                f"use more calibration data, or leave the layer out: ignore=({(missing or named)[0]!r},)",
            )
        return groups

    def _factor(self, group: Group, total: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the factor and the diagonal of a group's Hessian on the rank that owns it."""
        if total is None:
            return None
        return factor(total, self.scheme, ", ".join(group)), total.diagonal().clone()

    def _round(self, name: str, weight: Tensor, upper: Tensor, diagonal: Tensor) -> None:
        """Quantize a whole weight: each rank rounds its rows."""
        numbers = self.scheme.weights
        scale, zero = scales_of(weight, numbers)
        rows = self.ranks.rows_of(self.ranks.rank, len(weight), PANEL)
        mine = slice(rows.start, rows.stop)
        zero_of_rows = None if zero is None else _rows_of(zero, mine, weight)
        part = round_rows(weight[mine], _rows_of(scale, mine, weight), zero_of_rows, upper, diagonal, self.scheme)
        codes = self.ranks.gather_rows(part, len(weight), PANEL)
        stored = store(codes, scale, zero, self.scheme)
        layer = self.layers[name]
        shape = layer.out_features, layer.in_features
        bias = layer._parameters["bias"]
        bias = None if bias is None else nn.Parameter(whole(bias), requires_grad=False)
        self.plain[name] = QuantizedLinear(shape, self.scheme, stored, bias)
        self.found[name] = QuantizedLinear(shape, self.scheme, placed_like(layer.weight, stored), layer.bias)

    def _outputs(
        self, module: nn.Module, state: Mapping[str, Tensor], layers: Mapping[str, str], calls: Calls
    ) -> dict[int, TorchValue]:
        """Return the outputs of a stage with quantized layers, for this rank's batches."""
        if list(layers.values()) == [""]:
            (new,) = self.plain.values()
            return {i: run_whole(new, {}, call) for i, call in calls.items()}
        new = {inner: self.plain[name] for name, inner in layers.items()}
        own = {name: x for name, x in state.items() if name.rpartition(".")[0] not in new}
        with put_in_place(module, new):
            return {i: run_whole(module, own, call) for i, call in calls.items()}

    def _error(self, exact: Mapping[int, TorchValue], found: Mapping[int, TorchValue]) -> float:
        """Return the relative error of the outputs of a stage over all batches."""
        norms = [(i, _square(exact[i], None), _square(exact[i], found[i])) for i in exact]
        every = sorted(tuple(told) for rank in self.ranks.gathered(norms) for told in rank)
        whole_norm = sum(norm for _, norm, _ in every)
        return sqrt(sum(error for _, _, error in every) / whole_norm) if whole_norm else 0.0


def _rows_of(scale: Tensor, rows: slice, weight: Tensor) -> Tensor:
    """Return the scales of some rows; one scale for all rows stays."""
    return scale[rows] if len(scale) == len(weight) else scale


def _square(exact: TorchValue, found: TorchValue) -> float:
    """Return the squared norm of a result, or that of its difference from another one."""
    ones = [x for x in tensors_in(exact) if x.is_floating_point()]
    others = [0.0] * len(ones) if found is None else [x for x in tensors_in(found) if x.is_floating_point()]
    return sum(float((x.double() - y).square().sum()) for x, y in zip(ones, others, strict=True))


def _note(inputs: dict[int, tuple[Tensor, list[str]]], name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    """Record the input of a layer, under the identity of the tensor."""
    inputs.setdefault(id(args[0]), (args[0], []))[1].append(name)


def _add_inputs(sums: dict[Group, Tensor], inputs: Mapping[int, tuple[Tensor, list[str]]]) -> None:
    """Add xᵀx of each input to the sum of its group. A layer that ran several times has several inputs."""
    for x, names in inputs.values():
        rows = x.flatten(0, -2).float()
        group = tuple(dict.fromkeys(names))
        product = rows.t() @ rows
        sums[group] = sums[group] + product if group in sums else product
