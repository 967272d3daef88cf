"""Pretrains `tiny`, the embedded target: a DeepSeek-V2-style MoE of 13.2 M parameters.

Command:   dejax pretrain configs/pretrain_tiny.py --data DIR --out DIR
Hardware:  2 CPU cores; see the model card in `dejax/assets/tiny` for tokens, time and result.
Data:      DIR is the folder written by `python -m train.data` (tokenizer and token files).
"""

from train.data import Phase
from train.loop import LoopConfig
from train.optimizer import OptimizerConfig
from train.pretrain import PretrainConfig

STEPS = 2300


def get_config() -> PretrainConfig:
    return PretrainConfig(
        model=dict(
            model_type="deepseek_v2",
            architectures=["DeepseekV2ForCausalLM"],
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=1024,
            moe_intermediate_size=32,
            num_hidden_layers=7,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            first_k_dense_replace=1,
            n_routed_experts=64,
            num_experts_per_tok=6,
            n_shared_experts=2,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
            topk_method="greedy",
            norm_topk_prob=False,
            routed_scaling_factor=4.0,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
            tie_word_embeddings=True,
            hidden_act="silu",
            bos_token_id=0,
            eos_token_id=[2, 0],
            pad_token_id=3,
        ),
        phases=(
            Phase(start=0, seq_len=256, batch_size=32),
            Phase(start=STEPS * 9 // 10, seq_len=1024, batch_size=8),
        ),
        optimizer=OptimizerConfig(
            kind="muon",
            learning_rate=4e-3,
            warmup_steps=50,
            decay_steps=STEPS // 5,
            weight_decay=0.05,
        ),
        loop=LoopConfig(steps=STEPS, log_every=20, eval_every=200, save_every=100, keep=3),
        seed=0,
        balance_weight=0.01,
        spread_weight=1.0,
        cpu_devices=2,
    )
