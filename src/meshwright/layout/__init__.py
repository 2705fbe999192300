"""Meshes, placements, layouts: the distribution of a tensor's elements over ranks; platforms. No communication."""

from typing import TYPE_CHECKING

from ._lazy_names import lazy_names

if TYPE_CHECKING:
    from ._accelerator import (
        accelerators_in_use,
        autocast_modes,
        device_name,
        device_types,
        generator_state,
        generator_states,
        platform_of,
        register_platform,
        set_generator_state,
        set_generator_states,
    )
    from ._bounded_file import MOST_TEXT, decoded_text, inside, read_file, read_text_file
    from ._bounded_text import check_length, check_values, read_json, read_toml
    from ._cache import Cache
    from ._errors import InputError, LayoutError, MeshError, MeshwrightError, PlacementError, PlatformError
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
    from ._platform import (
        CPU,
        EFFICIENT,
        FLASH,
        FLASH_ON_CPU,
        ROWWISE,
        TENSORWISE,
        HostSignal,
        PlacedMessage,
        Platform,
        Transport,
        TransportGroup,
        check_transport_methods,
    )
    from ._size import hint, identity
    from ._spec import Spec, parse_spec
    from ._strides import Strides, contiguous_strides, dense_strides, is_contiguous, strides_like, whole_of
    from ._text import parse_layout, read_dtype, write_dtype
    from ._toml import write_toml
    from ._untyped import JsonValue, TorchValue
    from ._where import module_path, user_frame, user_line, user_place, warn_user
    from ._whole_file import write_whole

__all__ = [
    "CPU",
    "EFFICIENT",
    "FLASH",
    "FLASH_ON_CPU",
    "MOST_TEXT",
    "PARTIAL_OPS",
    "ROWWISE",
    "TENSORWISE",
    "Cache",
    "Dim",
    "Factors",
    "HostSignal",
    "InputError",
    "JsonValue",
    "Layout",
    "LayoutError",
    "MeshError",
    "MeshwrightError",
    "Partial",
    "PlacedMessage",
    "Placement",
    "PlacementError",
    "Platform",
    "PlatformError",
    "ProcessMesh",
    "Product",
    "Range",
    "Replicate",
    "Shard",
    "Spec",
    "Strides",
    "TorchValue",
    "Transport",
    "TransportGroup",
    "accelerators_in_use",
    "autocast_modes",
    "axes_of",
    "check_length",
    "check_transport_methods",
    "check_values",
    "chunk",
    "contiguous_strides",
    "cut",
    "decoded_text",
    "dense_strides",
    "device_name",
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
    "platform_of",
    "read_dtype",
    "read_file",
    "read_json",
    "read_text_file",
    "read_toml",
    "register_platform",
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
