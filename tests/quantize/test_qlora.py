"""QLoRA: adapters of PEFT over nf4 weights train on a mesh as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.quantize import QuantizedLinear, Scheme

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

NF4 = Scheme.preset("nf4", group_size=16, targets=("re:.*base_layer$",))
PLAN = {f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "v")} | {"*.o_proj": mw.RowwiseParallel()}


def adapted() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora)


def losses(model: Any) -> list[float]:
    """Train the adapters for three steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.arange(16).view(2, 8) % 24
    found: list[float] = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_adapters_over_nf4_weights_train_on_a_mesh_as_on_one_device() -> None:
    one = mw.quantize(adapted(), NF4)
    quantized = [name for name, m in one.named_modules() if isinstance(m, QuantizedLinear)]
    assert [name.split(".")[-2:] for name in quantized] == [["q_proj", "base_layer"], ["v_proj", "base_layer"]]
    expected = losses(one)
    assert expected[2] < expected[0]

    def program() -> list[float]:
        model, _ = mw.parallelize(adapted(), None, mw.init_mesh(dp=2, tp=2), mw.Parallelism(PLAN))
        return losses(mw.quantize(model, NF4))

    for found in mw.simulate(program, 4):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
