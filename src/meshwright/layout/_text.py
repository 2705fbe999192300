"""Text form of layouts and specs, such as `f32[8@dp, 1024, 4096@tp@cp] +ep ~cp`, and its parser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import torch

from ._errors import LayoutError
from ._layout import Dim, Layout, Product

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "b": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
"""Short names of dtypes; any other dtype is written by its torch name."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_CHARACTERS = 10_000
MOST_DIGITS = 18
"""Maximum number of digits of a size: sizes of tensors are below 2 ** 63."""

_SPEC = re.compile(r"\s*(?P<dtype>\w*)\s*\[(?P<dims>[^\]]*)\](?P<marks>(?:\s*[+~]\s*\w+(?::\w+)?)*)\s*")
_FACTOR = re.compile(r"\s*(?P<size>\d*)\s*(?P<axes>(?:@\w+)*)\s*")
_MARK = re.compile(r"([+~])\s*(\w+)(?::(\w+))?")


def write_dtype(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype for a short name or a torch name. Raises LayoutError for an unknown name.

    >>> read_dtype("bf16"), read_dtype("float8_e4m3fn")
    (torch.bfloat16, torch.float8_e4m3fn)
    """
    dtype = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(
            f"a dtype {name[:80]!r}", "an unknown name", "there is no such dtype", f"use one of {', '.join(DTYPES)}"
        )
    return dtype


def write_dims(shape: Sequence[int], layout: Layout) -> str:
    """Return the dims and marks as text, such as `[8@dp, 1024] +tp`."""
    dims = ", ".join(
        repr(d) if isinstance(d, Product) else f"{n}" + "".join(f"@{a}" for a in d)
        for n, d in zip(shape, layout.dims, strict=True)
    )
    return f"[{dims}]{layout.marks()}"


_STRIDES = re.compile(r"(?P<rest>.*\S)\s+strides\s*\((?P<strides>\s*\d+\s*(?:,\s*\d+\s*)*),?\s*\)\s*")


def write_strides(strides: Sequence[int] | None) -> str:
    """Return the strides as text, such as ` strides (1, 8)`; an empty text for None."""
    return "" if strides is None else f" strides ({', '.join(map(str, strides))})"


def read_strides(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Split the text of a spec into the part before its strides, and the strides (None if the text has none).

    >>> read_strides("f32[8@dp, 4] +tp strides (1, 8)")
    ('f32[8@dp, 4] +tp', (1, 8))
    """
    found = _STRIDES.fullmatch(_checked(text))
    if found is None:
        return text, None
    return found["rest"], tuple(_size(n.strip(), text) for n in found["strides"].split(","))


def parse_layout(text: str) -> Layout:
    """Return the layout for a text such as `[@dp, :, @tp@cp] +ep`; sizes and a dtype are allowed.

    >>> parse_layout("[8@dp, :, 3 * 512@tp] +ep:max ~cp")
    [@dp, :, 3 * 512@tp] +ep:max ~cp
    """
    return _parse(text)[2]


def parse_sized(text: str) -> tuple[torch.dtype, list[int], Layout]:
    """Return dtype, shape and layout for a text such as `f32[8@dp, 1024] +tp`. Raises LayoutError for other texts."""
    name, shape, layout = _parse(text)
    dtype = read_dtype(name)
    sizes = [n for n in shape if n is not None]
    if len(sizes) != len(shape):
        raise LayoutError(
            f"{text!r}",
            "a dim without a size",
            "a spec has the global size of every dim",
            "write it as in f32[8@dp, 16]",
        )
    _check_elements(sizes, text)
    return dtype, sizes, layout


def _parse(text: str) -> tuple[str, list[int | None], Layout]:
    found = _SPEC.fullmatch(_checked(text))
    if found is None:
        raise LayoutError(
            f"{text!r}",
            "text that is not a layout",
            "a layout is [dims] and then marks",
            "write it as in f32[8@dp, 16] +tp ~cp",
        )
    body = found["dims"].strip()
    parsed = [_parse_dim(part, text) for part in body.split(",")] if body else []
    marks = _MARK.findall(found["marks"])
    partial = tuple((axis, op or "sum") for sign, axis, op in marks if sign == "+")
    varying = tuple(axis for sign, axis, _ in marks if sign == "~")
    return found["dtype"], [n for n, _ in parsed], Layout(tuple(d for _, d in parsed), partial, varying)


def _check_elements(sizes: Sequence[int], text: str) -> None:
    if prod(max(1, n) for n in sizes) >= 2**63:
        raise LayoutError(f"{text!r}", "2**63 elements or more", "no tensor has so many elements", "use smaller sizes")


def _checked(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    why = f"the text of a layout has at most {MOST_CHARACTERS} characters"
    raise LayoutError(
        f"a layout {text[:40]!r}...", f"{len(text)} characters", why, "write it as in f32[8@dp, 16] +tp ~cp"
    )


def _size(digits: str, text: str) -> int:
    if len(digits) <= MOST_DIGITS:
        return int(digits)
    raise LayoutError(f"{text!r}", f"{digits[:40]}", f"a size has at most {MOST_DIGITS} digits", "use a smaller size")


def _parse_dim(part: str, text: str) -> tuple[int | None, Dim]:
    if part.strip() == ":":
        return None, ()
    factors: list[tuple[int | None, tuple[str, ...]]] = []
    for piece in part.split("*"):
        found = _FACTOR.fullmatch(piece)
        if found is None or not piece.strip():
            raise LayoutError(
                f"{text!r}", f"{part.strip()!r}", "this is not a dim", "write 16, 16@dp, @dp, : or 3 * 512@tp"
            )
        axes = tuple(found["axes"].split("@")[1:])
        factors.append((_size(found["size"], text) if found["size"] else None, axes))
    if len(factors) == 1:
        return factors[0]
    sized = tuple((n, axes) for n, axes in factors if n is not None)
    if len(sized) != len(factors):
        raise LayoutError(
            f"{text!r}", f"{part.strip()!r}", "every factor of a product needs its size", "write 3 * 512@tp"
        )
    product = Product(sized)
    _check_elements([product.size], text)
    return product.size, product
