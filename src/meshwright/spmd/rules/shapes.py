"""Rules of operators that only move elements: views, permutations, slices, splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import RuleError
from ..notation.dim_names import (
    Dims,
    dim_names,
    dims_of,
    names_and_dims,
    normalized_dims,
    operand_text,
    product_text,
    sized_name,
)
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, LocalForm, Rule


def common_factors(old: Sequence[int], new: Sequence[int]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names of the factors of every dim before and after a reshape, outermost first.

    >>> common_factors((6, 4), (2, 12))
    ([['f0_2', 'f1_3'], ['f2_4']], [['f0_2'], ['f1_3', 'f2_4']])
    """
    left: list[list[str]] = [[] for _ in old]
    right: list[list[str]] = [[] for _ in new]
    i = j = count = 0
    a = b = 1
    while True:
        while a == 1 and i < len(old):
            a, i = old[i], i + 1
        while b == 1 and j < len(new):
            b, j = new[j], j + 1
        if a == 1 or b == 1:
            return left, right
        common = gcd(a, b)
        if common > 1:
            name = sized_name(f"f{count}", common)
            left[i - 1].append(name)
            right[j - 1].append(name)
            a, b = a // common, b // common
        else:
            left[i - 1].append(sized_name(f"f{count}", a) + "!")
            right[j - 1].append(sized_name(f"new{count}", b))
            a, b, i, j = _add_whole_factors(a, b, i, j, old, new, left, right, count)
        count += 1


def _add_whole_factors(
    a: int,
    b: int,
    i: int,
    j: int,
    old: Sequence[int],
    new: Sequence[int],
    left: list[list[str]],
    right: list[list[str]],
    count: int,
) -> tuple[int, int, int, int]:
    """Add whole factors on both sides until both sides cover the same number of elements."""
    while a != b:
        if a < b:
            left[i].append(sized_name(f"f{count}x{i}", old[i]) + "!")
            a, i = a * old[i], i + 1
        else:
            right[j].append(sized_name(f"new{count}x{j}", new[j]))
            b, j = b * new[j], j + 1
    return 1, 1, i, j


def reshape_text(old: Sequence[int], new: Sequence[int]) -> str:
    """Return the rule of a reshape; an empty tensor keeps its equal leading dims.

    Raises RuleError if the numbers of elements differ.
    """
    if 0 in old:
        return _empty_reshape_text(old, new)
    if prod(old) != prod(new):
        raise RuleError(
            f"a reshape of {tuple(old)}",
            f"sizes {tuple(new)}",
            "the number of elements differs",
            f"use sizes whose product is {prod(old)}, or -1 for one size",
        )
    left, right = common_factors(old, new)
    ones = ([d for d, n in enumerate(sizes) if n == 1] for sizes in (old, new))
    for k, (before, after) in enumerate(zip(*ones, strict=False)):
        left[before], right[after] = [f"one{k}"], [f"one{k}"]
    return f"{' '.join(map(product_text, left))} -> {' '.join(map(product_text, right))}"


def _empty_reshape_text(old: Sequence[int], new: Sequence[int]) -> str:
    pairs = zip(old, new, strict=False)
    same = next((d for d, (m, n) in enumerate(pairs) if m != n), min(len(old), len(new)))
    before = operand_text([f"a{d}" for d in range(len(old))], range(same, len(old)))
    return f"{before} -> {' '.join(f'a{d}' if d < same else f'new{d}' for d in range(len(new)))}"


def resolved(size: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the sizes with -1 replaced by the computed size."""
    known = prod(n for n in size if n != -1)
    return tuple(total // max(known, 1) if n == -1 else n for n in size)


def view_rule(x: Tensor, size: TorchValue, *rest: TorchValue, **kwargs: TorchValue) -> Rule | None:
    """Return the rule of `view`. `view(dtype)` has no rule if the item size changes."""
    if not isinstance(size, (list, tuple)):
        return Rule("..., -> ...") if getattr(size, "itemsize", 0) == x.dtype.itemsize else None
    return Rule(reshape_text(x.shape, resolved(size, x.numel())), sizes=(1,))


def view_as_rule(x: Tensor, other: Tensor) -> str:
    """Return the rule of `view_as`; the other tensor has the dims of the result."""
    left, _, right = reshape_text(x.shape, other.shape).partition(" -> ")
    lies = re.sub(r"new(\w+)", r"o\1!", right)
    return f"{left} | {lies} -> {right}"


def flatten_rule(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> str:
    if x.dim() == 0:
        return "-> 1"
    (first, last) = dims_of(x, (start_dim, end_dim))
    merged = prod(x.shape[first : last + 1])
    return reshape_text(x.shape, (*x.shape[:first], merged, *x.shape[last + 1 :]))


def unflatten_rule(x: Tensor, dim: int, sizes: Sequence[int]) -> Rule:
    (at,) = dims_of(x, dim)
    text = reshape_text(x.shape, (*x.shape[:at], *resolved(sizes, x.shape[at]), *x.shape[at + 1 :]))
    return Rule(text, forms=dict.fromkeys(_factor_names(text), as_its_shape))


def _factor_names(text: str) -> list[str]:
    """Return all factors of the operands of a rule that may be sharded."""
    equation = Rule(text).equation
    return [n for o in equation.operands for d in o for n in d.names if n not in equation.whole]


def as_its_shape(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
    """Return the local tensor in the local shape of the result."""
    return x.view(call.out_shape(0))


def permute_rule(x: Tensor, dims: Sequence[int]) -> str:
    names = dim_names(x)
    return f"{operand_text(names)} -> {' '.join(names[d] for d in dims_of(x, tuple(dims))) if dims else ''}"


def swap_rule(x: Tensor, dim0: int = -1, dim1: int = -2) -> str:
    order = list(range(x.dim()))
    if order:
        a, b = dims_of(x, (dim0, dim1))
        order[a], order[b] = order[b], order[a]
    return permute_rule(x, order)


def t_rule(x: Tensor) -> str:
    return swap_rule(x) if x.dim() == 2 else "... -> ..."


def reverse_rule(x: Tensor) -> str:
    return permute_rule(x, range(x.dim())[::-1])


def movedim_rule(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> str:
    if x.dim() == 0:
        return "->"
    sources, goals = dims_of(x, source), dims_of(x, destination)
    left = iter(d for d in range(x.dim()) if d not in sources)
    there = dict(zip(goals, sources, strict=True))
    return permute_rule(x, [there[d] if d in there else next(left) for d in range(x.dim())])


def unsqueeze_rule(x: Tensor, dim: int) -> str:
    names = dim_names(x)
    at = dim % (x.dim() + 1)
    return f"{operand_text(names)} -> {' '.join([*names[:at], '1', *names[at:]])}"


def squeeze_rule(x: Tensor, dim: int | Sequence[int] | None = None) -> Rule:
    """Return the rule of `squeeze`: dims of global size one are removed, but not dims of local size one."""
    names, listed = dim_names(x), dims_of(x, dim) if dim is None or isinstance(dim, int) or dim else ()
    gone = tuple(d for d in listed if x.shape[d] == 1)
    kept = [n for d, n in enumerate(names) if d not in gone]

    def squeeze(call: LocalCall, x: Tensor, *args: TorchValue) -> Tensor:
        return x.squeeze(gone)

    stays = [names[d] for d in listed if d not in gone]
    return Rule(f"{operand_text(names, gone)} -> {' '.join(kept)}", forms=dict.fromkeys(stays, squeeze))


def expand_rule(x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Rule:
    """Return the rule of `expand`: expanded dims and new leading dims are whole."""
    names, extra = dim_names(x), len(size) - x.dim()
    kept = [n if s in (-1, m) else f"new{n}" for n, m, s in zip(names, x.shape, size[extra:], strict=True)]
    grown = [d for d, n in enumerate(names) if kept[d] != n]
    return Rule(f"{operand_text(names, grown)} -> {' '.join([f'new{d}' for d in range(extra)] + kept)}", sizes=(1,))


def repeat_rule(x: Tensor, repeats: Sequence[int]) -> str:
    """Return the rule of `repeat`: a dim repeated r times becomes a product of r and the dim."""
    counts = (1,) * (x.dim() - len(repeats)) + tuple(repeats)
    extra = len(counts) - x.dim()
    if 0 in counts or 0 in x.shape:
        return _whole_text(x, len(counts))
    names = [sized_name(n, s) for n, s in zip(dim_names(x), x.shape, strict=True)]
    kept = [n if r == 1 else f"({sized_name(f'new{n}', r)} {n})" for n, r in zip(names, counts[extra:], strict=True)]
    return f"{operand_text(names)} -> {' '.join([f'new{d}' for d in range(extra)] + kept)}"


def _whole_text(x: Tensor, results: int) -> str:
    return f"{operand_text(dim_names(x), range(x.dim()))} -> {' '.join(f'new{d}' for d in range(results))}"


def repeat_interleave_rule(
    x: Tensor, repeats: TorchValue = None, dim: int | None = None, *, output_size: int | None = None
) -> Rule | None:
    """Return the rule of `repeat_interleave` with a number r: the dim becomes a product of the dim and r.

    `output_size` is the size of the whole dim, which a shard does not have.
    """
    if not isinstance(repeats, int) or repeats == 0 or 0 in x.shape or (dim is None and x.dim() != 1):
        return None
    names = [sized_name(n, s) for n, s in zip(dim_names(x), x.shape, strict=True)]
    (at,) = dims_of(x, dim or 0)
    out = [f"({n} {sized_name('new', repeats)})" if d == at and repeats > 1 else n for d, n in enumerate(names)]
    forms = {} if output_size is None else {names[at]: _interleaved_without_size}
    return Rule(f"{operand_text(names)} -> {' '.join(out)}", forms=forms)


def _interleaved_without_size(
    call: LocalCall, x: Tensor, repeats: int, dim: int | None = None, *, output_size: int
) -> Tensor:
    return x.repeat_interleave(repeats, dim)


def slice_rule(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> str:
    """Return the rule of a slice: a full slice keeps the layout of the dim; any other needs a whole dim."""
    names, (at,) = names_and_dims(x, dim)
    if range(x.shape[at])[slice(start, end, step)] == range(x.shape[at]):
        return f"{operand_text(names)} -> {operand_text(names)}"
    return whole_dims_rule(x, (at,))


def narrow_rule(x: Tensor, dim: int, start: TorchValue, length: int) -> Rule | None:
    """Return the rule of `narrow`; it can run as a slice, which allows an end beyond the local tensor."""
    (at,) = dims_of(x, dim)
    return Rule(whole_dims_rule(x, (at,)), parts=_as_slice) if isinstance(start, int) else None


def _as_slice(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return torch.ops.aten.slice.Tensor(x, dim, start, start + length if start >= 0 or start + length else None)


def whole_dims_rule(x: Tensor, dims: Sequence[int]) -> str:
    """Return a rule in which `dims` are whole, and have another size or order in the result."""
    names = dim_names(x)
    return f"{operand_text(names, dims)} -> {' '.join(f'new{d}' if d in dims else n for d, n in enumerate(names))}"


def removed_dim_rule(x: Tensor, dim: int, results: int = 1) -> str:
    """Return a rule in which one dim is whole, and missing in each of the results."""
    names, (at,) = names_and_dims(x, dim)
    kept = " ".join(names[:at] + names[at + 1 :])
    return f"{operand_text(names, (at,))} -> {' ; '.join([kept] * results)}"


def select_rule(x: Tensor, dim: int, index: int) -> str:
    return removed_dim_rule(x, dim)


def unbind_rule(x: Tensor, dim: int = 0) -> str | None:
    pieces = x.shape[dim]
    return removed_dim_rule(x, dim, pieces) if pieces else None


def pieces_rule(x: Tensor, lengths: Sequence[int], dim: int) -> Rule | None:
    """Return the rule of a split along a dim; None without pieces.

    If all pieces have one length, the dim is a product, whose inner factor may stay sharded.
    """
    if not lengths:
        return None
    names, (at,) = names_and_dims(x, dim)
    if len(lengths) == 1:
        return Rule(f"{operand_text(names)} -> {operand_text(names)}", forms={names[at]: _one_piece(at)})
    if len(set(lengths)) > 1 or lengths[0] < 2:
        out = " ".join(f"new{d}" if d == at else n for d, n in enumerate(names))
        return Rule(f"{operand_text(names, (at,))} -> {' ; '.join([out] * len(lengths))}")
    outer, inner = sized_name("c", len(lengths)), sized_name("p", lengths[0])
    before = [f"({outer}! {inner})" if d == at else n for d, n in enumerate(names)]
    after = " ".join(inner if d == at else n for d, n in enumerate(names))

    def pieces(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> tuple[Tensor, ...]:
        return x.unflatten(at, (len(lengths), x.shape[at] // len(lengths))).unbind(at)

    return Rule(f"{' '.join(before)} -> {' ; '.join([after] * len(lengths))}", forms={inner: pieces})


def _one_piece(at: int) -> LocalForm:
    """Return the form of a split with one piece: it splits by the length of the local tensor."""
    return lambda call, x, *args, **kwargs: x.split(max(x.shape[at], 1), at)


def copied_pieces(entry: Callable[..., Rule | None]) -> Entry:
    """Return the entry with copied pieces instead of views, so that a write to one piece changes no other."""

    def of(form: LocalForm) -> LocalForm:
        return lambda call, *args, **kwargs: tuple(piece.clone() for piece in form(call, *args, **kwargs))

    def made(*args: TorchValue, **kwargs: TorchValue) -> Rule | None:
        rule = entry(*args, **kwargs)
        return None if rule is None else replace(rule, forms={n: of(form) for n, form in rule.forms.items()})

    return made


def lengths_of(total: int, piece: int) -> list[int]:
    if piece == 0 or total == 0:
        return [0]
    return [min(piece, total - s) for s in range(0, total, piece)]


def split_rule(x: Tensor, split_size: int | Sequence[int], dim: int = 0) -> Rule | None:
    if not isinstance(split_size, int):
        return pieces_rule(x, list(split_size), dim)
    return pieces_rule(x, lengths_of(x.shape[dim], split_size), dim)


def chunk_rule(x: Tensor, chunks: int, dim: int = 0) -> Rule | None:
    total = x.shape[dim]
    return pieces_rule(x, lengths_of(total, -(-total // chunks)) if total else [0] * chunks, dim)


def moved_elements_rule(x: Tensor, dims: Dims) -> str:
    """Return a rule in which elements move along `dims`, which are whole."""
    names = dim_names(x)
    at = dims_of(x, dims) if dims or dims == 0 else ()
    return f"{operand_text(names, at)} -> {operand_text(names)}"


def roll_rule(x: Tensor, shifts: int | Sequence[int], dims: Dims = ()) -> str:
    return moved_elements_rule(x, dims if dims or dims == 0 else range(x.dim()))


def rot90_rule(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    """Return the rule of `rot90`: both dims are whole, and swapped after an odd number of turns."""
    names, turned = names_and_dims(x, tuple(dims))
    return f"{operand_text(names, turned)} -> {' '.join(f'new{d}' if d in turned else n for d, n in enumerate(names))}"


def matrix_rule(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
    return "... m! n! -> ... m n"


def diagonal_rule(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    names, gone = names_and_dims(x, (dim1, dim2))
    return f"{operand_text(names, gone)} -> {' '.join([n for d, n in enumerate(names) if d not in gone] + ['new'])}"


def diag_embed_rule(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    names = dim_names(x)
    kept, fresh = iter(names[:-1]), normalized_dims((dim1, dim2), x.dim() + 1)
    out = [f"new{d}" if d in fresh else next(kept) for d in range(x.dim() + 1)]
    return f"{operand_text(names, (x.dim() - 1,))} -> {' '.join(out)}"


def unfold_rule(x: Tensor, dimension: int, size: int, step: int) -> str:
    return "-> new" if x.dim() == 0 else f"{whole_dims_rule(x, dims_of(x, dimension))} newsize"


SHAPE: dict[str, Entry] = {
    **dict.fromkeys(("aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_copy"), view_rule),
    "aten.flatten": flatten_rule,
    "aten.ravel": flatten_rule,
    "aten.unflatten": unflatten_rule,
    **dict.fromkeys(("aten.permute", "aten.permute_copy"), permute_rule),
    **dict.fromkeys(("aten.transpose", "aten.swapaxes", "aten.swapdims", "aten.mT", "aten.mH"), swap_rule),
    "aten.adjoint": swap_rule,
    **dict.fromkeys(("aten.t", "aten.t_copy"), t_rule),
    "aten.transpose_copy": swap_rule,
    **dict.fromkeys(("aten.numpy_T", "aten.matrix_H"), reverse_rule),
    **dict.fromkeys(("aten.movedim", "aten.moveaxis"), movedim_rule),
    **dict.fromkeys(("aten.unsqueeze", "aten.unsqueeze_copy"), unsqueeze_rule),
    **dict.fromkeys(("aten.squeeze", "aten.squeeze_copy"), squeeze_rule),
    **dict.fromkeys(("aten.expand", "aten.expand_copy", "aten.broadcast_to"), expand_rule),
    "aten.repeat": repeat_rule,
    "aten.tile": repeat_rule,
    "aten.repeat_interleave.self_int": repeat_interleave_rule,
    "aten.slice.Tensor": slice_rule,
    **dict.fromkeys(("aten.narrow", "aten.narrow_copy"), narrow_rule),
    **dict.fromkeys(("aten.select.int", "aten.select_copy.int"), select_rule),
    "aten.slice_copy.Tensor": slice_rule,
    **dict.fromkeys(("aten.unbind", "aten.unbind_copy"), unbind_rule),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes"), split_rule),
    **dict.fromkeys(("aten.unsafe_split", "aten.unsafe_split_with_sizes"), copied_pieces(split_rule)),
    **dict.fromkeys(("aten.split_with_sizes_copy", "aten.split_copy"), copied_pieces(split_rule)),
    "aten.chunk": chunk_rule,
    "aten.unsafe_chunk": copied_pieces(chunk_rule),
    "aten.flip": moved_elements_rule,
    "aten.rot90": rot90_rule,
    **dict.fromkeys(("aten.view_as", "aten.reshape_as"), view_as_rule),
    "aten.roll": roll_rule,
    **dict.fromkeys(("aten.tril", "aten.triu"), matrix_rule),
    **dict.fromkeys(("aten.diagonal", "aten.diagonal_copy"), diagonal_rule),
    "aten.diag_embed": diag_embed_rule,
    **dict.fromkeys(("aten.unfold", "aten.unfold_copy"), unfold_rule),
}
