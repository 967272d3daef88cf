"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): MLA, softmax router, shared experts, YaRN.

The reference is the `transformers` class: rotary pairs are always interleaved, the inner norms of
MLA always use eps 1e-6, and `norm_topk_prob` is not read (releases have it false, so true is
refused).
"""

from typing import Any

from dejax.config import MLAConfig, ModelConfig, MoEConfig
from dejax.families.raw_config import RawConfig

MODEL_TYPE = "deepseek_v2"


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """`config.json` of a DeepSeek-V2 checkpoint; UsageError for what is not honoured."""
    c = RawConfig(raw)
    c.must_lack("quantization_config", "weights are read as float32, bfloat16 or float16")
    # Left out, they have the reference's own defaults (1536 and 2), which no file means by that.
    c.must_have("q_lora_rank", "n_shared_experts")
    c.must_be("hidden_act", ("silu",), "the experts are SwiGLU")
    c.must_be("norm_topk_prob", (False,), "this family does not renormalise its gates")
    c.must_be("scoring_func", ("softmax",), "sigmoid routing is another family")
    c.must_be("moe_layer_freq", (1,), "every layer after the leading dense ones is a MoE layer")
    c.must_be(
        "topk_method", ("greedy", "group_limited_greedy"), "the selection rules of this family"
    )
    grouped = raw.get("topk_method") == "group_limited_greedy"
    heads = c.integer("num_attention_heads")
    c.must_be("num_key_value_heads", (heads,), "MLA has one key head per query head")
    expert_width = c.integer("moe_intermediate_size")
    names = {"n_routed_experts", "num_experts"} & raw.keys()
    experts_key = "num_experts" if names == {"num_experts"} else "n_routed_experts"
    return ModelConfig(
        family=MODEL_TYPE,
        vocab_size=c.integer("vocab_size"),
        width=c.integer("hidden_size"),
        num_layers=c.integer("num_hidden_layers"),
        dense_width=c.integer("intermediate_size"),
        context=c.integer("max_position_embeddings"),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        tied=c.flag("tie_word_embeddings", False),
        mlp_bias=c.flag("mlp_bias", False),
        eos_ids=c.eos_ids(),
        attention=MLAConfig(
            heads=heads,
            query_rank=c.integer("q_lora_rank", None),
            kv_rank=c.integer("kv_lora_rank"),
            nope_dim=c.integer("qk_nope_head_dim"),
            value_dim=c.integer("v_head_dim"),
            rope=c.rope(c.integer("qk_rope_head_dim"), interleaved=True),
            bias=c.flag("attention_bias", False),
        ),
        moe=MoEConfig(
            num_experts=c.integer(experts_key),
            top_k=c.integer("num_experts_per_tok"),
            expert_width=expert_width,
            shared_width=expert_width * c.integer("n_shared_experts", 0),
            first_dense=c.integer("first_k_dense_replace", 0),
            scaling=c.number("routed_scaling_factor", 1.0),
            groups=c.integer("n_group", 1) if grouped else 1,
            groups_kept=c.integer("topk_group", 1) if grouped else 1,
        ),
    )


def layer_keys(config: ModelConfig, index: int) -> dict[str, str]:
    """Checkpoint key -> path of the array in `DecoderLayer`, for a layer's resident weights."""
    attention = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    if config.attention.query_rank is None:
        attention += ["q_proj"]
    else:
        attention += ["q_a_proj", "q_a_layernorm", "q_b_proj"]
    keys = {f"self_attn.{name}.weight": f"attention.{name}.weight" for name in attention}
    if config.attention.bias:
        biased = ["kv_a_proj_with_mqa", "o_proj"]
        biased += [] if config.attention.query_rank is None else ["q_a_proj"]
        keys |= {f"self_attn.{name}.bias": f"attention.{name}.bias" for name in biased}
    keys |= {
        "input_layernorm.weight": "input_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
    }
    moe = index in config.moe_layers
    if moe:
        keys["mlp.gate.weight"] = "router.weight"
    mlps = {"mlp.shared_experts": "shared"} if moe else {"mlp": "mlp"}
    if moe and not config.moe.shared_width:
        mlps = {}
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    for disk, ours in mlps.items():
        for name in ("gate_proj", "up_proj", "down_proj"):
            keys |= {f"{disk}.{name}.{kind}": f"{ours}.{name}.{kind}" for kind in kinds}
    return keys


def expert_keys(expert: int) -> tuple[str, str, str]:
    """Keys of one routed expert below its layer: gate, up and down projection ([out, in] each)."""
    prefix = f"mlp.experts.{expert}"
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight"


FUSED_KEYS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Keys of a layer's experts in the fused form: [E, 2F, D] (gate rows first) and [E, D, F]."""
