"""The finished stages of a calibration in a folder, so that an interrupted calibration goes on where it ended.

All ranks decide together whether a stage is read or calibrated. One rank computes the digests and writes the files. A
stage is a checkpoint of safetensors files, which appears complete or not at all. It holds whole tensors: those of the
quantized layers and the changed parameters of norms, by their names in the model. Beside them are numbers of the
calibration, and digests of all that the results depend on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
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

from .._errors import CalibrationError
from .._scheme import Scheme
from .._stored_weight import Stored, stored_dtypes, stored_shapes
from ..layers.linear_layers import Layers
from ..layers.quantized_linear import QuantizedLinear
from .batches import digest_of_calls
from .one_device import Call
from .ranks import Ranks
from .stages import digest_of_stage

Folder = str | os.PathLike[str]
FORMAT = 1
"""Version of the results: raise it when a method chooses other numbers for the same data."""
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


class FinishedStages:
    """The finished stages of a calibration; without a folder, nothing is read or written. Every rank makes each call.

    Raises:
        CalibrationError: ranks have other folders, or the folder cannot be made.
    """

    def __init__(self, folder: Folder | None, ranks: Ranks, scheme: Scheme, calls: Sequence[Call]) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self._ranks, self._scheme, self._count = ranks, scheme, 0
        self._parameters: dict[str, Tensor] = {}
        """The state of the stage, by full name."""
        self._digests: dict[str, str] = {}
        _refuse_other_folders(ranks.gathered(None if folder is None else str(self._folder)))
        if self._folder is not None:
            _make(self._folder, ranks)
            self._digests = {SCHEME: _digest_of_scheme(scheme), MODEL: ""}
            self._digests[CALIBRATION] = ranks.of_first(lambda: digest_of_calls(calls))

    def follow(self, module: nn.Module, state: Mapping[str, Tensor], layers: Sequence[str] = ()) -> None:
        """Let the results of later stages depend on a module, its state and the names of its layers."""
        if self._folder is not None:
            before = self._digests[MODEL]
            self._digests[MODEL] = self._ranks.of_first(lambda: digest_of_stage(before, module, state, layers))

    def next(self, name: str, module: nn.Module, state: Mapping[str, Tensor], layers: Layers) -> StageResult | None:
        """Return the results of the next stage, with its layers by full name; None if it is not finished.

        Raises:
            CalibrationError: the results are damaged, or those of another scheme, of other data or another model.
        """
        self.follow(module, state, list(layers))
        if self._folder is None or not layers:
            return None
        self._count += 1
        self._parameters = {f"{name}.{inner}" if name else inner: x for inner, x in state.items()}
        path = self._path(self._folder)
        if not self._ranks.of_first(lambda: os.path.lexists(path)):
            return None
        return self._ranks.agreed(lambda: _read(path, self._digests, self._scheme, layers, self._parameters))

    def write(
        self, layers: Mapping[str, QuantizedLinear], parameters: Mapping[str, Tensor], error: float | None, checks: int
    ) -> None:
        """Write the results of the stage that `next` did not find, of all changed parameters those of the stage.

        Raises:
            CheckpointError: they cannot be written.
        """
        if self._folder is None:
            return
        path = self._path(self._folder)
        stored = {name: dict(layer.named_buffers()) for name, layer in layers.items()}
        changed = {name: x for name, x in parameters.items() if name in self._parameters}
        result = StageResult(stored, changed, error, checks)
        self._ranks.of_first(lambda: _write(path, result, self._digests))

    def _path(self, folder: Path) -> Path:
        return folder / f"stage_{self._count:05}"


def _refuse_other_folders(told: Sequence[str | None]) -> None:
    """Raise CalibrationError if ranks have other folders, given that of each rank."""
    other = next((rank for rank, path in enumerate(told) if path != told[0]), None)
    if other is not None:
        raise CalibrationError(
            "quantize with resume=",
            f"{told[other]} on rank {other}, and {told[0]} on rank 0",
            "all ranks read the same finished stages",
            "pass the same folder on every rank, in a file system that all ranks share",
        )


def _make(folder: Path, ranks: Ranks) -> None:
    """Make the folder, by one rank. Raises CalibrationError if it cannot be made."""

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibrationError(
                f"quantize with resume={str(folder)!r}",
                str(error),
                "the results of finished stages are written there",
                "pass resume= with a folder that can be written",
            ) from error

    ranks.of_first(make)


def _digest_of_scheme(scheme: Scheme) -> str:
    """Return the digest of a scheme, and of the version of its results."""
    return sha256(json.dumps([FORMAT, asdict(scheme)]).encode()).hexdigest()


def _write(path: Path, result: StageResult, digests: Digests) -> None:
    """Write the results of a stage to a new folder; one rank makes the call. Raises CheckpointError if it cannot."""
    tensors = {_full(name, key): x for name, stored in result.layers.items() for key, x in stored.items()}
    tensors |= result.parameters
    tensors |= {name: _bytes_of(digest) for name, digest in digests.items()}
    tensors[CHECKS] = torch.tensor(result.checks, device="cpu")
    if result.error is not None:
        tensors[ERROR] = torch.tensor(result.error, dtype=torch.float64, device="cpu")
    save(path, {n: HeldTensor(x) for n, x in tensors.items()}, {}, format_of("safetensors"), ranks=World()).wait()


def _bytes_of(digest: str) -> Tensor:
    return torch.tensor(list(digest.encode()), dtype=torch.uint8, device="cpu")


def _read(
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
            if not torch.equal(read_whole(found, fact), _bytes_of(digests[fact])):
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
    forms = {_full(name, key): form for name, layer in layers.items() for key, form in _forms(scheme, layer).items()}
    others = [name for name in found.entries if name not in {*forms, *OTHERS, ERROR, CHECKS}]
    _check_forms(path, found, forms, others, parameters)
    return StageResult(
        {name: _stored(found, name, _forms(scheme, layer), layer.weight.device) for name, layer in layers.items()},
        {name: read_whole(found, name).to(parameters[name].device) for name in others},
        float(read_whole(found, ERROR)) if ERROR in found.entries else None,
        int(read_whole(found, CHECKS)),
    )


def _stored(found: Catalogue, name: str, keys: Iterable[str], device: torch.device) -> Stored:
    return {key: read_whole(found, _full(name, key)).to(device) for key in keys}


def _check_forms(
    path: Path,
    found: Catalogue,
    forms: Mapping[str, Form],
    others: Iterable[str],
    parameters: Mapping[str, Tensor],
) -> None:
    """Raise CalibrationError if a tensor of a layer, or one of the other tensors, has not the form that is needed."""
    changed = {name: (tuple(parameters[name].shape), parameters[name].dtype) for name in others if name in parameters}
    wanted = {**forms, **changed}
    told = {name: (tuple(entry.shape), entry.dtype) for name, entry in found.entries.items()}
    for name in (*forms, *others):
        if name not in wanted or told.get(name) != wanted[name]:
            _refuse(path, f"no tensor {name} as the model and the scheme need it")


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
