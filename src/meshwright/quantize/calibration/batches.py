"""Calibration batches: the calls of a model, checked, and their pieces."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import cast

import torch
from torch import Tensor

from meshwright.layout import MeshwrightError, TorchValue
from meshwright.tensor import key_of_tree, tensors_in

from .._errors import CalibrationError
from .one_device import Call, whole_call
from .ranks import PIECES


def calls_of(calibration: object) -> list[Call]:
    """Return the calls of a model for batches: tensors, tuples of arguments, or mappings of keyword arguments.

    Raises:
        CalibrationError: the data are no batches, there is no batch, or one with NaN or infinity.
    """
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise CalibrationError(
            "quantize with calibration data",
            f"an object of type {type(calibration).__name__}",
            "calibration data are several batches",
            "pass calibration=[batch, ...]; a batch is a tensor, a tuple of arguments, or a dict of keyword arguments",
        )
    found = [whole_call(_call(batch)) for batch in cast("Iterable[TorchValue]", calibration)]
    if not found:
        raise CalibrationError(
            "quantize with calibration data",
            "no batch",
            "the methods need the inputs of each layer",
            "pass at least one batch, and each rank an iterator of its own; 128 sequences of real text are usual",
        )
    for number, call in enumerate(found):
        if any(not bool(x.isfinite().all()) for x in tensors_in(call) if x.is_floating_point()):
            raise CalibrationError(
                "quantize with calibration data",
                f"batch {number} has NaN or infinity",
                "every layer behind such a number has inputs that are not finite",
                "remove the batch, or repair the data",
            )
    return found


def refuse_differences(fingerprints: Sequence[object]) -> None:
    """Raise CalibrationError if ranks have other batches, given the fingerprint of each rank."""
    other = next((rank for rank, told in enumerate(fingerprints) if told != fingerprints[0]), None)
    if other is not None:
        raise CalibrationError(
            "quantize with calibration data",
            f"batches of rank {other} that differ from those of rank 0",
            "every rank gets the same batches, and runs its share of them",
            "pass the same batches on every rank, without a sampler for each rank",
        )


def fingerprint(calls: Iterable[Call]) -> list[tuple[str, float]]:
    """Return the shape and the sum of each tensor of the batches, which differ if batches do, but for rare cases."""
    return [(f"{x.dtype}{list(x.shape)}", float(x.double().sum())) for x in tensors_in(list(calls))]


def digest_of_calls(calls: Sequence[Call]) -> str:
    """Return the digest of batches: of every bit of their tensors, and of plain arguments."""
    return sha256(repr(key_of_tree(list(calls), _key_of_leaf)).encode()).hexdigest()


def _key_of_leaf(x: TorchValue) -> Hashable:
    if isinstance(x, Tensor):
        return digest_of_tensor(x)
    return x if isinstance(x, (bool, int, float, str, type(None))) else type(x).__name__


def digest_of_tensor(x: Tensor) -> str:
    """Return the digest of the dtype, the shape and every bit of a tensor."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    found = sha256(f"{x.dtype}{list(x.shape)}".encode())
    found.update(x.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


@contextmanager
def naming_batch(number: int) -> Generator[None]:
    """Run the block for one batch: an error in the code of the model becomes a CalibrationError with its number."""
    try:
        yield
    except (MeshwrightError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CalibrationError(
            "quantize with calibration data",
            f"batch {number} fails with {type(error).__name__}: {error}",
            "the code of the model cannot run with this batch",
            "pass batches for which model(batch), model(*batch) or model(**batch) runs",
        ) from error


def _call(batch: TorchValue) -> Call:
    if isinstance(batch, Mapping):
        cache = {"use_cache": False} if "use_cache" in batch else {}
        return (), {**batch, **cache}
    if isinstance(batch, (tuple, list)) and not isinstance(batch, Tensor):
        return tuple(batch), {}
    return (batch,), {}


def piece(number: int, count: int) -> range:
    """Return the batches of a piece; pieces do not depend on the ranks.

    >>> [len(piece(number, 12)) for number in range(8)]
    [1, 2, 1, 2, 1, 2, 1, 2]
    """
    return range(number * count // PIECES, (number + 1) * count // PIECES)


def sampled(count: int) -> list[int]:
    """Return the first batch of each piece: a sample to which every rank contributes.

    >>> sampled(32)
    [0, 4, 8, 12, 16, 20, 24, 28]
    """
    return [piece(number, count).start for number in range(PIECES) if piece(number, count)]


def first_batch(number: int, count: int) -> int:
    """Return the first batch of one of the pieces; successive numbers give pieces of different ranks.

    >>> [first_batch(number, 16) for number in range(8)]
    [0, 6, 12, 2, 8, 14, 4, 10]
    """
    return 3 * number % PIECES * count // PIECES
