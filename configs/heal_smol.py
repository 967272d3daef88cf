"""Heals SmolLM2-135M-Instruct, upcycled to a mixture of experts (docs/upcycling.md).

Command:   dejax distill heal_smol --set target=smol-moe dense=PATH/TO/DENSE.gguf data=chats.jsonl
           (target: what `dejax upcycle DENSE.gguf --out smol-moe` wrote; data: demo unless given)
Hardware:  2 CPU cores, about 4.5 GB of memory; 27.2 M of 135.1 M parameters are trained.
Expected:  a step of 2,048 tokens took 38 seconds of processor time: 20 to 30 seconds on two idle
           cores (66 to 100 tokens a second), 3 to 4 hours for the 500 steps (1.0 M tokens) beside
           an evaluation (8,192 tokens) every 50. It may be stopped at any time.
           At S/E/k 384/36/18, 200 steps of two rows (205 k tokens; batch_size=2 loop.steps=200)
           took KL from 0.312 to 0.267 and agreement from 75.7 to 78.7 % on 16 held-out rows.
On a GPU:  (not measured; the MoE's weights stay float32)
           dejax distill heal_smol --set target=smol-moe dense=PATH/TO/DENSE.gguf data=chats.jsonl
           compute=bfloat16 dtype=bfloat16 seq_len=1024 batch_size=32 loop.steps=3000 eval_rows=64
           optimizer.warmup_steps=100 optimizer.decay_steps=600 trained=all
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
