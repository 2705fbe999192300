"""The results of one calibrated stage as a checkpoint of safetensors files, with checksums.

It holds whole tensors: those of the quantized layers and the changed parameters of norms, by their names in the model.
Beside them are numbers of the calibration, and digests of all that the results depend on. The checkpoint appears
complete or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from meshwright.checkpoint import (
    Catalogue,
    CheckpointFileError,
    HeldTensor,
    ReadTimeoutError,
    World,
    format_of,
    read_whole,
    save,
    verify,
)

from ._errors import CalibrationError
from ._layers import Layers
from ._scheme import Scheme
from ._stored_weight import Stored, stored_dtypes, stored_shapes

SCHEME, CALIBRATION, MODEL = "meshwright:scheme", "meshwright:calibration", "meshwright:model"
OTHERS = {
    SCHEME: "the results of another scheme",
    CALIBRATION: "the results of other calibration data",
    MODEL: "the results of another model: other weights, layers or settings, in this stage or an earlier one",
}
"""Digest → what a stage is that has another one."""
ERROR, CHECKS = "meshwright:error", "meshwright:checks"
Digests = Mapping[str, str]
Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The results of a stage, whole: stored weights by layer, and changed parameters of norms, by full name.

    `error` is the relative error of the outputs; None for layers outside of blocks. `checks` is the number of checks of
    smoothed stages so far.
    """

    layers: Mapping[str, Stored]
    parameters: Mapping[str, Tensor]
    error: float | None
    checks: int


def write_stage(path: Path, result: StageResult, digests: Digests) -> None:
    """Write the results of a stage to a new folder; one rank makes the call. Raises CheckpointError if it cannot."""
    tensors = {_full(name, key): x for name, stored in result.layers.items() for key, x in stored.items()}
    tensors |= result.parameters
    tensors |= {name: torch.tensor(list(digest.encode()), dtype=torch.uint8) for name, digest in digests.items()}
    tensors[CHECKS] = torch.tensor(result.checks)
    if result.error is not None:
        tensors[ERROR] = torch.tensor(result.error, dtype=torch.float64)
    save(path, {n: HeldTensor(x) for n, x in tensors.items()}, {}, format_of("safetensors"), ranks=World()).wait()


def read_stage(
    path: Path, digests: Digests, scheme: Scheme, layers: Layers, parameters: Mapping[str, Tensor]
) -> StageResult:
    """Return the results in a folder, given the layers of the stage and the parameters that may have changed.

    Raises:
        CalibrationError: the folder is damaged, or has the results of another scheme, of other data or another model.
    """
    try:
        found = verify(path)
        if not found.entries.keys() >= {*OTHERS, CHECKS}:
            _refuse(path, "a checkpoint that is no stage of a calibration")
        for fact, other in OTHERS.items():
            if read_whole(found, fact).tolist() != list(digests[fact].encode()):
                _refuse(path, other)
        return _result(path, found, scheme, layers, parameters)
    except ReadTimeoutError:
        raise
    except CheckpointFileError as error:
        raise CalibrationError(
            f"resume a calibration from {path}",
            error.found,
            f"results that are missing or damaged are not used: {error.why}",
            f"remove {path.name}, and this stage is calibrated again; or pass resume= with another folder",
        ) from error


def _result(
    path: Path, found: Catalogue, scheme: Scheme, layers: Layers, parameters: Mapping[str, Tensor]
) -> StageResult:
    """Return the results in a checkpoint whose digests are right, after a check of names, shapes and dtypes."""
    forms = {name: _forms(scheme, layer) for name, layer in layers.items()}
    wanted = {_full(name, key): form for name, own in forms.items() for key, form in own.items()}
    others = found.entries.keys() - wanted.keys() - {*OTHERS, ERROR, CHECKS}
    wanted |= {name: (tuple(x.shape), x.dtype) for name, x in parameters.items() if name in others}
    told = {name: (tuple(entry.shape), entry.dtype) for name, entry in found.entries.items()}
    if wrong := [name for name in wanted.keys() | others if told.get(name) != wanted.get(name)]:
        _refuse(path, f"no tensor {min(wrong)} as the model and the scheme need it")
    stored = {
        name: {key: read_whole(found, _full(name, key)).to(layer.weight.device) for key in forms[name]}
        for name, layer in layers.items()
    }
    return StageResult(
        stored,
        {name: read_whole(found, name).to(parameters[name].device) for name in others},
        float(read_whole(found, ERROR)) if ERROR in told else None,
        int(read_whole(found, CHECKS)),
    )


def _forms(scheme: Scheme, layer: nn.Linear) -> dict[str, Form]:
    """Return the shape and dtype of each tensor that holds the weight of a layer."""
    dtypes = stored_dtypes(scheme, layer.weight.dtype)
    shapes = stored_shapes(layer.out_features, layer.in_features, scheme)
    return {key: (shape, dtypes[key]) for key, shape in shapes.items()}


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _refuse(path: Path, found: str) -> NoReturn:
    raise CalibrationError(
        f"resume a calibration from {path}",
        found,
        "a stage depends on the scheme, the calibration data and the model, so results of others would be wrong",
        "pass resume= with another folder; nothing was changed in this one",
    )
