"""Draft experts for SmolLM2-135M-Instruct, upcycled to a mixture of experts (docs/upcycling.md).

Command:   dejax distill distill_smol --set target=smol-moe
           (target: what `dejax upcycle` or a healing wrote)
Hardware:  2 CPU cores, 6 GiB of memory by the plan (`--dry-run`), at 36 experts of 32.
Expected:  not run to its end by us yet.
"""

from dejax.config import DraftConfig
from train.distill import DistillConfig
from train.loop import LoopConfig
from train.losses import LossWeights
from train.optimizer import OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="smol-moe",
        data="demo",
        draft=DraftConfig(width=128),
        losses=LossWeights(router=0.5),
        kv="mixed",
        kv_block=4,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, decay_steps=60),
        loop=LoopConfig(steps=120, log_every=5, save_every=20),
        seq_len=256,
        batch_size=8,
    )
