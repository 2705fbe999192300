"""Sizes of a transformer, read from the configuration that its weights are published with."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout import JsonValue

from .._errors import SearchError
from .families import GATED, PLAIN, TIED
from .sizes import Experts, Latent, Transformer, Window

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
}
"""Name of a size here → its names in configurations."""
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
UNGATED = frozenset({"gelu", "gelu_new", "relu", "gelu_fast", "gelu_pytorch_tanh"})
"""Activations without a gate, for models whose configuration does not name their family."""


def transformer_of(config: Mapping[str, JsonValue]) -> Transformer:
    """Return the model that a configuration with the names of `config.json` files describes.

    >>> transformer_of({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100})
    Transformer(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100, gated=True, tied=False, \
experts=None, latent=None, window=None, ahead=0)

    Raises:
        SearchError: a size is missing or no whole number, or the layers of the `model_type` do not follow from
            sizes or are not alike.
    """
    _check_family(config)
    sizes = {name: _first(config, names) for name, names in NAMES.items()}
    missing = [n for n, x in sizes.items() if x is None and n != "ffn"]
    if missing:
        raise SearchError(
            "a transformer from a configuration",
            f"{', '.join(sorted(config)) or 'nothing'}",
            f"the configuration lacks {', '.join(missing)}",
            f"add {', '.join(NAMES[n][0] for n in missing)}",
        )
    layers, hidden, heads, vocab = (_whole(n, sizes[n]) for n in ("layers", "hidden", "heads", "vocab"))
    head_dim, expansion = _whole("head_dim", config.get("head_dim") or 0), config.get("expansion_ratio") or 4
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") in TIED))
    return Transformer(
        layers,
        hidden,
        heads,
        _kv_heads(config) or heads,
        head_dim or hidden // max(heads, 1),
        _whole("ffn", sizes["ffn"] or expansion * hidden),
        vocab,
        _is_gated(config),
        tied,
        _experts(config, layers),
        _latent(config),
        _window(config),
    )


def _check_family(config: Mapping[str, JsonValue]) -> None:
    family = config.get("model_type")
    if family is not None and family not in GATED | PLAIN:
        raise SearchError(
            "a transformer from a configuration",
            f"model_type {family!r}",
            "the layers of this model type are unknown, or do not follow from sizes",
            "run meshwright parallelize config.json, or call mw.plan(model, ...): both read the model itself;"
            " without model_type, the sizes are read as those of a Llama",
        )


def _kv_heads(config: Mapping[str, JsonValue]) -> int:
    """Return the number of key and value heads; 0 stands for as many as query heads."""
    if config.get("multi_query") is not None and not config.get("new_decoder_architecture"):
        return int(bool(config["multi_query"]))
    return _whole("num_key_value_heads", _first(config, ("num_key_value_heads", "num_kv_heads")) or 0)


def _first(config: Mapping[str, JsonValue], names: tuple[str, ...]) -> JsonValue:
    return next((config[n] for n in names if config.get(n) is not None), None)


def _whole(name: str, value: JsonValue) -> int:
    if not isinstance(value, int) and not (isinstance(value, float) and value.is_integer()):
        raise SearchError(
            "a transformer from a configuration",
            f"{name}: {value!r}",
            "the value must be an integer",
            f'write "{name}": 32',
        )
    return int(value)


def _is_gated(config: Mapping[str, JsonValue]) -> bool:
    if config.get("model_type") in GATED | PLAIN:
        return config["model_type"] in GATED
    activation = str(_first(config, ("hidden_act", "activation_function", "hidden_activation")) or "silu")
    return activation not in UNGATED


def _experts(config: Mapping[str, JsonValue], layers: int) -> Experts | None:
    count = _first(config, EXPERTS)
    if not count:
        return None
    width = int(_first(config, ("moe_intermediate_size", "intermediate_size")) or 4 * config["hidden_size"])
    shared = int(config.get("shared_expert_intermediate_size") or width * int(config.get("n_shared_experts") or 0))
    chosen = int(_first(config, ("num_experts_per_tok", "num_experts_per_token", "top_k")) or 1)
    return Experts(int(count), chosen, width, shared, min(layers, int(config.get("first_k_dense_replace") or 0)))


def _latent(config: Mapping[str, JsonValue]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(*(int(config.get(n) or 0) for n in names))


def _window(config: Mapping[str, JsonValue]) -> Window | None:
    size = config.get("sliding_window")
    if not size or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types") or []
    some = sum(kind == "sliding_attention" for kind in kinds)
    return Window(int(size), max(1, round(len(kinds) / some)) if some else 1)
