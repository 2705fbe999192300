"""Group-relative policy optimisation (GRPO) of a small Llama that learns to count: `meshwright run --ranks 4`.

A program rewards each new token that is the successor of the token before it. The trainer has the layout dp × tp, the
frozen reference ZeRO-3, and the sampler tp over all ranks. With the argument `apart`, trainer and sampler have half of
the ranks each. Then the sampler generates a batch while the trainer learns from the one before.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

WORDS, PROMPTS, SAMPLES, NEW = 16, 8, 8, 8
STEPS = next((int(word) for word in sys.argv[1:] if word.isdigit()), 20)
LIMIT, PENALTY = 0.2, 0.001  # of the ratio of probabilities, and of the divergence from the reference
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": mw.ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": mw.RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": mw.ColwiseParallel(),
    "model.layers.*.mlp.up_proj": mw.ColwiseParallel(),
    "model.layers.*.mlp.down_proj": mw.RowwiseParallel(),
}

ranks = range(mw.init_mesh(dp=-1).size)
is_apart = "apart" in sys.argv
middle = len(ranks) // 2 if is_apart else 0
train_ranks, sample_ranks = ranks[:middle] or ranks, ranks[middle:]
tp = 2 - len(train_ranks) % 2
train_mesh = mw.ProcessMesh([train_ranks[at : at + tp] for at in train_ranks[::tp]], ["dp", "tp"])


def llama(mesh, parallelism, lr=0.0, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
    mw.parallelize(model, optimizer, mesh, parallelism)
    return model, optimizer


trainer, optimizer = llama(train_mesh, mw.Parallelism(PLAN), lr=1e-2)
reference, _ = llama(train_mesh, mw.Parallelism(zero=3))
sampler = mw.sampler(llama(mw.ProcessMesh(sample_ranks, ["tp"]), mw.Parallelism(PLAN), device="meta")[0])
generator = torch.Generator().manual_seed(1)


def sample(step):
    """Return prompts with new tokens, the log-probabilities of the new tokens, and the reward of each row."""
    prompts = torch.randint(0, WORDS, (PROMPTS, 4), generator=generator)
    found = sampler.generate(prompts, NEW, n=SAMPLES, seed=step)
    sequences = torch.cat([prompts.repeat_interleave(SAMPLES, 0), found.tokens], 1)
    is_next = sequences[:, -NEW:] == (sequences[:, -NEW - 1 : -1] + 1) % WORDS
    return sequences, found.log_probs, is_next.float().mean(-1)


def log_probs(model, sequences):
    logits = model(sequences[:, :-1]).logits[:, -NEW:].log_softmax(-1)
    return logits.gather(-1, sequences[:, -NEW:, None])[..., 0]


def improve(sequences, sampled, reward):
    """Make a step of the optimizer: rewards are compared within the samples of a prompt."""
    groups = reward.unflatten(0, (PROMPTS, SAMPLES))
    advantage = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantage = advantage.flatten()[:, None]
    with torch.no_grad():
        before = log_probs(reference, sequences)
    now = log_probs(trainer, sequences)
    ratio = (now - sampled).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LIMIT, 1 + LIMIT) * advantage)
    divergence = (before - now).exp() - (before - now) - 1
    (PENALTY * divergence - gain).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


batch = None
with mw.same_numbers():  # the same rewards on every mesh; without it, training is faster
    for step in range(STEPS):
        mw.weights.sync(trainer, sampler, when_stale="keep" if is_apart else "error")
        if is_apart and batch:
            improve(*batch)
        batch = sample(step)
        if not is_apart:
            improve(*batch)
        print(f"step {step} reward {batch[-1].mean().item():.5f}")
