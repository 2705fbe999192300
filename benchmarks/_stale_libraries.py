"""Kinds of change: settings, tables and functions of installed libraries: transformers, PEFT, Python's own."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import torch
from torch import Tensor, nn

from ._stale_case import Case, Run, attribute, calls, item, kind, kind_on_mesh, reads


def llama_config(**options: Any) -> Any:
    import transformers

    config: Any = transformers.LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    return config(**{**sizes, "num_hidden_layers": 1, "vocab_size": 6, **options})


def with_attention(run: Run) -> tuple[Any, Any]:
    """Return an attention layer of Llama, and the method that calls it between two layers."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    angles = torch.arange(4.0)[None, :, None].expand(1, 4, 6)

    def between(self: Any, x: Tensor) -> Tensor:
        return self.attention(x[None], (angles.cos(), angles.sin()), None)[0][0]

    return LlamaAttention(llama_config(attn_implementation="eager"), layer_idx=0), between


# --- transformers ----------------------------------------------------------------------------------------------------


@kind_on_mesh
def epsilon_of_a_norm_of_llama(run: Run) -> Case:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(6)
    return calls(lambda self, x: self.norm(x), attribute(norm, "variance_epsilon"), norm=norm)


@kind
def activation_of_llama_replaced(run: Run) -> Case:
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(llama_config())
    acts = {factor: ACT2FN["silu" if factor == 1 else "relu"] for factor in (1.0, 2.0, 3.0)}
    return calls(lambda self, x: self.mlp(x), lambda factor: setattr(mlp, "act_fn", acts[factor]), mlp=mlp)


@kind
def scaling_of_attention(run: Run) -> Case:
    attention, between = with_attention(run)
    return calls(between, attribute(attention, "scaling"), attention=attention)


@kind
def function_of_a_modeling_file_replaced(run: Run) -> Case:
    from transformers.models.llama import modeling_llama

    attention, between = with_attention(run)
    rotate = modeling_llama.rotate_half
    run.set_attribute(modeling_llama, "rotate_half", rotate)

    def change(factor: float) -> None:
        modeling_llama.rotate_half = lambda x: rotate(x) * factor

    return calls(between, change, attention=attention)


@kind
def default_attention_of_a_modeling_file_replaced(run: Run) -> Case:
    from transformers.models.llama import modeling_llama

    attention, between = with_attention(run)
    eager: Any = modeling_llama.eager_attention_forward
    run.set_attribute(modeling_llama, "eager_attention_forward", eager)

    def change(factor: float) -> None:
        def scaled(*args: Any, **options: Any) -> Any:
            out, weights = eager(*args, **options)
            return out * factor, weights

        modeling_llama.eager_attention_forward = scaled

    return calls(between, change, attention=attention)


@kind
def entry_of_a_table_of_activations(run: Run) -> Case:
    from transformers.activations import ACT2FN

    run.set_item(ACT2FN, "stale", nn.Tanh)

    def change(factor: float) -> None:
        ACT2FN["stale"] = nn.Tanh if factor == 1 else nn.ReLU

    return calls(lambda self, x: ACT2FN[self.act](x), change, act="stale")


@kind
def entry_of_a_table_of_attentions(run: Run) -> Case:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, between = with_attention(run)
    table: Any = ALL_ATTENTION_FUNCTIONS

    def scaled(by: float) -> Any:
        return lambda module, q, k, v, *args, **options: ((v * by).transpose(1, 2), None)

    run.set_item(table, "stale", scaled(1.0))
    attention.config._attn_implementation = "stale"
    return calls(between, lambda factor: item(table, "stale")(scaled(factor)), attention=attention)


@kind
def attention_named_by_a_config(run: Run) -> Case:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, between = with_attention(run)
    table: Any = ALL_ATTENTION_FUNCTIONS
    run.set_item(table, "stale", lambda module, q, k, v, *args, **options: (v.transpose(1, 2), None))

    def change(factor: float) -> None:
        attention.config._attn_implementation = "eager" if factor == 1 else "stale"

    return calls(between, change, attention=attention)


@kind
def soft_cap_of_a_config(run: Run) -> Case:
    """Return a whole model whose forward reads its configuration."""
    import transformers

    module: Any = transformers
    config = module.Gemma2Config(
        hidden_size=6,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=6,
        vocab_size=6,
        final_logit_softcapping=1.0,
        attn_implementation="eager",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = module.Gemma2ForCausalLM(config)
    model.lm_head.weight.data = torch.linspace(-1.0, 1.0, 36).view(6, 6)
    return calls(
        lambda self, x: self.model(inputs_embeds=x.view(2, 2, 6), use_cache=False).logits.flatten(0, 1),
        attribute(config, "final_logit_softcapping"),
        model=model,
    )


# --- PEFT ------------------------------------------------------------------------------------------------------------


def with_adapter() -> Any:
    """Return a linear layer with an adapter of PEFT."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = nn.Sequential(nn.Linear(6, 6))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), layers)
    return layers[0]


@kind
def scaling_of_an_adapter(run: Run) -> Case:
    adapter = with_adapter()
    return calls(lambda self, x: self.adapter(x), item(adapter.scaling, "default"), adapter=adapter)


@kind
def adapter_switched_off(run: Run) -> Case:
    adapter = with_adapter()

    def change(factor: float) -> None:
        adapter._disable_adapters = factor != 1

    return calls(lambda self, x: self.adapter(x), change, adapter=adapter)


# --- Python's own ----------------------------------------------------------------------------------------------------


@kind
def constant_of_a_module_of_python(run: Run) -> Case:
    run.set_attribute(math, "pi", 1.0)
    return reads(run, lambda self: math.pi, attribute(math, "pi"))


@kind
def constant_that_a_function_of_python_reads(run: Run) -> Case:
    run.set_attribute(colorsys, "ONE_SIXTH", 1.0)
    return reads(
        run, lambda self: colorsys.rgb_to_hls(0.2, 0.4, 0.6)[1] * colorsys.ONE_SIXTH, attribute(colorsys, "ONE_SIXTH")
    )


@kind
def function_of_a_module_of_python_replaced(run: Run) -> Case:
    sqrt = math.sqrt
    run.set_attribute(math, "sqrt", sqrt)
    return reads(run, lambda self: math.sqrt(4.0), lambda factor: setattr(math, "sqrt", lambda x: sqrt(x) * factor))
