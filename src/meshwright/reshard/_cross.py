"""Paths from one mesh to another: reduce inside the first, send every element once, gather inside the second."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.layout import Layout, Spec

from ._path import padded_axes, plain_paths
from ._regions import cuts_of, widest
from ._steps import ConversionStep, Exchange


def cross_paths(src: Spec, dst: Spec, all_ways: bool) -> Iterator[tuple[ConversionStep, ...]]:
    """Yield the paths from `src` to `dst` on another mesh, for tensors without product dims.

    Some paths spread: the ranks on which `dst` replicates a shard receive a share of it each, and gather the shares.
    """
    left = _leaving(src)
    for spread in (True, False):
        landed = _landing(dst, spread)
        for before in plain_paths(src, left, all_ways):
            for after in plain_paths(landed, dst, all_ways):
                yield (*before, Exchange(landed), *after)


def _leaving(src: Spec) -> Spec:
    """Return `src` with its terms reduce-scattered if possible, so that the ranks send the smallest local tensors."""
    cuts = list(cuts_of(src))
    terms = src.layout.partial_axes
    dim = widest(src, terms) if terms else None
    if dim is not None:
        cuts[dim] += terms
    return src.with_layout(Layout(tuple(cuts)))


def _landing(dst: Spec, spread: bool) -> Spec:
    """Return the spec that arrives on the target mesh.

    It is sharded further over axes that become partial by padding, and with `spread` over axes that replicate `dst`.
    """
    bare = dst.with_layout(Layout(cuts_of(dst)))
    order, chosen = dst.mesh.dim_names, padded_axes(dst)
    padded = tuple(a for a in order if a in chosen)
    repeated = tuple(a for a in order if a not in padded and a not in dst.layout.cut_axes) if spread else ()
    return _cut_further(_cut_further(bare, padded), repeated)


def _cut_further(spec: Spec, axes: tuple[str, ...]) -> Spec:
    dim = widest(spec, axes) if axes else None
    if dim is None:
        return spec
    cuts = list(cuts_of(spec))
    cuts[dim] += axes
    return spec.with_layout(Layout(tuple(cuts)))
