"""Draft experts for gpt-oss-20b (20.9 B, MXFP4 read as bfloat16).

Command:   dejax distill distill_gpt_oss_20b --set target=gpt-oss-20b
           data=FILE --out DIR --distributed auto
Hardware:  8 GPUs of 80 GB, one host
Mesh:      data 2 x fsdp 4: a device holds a quarter of the target
Memory:    about 21.6 GiB of each device by the plan (`--dry-run`).
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
        target="gpt-oss-20b",
        data="data.jsonl",
        draft=DraftConfig(width=2880),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=200, decay_steps=1000),
        loop=LoopConfig(
            steps=3050,
            log_every=10,
            eval_every=200,
            norms_every=500,
            decode_every=0,
            save_every=200,
        ),
        seq_len=2048,
        batch_size=32,
        dtype="bfloat16",
        compute="bfloat16",
        remat="layer",
        mesh=MeshConfig(data=2, fsdp=4),
        split_draft=True,
    )
