"""The same Llama on 2 stages × 2 parts of the batch × 2 parts of the weights, with ZeRO: `meshwright run --ranks 8`."""

import torch

import meshwright as mw
from meshwright.models import Llama, LlamaConfig

torch.manual_seed(0)
model = Llama(LlamaConfig(vocab=256, hidden=64, layers=4, heads=4, kv_heads=2, feed_forward=176))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
data = torch.randint(0, 256, (5, 16, 33), generator=torch.Generator().manual_seed(1))

mesh = mw.init_mesh(pp=2, dp=2, tp=2)
plan = {
    "entry.embed": mw.VocabParallel(),
    "blocks.*.attention.[qkv]": mw.ColwiseParallel(),
    "blocks.*.attention.o": mw.RowwiseParallel(),
    "blocks.*.feed_forward.gate": mw.ColwiseParallel(),
    "blocks.*.feed_forward.up": mw.ColwiseParallel(),
    "blocks.*.feed_forward.down": mw.RowwiseParallel(),
}
mw.parallelize(model, optimizer, mesh, mw.Parallelism(plan, zero=2))
step = mw.microbatched(model, None, mesh, microbatches=4)

for batch in data:
    loss = step(batch[:, :-1], batch[:, 1:])
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
