"""A model of transformers, from its configuration, without a mark: `meshwright run --ranks 4`.

`auto` captures the model, prices every way of cutting each operator on the ranks there are, and lays the parameters.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw

torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
data = torch.randint(0, 256, (4, 8, 33), generator=torch.Generator().manual_seed(1))


def loss_of(output, labels):
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


mw.init_mesh(dp=-1)
step = mw.auto(model, [(data[0, :, :-1], data[0, :, 1:])], loss_of, optimizer)
for batch in data:
    print(f"loss {step(batch[:, :-1], batch[:, 1:]).item():.5f}")
