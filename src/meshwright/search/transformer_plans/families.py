"""Families of models whose layers are alike, so that sizes describe them: with or without gates, tied or not.

The names are the `model_type` of `config.json` files. A test compares each family with the parameters of its model.
"""

from __future__ import annotations

GATED = frozenset(
    """bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 ernie4_5 exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4
    glm4_moe gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium internlm3 kimi_k2 llama
    llama4_text minicpm3 minimax_m2 ministral3 mistral mixtral modernbert modernbert-decoder olmo olmo2 olmo3 olmoe
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm vaultgemma""".split()
)
"""Families with three linear maps in the feed-forward part."""
PLAIN = frozenset(
    """apertus arcee bert bert-generation biogpt bloom camembert codegen ernie falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gptj jais2 megatron-bert mpt nanochat nemotron openai-gpt opt persimmon phi roberta
    roberta-prelayernorm starcoder2 xlm-roberta xlm-roberta-xl""".split()
)
"""Families with two linear maps in the feed-forward part."""
TIED = frozenset(
    """bert bert-generation biogpt bloom camembert cohere cohere2 ernie ernie4_5 falcon gemma gemma2 gemma3_text
    gpt-sw3 gpt2 gpt_bigcode gpt_neo granite_swa megatron-bert minicpm3 modernbert modernbert-decoder mpt openai-gpt
    opt roberta roberta-prelayernorm smollm3 starcoder2 vaultgemma xlm-roberta xlm-roberta-xl""".split()
)
"""Families whose head is the embedding table unless the file says otherwise: files leave out the default."""
BIDIRECTIONAL = frozenset(
    """bert bert-generation camembert ernie megatron-bert modernbert roberta roberta-prelayernorm xlm-roberta
    xlm-roberta-xl""".split()
)
"""Families whose tokens attend to all tokens, unless the file says that they are decoders."""
WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "llama4_text": 4, "modernbert": 3}
"""Family → number of layers for each one without a window, where a file does not say it."""
