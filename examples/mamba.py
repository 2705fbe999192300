"""A state-space model of transformers under data and tensor parallelism: `meshwright run --ranks 4`.

The plan cuts channels by module names; the scan along the sequence runs on each rank's own channels.
"""

import torch
from transformers import MambaConfig, MambaForCausalLM

import meshwright as mw

torch.manual_seed(0)
config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False)
model = MambaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
plan = {"*.mixer.out_proj": mw.RowwiseParallel(), "*.mixer.x_proj": mw.RowwiseParallel()}
mw.parallelize(model, optimizer, mw.init_mesh(dp=-1, tp=2), mw.Parallelism(plan, zero=1))

for batch in torch.randint(0, 64, (3, 4, 16), generator=torch.Generator().manual_seed(1)):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
