"""Layers of the class Conv1D of transformers, as in GPT-2: linear layers that store the transposed weight [k, n].

While a model is quantized or loaded, such a layer is an `nn.Linear` whose weight [n, k] is a view of its own. So all
methods and forms know it, and its codes are those of the linear layer. transformers is not imported: the name of the
class, the shape of the weight and the attribute `nf` tell such a layer.
"""

from __future__ import annotations

from collections.abc import Container, Generator
from contextlib import contextmanager

from torch import nn

from ..layers.linear_layers import shared_weights
from ..layers.quantized_linear import QuantizedLinear


class Conv1D(nn.Linear):
    """A layer of the class Conv1D of transformers, as the linear layer that it is while its model is quantized."""


class QuantizedConv1D(QuantizedLinear):
    """A quantized layer that was of the class Conv1D of transformers. Its tensors are those of a linear layer."""


def is_conv1d(module: nn.Module) -> bool:
    """True for a layer of the class Conv1D of transformers that is not a linear layer at the moment."""
    weight = module._parameters.get("weight")
    is_named = type(module).__name__ == Conv1D.__name__ and not isinstance(module, nn.Linear)
    return is_named and weight is not None and weight.dim() == 2 and weight.shape[1] == getattr(module, "nf", None)


@contextmanager
def conv1d_as_linear(model: nn.Module, names: Container[str] | None = None) -> Generator[None]:
    """Make the Conv1D layers of a model, or those with these names, linear layers inside the block.

    At its end, layers that were quantized become `QuantizedConv1D`. The others become what they were, with the very
    same parameter. Layers that share their weight stay as they are.
    """
    shared = shared_weights(model)
    changed = [
        (module, type(module), module.get_parameter("weight"))
        for name, module in model.named_modules()
        if (names is None or name in names) and is_conv1d(module) and id(module._parameters["weight"]) not in shared
    ]
    for module, _, weight in changed:
        module.__class__ = Conv1D
        vars(module)["in_features"], vars(module)["out_features"] = weight.shape
        module._parameters["weight"] = nn.Parameter(weight.detach().t(), weight.requires_grad)
    try:
        yield
    finally:
        for module, kind, weight in changed:
            if isinstance(module, QuantizedLinear):
                module.__class__ = QuantizedConv1D
            else:
                module.__class__ = kind
                del vars(module)["in_features"], vars(module)["out_features"]
                module._parameters["weight"] = weight
