"""Calibration: observe the inputs of layers, stage by stage, and choose the numbers of their weights.

Each rank runs its pieces of the batches, with the whole weights of one stage. Sums over batches are joined as a fixed
tree, so the numbers do not depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, tensors_in

from .._errors import CalibrationError
from .._rounding import scale_for, scales_of, to_codes
from .._scheme import Scheme
from .._stored_weight import INPUT_SCALE, Stored, has_input_scale, placed_like, store
from ..layers.linear_layers import Layers
from ..layers.quantized_linear import QuantizedLinear
from .awq import errors
from .batches import calls_of, fingerprint, first_batch, naming_batch, piece, refuse_differences, sampled
from .finished_stages import FinishedStages, Folder, StageResult
from .gptq import PANEL, factor, round_rows
from .observation import Group, Observed, hessian, magnitudes, observe
from .one_device import Call, in_evaluation, run_whole, squared, whole, whole_state
from .ranks import Ranks, TreeSum
from .smoothing import awq_factors, divided, multiplied, powers_of_two, smoothquant_factors
from .stages import Chain, calls_of_blocks, container_of, find_chain, inside, put_in_place

READ = " (read, not calibrated)"
"""End of the line of progress for a stage that an earlier call finished."""
Calls = dict[int, Call]
"""Number of a batch → the call of a module; those of this rank."""
Progress = Callable[[str], None]


class Calibration:
    """The calibration of a model; `run` returns the quantized layers, and leaves the model as it is."""

    def __init__(
        self, model: nn.Module, layers: Layers, scheme: Scheme, progress: Progress | None, resume: Folder | None
    ) -> None:
        self.model, self.layers, self.scheme, self.resume = model, layers, scheme, resume
        self.ranks = Ranks(alone=not any(isinstance(x, DistTensor) for x in model.state_dict(keep_vars=True).values()))
        self.found: dict[str, QuantizedLinear] = {}
        self.plain: dict[str, QuantizedLinear] = {}
        """The new layers with whole tensors, of the stage that is calibrated."""
        self.input_scales: dict[str, Tensor] = {}
        """The scales of the inputs of the layers of the stage, if they are stored."""
        self.parameters: dict[str, Tensor] = {}
        """Parameters of norms that smoothing changes, whole, by name."""
        self.checks = 0
        """Number of checks of smoothed stages."""
        self.progress = progress or (lambda text: None)

    def run(self, calibration: Iterable[TorchValue]) -> dict[str, QuantizedLinear]:
        """Return the quantized layers by name; `parameters` has the changed parameters of norms."""
        with in_evaluation(self.model):
            calls = self.ranks.agreed(lambda: calls_of(calibration))
            refuse_differences(self.ranks.gathered(fingerprint(calls)))
            self.count = len(calls)
            self.finished = FinishedStages(self.resume, self.ranks, self.scheme, calls)
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
        chain = self.ranks.agreed(lambda: self._chain(outside, state, first))
        if chain is None:
            return False
        self.finished.follow(self.model, outside)
        calls = self.ranks.agreed(lambda: {i: self._blocks(chain, outside, i, call) for i, call in mine.items()})
        given = {i: blocks_of_call[0] for i, blocks_of_call in calls.items()}
        for at, name in enumerate(names):
            state = state if at == 0 else whole_state(blocks[at])
            outputs = self._run_stage(name, given, state, {n: n[len(name) + 1 :] for n in inside(name, self.layers)})
            given = _calls_after(chain, at, calls, outputs)
        self._run_rest(chain, outside, mine, given)
        return True

    def _chain(self, outside: Mapping[str, Tensor], state: Mapping[str, Tensor], first: Call) -> Chain | None:
        with naming_batch(0):
            return find_chain(self.model, self.layers, outside, state, first)

    def _blocks(self, chain: Chain, outside: Mapping[str, Tensor], number: int, call: Call) -> list[Call]:
        with naming_batch(number):
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
        result = self.finished.next("", self.model, {}, {name: self.layers[name] for name in rest})
        if result is not None:
            self._take(result)
        else:
            seen = self._observe(
                self.model, rest, lambda i: calls_of_blocks(self.model, chain, outside, mine[i], given[i][0][0])
            )
            self._choose(rest, outside, seen)
            self.finished.write(self.plain, {}, None, self.checks)
        self.progress(f"{len(rest)} layers outside of the blocks{READ if result else ''}")

    def _run_stage(
        self, name: str, calls: Calls, state: Mapping[str, Tensor], layers: Mapping[str, str]
    ) -> dict[int, TorchValue]:
        """Calibrate the layers of a stage (full name → name inside), and return its outputs with quantized layers."""
        module = self.model.get_submodule(name)
        result = self.finished.next(name, module, state, {each: self.layers[each] for each in layers})
        if result is not None:
            return self._run_finished(name, calls, state, layers, result)
        seen = self._observe(module, layers, lambda i: run_whole(module, state, calls[i]))
        if not layers:
            return seen.outputs
        if self.scheme.method in ("awq", "smoothquant"):
            state = self._smoothed(name, calls, state, layers, seen)
        self._choose(layers, state, seen)
        outputs = self.ranks.agreed(lambda: self._outputs(module, state, layers, calls))
        error = self._error(seen.outputs, outputs)
        for each in layers:
            self.found[each].error = error
        self.finished.write(self.plain, self.parameters, error, self.checks)
        self.progress(f"{name or 'the model'}: {len(layers)} layers, relative error {error:.2g}")
        return outputs

    def _run_finished(
        self, name: str, calls: Calls, state: Mapping[str, Tensor], layers: Mapping[str, str], result: StageResult
    ) -> dict[int, TorchValue]:
        """Take the results of a finished stage, and return its outputs with quantized layers."""
        self._take(result)
        prefix = f"{name}." if name else ""
        state = {inner: result.parameters.get(f"{prefix}{inner}", x) for inner, x in state.items()}
        outputs = self.ranks.agreed(lambda: self._outputs(self.model.get_submodule(name), state, layers, calls))
        self.progress(f"{name or 'the model'}: {len(layers)} layers, relative error {result.error:.2g}{READ}")
        return outputs

    def _take(self, result: StageResult) -> None:
        """Make the new layers of a finished stage, and take its parameters."""
        self.plain, self.checks = {}, result.checks
        self.parameters |= result.parameters
        for name, stored in result.layers.items():
            self._place(name, stored)
            self.found[name].error = result.error

    def _observe(self, module: nn.Module, layers: Mapping[str, str], run: Callable[[int], TorchValue]) -> Observed:
        """Run this rank's batches through a module, and observe the inputs of its layers."""
        pieces = [(p, piece(p, self.count)) for p in self.ranks.pieces_of(self.ranks.rank)]
        summed = hessian if self.scheme.method == "gptq" else magnitudes
        return self.ranks.agreed(lambda: observe(module, layers, pieces, run, summed))

    def _choose(self, layers: Mapping[str, str], state: Mapping[str, Tensor], seen: Observed) -> None:
        """Choose the numbers of the layers' weights."""
        self.plain = {}
        self.input_scales = self._input_scales(layers, seen) if has_input_scale(self.scheme) else {}
        weights = {name: state[_weight_of(inner)] for name, inner in layers.items()}
        if self.scheme.method == "gptq":
            self._choose_by_hessians(layers, weights, seen)
            return
        for name, weight in weights.items():
            scale, zero = scales_of(weight, self.scheme.weights)
            self._put(name, to_codes(weight, scale, zero, self.scheme.weights), scale, zero)

    def _choose_by_hessians(self, layers: Mapping[str, str], weights: Mapping[str, Tensor], seen: Observed) -> None:
        """Choose the numbers of weights by GPTQ: a rank factors the Hessian of a group, and all ranks round rows."""
        groups = self._groups(layers, seen)
        owners = self.ranks.owners([float(self._features(group)) ** 3 for group in groups])
        totals = [self._total(seen, g, owner, weights[g[0]], 2) for g, owner in zip(groups, owners, strict=True)]
        made = self.ranks.agreed(lambda: [self._factor(g, total) for g, total in zip(groups, totals, strict=True)])
        for group, owner, pair in zip(groups, owners, made, strict=True):
            k, weight = self._features(group), weights[group[0]]
            upper = self.ranks.broadcast(None if pair is None else pair[0], (k, k), weight, owner)
            diagonal = self.ranks.broadcast(None if pair is None else pair[1], (k,), weight, owner)
            self._round(group, weights, upper, diagonal)

    def _input_scales(self, layers: Mapping[str, str], seen: Observed) -> dict[str, Tensor]:
        """Return the scale of the inputs of each layer, from the largest input of all batches."""
        numbers = self.scheme.input_activations
        assert numbers is not None
        found: dict[str, Tensor] = {}
        for group in self._groups(layers, seen):
            weight = self.layers[group[0]].weight
            largest = self._extremes(group, seen, weight.device).amax()
            found |= dict.fromkeys(group, scale_for(largest, numbers, weight.dtype))
        return found

    def _extremes(self, group: Group, seen: Observed, device: torch.device) -> Tensor:
        """Return the largest x and the largest -x of each input feature [2, k] over the batches of all ranks."""
        none = torch.full((2, self._features(group)), -torch.inf, device=device)
        return self.ranks.largest(seen.extremes.get(group, none))

    def _features(self, group: Group) -> int:
        return self.layers[group[0]].in_features

    def _total(self, seen: Observed, group: Group, owner: int, weight: Tensor, dims: int) -> Tensor | None:
        """Return the sum of a group on its owner, on the device of the weight; None on other ranks.

        It is the Hessian with two dims, or the magnitudes of the input features with one.
        """
        shape = (self._features(group),) * dims
        return self.ranks.tree_sum(seen.sums.get(group, TreeSum()), shape, owner, weight.device)

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

    def _smoothed(
        self, stage: str, calls: Calls, state: Mapping[str, Tensor], layers: Mapping[str, str], seen: Observed
    ) -> Mapping[str, Tensor]:
        """Return the state of a stage with smoothed inputs, where one module makes them for a group only."""
        module = self.model.get_submodule(stage)
        producers = {tuple(g): norm for told in self.ranks.gathered(list(seen.producers.items())) for g, norm in told}
        for group in self._groups(layers, seen):
            names, norm = [layers[name] for name in group], producers.get(group)
            candidates = self._layers_before(group, layers) if norm is None else [norm]
            producer = self._producer(group, module, names, candidates, state, calls, seen)
            factors = None if producer is None else self._factors(group, module, names, state, calls, seen)
            if producer is None or factors is None:
                continue
            state = _smoothed_state(state, producer, names, factors)
            if norm is not None:
                self._change_parameters(stage, norm, state)
        return state

    def _producer(
        self,
        group: Group,
        module: nn.Module,
        names: Sequence[str],
        candidates: Sequence[str],
        state: Mapping[str, Tensor],
        calls: Calls,
        seen: Observed,
    ) -> str | None:
        """Return the first of the modules whose results are scaled as the inputs of a group; None if there is none.

        Factors that are powers of two round nothing, so they show it.
        """
        factors = powers_of_two(self._features(group), state[_weight_of(names[0])].device)
        for name in candidates:
            if self._is_same(module, _smoothed_state(state, name, names, factors), calls, seen):
                return name
        return None

    def _layers_before(self, group: Group, layers: Mapping[str, str]) -> list[str]:
        """Return the names inside of the layers that may make the inputs of a group, and whose rows AWQ can divide.

        A row has scales of its own, so that its numbers are rounded as before.
        """
        if self.scheme.method != "awq" or self.scheme.weights.strategy not in ("channel", "group"):
            return []
        earlier = list(layers)[: list(layers).index(group[0])]
        fits = [name for name in earlier if self.layers[name].out_features == self._features(group)]
        return [layers[name] for name in fits if self.layers[name]._parameters["bias"] is None]

    def _change_parameters(self, stage: str, norm: str, state: Mapping[str, Tensor]) -> None:
        prefix = f"{stage}." if stage else ""
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in state:
                self.parameters[f"{prefix}{name}"] = state[name]

    def _factors(
        self,
        group: Group,
        module: nn.Module,
        names: Sequence[str],
        state: Mapping[str, Tensor],
        calls: Calls,
        seen: Observed,
    ) -> Tensor | None:
        """Return the factors of a group by the method; None if AWQ finds no better ones than 1."""
        weights = [state[_weight_of(name)] for name in names]
        if self.scheme.method == "smoothquant":
            ranges = self._extremes(group, seen, weights[0].device).sum(0)
            return smoothquant_factors(weights, ranges, self.scheme.smoothing)
        k, numbers = self._features(group), self.scheme.weights
        (owner,) = self.ranks.owners([float(k)])
        total = self.ranks.broadcast(self._total(seen, group, owner, weights[0], 1), (k,), weights[0], owner)
        choices = awq_factors(total / total.max().clamp(min=1e-30), weights, numbers)
        losses = self._losses(lambda i: errors(module, state, names, calls[i], choices, numbers), calls)
        best = losses.index(min(losses))
        return choices[best] if best else None

    def _losses(self, errors_of: Callable[[int], list[float]], calls: Calls) -> list[float]:
        """Return the sums of errors over the sampled batches of all ranks, each in the order of the batches."""
        mine = [i for i in sampled(self.count) if i in calls]
        found = self.ranks.agreed(lambda: [(i, errors_of(i)) for i in mine])
        every = sorted((i, tuple(each)) for told in self.ranks.gathered(found) for i, each in told)
        return [sum(each) for each in zip(*(errors_of_batch for _, errors_of_batch in every), strict=True)]

    def _is_same(self, module: nn.Module, trial: Mapping[str, Tensor], calls: Calls, seen: Observed) -> bool:
        """True if a stage has the same outputs with another state, but for rounding, on one batch.

        The batch does not depend on the number of ranks. Each check takes another one, so that ranks take turns.
        """
        i = first_batch(self.checks, self.count)
        self.checks += 1

        def mine() -> bool:
            if i not in calls:
                return True
            exact = seen.outputs[i]
            dtype = next(x.dtype for x in tensors_in(exact) if x.is_floating_point())
            found = run_whole(module, trial, calls[i])
            return squared(exact, found) <= torch.finfo(dtype).eps * squared(exact, None)

        same = self.ranks.agreed(mine)
        return all(self.ranks.gathered(same))

    def _factor(self, group: Group, total: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the factor and the diagonal of a group's Hessian on the rank that owns it."""
        if total is None:
            return None
        return factor(total, self.scheme, ", ".join(group)), total.diagonal().clone()

    def _round(self, group: Group, weights: Mapping[str, Tensor], upper: Tensor, diagonal: Tensor) -> None:
        """Quantize the whole weights of a group, stacked: each rank rounds its rows of the stack."""
        scales = {name: scales_of(weights[name], self.scheme.weights) for name in group}
        stack = torch.cat([weights[name] for name in group])
        scale = torch.cat([_for_rows(scales[name][0], weights[name]) for name in group])
        zeros = [_for_rows(zero, weights[name]) for name in group if (zero := scales[name][1]) is not None]
        rows = self.ranks.rows_of(self.ranks.rank, len(stack), PANEL)
        mine = slice(rows.start, rows.stop)
        zero_of_rows = torch.cat(zeros)[mine] if zeros else None
        part = round_rows(stack[mine], scale[mine], zero_of_rows, upper, diagonal, self.scheme)
        codes = self.ranks.gather_rows(part, len(stack), PANEL)
        for name, own in zip(group, codes.split([len(weights[name]) for name in group]), strict=True):
            self._put(name, own.contiguous(), *scales[name])

    def _put(self, name: str, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Make the new layer of codes, scales and zero points."""
        stored = store(codes, scale, zero, self.scheme)
        if name in self.input_scales:
            stored[INPUT_SCALE] = self.input_scales[name].clone()  # each layer has its own in a checkpoint
        self._place(name, stored)

    def _place(self, name: str, stored: Stored) -> None:
        """Make the new layer, with whole tensors and with those of this rank."""
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
        norms = [(i, squared(exact[i], None), squared(exact[i], found[i])) for i in exact]
        every = sorted(tuple(told) for rank in self.ranks.gathered(norms) for told in rank)
        whole_norm = sum(norm for _, norm, _ in every)
        return sqrt(sum(error for _, _, error in every) / whole_norm) if whole_norm else 0.0


def _calls_after(
    chain: Chain, at: int, calls: Mapping[int, Sequence[Call]], outputs: Mapping[int, TorchValue]
) -> Calls:
    """Return the calls of the block after the one at `at`, with the outputs of that one; of the last block, its own."""
    return {i: chain.with_output(outputs[i], each[min(at + 1, len(each) - 1)]) for i, each in calls.items()}


def _smoothed_state(
    state: Mapping[str, Tensor], producer: str, names: Iterable[str], factors: Tensor
) -> dict[str, Tensor]:
    """Return the state of a stage with the producer divided by factors, and the weights of layers multiplied."""
    made = {f"{producer}.weight", f"{producer}.bias"} & state.keys()
    weights = [_weight_of(name) for name in names]
    changed = {name: divided(state[name], factors) for name in made}
    return {**state, **changed, **{name: multiplied(state[name], factors) for name in weights}}


def _for_rows(scale: Tensor, weight: Tensor) -> Tensor:
    """Return the scales [n, g] of the rows of a weight; one scale for the whole weight is repeated."""
    return scale if scale.dim() == weight.dim() else scale.expand(len(weight), 1)


def _weight_of(inner: str) -> str:
    return f"{inner}.weight" if inner else "weight"
