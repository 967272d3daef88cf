"""Draft experts for SmolLM2-135M-Instruct, upcycled to a mixture of experts (docs/upcycling.md).

Command:   dejax distill distill_smol --set target=smol-moe
           (target: what `dejax upcycle` or a healing wrote)
Hardware:  2 CPU cores, 10 seconds a step, 25 on busy ones; memory by the plan: `--dry-run`.
Expected:  in 19 minutes, at 384 shared neurons and 36 experts of 32, 18 of them chosen, healed: KL
           from the target 0.345 and agreement with it 73.1 % on held-out text (without draft
           experts 0.87 and 56 %). docs/smol-moe.md has acceptance by kind of prompt, and each
           loss's part; the keys and values of decoding (kv="mixed") made no difference there.

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
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, decay_steps=60),
        loop=LoopConfig(steps=110, log_every=5, save_every=10),
        seq_len=256,
        batch_size=4,
    )
