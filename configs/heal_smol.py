"""Heals SmolLM2-135M-Instruct, upcycled to a mixture of experts (docs/upcycling.md).

Command:   dejax distill heal_smol --set target=smol-moe dense=DENSE.gguf data=chats.jsonl
Hardware:  2 CPU cores.
"""

from train.heal_config import HealConfig
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig


def get_config() -> HealConfig:
    return HealConfig(
        target="smol-moe",
        dense="SmolLM2-135M-Instruct.Q4_1.gguf",
        data="demo",
        trained=("routers", "down", "norms"),
        balance_weight=0.01,
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=20, decay_steps=100),
        loop=LoopConfig(steps=500, log_every=5, eval_every=50, save_every=25),
        seq_len=512,
        batch_size=4,
        remat="layer",
    )
