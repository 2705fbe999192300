"""Save and restore the states of the random generators with a run: torch's, Python's and NumPy's.

They are one row of bytes if they are equal on all ranks, else one row per rank. Ranks of a static pipeline draw numbers
for their own stage only, and with `random_source("rank")` each rank draws for itself. A run on the same meshes loads
its own rows. On other meshes all ranks load the first row, because numbers that they draw together must be equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint import Catalogue, CheckpointError, HeldTensor, World
from meshwright.layout import (
    InputError,
    JsonValue,
    Layout,
    ProcessMesh,
    Spec,
    accelerators_in_use,
    generator_state,
    read_json,
    set_generator_state,
)
from meshwright.tensor import current_random_source

NAME = "random"
MOST_BYTES = 2**20
"""Most bytes of the states of one rank."""


def random_of(ranks: World) -> dict[str, HeldTensor]:
    """Return the states on this rank as bytes."""
    data = _written()
    told: list[Any] = ranks.gathered([sha256(data).hexdigest(), len(data)])
    if all(digest == told[0][0] for digest, _ in told):
        return {NAME: HeldTensor(_bytes(data))}
    longest = max(length for _, length in told)
    spec = Spec(ranks.mesh, Layout((("world",), ())), (ranks.size, longest), torch.uint8)
    return {NAME: HeldTensor(_bytes(data.ljust(longest)).unsqueeze(0), spec)}


def place_for_random(catalogue: Catalogue, ranks: World, same: bool) -> dict[str, HeldTensor]:
    """Return an empty tensor for the row that this rank loads. `same`: True if the meshes are those that were saved."""
    shape = catalogue.entries[NAME].shape
    if len(shape) not in (1, 2) or shape[-1] > MOST_BYTES or shape[0] > MOST_BYTES:
        raise CheckpointError(
            f"loading {NAME} from {catalogue.folder}",
            f"a tensor of shape {shape}",
            f"the states of random generators are rows of at most {MOST_BYTES} bytes",
            "pass a checkpoint that mw.save_checkpoint wrote",
        )
    if len(shape) == 1:
        return {NAME: HeldTensor(torch.empty(shape, dtype=torch.uint8, device="cpu"))}
    row = ranks.rank if _has_own(shape, ranks, same) else 0
    others = iter(range(ranks.rank + 1, ranks.rank + 1 + shape[0]))
    mesh = ProcessMesh([ranks.rank if at == row else next(others) for at in range(shape[0])], ["world"])
    spec = Spec(mesh, Layout((("world",), ())), shape, torch.uint8)  # as if this were the rank of that row
    return {NAME: HeldTensor(torch.empty(1, shape[1], dtype=torch.uint8, device="cpu"), spec)}


def check_random(found: Mapping[str, HeldTensor]) -> None:
    """Raise CheckpointError for bytes that are no states of generators; nothing is set."""
    try:
        states = read_json(found[NAME].part.numpy().tobytes(), MOST_BYTES)
        torch.Generator().set_state(_bytes(bytes.fromhex(states["torch"])))
        random.Random().setstate(_python_state(states))
        np.random.RandomState().set_state(_numpy_state(states))
    except (InputError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            "restoring the random generators",
            f"no states of random generators under the name {NAME!r}",
            str(error).split("\n")[0],
            "pass a checkpoint that mw.save_checkpoint wrote",
        ) from error


def put_back_random(found: Mapping[str, HeldTensor], ranks: World, same: bool) -> None:
    """Set the generators. Under `random_source("rank")`, ranks without a row of their own get new seeds."""
    held = found[NAME]
    data = held.part.numpy().tobytes()
    _set(read_json(data, MOST_BYTES))
    if held.spec is not None and current_random_source() == "rank" and not _has_own(held.spec.shape, ranks, same):
        torch.manual_seed(int.from_bytes(sha256(data + str(ranks.rank).encode()).digest()[:8], "little"))


def _has_own(shape: Sequence[int], ranks: World, same: bool) -> bool:
    return same and shape[0] == ranks.size


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _written() -> bytes:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    if (device := _accelerator()) is not None:
        states[device.type] = generator_state(device).cpu().numpy().tobytes().hex()
    return json.dumps(states).encode()


def _accelerator() -> torch.device | None:
    """Return the accelerator of this rank; None if it has none, or does not use it."""
    found = accelerators_in_use()
    return torch.device(found[torch.accelerator.current_device_index()]) if found else None


def _set(states: JsonValue) -> None:
    torch.set_rng_state(_bytes(bytes.fromhex(states["torch"])))
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    if (device := _accelerator()) is not None and device.type in states:
        set_generator_state(_bytes(bytes.fromhex(states[device.type])), device)


def _python_state(states: JsonValue) -> tuple[Any, ...]:
    version, words, gauss = states["python"]
    return version, tuple(words), gauss


def _numpy_state(states: JsonValue) -> tuple[Any, ...]:
    kind, keys, *rest = states["numpy"]
    return kind, np.array(keys, dtype=np.uint32), *rest
