"""Sizes of a transformer, read from the configuration that its weights are published with."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout import JsonValue

from .._errors import SearchError
from .families import BIDIRECTIONAL, GATED, PLAIN, TIED
from .layer_config import experts_of, first_of, latent_of, number_of, whole_number, window_of
from .sizes import Transformer

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
}
"""Name of a size here → its names in configurations."""
UNGATED = frozenset({"gelu", "gelu_new", "relu", "gelu_fast", "gelu_pytorch_tanh"})
"""Activations without a gate, for models whose configuration does not name their family."""


def transformer_of(config: Mapping[str, JsonValue], ahead: int | None = 0) -> Transformer:
    """Return the model that a configuration with the names of `config.json` files describes.

    `ahead` is the number of tokens that are predicted besides the next one. If None, the configuration says it; the
    models of transformers leave these layers out.

    >>> transformer_of({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100})
    Transformer(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100, gated=True, tied=False, \
experts=None, latent=None, window=None, ahead=0, causal=True)

    Raises:
        SearchError: a size is missing or no whole number, or the layers of the `model_type` do not follow from
            sizes or are not alike.
    """
    _check_family(config)
    sizes = {name: first_of(config, names) for name, names in NAMES.items()}
    missing = [n for n, x in sizes.items() if x is None and n != "ffn"]
    if missing:
        raise SearchError(
            "a transformer from a configuration",
            f"{', '.join(sorted(config)) or 'nothing'}",
            f"the configuration lacks {', '.join(missing)}",
            f"add {', '.join(NAMES[n][0] for n in missing)}",
        )
    layers, hidden, heads, vocab = (whole_number(n, sizes[n]) for n in ("layers", "hidden", "heads", "vocab"))
    head_dim, expansion = whole_number("head_dim", config.get("head_dim") or 0), config.get("expansion_ratio") or 4
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") in TIED))
    return Transformer(
        layers,
        hidden,
        heads,
        _kv_heads(config) or heads,
        head_dim or hidden // max(heads, 1),
        whole_number("ffn", sizes["ffn"] or expansion * hidden),
        vocab,
        _is_gated(config),
        tied,
        experts_of(config, layers),
        latent_of(config),
        window_of(config),
        number_of(config, "num_nextn_predict_layers") if ahead is None else ahead,
        causal=bool(config.get("is_decoder")) or config.get("model_type") not in BIDIRECTIONAL,
    )


def _check_family(config: Mapping[str, JsonValue]) -> None:
    family, inner = config.get("model_type"), config.get("text_config")
    if isinstance(inner, Mapping) and inner.get("model_type") in GATED | PLAIN:
        raise SearchError(
            "a transformer from a configuration",
            f"model_type {family!r} with a text_config of {inner['model_type']!r}",
            "only the layers of the language model follow from sizes, not those for images or sound",
            "save the object text_config as a file of its own, and pass that: the plan is that of the language model",
        )
    if family is not None and family not in GATED | PLAIN:
        raise SearchError(
            "a transformer from a configuration",
            f"model_type {family!r}",
            "the layers of this model type are unknown, or do not follow from sizes",
            "run meshwright parallelize config.json, or mw.plan(model, batch) without phases: both read the model;"
            " without model_type, the sizes are read as those of a Llama",
        )


def _kv_heads(config: Mapping[str, JsonValue]) -> int:
    """Return the number of key and value heads; 0 stands for as many as query heads."""
    if config.get("multi_query") is not None and not config.get("new_decoder_architecture"):
        return int(bool(config["multi_query"]))
    return whole_number("num_key_value_heads", first_of(config, ("num_key_value_heads", "num_kv_heads")) or 0)


def _is_gated(config: Mapping[str, JsonValue]) -> bool:
    if config.get("model_type") in GATED | PLAIN:
        return config["model_type"] in GATED
    activation = str(first_of(config, ("hidden_act", "activation_function", "hidden_activation")) or "silu")
    return activation not in UNGATED
