"""Give a model on the meta device, distributed over a mesh, memory for this rank's part and initial values.

The tensors of a module are allocated and initialised before those of the next module. So a rank never holds more than
its share of the model and one whole parameter. For a sharded parameter, "torch" draws the whole tensor, as on one
device, and keeps the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.tensor import DistTensor, as_part, distribute_as, local_parts

from .._errors import MaterializeError

Init = Callable[[nn.Module], Any]


def materialize(model: nn.Module, init: Init | None = None, device: torch.device | str | None = None) -> nn.Module:
    """Give memory and initial values to the tensors of `model` on the meta device; returns the same module.

    It works module by module, children first, as constructors do. A module's tensors get memory; then
    `reset_parameters()`, if the module has it, and `init(module)` fill them. Models of transformers need no `init`:
    their own initialisation follows. A tensor that several modules share gets its values from the first of them.
    Tensors that have memory already keep their values. Parameters stay the same objects, frozen ones stay frozen, and
    an optimizer that has them can go on.

    The numbers are those of one device that makes the same call with the same seed. They are also those of constructing
    the model there, if constructors draw by `reset_parameters` alone.

    Raises:
        MaterializeError: no initialiser gives a tensor its values, or one replaces a parameter.

    >>> import meshwright as mw
    >>> def go():
    ...     with torch.device("meta"):
    ...         net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    ...     net[0].weight = mw.shard_tensor(net[0].weight, mw.ProcessMesh([0, 1], ["tp"]), [mw.Shard(0)])
    ...     net = mw.shard_layer(net, mw.ProcessMesh([0, 1], ["tp"]))
    ...     torch.manual_seed(0)
    ...     return mw.materialize(net)
    >>> _ = torch.manual_seed(0)
    >>> one = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    >>> found = mw.simulate(go, 2)
    >>> [torch.equal(found[r][0].weight.to_local(), one[0].weight[2 * r : 2 * r + 2]) for r in range(2)]
    [True, True]
    """
    work = _Work(torch.device(device) if device is not None else _real_device())
    own = _initialisers(model)
    with torch.no_grad():
        for path, module in _children_first(model):
            work.fill(path, module, init)
            for below, part in _children_first(module, path) if module in own else ():
                work.refill(below, part, own[module][part])
        for path, module in model.named_modules():
            work.check(path, module)
    return model


class _Work:
    """The tensors that were allocated, and the modules that initialise them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.first: dict[int, nn.Module] = {}
        """Tensor (by id) that was allocated here → the module that initialises it."""
        self.kept: list[Tensor] = []

    def fill(self, path: str, module: nn.Module, init: Init | None) -> None:
        """Allocate and initialise the tensors that the module owns."""
        for _, _, x in _slots(module):
            if _device(x).type == "meta":
                _give_memory(x, self.device)
                self.first[id(x)] = module
                self.kept.append(x)
        self.refill(path, module, lambda m: self._reset(m, init))

    def refill(self, path: str, module: nn.Module, init: Init) -> None:
        """Run `init` on the module; tensors of other modules and tensors that had memory before keep their values."""
        before = {(id(table), key): x for table, key, x in _slots(module)}
        if before and not any(id(x) in self.first for x in before.values()):
            return
        others = [x for x in before.values() if self.first.get(id(x)) is not module]
        held = [(x, _local(x).clone()) for x in others]
        init(module)
        for x, values in held:
            _local(x).copy_(values)
        for table, key, new in list(_slots(module)):
            old = before.get((id(table), key))
            if old is not None and new is not old:
                self._put_back(f"{path}.{key}".lstrip("."), table, key, old, new)

    def check(self, path: str, module: nn.Module) -> None:
        """Raise MaterializeError for a tensor without values, and for a tensor that is neither parameter nor buffer."""
        for key, x in module.__dict__.items():
            if isinstance(x, Tensor) and _device(x).type == "meta":
                raise MaterializeError(
                    f"materializing {f'{path}.{key}'.lstrip('.')!r}",
                    "a tensor that is neither a parameter nor a buffer",
                    "it was created on the meta device, so its values are unknown",
                    "register it with register_buffer",
                )
        for _, key, x in _slots(module):
            if id(x) in self.first and not _has_values(_local(x)):
                raise MaterializeError(
                    f"materializing {type(module).__name__}.{key}, at {f'{path}.{key}'.lstrip('.')!r}",
                    "no values after reset_parameters and init",
                    "the values from its constructor were lost on the meta device",
                    f"call mw.materialize(model, init=fn); let fn(module) fill {type(module).__name__}.{key} in place",
                )

    def _reset(self, module: nn.Module, init: Init | None) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        if init is not None:
            init(module)

    def _put_back(self, path: str, table: dict[str, Any], key: str, old: Tensor, new: Tensor) -> None:
        """Copy a buffer that `init` replaced into the old buffer. Raises MaterializeError for a parameter."""
        if isinstance(old, nn.Parameter) or old.shape != new.shape or old.dtype != new.dtype:
            raise MaterializeError(
                f"materializing {path!r}",
                "a new tensor in its place",
                "the old tensor has its layout on the mesh, and an optimizer may hold it",
                "write the values in place",
            )
        with local_parts():
            values = distribute_as(new, old.spec.mesh, old.spec.layout) if isinstance(old, DistTensor) else new
            _local(old).copy_(_local(values))
        table[key] = old


def _children_first(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, after its children, in the order of `nn.Module.apply`."""
    seen: set[nn.Module] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}".lstrip("."), child)
        yield path, module

    yield from walk(path, model)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the module's own parameters and buffers, each with its table and name."""
    for table in (module._parameters, module._buffers):
        yield from ((table, name, x) for name, x in table.items() if x is not None)


def _give_memory(x: Tensor, device: torch.device) -> None:
    """Allocate this rank's part under the existing tensor object, filled with NaN until it is initialised."""
    with local_parts():
        new = torch.empty_like(x.detach().as_subclass(Tensor), device=device)
        if new.is_floating_point() or new.is_complex():
            new.fill_(torch.nan)
        made: Tensor = new.requires_grad_(x.requires_grad)
        if isinstance(x, DistTensor):
            made = as_part(made, x._spec)
            made.__class__ = type(x)
        elif isinstance(x, nn.Parameter):
            made = nn.Parameter(made, x.requires_grad)
        vars(made).update(vars(x))
        torch.utils.swap_tensors(x, made)


def _has_values(local: Tensor) -> bool:
    """False if an element is still NaN; an integer tensor has values once it was written to."""
    with local_parts():
        if local.is_floating_point() or local.is_complex():
            return not bool(local.isnan().any())
        return local.numel() == 0 or local._version > 0


def _local(x: Tensor) -> Tensor:
    """Return this rank's part, empty if the rank is outside the mesh."""
    with local_parts():
        local = x.detach().as_subclass(Tensor)
        return local.reshape(-1)[:0] if isinstance(x, DistTensor) and x._away else local


def _device(x: Tensor) -> torch.device:
    with local_parts():
        return x.device


def _real_device() -> torch.device:
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


# --- transformers, whose models have an initialisation function for the whole model --------------------------------


def _initialisers(model: nn.Module) -> Mapping[nn.Module, Mapping[nn.Module, Init]]:
    """Return, for each model of transformers, the initialiser of each module below it: that of its innermost model.

    The constructor of such a model initialises the modules below it that have no values yet. Constructors of models
    inside run before.
    """
    inits = {m: _own_init(m) for m in model.modules()}
    found: dict[nn.Module, dict[nn.Module, Init]] = {}
    for outer in (m for m, own in inits.items() if own is not None):
        found[outer] = {m: own for part in outer.modules() if (own := inits[part]) for m in part.modules()}
    return found


def _own_init(module: nn.Module) -> Init | None:
    own = getattr(module, "_initialize_weights", None)
    return own if callable(own) and callable(getattr(module, "init_weights", None)) else None
