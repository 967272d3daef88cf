"""Draft experts for Qwen3-235B-A22B (235 B).

Command:   dejax distill distill_qwen3_235b --set target=Qwen3-235B-A22B
           data=FILE --out DIR --distributed auto
Hardware:  64 GPUs of 80 GB, eight hosts
Mesh:      fsdp 8 x expert 8: a device holds a 64th of the target, two experts of each layer
Memory:    about 20.9 GiB of each device by the plan (`--dry-run`).
Data:      chats and text of the kind to be decoded, answers by the target itself where possible
           (`dejax generate --json`); 200 M tokens.
Expected:  not run by us at this size: expect the curves of `tiny` (README) in kind, not in number.
"""

from dejax.config import DraftConfig
from dejax.sharding import MeshConfig
from train.distill import DistillConfig
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="Qwen3-235B-A22B",
        data="data.jsonl",
        draft=DraftConfig(width=1536),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=200, decay_steps=1000),
        loop=LoopConfig(
            steps=1530,
            log_every=10,
            eval_every=200,
            norms_every=500,
            decode_every=0,
            save_every=200,
        ),
        seq_len=2048,
        batch_size=64,
        dtype="bfloat16",
        compute="bfloat16",
        remat="layer",
        mesh=MeshConfig(data=1, fsdp=8, expert=8),
        split_draft=True,
    )
