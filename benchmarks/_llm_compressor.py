"""llm-compressor as a rival: the same model, scheme and calibration batches, in an environment of its own.

llm-compressor needs other versions of its dependencies than the project, so another interpreter runs it:

    python -m venv RIVAL; RIVAL/bin/pip install llmcompressor
    MESHWRIGHT_LLM_COMPRESSOR=RIVAL/bin/python python -m benchmarks quantize_quality
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from meshwright.models import Llama, LlamaConfig
from meshwright.quantize import NumberFormat, Scheme

VARIABLE = "MESHWRIGHT_LLM_COMPRESSOR"
ABSENT = f"not installed: set {VARIABLE} to the interpreter of an environment with llmcompressor"
SCRIPT = Path(__file__).parent / "rivals" / "llm_compressor.py"
MODULES = {"entry.embed": "model.embed_tokens", "exit.norm": "model.norm", "exit.head": "lm_head"}
MODULES_OF_BLOCK = (
    {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    | {f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"}
    | {f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
)
"""Our name of a module → that of transformers."""


@dataclass(frozen=True)
class Rival:
    """The checkpoints that llm-compressor wrote, by scheme, and the seconds of each turn."""

    version: str
    folders: dict[str, Path]
    seconds: dict[str, list[float]]


def interpreter() -> str | None:
    """Return the interpreter that has llm-compressor; None if the user names none, or it has no such package."""
    path = shutil.which(os.environ.get(VARIABLE, ""))
    if path is None:
        return None
    found = subprocess.run([path, "-c", "import llmcompressor"], capture_output=True, check=False)
    return path if found.returncode == 0 else None


def recipe(scheme: Scheme) -> dict[str, dict[str, Any]] | None:
    """Return the modifiers of llm-compressor for a scheme, by name; None if it has no such numbers."""
    if scheme.weights.type == "nf":
        return None
    inputs = None if scheme.input_activations is None else _arguments(scheme.input_activations)
    group = {"targets": ["Linear"], "weights": _arguments(scheme.weights), "input_activations": inputs}
    told = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    if scheme.method == "gptq":
        return {"GPTQModifier": told | {"actorder": "static" if scheme.act_order else None}}
    before = {
        "nearest": {},
        "awq": {"AWQModifier": {}},
        "smoothquant": {"SmoothQuantModifier": {"smoothing_strength": scheme.smoothing}},
    }
    return before[scheme.method] | {"QuantizationModifier": told}


def _arguments(numbers: NumberFormat) -> dict[str, Any]:
    found = {
        "num_bits": numbers.num_bits,
        "type": numbers.type,
        "strategy": numbers.strategy,
        "group_size": numbers.group_size,
        "symmetric": numbers.symmetric,
        "dynamic": numbers.dynamic,
    }
    return found | ({"scale_dtype": "torch.float8_e4m3fn"} if numbers.strategy == "tensor_group" else {})


def quantized_by_rival(
    model: Any, schemes: Mapping[str, Scheme], batches: Sequence[Tensor], folder: Path, turns: int = 1
) -> Rival | None:
    """Return what llm-compressor makes of a model of transformers; None if it is not installed.

    It runs on one thread. `batches` are token ids. Schemes that it does not have are left out.
    """
    python = interpreter()
    if python is None:
        return None
    recipes = {name: each for name, scheme in schemes.items() if (each := recipe(scheme)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "exact")
    save_file({"input_ids": torch.stack(list(batches))}, folder / "calibration.safetensors")
    request = {
        "model": str(folder / "exact"),
        "calibration": str(folder / "calibration.safetensors"),
        "recipes": recipes,
        "turns": turns,
        "out": str(folder),
    }
    (folder / "request.json").write_text(json.dumps(request))
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [python, str(SCRIPT), str(folder / "request.json")],
        env=own | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,  # it writes its log there
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"llm-compressor failed:\n{ran.stderr[-2000:]}")
    told = json.loads(ran.stdout.splitlines()[-1])
    return Rival(told["version"], {name: folder / str(i) for i, name in enumerate(recipes)}, told["seconds"])


def of_transformers(model: Llama, config: LlamaConfig) -> Any:
    """Return the same model as a LlamaForCausalLM of transformers, with copies of the weights."""
    sizes = transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.feed_forward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    found: Any = transformers.LlamaForCausalLM(sizes).eval()
    found.load_state_dict({_name_of(name): x.detach().clone() for name, x in model.state_dict().items()})
    return found


def _name_of(name: str) -> str:
    """Return the name of transformers for a parameter.

    >>> _name_of("blocks.1.attention.q.weight")
    'model.layers.1.self_attn.q_proj.weight'
    """
    module, _, parameter = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{MODULES[module]}.{parameter}"
    _, number, inner = module.split(".", 2)
    return f"model.layers.{number}.{MODULES_OF_BLOCK[inner]}.{parameter}"
