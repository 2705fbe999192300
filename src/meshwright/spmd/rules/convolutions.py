"""Rules of convolutions, pooling, resampling, and normalizations over channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.layout import TorchValue

from ..forms import convolutions as forms
from ..forms.convolutions import Pad
from ..notation.dim_names import dim_names, operand_text, sized_name
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, Rule

Sizes = int | Sequence[int]
"""One size for all spatial dims, or one for each."""
Padding = Sizes | str


def listed(value: Sizes, count: int) -> list[int]:
    """Return one size per spatial dim, for a list, a list of one, or a number."""
    items = [value] if isinstance(value, int) else list(value)
    return items * count if len(items) == 1 else items


def conv_entry(name: str, spatial: int) -> Callable[..., Rule]:
    """Return the rule of a convolution: batch and output channels are free, input channels are summed.

    Spatial dims that keep their size may be sharded, with rows of neighbours.
    """
    op = getattr(torch.ops.aten, name)

    def entry(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Rule:
        batch = x.dim() - spatial - 1
        pads, reach = _same_rows(weight, stride, padding, dilation, spatial)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, left: list[Pad], groups: int) -> Tensor:
            x, given = (x, padding) if isinstance(padding, str) and left == pads else _evenly_padded(x, left)
            return op(x, weight, bias, listed(stride, spatial), given, listed(dilation, spatial), groups)

        text, names = _conv_text(x, weight, groups, batch, reach)
        form = forms.convolution(run, batch, pads, x.shape[batch] // groups if groups > 1 else 0)
        return Rule(text, forms=dict.fromkeys(names, form), guard=form)

    return entry


def _same_rows(
    weight: Tensor, stride: Sizes, padding: Padding, dilation: Sizes, spatial: int
) -> tuple[list[Pad], list[bool]]:
    """Return the padding per dim, and True for dims that keep their size: these may be sharded with neighbours' rows.

    With padding="same", an even kernel reads one row more after than before.
    """
    steps, spread, kernel = listed(stride, spatial), listed(dilation, spatial), list(weight.shape[2:])
    full = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    if padding == "same":
        pads = [(f // 2, f - f // 2) for f in full]
    else:
        pads = [(p, p) for p in ([0] * spatial if isinstance(padding, str) else listed(padding, spatial))]
    return pads, [s == 1 and sum(p) == f for s, p, f in zip(steps, pads, full, strict=True)]


def _evenly_padded(x: Tensor, pads: Sequence[Pad]) -> tuple[Tensor, list[int]]:
    """Return the tensor with uneven padding applied as zeros, and the remaining even padding."""
    least = [min(p) for p in pads]
    rest = [(before - n, after - n) for (before, after), n in zip(pads, least, strict=True)]
    if any(map(any, rest)):
        x = F.pad(x, [n for p in reversed(rest) for n in p])
    return x, least


def _conv_text(x: Tensor, weight: Tensor, groups: int, batch: int, reach: Sequence[bool]) -> tuple[str, list[str]]:
    rows = [f"x{s}" for s in range(len(reach))]
    place = " ".join(n if keeps else f"{n}!" for n, keeps in zip(rows, reach, strict=True))
    kernel = " ".join(f"k{s}!" for s in range(len(reach)))
    after = " ".join(n if keeps else f"new{n}" for n, keeps in zip(rows, reach, strict=True))
    lead = "b " * batch
    cut = [n for n, keeps in zip(rows, reach, strict=True) if keeps]
    if groups == 1:
        return f"{lead}i {place} * o i {kernel} + o -> {lead}o {after}", cut
    g, i, o = sized_name("g", groups), sized_name("i", weight.shape[1]), sized_name("o", weight.shape[0] // groups)
    text = f"{lead}({g} {i}) {place} * ({g} {o}) {i} {kernel} + ({g} {o}) -> {lead}({g} {o}) {after}"
    return text.replace(f"({g} {i})", f"({g} {i}!)"), [g, o, *cut]


def transposed_entry(name: str, spatial: int) -> Callable[..., Rule]:
    """Return the rule of a transposed convolution: like `conv_entry`, but spatial dims are whole."""
    op = getattr(torch.ops.aten, name)

    def entry(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Rule:
        batch = x.dim() - spatial - 1

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, left: list[Pad], groups: int) -> Tensor:
            shape = [listed(v, spatial) for v in (stride, padding, output_padding)]
            return op(x, weight, bias, *shape, groups, listed(dilation, spatial))

        text, names = _transposed_text(weight, groups, batch, spatial)
        per_group = x.shape[batch] // groups if groups > 1 else 0
        form = forms.convolution(run, batch, [(0, 0)] * spatial, per_group)
        return Rule(text, forms=dict.fromkeys(names, form), guard=form)

    return entry


def _transposed_text(weight: Tensor, groups: int, batch: int, spatial: int) -> tuple[str, list[str]]:
    lead, rows = "b " * batch, " ".join(f"x{s}!" for s in range(spatial))
    kernel, after = " ".join(f"k{s}!" for s in range(spatial)), " ".join(f"new{s}" for s in range(spatial))
    if groups == 1:
        return f"{lead}i {rows} * i o {kernel} + o -> {lead}o {after}", []
    g, i, o = sized_name("g", groups), sized_name("i", weight.shape[0] // groups), sized_name("o", weight.shape[1])
    return f"{lead}({g} {i}!) {rows} * ({g} {i}) {o} {kernel} + ({g} {o}) -> {lead}({g} {o}) {after}", [g, o]


STRAIGHT = {n: conv_entry(f"conv{n}d", n) for n in (1, 2, 3)}
TRANSPOSED = {n: transposed_entry(f"conv_transpose{n}d", n) for n in (1, 2, 3)}


def convolution_rule(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *how: TorchValue,
) -> Rule | None:
    """Return the rule of `aten.convolution`, which all convolutions call; None for an unbatched input."""
    spatial = weight.dim() - 2
    if x.dim() != weight.dim():
        return None
    if transposed:
        return TRANSPOSED[spatial](x, weight, bias, stride, padding, output_padding, groups, dilation)
    return STRAIGHT[spatial](x, weight, bias, stride, padding, dilation, groups)


def windows(spatial: int, linear: bool, results: int = 1) -> Entry:
    """Return the rule of pooling and resampling: the last dims are whole and change their sizes; other dims are free.

    Results of integers are rounded, so the rule is not linear for them.
    """

    def entry(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
        exact = linear and (x.is_floating_point() or x.is_complex())
        before, after = _window_texts(x, spatial)
        return f"{before}{'' if exact else ','} -> {' ; '.join([after] * results)}"

    return entry


def _window_texts(x: Tensor, spatial: int) -> tuple[str, str]:
    """Return the texts of operand and result of an operator that changes the sizes of the last dims."""
    free = dim_names(x)[: x.dim() - spatial]
    before = [*free, *(f"x{s}!" for s in range(spatial))]
    return " ".join(before), " ".join([*free, *(f"new{s}" for s in range(spatial))])


def pad_rule(x: Tensor, pad: Sequence[int], *how: TorchValue, mode: str = "constant", value: float | None = 0) -> str:
    """Return the rule of padding: padded dims are whole. Padding with zeros or with copies of elements is linear."""
    names = dim_names(x)
    numbers = [h for h in (*how, value) if isinstance(h, (int, float))]
    grown = [x.dim() - 1 - i // 2 for i, p in enumerate(pad) if p]
    mark = "," if any(numbers) else ""
    return (
        f"{operand_text(names, grown)}{mark} -> {' '.join(f'new{d}' if d in grown else n for d, n in enumerate(names))}"
    )


def batch_norm_rule(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    *rest: TorchValue,
    **kwargs: TorchValue,
) -> Rule:
    """Return the rule of batch norm. In training, the local form updates the running statistics on every rank."""
    names = dim_names(x)
    if not training:
        return Rule(f"{operand_text(names)}, a1, a1, a1, a1 -> {operand_text(names)}")
    return Rule(f"{operand_text(names)}, a1, a1 -> {operand_text(names)}", forms=dict.fromkeys(names, forms.batch_norm))


def group_norm_rule(x: Tensor, num_groups: int, *args: TorchValue, **kwargs: TorchValue) -> Rule:
    channels = x.shape[1] // num_groups
    behind = [f"s{d}" for d in range(x.dim() - 2)]
    dim = f"({sized_name('g', num_groups)} {sized_name('c', channels)}!)"
    text = f"b {dim} {' '.join(behind)}, {dim}, {dim} -> b {dim.replace('!', '')} {' '.join(behind)}"
    return Rule(text, forms=dict.fromkeys(["b", sized_name("g", num_groups), *behind], forms.group_norm(channels)))


def instance_norm_rule(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    *rest: TorchValue,
    **kwargs: TorchValue,
) -> str | None:
    """Return the rule of instance norm, which normalizes each sample and channel; None with running statistics."""
    if not use_input_stats or mean is not None:
        return None
    names = dim_names(x)
    return f"{operand_text(names, range(2, x.dim()))}, a1, a1 -> {operand_text(names)}"


def pixel_shuffle_rule(x: Tensor, factor: int) -> str | None:
    if 0 in x.shape or factor == 1:
        return None
    lead, r, q, c, h, w = _pixel_names(x, factor, (x.shape[-3] // factor**2, *x.shape[-2:]))
    return f"{lead} ({c} {r}! {q}!) {h} {w} -> {lead} {c} ({h} {r}) ({w} {q})"


def pixel_unshuffle_rule(x: Tensor, factor: int) -> str | None:
    if 0 in x.shape or factor == 1:
        return None
    lead, r, q, c, h, w = _pixel_names(x, factor, (x.shape[-3], x.shape[-2] // factor, x.shape[-1] // factor))
    return f"{lead} {c} ({h} {r}!) ({w} {q}!) -> {lead} ({c} {r} {q}) {h} {w}"


def _pixel_names(x: Tensor, factor: int, sizes: Sequence[int]) -> list[str]:
    """Return the text of the leading dims, and the names of two factors and of channels, height and width."""
    named = zip("rqchw", (factor, factor, *sizes), strict=True)
    return [operand_text(dim_names(x)[:-3]), *(sized_name(name, size) for name, size in named)]


def channel_shuffle_rule(x: Tensor, groups: int) -> str | None:
    if 0 in x.shape or groups == 1:
        return None
    g, c = sized_name("g", groups), sized_name("c", x.shape[1] // groups)
    rest = operand_text(dim_names(x)[2:])
    return f"b ({g}! {c}) {rest} -> b ({c} {g}) {rest}"


def im2col_rule(x: Tensor, kernel_size: Sizes, *args: TorchValue, **kwargs: TorchValue) -> str:
    patch, channels = prod(listed(kernel_size, 2)), x.shape[-3]
    lead, channel = "b " * (x.dim() - 3), sized_name("c", channels)
    return f"{lead}{channel} x! y! -> {lead}({channel} {sized_name('new', patch)}) newl"


def col2im_rule(x: Tensor, output_size: Sizes, kernel_size: Sizes, *args: TorchValue, **kwargs: TorchValue) -> str:
    patch = prod(listed(kernel_size, 2))
    lead, c = "b " * (x.dim() - 2), sized_name("c", x.shape[-2] // patch)
    return f"{lead}({c} {sized_name('p', patch)}!) l! -> {lead}{c} newx newy"


def grid_rule(x: Tensor, grid: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
    """Return the rule of `grid_sampler`: linear in the image, given the grid."""
    places, picked = ("h w", "x! y!") if x.dim() == 4 else ("t h w", "x! y! z!")
    return f"b c {picked} | b {places} place! -> b c {places}"


def affine_grid_rule(theta: Tensor, size: Sequence[int], align_corners: bool) -> Rule:
    """Return the rule of `affine_grid_generator`; the form replaces the global batch size by the local one."""

    def form(call: LocalCall, theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
        return torch.ops.aten.affine_grid_generator(theta, [theta.shape[0], *size[1:]], align_corners)

    places = " ".join(f"new{d}" for d in range(len(size) - 2))
    return Rule(f"b r! c! -> b {places} newr", forms={"b": form})


def unpool(spatial: int) -> Entry:
    """Return the rule of max unpooling, which writes elements to given indices; linear in the elements."""

    def entry(x: Tensor, indices: Tensor, *how: TorchValue, **kwargs: TorchValue) -> str:
        before, after = _window_texts(x, spatial)
        return f"{before} | {before} -> {after}"

    return entry


def fractional_pool(spatial: int) -> Entry:
    """Return the rule of fractional max pooling: maximum and index per window, given random numbers per channel."""

    def entry(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str | None:
        if x.dim() != spatial + 2:
            return None
        after = f"b c {' '.join(f'new{s}' for s in range(spatial))}"
        return f"b c {' '.join(f'x{s}!' for s in range(spatial))}, b c r! -> {after} ; {after}"

    return entry


POOLS = {
    "max_pool1d": (1, False, 1), "max_pool2d": (2, False, 1), "max_pool3d": (3, False, 1),
    "max_pool1d_with_indices": (1, False, 2), "max_pool2d_with_indices": (2, False, 2),
    "max_pool3d_with_indices": (3, False, 2), "avg_pool1d": (1, True, 1), "avg_pool2d": (2, True, 1),
    "avg_pool3d": (3, True, 1), "adaptive_avg_pool1d": (1, True, 1), "adaptive_avg_pool2d": (2, True, 1),
    "adaptive_avg_pool3d": (3, True, 1), "adaptive_max_pool1d": (1, False, 2), "adaptive_max_pool2d": (2, False, 2),
    "adaptive_max_pool3d": (3, False, 2), "upsample_nearest1d": (1, True, 1), "upsample_nearest2d": (2, True, 1),
    "upsample_nearest3d": (3, True, 1), "_upsample_nearest_exact1d": (1, True, 1),
    "_upsample_nearest_exact2d": (2, True, 1), "_upsample_nearest_exact3d": (3, True, 1),
    "upsample_linear1d": (1, True, 1),
    "_upsample_bilinear2d_aa": (2, True, 1), "_upsample_bicubic2d_aa": (2, True, 1),
    "_adaptive_avg_pool2d": (2, True, 1), "_adaptive_avg_pool3d": (3, True, 1), "upsample_bilinear2d": (2, True, 1),
    "upsample_bicubic2d": (2, True, 1), "upsample_trilinear3d": (3, True, 1),
    "reflection_pad1d": (1, True, 1), "reflection_pad2d": (2, True, 1), "reflection_pad3d": (3, True, 1),
    "replication_pad1d": (1, True, 1), "replication_pad2d": (2, True, 1), "replication_pad3d": (3, True, 1),
}  # fmt: skip
"""Operator → number of last dims that it works on, True if it is linear, number of results."""

CONV: dict[str, Entry] = {
    **{f"aten.conv{n}d": entry for n, entry in STRAIGHT.items()},
    **{f"aten.conv_transpose{n}d": entry for n, entry in TRANSPOSED.items()},
    **{f"aten.{name}": windows(*how) for name, how in POOLS.items()},
    "aten.convolution": convolution_rule,
    "aten._convolution": convolution_rule,
    "aten.max_unpool2d": unpool(2),
    "aten.max_unpool3d": unpool(3),
    "aten.fractional_max_pool2d": fractional_pool(2),
    "aten.fractional_max_pool3d": fractional_pool(3),
    "aten.affine_grid_generator": affine_grid_rule,
    "aten.constant_pad_nd": pad_rule,
    "aten.batch_norm": batch_norm_rule,
    "aten.group_norm": group_norm_rule,
    "aten.instance_norm": instance_norm_rule,
    "aten.pixel_shuffle": pixel_shuffle_rule,
    "aten.pixel_unshuffle": pixel_unshuffle_rule,
    "aten.channel_shuffle": channel_shuffle_rule,
    "aten.im2col": im2col_rule,
    "aten.col2im": col2im_rule,
    "aten.pad": pad_rule,
    **dict.fromkeys(("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d"), grid_rule),
    "aten.bilinear": "... i * ... j * o i j + o -> ... o",
}
