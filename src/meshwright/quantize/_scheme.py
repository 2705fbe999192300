"""Schemes: which layers are quantized, to which numbers, and by which method. Terms are those of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from ._errors import QuantizeError
from ._patterns import IGNORED, TARGETS, check_patterns

Strategy = Literal["tensor", "channel", "group", "tensor_group", "token"]
Method = Literal["nearest", "gptq", "awq", "smoothquant"]

MOST_BITS = 8
"""Most bits of a quantized number."""
FLOAT4_GROUPS = {"group": 32, "tensor_group": 16}
"""The group size of floats of 4 bits, by strategy: mxfp4 (OCP Microscaling Formats 1.0) and nvfp4."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A set of numbers to which values are rounded, and the values that share a scale.

    `type` is "int", "float" (8 bits: float8_e4m3fn; 4 bits: e2m1) or "nf" (4 bits: the quantiles of a normal
    distribution). Values share a scale by `strategy`: all of a "tensor", a row of a weight ("channel"), `group_size`
    neighbours in a row ("group"), or the features of a "token". If `dynamic`, the scales of activations are computed at
    each call. Floats of 4 bits are those of mxfp4 (strategy "group" of 32, scales are powers of two) or of nvfp4
    (strategy "tensor_group" of 16, scales are float8 numbers, and the tensor has one scale more).

    Raises:
        QuantizeError: there is no such format.

    >>> NumberFormat(num_bits=4, strategy="group", group_size=128)
    int4, group 128
    """

    num_bits: int = 8
    type: Literal["int", "float", "nf"] = "int"
    strategy: Strategy = "channel"
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        asked = f"a number format of {self.num_bits} bits and type {self.type!r}"
        widths = {"int": range(2, MOST_BITS + 1), "float": (4, 8), "nf": (4,)}.get(self.type, ())
        if type(self.num_bits) is not int or self.num_bits not in widths:
            raise QuantizeError(
                asked,
                f"num_bits={self.num_bits}",
                "integers have 2 to 8 bits, floats have 4 or 8, and normal floats have 4",
                'write NumberFormat(4), NumberFormat(8, "float") or NumberFormat(4, "nf")',
            )
        is_size = type(self.group_size) is int and self.group_size > 0
        has_groups = self.strategy in ("group", "tensor_group")
        if not is_size if has_groups else self.group_size is not None:
            raise QuantizeError(
                asked,
                f"strategy={self.strategy!r} and group_size={self.group_size}",
                'a group size belongs to the strategy "group", which needs one',
                'write NumberFormat(4, strategy="group", group_size=128)',
            )
        is_odd = FLOAT4_GROUPS.get(self.strategy) != self.group_size or self.group_size is None
        if is_odd if self.is_float4 else self.strategy == "tensor_group":
            raise _no_float4(asked, self.strategy, self.group_size)
        if not self.symmetric and self.type != "int":
            raise QuantizeError(
                asked,
                "symmetric=False",
                "only integers have zero points",
                "leave out symmetric=False",
            )

    @property
    def is_float4(self) -> bool:
        """True for the numbers of mxfp4 and nvfp4."""
        return self.type == "float" and self.num_bits == 4

    def __repr__(self) -> str:
        words = [f"{self.type}{self.num_bits}", self.strategy + (f" {self.group_size}" if self.group_size else "")]
        words += ["asymmetric"] * (not self.symmetric) + ["dynamic"] * self.dynamic
        return ", ".join(words)


def _no_float4(asked: str, strategy: str, group_size: int | None) -> QuantizeError:
    return QuantizeError(
        asked,
        f"strategy={strategy!r} and group_size={group_size}",
        'floats of 4 bits have the strategy "group" with groups of 32 (mxfp4), or "tensor_group" of 16 (nvfp4)',
        'write NumberFormat(8, "float"), or NumberFormat(4, "float", "group", 32)',
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of quantization.

    `targets` and `ignore` list layers: by name, by class, or by a regular expression that follows "re:". A layer is
    quantized if a target matches it and nothing in `ignore` does. `method` is how weights become numbers: to the
    nearest ("nearest"), or with calibration data by "gptq", "awq" or "smoothquant". With `act_order`, GPTQ begins with
    the columns that have the largest inputs. `damping` is the share of the mean diagonal that GPTQ adds to a Hessian.
    `smoothing` is the exponent of SmoothQuant: 0 leaves inputs as they are, 1 makes all features equally large.

    Raises:
        QuantizeError: the parts do not fit together.

    >>> Scheme.preset("w4a16-gptq", group_size=32)
    weights int4, group 32; by gptq with act_order
    """

    weights: NumberFormat
    input_activations: NumberFormat | None = None
    method: Method = "nearest"
    targets: tuple[str, ...] = TARGETS
    ignore: tuple[str, ...] = IGNORED
    act_order: bool = False
    damping: float = 0.01
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        check_patterns("targets", self.targets)
        check_patterns("ignore", self.ignore)
        if self.method not in ("nearest", "gptq", "awq", "smoothquant"):
            raise QuantizeError(
                f"a scheme by {self.method!r}",
                repr(self.method),
                "there is no such method",
                'write "nearest", "gptq", "awq" or "smoothquant"',
            )
        if self.weights.dynamic or self.weights.strategy == "token":
            raise QuantizeError(
                f"weights as {self.weights!r}",
                "scales that are computed at each call",
                "only activations have such scales; a weight does not change",
                'use the strategy "tensor", "channel" or "group" for weights',
            )
        inputs = self.input_activations
        if inputs is not None and not inputs.dynamic and (inputs.strategy != "tensor" or not inputs.symmetric):
            raise QuantizeError(
                f"inputs as {inputs!r}",
                "stored scales for parts of an input",
                "each call has other tokens, so a stored scale is one for all of them",
                'use NumberFormat(8, strategy="tensor"), or dynamic=True',
            )
        if inputs is not None and inputs.strategy == "tensor_group":
            raise QuantizeError(
                f"inputs as {inputs!r}",
                "nvfp4 inputs",
                "they need a scale of the whole tensor, which is not computed at each call",
                'use NumberFormat(4, "float", "group", 32, dynamic=True), or leave inputs as they are',
            )
        if self.method == "gptq" and self.weights.type == "nf":
            raise QuantizeError(
                "nf4 weights by gptq",
                repr(self.weights),
                "GPTQ rounds to numbers at equal distances",
                'use method="nearest", or NumberFormat(4, strategy="group", group_size=64)',
            )

    @property
    def is_calibrated(self) -> bool:
        """True if the scheme needs calibration data."""
        inputs = self.input_activations
        return self.method != "nearest" or (inputs is not None and not inputs.dynamic)

    @staticmethod
    def preset(
        name: str,
        *,
        group_size: int | None = None,
        targets: tuple[str, ...] = (),
        ignore: tuple[str, ...] | None = None,
    ) -> Scheme:
        """Return the scheme of a name in `PRESETS`, with another group size, targets or ignored layers.

        Raises:
            QuantizeError: there is no such preset, or it has no groups.
        """
        if name not in PRESETS:
            near = get_close_matches(name, PRESETS, 1)
            raise QuantizeError(
                f"the scheme {name!r}",
                repr(name),
                f"there is no such preset; presets are {', '.join(PRESETS)}",
                f"write {near[0]!r}" if near else "write a preset, or a Scheme of your own",
            )
        found = PRESETS[name]()
        if group_size is not None:
            found = replace(found, weights=_with_group(name, found.weights, group_size))
        return replace(found, targets=targets or found.targets, ignore=found.ignore if ignore is None else ignore)

    def __repr__(self) -> str:
        inputs = f"; inputs {self.input_activations!r}" if self.input_activations is not None else ""
        method = f"; by {self.method}" if self.method != "nearest" else ""
        order = " with act_order" if self.act_order else ""
        return f"weights {self.weights!r}{inputs}{method}{order}"


def _with_group(name: str, weights: NumberFormat, size: int) -> NumberFormat:
    if weights.group_size is None:
        raise QuantizeError(
            f"the scheme {name!r} with group_size={size}",
            f"weights {weights!r}",
            "this preset has no groups",
            "leave out group_size, or write Scheme(NumberFormat(8, strategy='group', group_size=128))",
        )
    return replace(weights, group_size=size)


_INT8 = NumberFormat(8)
_INT4 = NumberFormat(4, strategy="group", group_size=128)
_FP8 = NumberFormat(8, "float")
_MXFP4 = NumberFormat(4, "float", "group", 32)
_INT8_TOKENS = NumberFormat(8, strategy="token", dynamic=True)

PRESETS: dict[str, Callable[[], Scheme]] = {
    "int8": lambda: Scheme(_INT8),
    "int8-dynamic": lambda: Scheme(_INT8, _INT8_TOKENS),
    "w4a16": lambda: Scheme(_INT4),
    "w4a16-gptq": lambda: Scheme(_INT4, method="gptq", act_order=True),
    "w4a16-awq": lambda: Scheme(_INT4, method="awq"),
    "w8a8-smoothquant": lambda: Scheme(_INT8, _INT8_TOKENS, method="smoothquant"),
    "nf4": lambda: Scheme(NumberFormat(4, "nf", "group", 64)),
    "mxfp4": lambda: Scheme(_MXFP4),
    "mxfp4-dynamic": lambda: Scheme(_MXFP4, replace(_MXFP4, dynamic=True)),
    "nvfp4": lambda: Scheme(NumberFormat(4, "float", "tensor_group", 16)),
    "fp8": lambda: Scheme(_FP8, NumberFormat(8, "float", "tensor")),
    "fp8-dynamic": lambda: Scheme(_FP8, NumberFormat(8, "float", "token", dynamic=True)),
}
"""Name → the scheme."""


def scheme_of(scheme: object) -> Scheme:
    """Return the scheme, or the preset of this name.

    Raises:
        QuantizeError: it is neither a scheme nor the name of a preset.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if isinstance(scheme, str):
        return Scheme.preset(scheme)
    raise QuantizeError(
        f"quantize by {scheme!r}",
        f"a {type(scheme).__name__}",
        "a scheme is a Scheme, or the name of a preset",
        'write mw.quantize(model, "w4a16"); torchao\'s quantize_ and its configurations do not know marked models',
    )
