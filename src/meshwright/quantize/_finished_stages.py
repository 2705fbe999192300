"""The finished stages of a calibration in a folder, so that an interrupted calibration goes on where it ended.

All ranks decide together whether a stage is read or calibrated. One rank computes the digests and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ._errors import CalibrationError
from ._layers import Layers
from ._one_device import Call
from ._quantized_linear import QuantizedLinear
from ._ranks import Ranks
from ._scheme import Scheme
from ._stage_digests import digest_of_calls, digest_of_scheme, digest_of_stage
from ._stage_file import CALIBRATION, MODEL, SCHEME, StageResult, read_stage, write_stage

Folder = str | os.PathLike[str]


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
            self._digests = {SCHEME: digest_of_scheme(scheme), MODEL: ""}
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
        return self._ranks.agreed(lambda: read_stage(path, self._digests, self._scheme, layers, self._parameters))

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
        self._ranks.of_first(lambda: write_stage(path, result, self._digests))

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
