"""Distribute a model by the plan of a pipeline: layers on the meshes of stages, parameters in their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout import Placement, ProcessMesh, Spec
from meshwright.search import STAGES, MeshPlan
from meshwright.tensor import DistTensor

from ..eager.optimizer import replace_parameters
from ..eager.split_pipeline import split_pipeline
from ..marks.tensors import shard_tensor


def distribute_over_stages(model: nn.Module, optimizer: Optimizer, plan: MeshPlan) -> None:
    """Put `model` and its optimizer on the stages of a plan that has a pipeline.

    Raises:
        StageError: the plan names a module at which no stage may begin.
    """
    assert plan.pipeline is not None
    before = dict(model.named_parameters(remove_duplicate=False))
    lie = _by_module(model, plan.layouts)

    def mark(_: str, layer: nn.Module, home: ProcessMesh) -> None:
        for name, spec in lie.get(layer, {}).items():
            table: dict[str, Any] = layer._parameters if name in layer._parameters else layer._buffers
            if not isinstance(table[name], DistTensor) and spec.layout.cut_axes:
                table[name] = shard_tensor(table[name], home, spec.placements)

    split, way, batch = plan.pipeline.split, plan.pipeline.way or None, _row_placements(plan)
    split_pipeline(model, plan.mesh, split, axis=STAGES, way=way, batch=batch, shard_fn=mark)
    replace_parameters(optimizer, before, dict(model.named_parameters(remove_duplicate=False)))


def _by_module(model: nn.Module, layouts: Mapping[str, Spec]) -> Mapping[nn.Module, Mapping[str, Spec]]:
    """Return, for each module, the layouts of its own tensors by their own names."""
    found: dict[nn.Module, dict[str, Spec]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own: Mapping[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name in own:
            spec = layouts.get(f"{path}.{name}" if path else name)
            if spec is not None:
                found.setdefault(module, {})[name] = spec
    return found


def _row_placements(plan: MeshPlan) -> list[Placement]:
    """Return the placements of plain tensors that go into a layer: those of the batch's rows."""
    inputs = (spec for name, spec in plan.layouts.items() if name.startswith("batch_"))
    first = next((spec for spec in inputs if spec.layout.cut_axes), None)
    return [] if first is None else list(first.placements)
