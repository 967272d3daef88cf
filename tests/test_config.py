"""Configurations: what a config.json means, and what is refused in one line."""

import dataclasses

import pytest

from dejax import families
from dejax.config import DraftConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from dejax.errors import UsageError
from tests.families.random_folder import raw_config

OLD_YARN = dict(
    type="yarn",
    factor=40,
    original_max_position_embeddings=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=0.707,
    mscale_all_dim=0.707,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def config_of(**overrides) -> ModelConfig:
    return families.model_config(raw_config(**overrides))


def without(*keys: str) -> dict:
    return {key: value for key, value in raw_config().items() if key not in keys}


def test_every_dimension_has_its_place():
    config = config_of(vocab_size=300, n_shared_experts=3, eos_token_id=[2, 7])
    assert (config.vocab_size, config.width, config.num_layers, config.context) == (300, 64, 3, 128)
    assert (config.dense_width, config.norm_eps, config.tied) == (96, 1e-6, False)
    assert config.eos_ids == (2, 7) and config.moe_layers == (1, 2)
    attention, moe = config.attention, config.moe
    assert (attention.heads, attention.query_rank, attention.kv_rank) == (4, None, 32)
    assert (attention.nope_dim, attention.rope.dim, attention.value_dim) == (16, 8, 16)
    assert attention.rope.interleaved and attention.latent_norm_eps == 1e-6
    assert (moe.num_experts, moe.top_k, moe.expert_width, moe.shared_width) == (8, 3, 32, 96)
    assert config.expert_params == 3 * 64 * 32 and config.routed_params == 2 * 8 * 3 * 64 * 32


@pytest.mark.parametrize("eos, ids", [(None, ()), (2, (2,)), ([], ()), ([3, 1], (3, 1))])
def test_end_tokens(eos, ids):
    assert config_of(eos_token_id=eos).eos_ids == ids


@pytest.mark.parametrize("dense, layers", [(0, (0, 1, 2)), (2, (2,)), (3, ()), (9, ())])
def test_moe_layers_follow_the_dense_ones(dense, layers):
    assert config_of(first_k_dense_replace=dense).moe_layers == layers


def test_groups_count_only_for_the_method_that_uses_them():
    grouped = dict(n_group=4, topk_group=2)
    assert config_of(topk_method="greedy", **grouped).moe.groups == 1
    moe = config_of(topk_method="group_limited_greedy", **grouped).moe
    assert (moe.groups, moe.groups_kept) == (4, 2)


def test_the_old_and_the_new_rope_settings_mean_the_same():
    old = without("rope_parameters") | dict(rope_scaling=OLD_YARN, rope_theta=5000)
    new = raw_config(rope_parameters=OLD_YARN | dict(rope_type="yarn", rope_theta=5000.0))
    both = old | {"rope_parameters": new["rope_parameters"]}
    rope = families.model_config(old).attention.rope
    assert rope == families.model_config(new).attention.rope
    assert rope == families.model_config(both).attention.rope
    yarn = YarnConfig(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
    assert rope == RopeConfig(dim=8, theta=5000.0, interleaved=True, yarn=yarn)


@pytest.mark.parametrize("settings", [None, {}, dict(rope_type="default"), dict(type="default")])
def test_no_rope_scaling(settings):
    raw = without("rope_parameters") | dict(rope_scaling=settings, rope_theta=5000)
    rope = families.model_config(raw).attention.rope
    assert rope == RopeConfig(dim=8, theta=5000.0, interleaved=True)
    assert families.model_config(without("rope_parameters")).attention.rope.theta == 10000.0


def test_yarn_takes_its_original_length_where_the_reference_does():
    scaling = {k: v for k, v in OLD_YARN.items() if k != "original_max_position_embeddings"}
    yarn = config_of(rope_parameters=scaling).attention.rope.yarn
    assert yarn is not None and yarn.original_context == 128
    raw = raw_config(rope_parameters=OLD_YARN, original_max_position_embeddings=64)
    assert families.model_config(raw).attention.rope.yarn.original_context == 64


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "kv_lora_rank", "n_routed_experts"]
)
def test_a_missing_dimension_is_named(key):
    with pytest.raises(UsageError, match=f"the key {key} is missing"):
        families.model_config(without(key))


@pytest.mark.parametrize("key", ["q_lora_rank", "n_shared_experts", "model_type"])
def test_absence_is_not_null(key):
    with pytest.raises(UsageError, match=f"the key {key} is missing"):
        families.model_config(without(key))


REFUSED = [
    (dict(hidden_size="64"), "hidden_size is '64'; expected an integer"),
    (dict(hidden_size=64.0), "hidden_size is 64.0; expected an integer"),
    (dict(hidden_size=True), "hidden_size is True; expected an integer"),
    (dict(hidden_size=None), "hidden_size is None; expected an integer"),
    (dict(hidden_size=0), "width is 0; expected a positive integer"),
    (dict(q_lora_rank=0), "query_rank is 0"),
    (dict(q_lora_rank="none"), "q_lora_rank is 'none'; expected an integer"),
    (dict(qk_rope_head_dim=7), "dim is 7; expected an even number"),
    (dict(rms_norm_eps="small"), "rms_norm_eps is 'small'; expected a number"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected a number"),
    (dict(rms_norm_eps=0), "norm_eps is 0"),
    (dict(routed_scaling_factor=10**400), "expected a number"),
    (dict(routed_scaling_factor=0), "routed_scaling_factor) is 0.0; expected a number > 0"),
    (dict(routed_scaling_factor=-1.5), "routed_scaling_factor) is -1.5; expected a number > 0"),
    (dict(routed_scaling_factor=float("nan")), "routed_scaling_factor is nan; expected a number"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; expected true or false"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'; expected 'silu'"),
    (dict(norm_topk_prob=True), "norm_topk_prob is True; expected False"),
    (dict(scoring_func="sigmoid"), "scoring_func is 'sigmoid'"),
    (dict(topk_method="noaux_tc"), "topk_method is 'noaux_tc'; expected 'greedy' or 'group_lim"),
    (dict(moe_layer_freq=2), "moe_layer_freq is 2"),
    (dict(num_key_value_heads=2), "num_key_value_heads is 2; expected 4"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantization 'gptq' is not read"),
    (
        dict(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "weight_block_size is [64, 64]; expected [128, 128]",
    ),
    (dict(num_experts_per_tok=9), "9 per token out of 8"),
    (dict(num_hidden_layers=10**6), "num_hidden_layers is 1000000; expected 1 to 10000"),
    (dict(first_k_dense_replace=-1), "first_k_dense_replace is -1; expected 0 or more"),
    (dict(first_k_dense_replace=2**63), "expected one below 2^31"),
    (dict(eos_token_id=[2, -1]), "eos_token_id is [2, -1]; expected an id"),
    (dict(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    (
        dict(model_type="phi"),
        "model_type 'phi' is not supported; supported: deepseek_v2, deepseek_v3, glm4_moe",
    ),
    (dict(model_type=None), "model_type is None; expected a string"),
    (dict(rope_parameters="yarn"), "rope_parameters is 'yarn'; expected an object"),
    (dict(rope_parameters=dict(type="linear", factor=2.0)), "rope type 'linear' is unknown"),
    (dict(rope_parameters=dict(type="yarn")), "the key factor is missing"),
    (dict(rope_parameters=OLD_YARN | dict(factor=0)), "YaRN factor is 0.0"),
    (dict(rope_parameters=OLD_YARN | dict(truncate=1)), "truncate is 1; expected true or false"),
    (dict(rope_parameters=OLD_YARN | dict(beta_slow=-1)), "expected positive betas"),
    (dict(rope_parameters=OLD_YARN | dict(attention_factor=0)), "expected positive betas"),
    (dict(rope_parameters=OLD_YARN | dict(factor=-4)), "YaRN factor is -4.0; expected > 0"),
    (dict(rope_parameters=OLD_YARN | dict(factor=float("nan"))), "factor is nan; expected a numb"),
    (dict(rope_parameters=OLD_YARN | dict(beta_fast=0.5)), "beta_fast is 0.5; expected at least"),
    (
        dict(rope_parameters=OLD_YARN | dict(original_max_position_embeddings=0)),
        "original_context is 0; expected a positive integer",
    ),
    (
        dict(rope_parameters=dict(rope_type="llama3", factor=8.0)),
        "the key low_freq_factor is missing",
    ),
    (dict(rope_parameters=LLAMA3), "the key original_max_position_embeddings is missing"),
    (
        dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=64, factor=0)),
        "expected a factor > 0",
    ),
    (
        dict(rope_parameters=dict(mrope_section=[8, 12, 12])),
        "rope_parameters has the key 'mrope_section', which is not computed here",
    ),
    (
        dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
        "rope_parameters has the key 'full_attention', which is not computed here",
    ),
    (dict(rope_parameters=dict(rope_theta=0)), "theta is 0.0; expected > 1"),
    (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor is 0.5"),
    (dict(rope_scaling=OLD_YARN), "rope_parameters and rope_scaling disagree"),
]


@pytest.mark.parametrize("overrides, message", REFUSED, ids=[text for _, text in REFUSED])
def test_what_is_not_honoured_is_refused(overrides, message):
    with pytest.raises(UsageError) as caught:
        config_of(**overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


WINDOWS = [
    ("mixtral-window", dict(sliding_window=0), "window is 0; expected a positive integer"),
    ("mixtral-window", dict(sliding_window=-8), "window is -8; expected a positive integer"),
    ("mixtral-window", dict(sliding_window=8.0), "sliding_window is 8.0; expected an integer"),
    ("gpt-oss", dict(sliding_window=0), "window is 0; expected a positive integer"),
    ("gpt-oss", dict(sliding_window=None), "window is None; expected a positive integer (2 layers"),
    ("qwen3-window", dict(sliding_window=0), "window is 0; expected a positive integer"),
    (
        "qwen3",
        dict(layer_types=["sliding_attention"] * 3),
        "window is None; expected a positive integer (3 layers",
    ),
]


@pytest.mark.parametrize("name, overrides, message", WINDOWS)
def test_windows_that_mean_nothing_are_refused(name, overrides, message):
    with pytest.raises(UsageError) as caught:
        families.model_config(raw_config(name, **overrides))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_window_left_out_is_the_reference_s():
    raw = {k: v for k, v in raw_config("gpt-oss").items() if k != "sliding_window"}
    assert families.model_config(raw).window == 128
    raw = {k: v for k, v in raw_config("mixtral-window").items() if k != "sliding_window"}
    assert families.model_config(raw).window is None
    assert families.model_config(raw_config("qwen3-window", max_window_layers=-1)).attention == (
        families.model_config(raw_config("qwen3-window", max_window_layers=0)).attention
    )


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf")])
def test_divisors_of_frequencies_are_positive(divisor):
    with pytest.raises(UsageError, match="divisor of the frequencies is not a positive number"):
        RopeConfig(dim=4, theta=1e4, interleaved=False, divisors=(1.0, divisor))


@pytest.mark.parametrize(
    "groups, kept, top_k, message",
    [
        (3, 1, 1, "expected groups that divide the experts"),
        (4, 5, 1, "at most all groups kept"),
        (4, 1, 3, "only 2 lie in the kept groups"),
        (0, 1, 1, "groups is 0"),
    ],
)
def test_groups_must_work_out(groups, kept, top_k, message):
    sizes = dict(num_experts=8, expert_width=4, shared_width=0)
    with pytest.raises(UsageError, match=message):
        MoEConfig(top_k=top_k, groups=groups, groups_kept=kept, **sizes)


def test_draft_config():
    assert DraftConfig(width=8).top_r == 1
    for wrong in (dict(width=0), dict(width=8, top_r=-1)):
        with pytest.raises(UsageError):
            DraftConfig(**wrong)


def test_identity_tells_configurations_apart():
    base = config_of()
    assert base.identity() == config_of().identity()
    others = [dict(rms_norm_eps=1e-5), dict(rope_parameters=OLD_YARN), dict(vocab_size=300)]
    identities = {config_of(**other).identity() for other in others}
    assert len(identities) == 3 and base.identity() not in identities


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_of().width = 3  # pyright: ignore[reportAttributeAccessIssue]
