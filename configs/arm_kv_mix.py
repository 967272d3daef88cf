"""Arm of the ablation (DraftExpert's Table 5) on `tiny`: all losses, on decoding's own cache.

Command:   python -m train.arms (all arms, several seeds); alone: dejax distill arm_kv_mix
Hardware:  2 CPU cores, about 2 minutes.
Expected:  the table in docs/distillation.md.
"""

from dejax.config import DraftConfig
from train.distill import DistillConfig
from train.loop import LoopConfig
from train.losses import LossWeights
from train.optimizer import OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="tiny",
        data="demo",
        draft=DraftConfig(width=32),
        losses=LossWeights(router=0.5),
        kv="mixed",
        kv_block=4,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=10, decay_steps=80),
        loop=LoopConfig(steps=100, log_every=10),
        seq_len=256,
        batch_size=8,
        cpu_devices=2,
    )
