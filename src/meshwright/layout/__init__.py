"""Meshes, placements and layouts: the distribution of a tensor's elements over ranks. No communication."""

from typing import TYPE_CHECKING

from ._lazy_names import lazy_names

if TYPE_CHECKING:
    from ._accelerator import (
        accelerators_in_use,
        autocast_modes,
        can_pin_memory,
        device_types,
        generator_state,
        generator_states,
        set_generator_state,
        set_generator_states,
    )
    from ._bounded_file import MOST_TEXT, decoded_text, inside, read_file, read_text_file
    from ._bounded_text import check_length, check_values, read_json, read_toml
    from ._cache import Cache
    from ._errors import InputError, LayoutError, MeshError, MeshwrightError, PlacementError
    from ._escape import escaped
    from ._layout import (
        Dim,
        Factors,
        Layout,
        Product,
        axes_of,
        factors_of,
        layout_of,
        placements_of,
        replicated,
        without_trivial_axes,
    )
    from ._local import Range, chunk, cut, expand_products, local_length, local_ranges, local_shape
    from ._mesh import ProcessMesh, evenly
    from ._placement import PARTIAL_OPS, Partial, Placement, Replicate, Shard
    from ._size import hint, identity
    from ._spec import Spec, parse_spec
    from ._strides import Strides, contiguous_strides, dense_strides, is_contiguous, strides_like, whole_of
    from ._text import parse_layout, read_dtype, write_dtype
    from ._toml import write_toml
    from ._untyped import JsonValue, TorchValue
    from ._where import module_path, user_frame, user_line, user_place, warn_user
    from ._whole_file import write_whole

__all__ = [
    "MOST_TEXT",
    "PARTIAL_OPS",
    "Cache",
    "Dim",
    "Factors",
    "InputError",
    "JsonValue",
    "Layout",
    "LayoutError",
    "MeshError",
    "MeshwrightError",
    "Partial",
    "Placement",
    "PlacementError",
    "ProcessMesh",
    "Product",
    "Range",
    "Replicate",
    "Shard",
    "Spec",
    "Strides",
    "TorchValue",
    "accelerators_in_use",
    "autocast_modes",
    "axes_of",
    "can_pin_memory",
    "check_length",
    "check_values",
    "chunk",
    "contiguous_strides",
    "cut",
    "decoded_text",
    "dense_strides",
    "device_types",
    "escaped",
    "evenly",
    "expand_products",
    "factors_of",
    "generator_state",
    "generator_states",
    "hint",
    "identity",
    "inside",
    "is_contiguous",
    "layout_of",
    "lazy_names",
    "local_length",
    "local_ranges",
    "local_shape",
    "module_path",
    "parse_layout",
    "parse_spec",
    "placements_of",
    "read_dtype",
    "read_file",
    "read_json",
    "read_text_file",
    "read_toml",
    "replicated",
    "set_generator_state",
    "set_generator_states",
    "strides_like",
    "user_frame",
    "user_line",
    "user_place",
    "warn_user",
    "whole_of",
    "without_trivial_axes",
    "write_dtype",
    "write_toml",
    "write_whole",
]

__getattr__ = lazy_names(__name__)
