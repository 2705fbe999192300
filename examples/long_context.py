"""A sequence cut over four ranks, attention round a ring: `meshwright run --ranks 4`.

Keys and values travel from rank to rank, half a block of queries at a time, so that causal work is even. Only the name
"ring" says so; "ulysses" exchanges heads for parts of the sequence, and without a name the keys are gathered.
"""

import torch

import meshwright as mw
from meshwright.models import Llama, LlamaConfig

mesh = mw.init_mesh(dp=1, cp=-1)
torch.manual_seed(0)
model = Llama(LlamaConfig(vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, feed_forward=176))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
mw.parallelize(model, optimizer, mesh, mw.Parallelism(context="ring"))

book = torch.randint(0, 256, (3, 1, 1025), generator=torch.Generator().manual_seed(1))
for page in book:
    loss = model(page[:, :-1], page[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
