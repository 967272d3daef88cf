"""deepseek_v2 beyond what all families are tested for: its mistakes, and any configuration.

What is equal to `transformers` here, and how, is in `test_parity` and `test_disk`.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as theirs

from dejax.target import load_target
from tests.families import reference
from tests.families.configurations import yarn
from tests.families.parity import TOKENS, TOLERANCE, assert_same
from tests.families.reference import set_gates

# Mistakes that other implementations made, with the thread where it was found. Each is made in the
# reference, which must then be far from us: parity above would catch us making it.


def half_split(x):
    """Interleaves the two halves, as if the weights were laid out for rotate-half."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def set_scaling(model, scaling):
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling


def top_k_of_groups(gate, logits, group_score):
    scores = logits.softmax(-1)
    grouped = scores.view(len(scores), gate.num_group, -1)
    best = group_score(grouped).topk(gate.topk_group).indices
    kept = torch.zeros(grouped.shape[:2]).scatter(1, best, 1)[:, :, None] * grouped
    weights, ids = kept.flatten(1).topk(gate.top_k)
    return weights * gate.routed_scaling_factor, ids


def softmax_after_top_k(gate, logits):
    chosen, ids = logits.topk(gate.top_k)
    return chosen.softmax(-1), ids


def raw_logits(gate, logits):
    return logits.topk(gate.top_k)


def no_scaling(model):
    for layer in model.model.layers[1:]:
        layer.mlp.gate.routed_scaling_factor = 1.0


def magnitude(scale):
    return 0.1 * scale * np.log(4.0) + 1


BASE_SCALE = 24**-0.5
MISTAKES = {
    # huggingface/transformers 47435, onnxruntime/mobius 548: YaRN's factor on the softmax scale.
    "no softmax factor": ("lite", lambda model: set_scaling(model, BASE_SCALE)),
    # NVIDIA/Megatron-LM 1429: that factor comes from mscale_all_dim, not from mscale.
    "factor of mscale": (
        "two-mscales-biases-tied",
        lambda model: set_scaling(model, BASE_SCALE * magnitude(1.0) ** 2),
    ),
    # The other correction, on cos and sin, when the two scales differ.
    "no table factor": (
        "two-mscales-biases-tied",
        lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.0),
    ),
    # EricLBuehler/mistral.rs 1278: a group's score is its maximum, not the sum of its best two.
    "group sum": (
        "full",
        lambda model: set_gates(
            model,
            lambda gate, logits: top_k_of_groups(gate, logits, lambda g: g.topk(2).values.sum(-1)),
        ),
    ),
    # NVIDIA/Megatron-LM 955, pytorch/torchtitan 1448: softmax over all experts, then top-k.
    "softmax after top-k": (
        "lite",
        lambda model: set_gates(model, softmax_after_top_k),
    ),
    # sgl-project/sglang 35160: the weights are probabilities.
    "raw logits": ("lite", lambda model: set_gates(model, raw_logits)),
    # sgl-project/sglang-jax 1282: the scaling factor also counts without renormalisation.
    "no scaling": ("full", no_scaling),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_would_be_seen(case, mistake):
    name, make = MISTAKES[mistake]
    assert_same(case(name).ours, case(name).logits)
    model = reference.random_model(name)
    make(model)
    assert np.abs(case(name).ours - reference.logits(model, TOKENS)).max() > 100 * TOLERANCE


def test_the_patched_gates_are_right_but_for_the_mistake(case):
    """The rule that `MISTAKES` changes, unchanged, is the reference."""
    model = reference.random_model("full")
    rule = functools.partial(top_k_of_groups, group_score=lambda g: g.max(-1).values)
    set_gates(model, rule)
    assert_same(reference.logits(model, TOKENS), case("full").logits)


def test_half_split_rope_would_be_seen(case, monkeypatch):
    """vllm-project/vllm 26995: the weights are laid out for interleaved pairs."""
    right = theirs.apply_rotary_emb
    wrong = lambda q, k, angles: right(half_split(q), half_split(k), angles)  # noqa: E731
    monkeypatch.setattr(theirs, "apply_rotary_emb", wrong)
    logits = reference.logits(case("lite").model, TOKENS)
    difference = np.abs(case("lite").ours - logits).max(axis=(0, 2))
    assert difference[0] <= TOLERANCE and difference[1:].max() > 100 * TOLERANCE


def test_inner_norms_keep_their_own_eps(tmp_path):
    """vllm-project/vllm 35515: 1e-6 in the norms of MLA, whatever rms_norm_eps says."""
    one_layer = dict(num_hidden_layers=1, first_k_dense_replace=0, rms_norm_eps=1e-2)
    model = reference.random_model("full", **one_layer)
    for layer in model.model.layers:  # latents so small that an eps of 1e-6 matters
        layer.self_attn.q_a_proj.weight.data *= 1e-3
        layer.self_attn.kv_a_proj_with_mqa.weight.data *= 1e-3
    ours = load_target(reference.save(model, tmp_path / "m"))(TOKENS)
    assert_same(ours, reference.logits(model, TOKENS))
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = 1e-2
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-2
    assert np.abs(ours - reference.logits(model, TOKENS)).max() > 100 * TOLERANCE


@st.composite
def overrides(draw):
    """Settings that differ from every named configuration, within what the family allows."""
    grouped = draw(st.booleans())
    groups = draw(st.sampled_from([2, 3, 6])) if grouped else 1
    kept = draw(st.integers(1, groups))
    rope_dim = draw(st.sampled_from([2, 4, 10]))
    settings = yarn(draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.9])))
    settings |= dict(
        factor=draw(st.floats(1.0, 40.0)),
        original_max_position_embeddings=draw(st.sampled_from([8, 20, 100])),
        beta_fast=draw(st.sampled_from([4, 32])),
        truncate=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([100.0, 1e6])),
    )
    if draw(st.booleans()):
        settings["attention_factor"] = draw(st.floats(0.5, 1.5))
    heads = draw(st.sampled_from([1, 2, 4]))
    return dict(
        hidden_size=draw(st.sampled_from([20, 32])),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        q_lora_rank=draw(st.sampled_from([None, 5])),
        kv_lora_rank=draw(st.sampled_from([6, 16])),
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=draw(st.sampled_from([2, 6, 10])),  # the reference fails if odd
        v_head_dim=draw(st.integers(1, 9)),
        n_routed_experts=12,
        n_shared_experts=draw(st.integers(0, 2)),
        num_experts_per_tok=draw(st.integers(1, 12 // groups * kept)),
        n_group=groups,
        topk_group=kept,
        topk_method="group_limited_greedy" if grouped else "greedy",
        routed_scaling_factor=draw(st.floats(0.5, 20.0)),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        rope_parameters=settings,
    )


@pytest.mark.slow
@settings(max_examples=5, phases=[Phase.generate])  # each compiles: shrinking would take minutes
@given(settings=overrides(), seed=st.integers(0, 99))
def test_any_configuration(tmp_path_factory, settings, seed):
    model = reference.random_model("lite", seed, **settings)
    target = load_target(reference.save(model, tmp_path_factory.mktemp("drawn")))
    tokens = TOKENS[:1, :33]
    expected = reference.logits(model, tokens)
    scale = max(1.0, expected.std())
    assert np.abs(np.asarray(target(tokens)) - expected).max() <= TOLERANCE * scale


def test_the_architecture_is_told_by_the_config(case):
    config = case("full").target.config
    assert (config.family, config.num_layers, config.moe_layers) == ("deepseek_v2", 3, (1, 2))
    assert config.moe.groups == 4 and config.moe.scaling == 16.0
    assert dataclasses.replace(config).identity() == config.identity()
