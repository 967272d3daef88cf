"""Draft experts for `tiny`."""

from dejax.config import DraftConfig
from train.closed_form import InitConfig
from train.distill import DistillConfig
from train.loop import LoopConfig
from train.losses import LossWeights
from train.optimizer import OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="tiny",
        data="demo",
        draft=DraftConfig(width=32),
        init=InitConfig(),
        losses=LossWeights(router=0.5),
        optimizer=OptimizerConfig(
            kind="adamw", learning_rate=2e-3, warmup_steps=10, decay_steps=80
        ),
        loop=LoopConfig(steps=200, log_every=10, eval_every=50, save_every=50),
        seq_len=256,
        batch_size=8,
        cpu_devices=2,
    )
