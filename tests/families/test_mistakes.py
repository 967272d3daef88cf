"""Mistakes that other implementations made, each with the thread where it was found.

Each is made in the reference, which must then be far from us: `test_parity` would catch us making
it. Those of deepseek_v2 are in its own file.
"""

import copy
import sys
from functools import partial

import numpy as np
import pytest
import torch

from dejax import families
from dejax.target import load_target
from tests.families import reference
from tests.families.configurations import FIRST, MOE_CONFIGS, PLAIN, raw_config, yarn
from tests.families.parity import (
    TOKENS,
    TOLERANCE,
    assert_same,
    difference,
    run,
)

pytestmark = pytest.mark.slow
FAR = 50 * TOLERANCE


def gates(**values):
    """Sets attributes of every router."""

    def make(model):
        for _, gate in reference.gates(model):
            for name, value in values.items():
                assert getattr(gate, name) != value
                setattr(gate, name, value)

    return make


def rule(function, **options):
    """Replaces the routing rule."""
    return lambda model: reference.set_gates(model, partial(function, **options))


def best_two(grouped):
    return grouped.topk(2).values.sum(-1)


def best_one(grouped):
    return grouped.max(-1).values


def sigmoid_rule(gate, logits, *, group_score=best_two, biased=False):
    """Of deepseek_v3 and glm4_moe."""
    scores = logits.sigmoid()
    choice = scores + gate.e_score_correction_bias
    grouped = choice.view(len(choice), gate.num_group, -1)
    best = group_score(grouped).topk(gate.topk_group).indices
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)
    ids = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(gate.top_k).indices
    weights = (choice if biased else scores).gather(1, ids)
    if gate.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * gate.routed_scaling_factor, ids


def softmax_rule(gate, logits, *, normalised):
    """Of qwen3_moe, olmoe and mixtral."""
    weights, ids = logits.softmax(-1).topk(gate.top_k)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights, ids


def softmax_of_chosen(gate, logits):
    """Of gpt_oss."""
    chosen, ids = logits.topk(gate.top_k)
    return chosen.softmax(-1), ids


def raw_logits(gate, logits):
    return logits.topk(gate.top_k)


def router_in_bfloat16(model):
    for _, gate in reference.gates(model):
        gate.weight.data = gate.weight.data.bfloat16().float()
        gate.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))


def configured(**values):
    """Changes what the model reads in its configuration while it runs."""

    def make(model):
        for name, value in values.items():
            assert getattr(model.config, name) != value
            setattr(model.config, name, value)

    return make


def transposed_down(model):
    for layer in model.model.layers:
        down = layer.mlp.experts.down_proj
        down.data = down.data.mT.contiguous()


def gate_and_up_in_halves(model):
    for layer in model.model.layers:
        experts, right = layer.mlp.experts, layer.mlp.experts._apply_gate

        def wrong(gate_up, right=right):
            return right(torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2))

        experts._apply_gate = wrong


def experts_with(**values):
    def make(model):
        for layer in model.model.layers:
            for name, value in values.items():
                setattr(layer.mlp.experts, name, value)

    return make


def no_sinks(model):
    for layer in model.model.layers:
        layer.self_attn.sinks.data[:] = -torch.inf


def unscaled_tables(model):
    model.model.rotary_emb.attention_scaling = 1.0


def without_head_norms(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()


MISTAKES = {
    # huggingface/transformers 41647, 41663: gates are the scores without the selection bias.
    "v3: biased gates": ("v3", rule(sigmoid_rule, biased=True)),
    "glm4: biased gates": ("glm4-moe", rule(sigmoid_rule, biased=True)),
    # vllm-project/vllm 14027: router logits need float32.
    "v3: short router": ("v3", router_in_bfloat16),
    "qwen3: short router": ("qwen3-moe", router_in_bfloat16),
    "mixtral: short router": ("mixtral", router_in_bfloat16),
    "gpt-oss: short router": ("gpt-oss", router_in_bfloat16),
    # pytorch/torchtitan 1448: gates are renormalised where the config says so.
    "moonlight: not normalised": ("moonlight", gates(norm_topk_prob=False)),
    "qwen3: not normalised": ("qwen3-moe", gates(norm_topk_prob=False)),
    # sgl-project/sglang-jax 1282: the scaling factor also counts without renormalisation.
    "v3: no scaling": ("v3-half-split", gates(routed_scaling_factor=1.0)),
    "glm4: no scaling": ("glm4-moe", gates(routed_scaling_factor=1.0)),
    # sgl-project/sglang 35160: gates are probabilities over all experts.
    "olmoe: raw logits": ("olmoe", rule(raw_logits)),
    "qwen3: raw logits": ("qwen3-moe-sparse", rule(raw_logits)),
    # NVIDIA/Megatron-LM 955: softmax over the chosen alone is another thing without renormalising.
    "qwen3: softmax of chosen": ("qwen3-moe-sparse", rule(softmax_of_chosen)),
    "gpt-oss: softmax of all": ("gpt-oss", rule(softmax_rule, normalised=False)),
    # ServiceNow/Fast-LLM 83: OLMoE does not renormalise.
    "olmoe: normalised": ("olmoe", gates(norm_topk_prob=True)),
    # EricLBuehler/mistral.rs 1278, NVIDIA/Megatron-LM 1381: a group's score is its best two.
    "v3: best one of a group": ("v3", rule(sigmoid_rule, group_score=best_one)),
    "glm4: best one of a group": ("glm4-moe-groups", rule(sigmoid_rule, group_score=best_one)),
    # NVIDIA-NeMo/Megatron-Bridge 3743: square experts, loaded the wrong way round.
    "gpt-oss: transposed": ("gpt-oss", transposed_down),
    "gpt-oss: halves": ("gpt-oss", gate_and_up_in_halves),
    # sgl-project/sglang 14270, TensorRT-Model-Connect 399: windows and YaRN's magnitude left out.
    "gpt-oss: no window": ("gpt-oss", configured(sliding_window=1000)),
    "mixtral: no window": ("mixtral-window", configured(sliding_window=1000)),
    "qwen3: no window": ("qwen3-window", configured(sliding_window=1000)),
    "qwen3-moe: no window": ("qwen3-moe-sparse", configured(sliding_window=1000)),
    "gpt-oss: unscaled tables": ("gpt-oss", unscaled_tables),
    # vllm-project/vllm 26995: which pairs are rotated is the weights' matter.
    "v3: half-split": ("v3", configured(rope_interleave=False)),
    "v3: interleaved": ("v3-half-split", configured(rope_interleave=True)),
    # What no thread is about, but nothing else would miss either.
    "gpt-oss: no sinks": ("gpt-oss", no_sinks),
    "gpt-oss: unclamped": ("gpt-oss-clamped", experts_with(limit=1e9)),
    "gpt-oss: other slope": ("gpt-oss-clamped", experts_with(alpha=1.702)),
    "olmoe: unclipped": ("olmoe-clip", configured(clip_qkv=None)),
    "qwen3: no head norms": ("qwen3-moe", without_head_norms),
    "glm4: no head norms": ("glm4-moe", without_head_norms),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_would_be_seen(case, mistake):
    name, make = MISTAKES[mistake]
    model = copy.deepcopy(case(name).model)
    make(model)
    assert difference(case(name).ours, reference.logits(model, TOKENS)) > FAR


RIGHT = {
    "v3": sigmoid_rule,
    "glm4-moe": sigmoid_rule,
    "qwen3-moe": partial(softmax_rule, normalised=True),
    "olmoe": partial(softmax_rule, normalised=False),
    "gpt-oss": softmax_of_chosen,
    # The two orders are one where the gates are renormalised (NVIDIA/Megatron-LM 955).
    "mixtral": softmax_of_chosen,
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_patched_rules_are_right_but_for_the_mistake(case, name):
    model = copy.deepcopy(case(name).model)
    reference.set_gates(model, RIGHT[name])
    assert_same(reference.logits(model, TOKENS), case(name).logits)


OTHER_ROTATIONS = {
    # huggingface/transformers: a key that is read from the wrong place falls back to a default.
    "gpt-oss": yarn(truncate=True, rope_theta=150000.0),
    "glm4-moe-groups": dict(PLAIN, partial_rotary_factor=0.5),
    "llama": dict(PLAIN, rope_theta=1e4),
    "v3": yarn(1.0, 0.5),
    "moonlight": dict(PLAIN, rope_theta=1e4),
}


@pytest.mark.parametrize("name", OTHER_ROTATIONS)
def test_another_rotation_would_be_seen(case, name):
    """TensorRT-Model-Connect 399: truncate, and every other setting of the rotation, counts."""
    other = reference.random_model(name, rope_parameters=OTHER_ROTATIONS[name])
    assert difference(case(name).ours, reference.logits(other, TOKENS)) > FAR


@pytest.mark.parametrize("name", ["qwen3-moe", "olmoe", "mixtral", "gpt-oss", "llama", "qwen3"])
def test_interleaved_rotation_would_be_seen(case, name, monkeypatch):
    """vllm-project/vllm 26995, the other way round: these weights are laid out in halves."""
    this = case(name)
    theirs = sys.modules[type(this.model).__module__]
    right = theirs.apply_rotary_pos_emb

    def paired(x):
        return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)

    monkeypatch.setattr(
        theirs, "apply_rotary_pos_emb", lambda q, k, *more: right(paired(q), paired(k), *more)
    )
    logits = reference.logits(this.model, TOKENS)
    by_position = np.abs(this.ours - logits).max(axis=(0, 2))
    assert by_position[0] <= TOLERANCE and by_position[1:].max() > FAR


def test_queries_and_keys_permuted_together_are_the_same_model(case, tmp_path):
    """huggingface/transformers 39687: rope_interleave and the order of the rows belong together."""
    model = copy.deepcopy(case("v3").model)
    model.config.rope_interleave = False
    heads, rope = 4, model.config.qk_rope_head_dim
    order = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    for layer in model.model.layers:
        queries = layer.self_attn.q_b_proj.weight.data.view(heads, -1, 24)
        queries[:, -rope:] = queries[:, -rope:][:, order]
        keys = layer.self_attn.kv_a_proj_with_mqa.weight.data
        keys[-rope:] = keys[-rope:][order]
    target = load_target(reference.save(model, tmp_path / "m"))
    assert not target.config.attention.rope.interleaved
    assert_same(target(TOKENS), case("v3").logits)


@pytest.mark.parametrize("name", ["v3", "glm4-moe"])
def test_selection_biases_are_never_short(case, tmp_path, name):
    """huggingface/transformers 42580, vllm-project/vllm 23640: bfloat16 picks other experts."""
    model = copy.deepcopy(case(name).model)
    for _, gate in reference.gates(model):
        gate.e_score_correction_bias += 8  # where bfloat16 has steps of 1/16
    folder = reference.save(model, tmp_path / "m")
    ours, ids = run(load_target(folder), TOKENS)
    assert_same(ours, reference.logits(model, TOKENS))
    held = load_target(folder, "bfloat16").model.layers[1].router
    kept = model.model.layers[1].mlp.gate.e_score_correction_bias.numpy()
    np.testing.assert_array_equal(held.selection_bias[...], kept, strict=True)
    for _, gate in reference.gates(model):
        gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16().float()
    logits, others = reference.run(model, TOKENS)
    assert difference(ours, logits) > FAR
    assert any((ids[layer] != others[layer]).any() for layer in ids)


@pytest.mark.parametrize("name", [n for n in FIRST.values() if n in MOE_CONFIGS])
def test_the_lower_of_equal_experts_is_chosen(case, tmp_path, name):
    """vllm-project/vllm 55514, 54403: which of two equal scores wins is stated, not left open."""
    model = copy.deepcopy(case(name).model)
    for _, gate in reference.gates(model):
        one = gate.num_experts // 2  # its neighbour is in the same group
        for attribute in ("weight", "bias", "e_score_correction_bias"):
            tensor = getattr(gate, attribute, None)
            if tensor is not None:
                tensor.data[one + 1] = tensor.data[one]
    _, ids = run(load_target(reference.save(model, tmp_path / "m")), TOKENS)
    alone = 0
    for chosen in ids.values():
        lower, higher = (chosen == one).any(-1), (chosen == one + 1).any(-1)
        assert not (higher & ~lower).any()
        alone += (lower & ~higher).sum()
    assert alone > 0  # the tie was on the edge of the selection


def test_both_styles_of_rope_keys_are_read():
    """TensorRT-Model-Connect 399: a release writes rope_scaling, a newer file rope_parameters."""
    new = raw_config("gpt-oss")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {k: v for k, v in new["rope_parameters"].items() if k != "rope_theta"}
    old |= dict(rope_scaling=scaling, rope_theta=150000.0)
    assert families.model_config(old) == families.model_config(new)
    assert families.model_config(old | dict(rope_theta=1e4)) != families.model_config(new)
    short = old | dict(rope_scaling={k: v for k, v in scaling.items() if k != "truncate"})
    assert families.model_config(short) != families.model_config(new)
