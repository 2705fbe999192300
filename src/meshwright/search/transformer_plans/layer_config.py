"""Experts, narrow projections and windows of a transformer's layers, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout import JsonValue

from .._errors import SearchError
from .families import WINDOW_PATTERNS
from .sizes import Experts, Latent, Window

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
INTERVALS = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
"""Names of the number of layers for each one with experts."""
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
"""Names of the number of layers for each one without a window."""
LOCAL = frozenset({"sliding_attention", "chunked_attention"})


def first_of(config: Mapping[str, JsonValue], names: tuple[str, ...]) -> JsonValue:
    """Return the value of the first of these names that a configuration has; None if it has none."""
    return next((config[n] for n in names if config.get(n) is not None), None)


def whole_number(name: str, value: JsonValue) -> int:
    """Return a value as an integer, or raise SearchError."""
    if not isinstance(value, int) and not (isinstance(value, float) and value.is_integer()):
        raise SearchError(
            "a transformer from a configuration",
            f"{name}: {value!r}",
            "the value must be an integer",
            f'write "{name}": 32',
        )
    return int(value)


def number_of(config: Mapping[str, JsonValue], *names: str) -> int:
    """Return the first number that a configuration has under one of these names; 0 if it has none."""
    found = whole_number(names[0], first_of(config, names) or 0)
    if found < 0:
        raise SearchError(
            "a transformer from a configuration", f"{names[0]}: {found}", "the number is negative", "write 0 or more"
        )
    return found


def experts_of(config: Mapping[str, JsonValue], layers: int) -> Experts | None:
    """Return the experts of a configuration, or None if it has none.

    Raises:
        SearchError: layers with and without experts alternate.
    """
    count, family = number_of(config, *EXPERTS), config.get("model_type")
    if not count:
        return None
    width = number_of(config, "moe_intermediate_size", "intermediate_size") or 4 * number_of(config, "hidden_size")
    shared = number_of(config, "shared_expert_intermediate_size") or width * number_of(config, "n_shared_experts")
    chosen = number_of(config, "num_experts_per_tok", "num_experts_per_token", "top_k") or 1
    shared = width if family == "llama4_text" else shared
    return Experts(count, chosen, width, shared, _dense_layers(config, layers), biased=family == "gpt_oss")


def _dense_layers(config: Mapping[str, JsonValue], layers: int) -> int:
    """Return the number of layers without experts, which must come before all others."""
    plain, step = config.get("mlp_only_layers") or [], first_of(config, INTERVALS) or 1
    dense = number_of(config, "first_k_dense_replace") or (len(plain) if isinstance(plain, list) else 0)
    if step != 1 or plain not in ([], list(range(dense))):
        raise SearchError(
            "a transformer from a configuration",
            f"experts in every {step} layers, none in the layers {plain}",
            "the layers without experts must come before all layers with experts",
            "run meshwright parallelize config.json, or mw.plan(model, batch) without phases: both read the model",
        )
    return min(layers, dense)


def latent_of(config: Mapping[str, JsonValue]) -> Latent | None:
    """Return the narrow projections of attention, or None if a configuration has none."""
    if not number_of(config, "kv_lora_rank"):
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(*(number_of(config, name) for name in names))


def window_of(config: Mapping[str, JsonValue]) -> Window | None:
    """Return the windows of attention, or None if all layers attend to all tokens.

    A chunk of tokens that attend to each other counts as a window of half its size, which has as many pairs.
    """
    size = number_of(config, "sliding_window", "local_attention") or number_of(config, "attention_chunk_size") // 2
    if not size or config.get("use_sliding_window") is False:
        return None
    share = _share_of_windows(config)
    return Window(size, 1 / share) if share else None


def _share_of_windows(config: Mapping[str, JsonValue]) -> float:
    """Return the fraction of the layers that have a window."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(str(kind) in LOCAL for kind in kinds) / len(kinds)
    pattern = number_of(config, *PATTERNS) or WINDOW_PATTERNS.get(str(config.get("model_type")))
    return 1 - 1 / pattern if pattern else 1.0
