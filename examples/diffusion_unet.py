"""A U-Net of diffusers, images cut over ranks and weights held in parts (ZeRO-3): `meshwright run --ranks 4`."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel

import meshwright as mw

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=3,
    out_channels=3,
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
noise = DDPMScheduler(num_train_timesteps=100)
mw.parallelize(model, optimizer, mw.init_mesh(dp=-1), mw.Parallelism(zero=3))

generator = torch.Generator().manual_seed(1)
for _ in range(3):
    clean, added = torch.randn(2, 4, 3, 8, 8, generator=generator)
    times = torch.randint(0, 100, (4,), generator=generator)
    guess = model(noise.add_noise(clean, added, times), times).sample
    loss = F.mse_loss(guess, added)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
