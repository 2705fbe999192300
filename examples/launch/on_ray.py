"""Ray Train starts the processes and sets torchrun's variables in them; `mw.init_mesh` reads those."""

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def work() -> None:
    import train  # your script's module

    train.main()


trainer = TorchTrainer(work, scaling_config=ScalingConfig(num_workers=32, use_gpu=True))
trainer.fit()
