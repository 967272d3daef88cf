"""Configurations that nobody chose by hand, of every family, against `transformers`."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dejax.target import load_target
from tests.families import reference
from tests.families.configurations import FIRST, yarn
from tests.families.parity import TOKENS, TOLERANCE


def rotations():
    """Settings of the rotation that are open to every family."""
    thetas = st.sampled_from([100.0, 1e4, 1e6])
    originals = st.sampled_from([8, 20, 100])
    factors = st.floats(1.0, 40.0)
    return st.one_of(
        st.builds(dict, rope_type=st.just("default"), rope_theta=thetas),
        st.builds(
            yarn,
            rope_theta=thetas,
            factor=factors,
            original_max_position_embeddings=originals,
            beta_fast=st.sampled_from([4, 32]),
            truncate=st.booleans(),
        ),
        st.builds(
            dict,
            rope_type=st.just("llama3"),
            rope_theta=thetas,
            factor=factors,
            low_freq_factor=st.floats(0.5, 1.5),
            high_freq_factor=st.floats(2.0, 6.0),
            original_max_position_embeddings=originals,
        ),
    )


@st.composite
def grouped_query(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    return dict(
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        head_dim=draw(st.sampled_from([4, 6, 16])),
        rope_parameters=draw(rotations()),
    )


@st.composite
def latent(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    return dict(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=draw(st.sampled_from([None, 5])),
        kv_lora_rank=draw(st.sampled_from([6, 16])),
        qk_rope_head_dim=draw(st.sampled_from([2, 4, 10])),
        qk_nope_head_dim=draw(st.sampled_from([2, 6, 10])),
        v_head_dim=draw(st.integers(1, 9)),
        rope_interleave=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        rope_parameters=draw(rotations()),
    )


@st.composite
def sigmoid_experts(draw):
    groups = draw(st.sampled_from([1, 2, 3, 6]))
    kept = draw(st.integers(1, groups))
    return dict(
        n_routed_experts=12,
        n_shared_experts=draw(st.integers(1, 2)),
        num_experts_per_tok=draw(st.integers(1, 12 // groups * kept)),
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.floats(0.5, 4.0)),
        first_k_dense_replace=draw(st.integers(0, 1)),
    )


def merged(*parts):
    """One dictionary drawn of several strategies, or of values."""
    whole = st.tuples(*parts)
    return whole.map(lambda dicts: {k: v for part in dicts for k, v in part.items()})


def some(**values):
    """A dictionary with a strategy a key."""
    return st.fixed_dictionaries(values)


COMMON = some(
    hidden_size=st.sampled_from([20, 32]),
    num_hidden_layers=st.just(2),
    rms_norm_eps=st.sampled_from([1e-6, 1e-2]),
    tie_word_embeddings=st.booleans(),
)
BIAS = some(attention_bias=st.booleans())
WINDOW = st.sampled_from([1, 5, 40])
WINDOWED = some(use_sliding_window=st.booleans(), sliding_window=WINDOW)
CHOSEN = some(num_experts_per_tok=st.integers(1, 8), norm_topk_prob=st.booleans())
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=2, max_size=2)
SETTINGS = {
    "deepseek_v3": (latent(), sigmoid_experts()),
    "glm4_moe": (
        grouped_query().map(lambda s: s | dict(head_dim=8)),
        sigmoid_experts(),
        BIAS,
        some(use_qk_norm=st.booleans(), partial_rotary_factor=st.sampled_from([0.25, 0.5, 1.0])),
    ),
    "qwen3_moe": (
        grouped_query(),
        BIAS,
        WINDOWED,
        CHOSEN,
        some(decoder_sparse_step=st.integers(1, 2), mlp_only_layers=st.sampled_from([[], [0]])),
    ),
    "olmoe": (
        grouped_query().map(lambda s: {k: v for k, v in s.items() if k != "head_dim"}),
        BIAS,
        CHOSEN,
        some(clip_qkv=st.sampled_from([None, 0.5, 3.0]), hidden_size=st.just(32)),
    ),
    "mixtral": (
        grouped_query(),
        some(
            sliding_window=st.one_of(st.none(), WINDOW),
            num_local_experts=st.just(6),
            num_experts_per_tok=st.integers(1, 6),
        ),
    ),
    "gpt_oss": (
        grouped_query(),
        BIAS,
        some(
            sliding_window=WINDOW,
            layer_types=KINDS,
            num_experts_per_tok=st.integers(1, 8),
            intermediate_size=st.sampled_from([20, 32, 7]),
            swiglu_limit=st.sampled_from([0.5, 7.0]),
        ),
    ),
    "llama": (grouped_query(), BIAS, some(mlp_bias=st.booleans())),
    "qwen3": (
        grouped_query(),
        BIAS,
        some(use_sliding_window=st.just(True), sliding_window=WINDOW, layer_types=KINDS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SETTINGS)
def test_any_configuration(tmp_path_factory, family):
    @settings(max_examples=3, phases=[Phase.generate])  # each compiles: shrinking takes minutes
    @given(overrides=merged(COMMON, *SETTINGS[family]), seed=st.integers(0, 99))
    def sweep(overrides, seed):
        partial_factor = overrides.pop("partial_rotary_factor", None)
        if partial_factor is not None:
            overrides["rope_parameters"]["partial_rotary_factor"] = partial_factor
        model = reference.random_model(FIRST[family], seed, **overrides)
        target = load_target(reference.save(model, tmp_path_factory.mktemp("drawn")))
        tokens = TOKENS[:1, :33]
        expected = reference.logits(model, tokens)
        scale = max(1.0, expected.std())
        assert np.abs(np.asarray(target(tokens)) - expected).max() <= TOLERANCE * scale

    sweep()
