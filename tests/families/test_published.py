"""The `config.json` of published checkpoints, read into models of the published size.

Quantised releases are here without their `quantization_config`.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dejax import families
from dejax.ckpt.hf_weights import abstract_model
from dejax.ckpt.tensor_files import read_json
from dejax.config import GQAConfig, MLAConfig, ModelConfig
from dejax.nn.rope import softmax_scale_factor

FOLDER = Path(__file__).parent / "published"
PUBLISHED = {
    # In billions: parameters, and those of the routed experts (None: not told apart).
    "DeepSeek-V2-Lite": (15.706, 14.395),
    "Moonlight-16B-A3B": (15.960, 14.395),
    "DeepSeek-V3.1": (671.026, 653.909),
    "Qwen3-30B-A3B": (30.532, 28.991),
    "Qwen3-235B-A22B": (235.094, 227.096),
    "OLMoE-1B-7B-0924": (6.919, 6.442),
    "Mixtral-8x7B-v0.1": (46.703, 45.097),
    "GLM-4.5-Air": (106.0, None),
    "gpt-oss-20b": (20.915, 19.117),
    "gpt-oss-120b": (116.829, 114.702),
}
SCALES = {"DeepSeek-V2-Lite": 0.114721, "DeepSeek-V3.1": 0.135234}


def config_of(name: str) -> ModelConfig:
    return families.model_config(read_json(FOLDER / f"{name}.json"))


def size(state) -> int:
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in jax.tree.leaves(state))


def total_params(config: ModelConfig) -> int:
    """Parameters of all layers, of which one of each kind is traced: a deep model takes seconds."""
    dense = len(config.moe.dense_layers)
    assert config.moe.dense_layers == tuple(range(dense))
    few = dataclasses.replace(config, num_layers=dense + 1)
    whole = nnx.to_pure_dict(abstract_model(few)[1])
    last = size(whole["layers"][dense])
    return size(whole) + last * (config.num_layers - few.num_layers) + config.routed_params


def test_every_published_file_is_counted():
    assert {file.stem for file in FOLDER.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_size_is_the_published_one(name):
    config = config_of(name)
    billions, routed = PUBLISHED[name]
    assert total_params(config) / 1e9 == pytest.approx(billions, rel=0.01)
    if routed is not None:
        assert config.routed_params / 1e9 == pytest.approx(routed, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "gpt-oss-20b"])
def test_the_layers_not_traced_are_as_the_last(name):
    config = config_of(name)
    assert size(abstract_model(config)[1]) + config.routed_params == total_params(config)


@pytest.mark.parametrize("name", SCALES)
def test_the_softmax_scale_of_extended_models(name):
    """huggingface/transformers 47435: with YaRN's factor."""
    attention = config_of(name).attention
    assert isinstance(attention, MLAConfig)
    dim = attention.nope_dim + attention.rope.dim
    assert dim**-0.5 * softmax_scale_factor(attention.rope) == pytest.approx(SCALES[name], rel=1e-5)


def test_settings_that_no_count_sees():
    oss = config_of("gpt-oss-20b")
    assert isinstance(oss.attention, GQAConfig) and oss.attention.rope.yarn is not None
    assert oss.window == 128 and oss.attention.windowed == tuple(range(0, 24, 2))
    assert oss.attention.sinks and not oss.attention.rope.yarn.truncate
    assert oss.moe.top_k == 4 and oss.moe.scoring == "softmax_chosen"
    air = config_of("GLM-4.5-Air")
    assert air.attention.rope.dim == 64 and air.moe.scoring == "sigmoid" and air.moe.normalised
    assert air.eos_ids == (151329, 151336, 151338)
    moonlight, v3 = config_of("Moonlight-16B-A3B"), config_of("DeepSeek-V3.1")
    assert moonlight.moe.scaling == 2.446 and moonlight.norm_eps == 1e-5
    assert (v3.moe.groups, v3.moe.groups_kept, v3.moe.group_score) == (8, 4, "top2")
    assert v3.moe.dense_layers == (0, 1, 2) and v3.attention.rope.interleaved
    assert (
        config_of("Qwen3-30B-A3B").moe.normalised and config_of("Mixtral-8x7B-v0.1").moe.normalised
    )
    olmoe = config_of("OLMoE-1B-7B-0924")
    assert not olmoe.moe.normalised and olmoe.attention.norm == "whole"
    assert config_of("Qwen3-235B-A22B").attention.head_dim == 128
    assert all(config_of(name).window is None for name in PUBLISHED if "gpt" not in name)
