"""A target's configuration as the metadata of a GGUF file, and where llama.cpp deviates from it.

Every key that llama.cpp asks for is written, and those whose absence it takes for a default that
would be wrong without a word: rotary base and scaling, gating function, scale and renormalisation
of the gates, expert groups.
"""

import dataclasses

import numpy as np

from dejax.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig
from dejax.errors import UsageError
from dejax.export.gguf_file import Value
from dejax.nn.rope import inverse_frequencies, magnitude, table_scale

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""Family -> what llama.cpp calls it."""

_GATING = {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}
_LITE_DEPTHS = (26, 27)  # llama.cpp takes deepseek2 of these depths for V2-Lite


def architecture(config: ModelConfig) -> str:
    """llama.cpp's name of a target's architecture.

    Raises:
      UsageError: it has none that holds this configuration; the message says what is in the way.
    """
    name = ARCHITECTURES.get(config.family)
    if name is None:
        raise UsageError(f"llama.cpp has no architecture for the family {config.family}")
    obstacle = _obstacle(config)
    if obstacle:
        raise UsageError(f"not a GGUF file: llama.cpp's architecture {name} has {obstacle}")
    return name


def _obstacle(config: ModelConfig) -> str | None:
    """What llama.cpp lacks that would make it refuse the file."""
    a, moe, family = config.attention, config.experts, config.family
    if moe is not None and moe.dense_layers != tuple(range(len(moe.dense_layers))):
        return "no dense layers between those with experts"
    if moe is not None and moe.dense_layers and family not in _SHARING:
        return "no dense layers"
    if moe is not None and not moe.shared_width and family in _SHARING:
        return "no layers without shared experts"
    if isinstance(a, MLAConfig):
        if a.bias or config.mlp_bias:
            return "no biases"
        if a.query_rank is not None and config.num_layers in _LITE_DEPTHS:
            return f"no query rank in models of {config.num_layers} layers"
        return None
    if ARCHITECTURES[family] != "llama" and (a.rope.llama3 or a.rope.divisors):
        return "no divisors of rotary frequencies"
    if family == "gpt_oss":
        return None if a.bias and a.out_bias else "biases in every attention"
    if family in ("olmoe", "qwen3", "qwen3_moe") and (a.bias or a.out_bias):
        return "no biases in its attention"
    if family == "olmoe" and not config.width == a.heads * a.head_dim == a.kv_heads * a.head_dim:
        return "only keys and queries as wide as the model"
    return None


_SHARING = ("deepseek_v2", "deepseek_v3", "glm4_moe")


def differences(config: ModelConfig) -> list[str]:
    """Where llama.cpp computes something else than the reference, a sentence each."""
    a, moe, found = config.attention, config.experts, []
    yarn = a.rope.yarn
    if yarn is not None and not yarn.truncate:
        rounded = dataclasses.replace(a.rope, yarn=dataclasses.replace(yarn, truncate=True))
        if not np.allclose(inverse_frequencies(a.rope), inverse_frequencies(rounded), rtol=1e-6):
            found.append("YaRN's range is rounded to whole dimensions (truncate is false here)")
    if isinstance(a, MLAConfig):
        if yarn is not None and abs(table_scale(a.rope) - 1) > 1e-6:
            found.append("YaRN's mscale is taken to be equal to mscale_all_dim")
        if a.latent_norm_eps != config.norm_eps:
            found.append(
                f"attention's inner norms use eps {config.norm_eps:g}, not {a.latent_norm_eps:g}"
            )
    else:
        if a.windowed and config.family != "gpt_oss":
            found.append(f"there is no window: every position is seen (the window is {a.window})")
        every_second = tuple(range(0, config.num_layers, 2))
        if config.family == "gpt_oss" and a.window is not None and a.windowed != every_second:
            found.append("layers 0, 2, 4, ... have the window, whatever layer_types says")
        if a.clip is not None:
            found.append(f"queries, keys and values are not clipped (clip_qkv is {a.clip:g})")
    return found if moe is None else found + _expert_differences(config, moe)


def _expert_differences(config: ModelConfig, moe: MoEConfig) -> list[str]:
    found = []
    if moe.groups > 1 and moe.group_score == "max":
        found.append("groups of experts are ranked by their best two experts, not by their best")
    if config.family == "qwen3_moe" and not moe.normalised:
        found.append("gates are always renormalised (norm_topk_prob is false here)")
    if config.family == "olmoe" and moe.normalised:
        found.append("gates are never renormalised (norm_topk_prob is true here)")
    if moe.activation is not None:
        alpha, limit = moe.activation.alpha, moe.activation.limit
        if (alpha, limit) != (1.702, 7.0):
            found.append(
                f"experts use alpha 1.702 and limit 7 (swiglu_alpha is {alpha:g}, swiglu_limit "
                f"{limit:g} here)"
            )
    return found


def metadata(config: ModelConfig) -> dict[str, Value]:
    """All keys of the architecture (without the tokenizer's)."""
    a = config.attention
    own: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "feed_forward_length": config.dense_width,
        "attention.head_count": a.heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    own |= _mla(a) if isinstance(a, MLAConfig) else _gqa(config, a)
    own |= _rope(config)
    if config.experts is not None:
        own |= _experts(config, config.experts)
    name = architecture(config)
    return {f"{name}.{key}": value for key, value in own.items()}


def _mla(a: MLAConfig) -> dict[str, Value]:
    latent = a.kv_rank + a.rope.dim
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": latent,
        "attention.value_length": a.kv_rank,
        "attention.key_length_mla": a.nope_dim + a.rope.dim,
        "attention.value_length_mla": a.value_dim,
        "attention.kv_lora_rank": a.kv_rank,
        # Absent, it is missed at every depth but V2-Lite's.
        "attention.q_lora_rank": a.query_rank or 0,
    }


def _gqa(config: ModelConfig, a: GQAConfig) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "attention.head_count_kv": a.kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
    }
    if config.family == "gpt_oss":
        keys["attention.sliding_window"] = a.window if a.windowed and a.window else config.context
    return keys


def _rope(config: ModelConfig) -> dict[str, Value]:
    rope = config.attention.rope
    keys: dict[str, Value] = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    yarn = rope.yarn
    if yarn is None:
        return keys | {"rope.scaling.type": "none"}
    keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn.factor,
        "rope.scaling.original_context_length": yarn.original_context,
        "rope.scaling.yarn_beta_fast": yarn.beta_fast,
        "rope.scaling.yarn_beta_slow": yarn.beta_slow,
    }
    if isinstance(config.attention, MLAConfig):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * yarn.mscale_all_dim
    else:  # a factor on top of YaRN's own
        keys["rope.scaling.attn_factor"] = table_scale(rope) / magnitude(yarn.factor, 1.0)
    return keys


def _experts(config: ModelConfig, moe: MoEConfig) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.top_k,
        "expert_feed_forward_length": moe.expert_width,
        "expert_gating_func": _GATING[moe.scoring],
        "expert_weights_scale": moe.scaling,
        "expert_weights_norm": moe.normalised,
    }
    if config.family in _SHARING:
        keys["expert_shared_count"] = moe.shared_width // moe.expert_width
        keys["leading_dense_block_count"] = len(moe.dense_layers)
    if moe.groups > 1:
        keys |= {"expert_group_count": moe.groups, "expert_group_used_count": moe.groups_kept}
    return keys
