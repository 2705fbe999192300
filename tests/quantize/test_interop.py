"""Files in the form of compressed-tensors give transformers the very same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import meshwright as mw
from meshwright.quantize import NumberFormat, Scheme

pytestmark = pytest.mark.filterwarnings("ignore")

INT3 = Scheme(NumberFormat(3, strategy="group", group_size=32))
SCHEMES: dict[str, Any] = {
    "int8": "int8",
    "w4a16": Scheme.preset("w4a16", group_size=32),
    "gptq": Scheme.preset("w4a16-gptq", group_size=32),
    "int3": INT3,
    "fp8": "fp8",
    "fp8-dynamic": "fp8-dynamic",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
"""Schemes whose products transformers computes in the same way: products of the dequantized numbers."""


def llama(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_computes_the_same_logits(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ids = torch.arange(16).view(2, 8)
    dtype = torch.bfloat16 if scheme in ("mxfp4", "nvfp4") else torch.float32  # the other one unpacks them to bfloat16
    model = mw.quantize(llama(dtype), SCHEMES[scheme], [{"input_ids": ids}])
    mw.save_quantized(model, tmp_path / "q")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=0, atol=0)
