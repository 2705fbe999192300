"""The private names of torch that this package needs, each with the reason."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode  # only a mode sees the operators of backward passes


class CalledOperators(TorchDispatchMode):
    """The names of the operators that are called inside the context, such as "aten.mm"; those in place without "_"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).rstrip("_"))
        return func(*args, **(kwargs or {}))
