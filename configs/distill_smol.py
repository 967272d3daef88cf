"""Draft experts for SmolLM2-135M-Instruct, upcycled to a mixture of experts (docs/upcycling.md).

Command:   dejax distill distill_smol --set target=smol-moe
           (target: what `dejax upcycle` or a healing wrote)
Hardware:  2 CPU cores, 15 to 25 seconds a step on busy ones; memory by the plan: `--dry-run`.
Expected:  not run to its end by us yet. With loop.steps=48 optimizer.decay_steps=30, at 384 shared
           neurons and 36 experts of 32, 18 of them chosen, healed: KL from 0.87 to 0.40, agreement
           from 56 to 71 %, drafts of 4 from 2.54 to 2.88 tokens a round.

Experts are small here: the first 3 of 18 are the share that the first of 6 is in DeepSeek-V2-Lite.
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
        draft=DraftConfig(width=128, top_r=3),
        losses=LossWeights(router=0.5),
        kv="mixed",
        kv_block=4,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, decay_steps=100),
        loop=LoopConfig(steps=200, log_every=5, save_every=10),
        seq_len=256,
        batch_size=4,
    )
