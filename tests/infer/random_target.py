"""Random targets made without a checkpoint: the shapes that decoding has to cope with.

Float64 targets need JAX's 64-bit mode around whatever makes or runs them. Weights come from NumPy,
so that a target is the same on every machine; their scales are such that the short draft path
agrees with the target on some tokens and not on others.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dejax.ckpt.expert_store import ExpertStore, ExpertStoreWriter
from dejax.ckpt.hf_weights import abstract_model
from dejax.config import DraftConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from dejax.draft.expert import Draft, random_draft
from dejax.target import Target

VOCAB, CONTEXT = 64, 320

_ATTENTION = MLAConfig(
    heads=2,
    query_rank=None,
    kv_rank=16,
    nope_dim=8,
    value_dim=8,
    rope=RopeConfig(dim=4, theta=1e4, interleaved=True),
)
_MOE = MoEConfig(
    num_experts=8, top_k=3, expert_width=16, shared_width=16, dense_layers=(0,), scaling=2.0
)
_SHARED = ModelConfig(
    family="deepseek_v2",
    vocab_size=VOCAB,
    width=32,
    num_layers=3,
    dense_width=48,
    context=CONTEXT,
    norm_eps=1e-6,
    tied=False,
    attention=_ATTENTION,
    experts=_MOE,
    eos_ids=(5, 9),
)
_YARN = YarnConfig(factor=4.0, original_context=80, mscale=0.707, mscale_all_dim=0.707)

SHAPES = {
    # A dense layer, then shared and routed experts.
    "shared": _SHARED,
    # Experts in every layer and none shared, compressed queries, biases, tied head, one EOS.
    "bare": dataclasses.replace(
        _SHARED,
        num_layers=2,
        tied=True,
        attention=dataclasses.replace(_ATTENTION, query_rank=12, bias=True),
        experts=dataclasses.replace(_MOE, top_k=2, shared_width=0, dense_layers=()),
        mlp_bias=True,
        eos_ids=(7,),
    ),
    # Group-limited routing, two dense layers, YaRN, half-split rotation, no EOS.
    "groups": dataclasses.replace(
        _SHARED,
        num_layers=4,
        attention=dataclasses.replace(
            _ATTENTION, rope=RopeConfig(dim=4, theta=1e4, interleaved=False, yarn=_YARN)
        ),
        experts=dataclasses.replace(
            _MOE, num_experts=12, groups=4, groups_kept=2, dense_layers=(0, 1), scaling=3.0
        ),
        eos_ids=(),
    ),
}


def random_target(
    config: ModelConfig | str = "shared", *, dtype=jnp.float64, seed: int = 0, tokenizer=None
) -> Target:
    """A target of a configuration, or of one of `SHAPES` by name; no weight is a default."""
    config = SHAPES[config] if isinstance(config, str) else config
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = ".".join(str(part.key) for part in path)
        noise = rng.standard_normal(leaf.shape)
        if "norm" in name:
            values = 1 + 0.2 * noise
        elif name.endswith("bias"):
            values = 0.2 * noise
        elif name in ("embedding", "head"):
            values = noise * 4 * config.width**-0.5
        else:
            values = 2 * noise * leaf.shape[-1] ** -0.5
        return jnp.asarray(values, dtype)

    definition, state = abstract_model(config)
    params = jax.tree_util.tree_map_with_path(fill, nnx.to_pure_dict(state))
    shape = (config.moe.num_experts, 3, config.moe.expert_width, config.width)
    scale = np.array([config.width**-0.5, config.width**-0.5, config.moe.expert_width**-0.5])
    routed = {
        layer: jnp.asarray(2 * rng.standard_normal(shape) * scale[:, None, None], dtype)
        for layer in config.moe_layers
    }
    return Target(
        config=config,
        model=nnx.merge(definition, params),
        routed=routed,
        store=None,
        tokenizer=tokenizer,
        identity=f"random-{seed}",
        name="random",
    )


def draft_of(target: Target, *, width: int = 8, seed: int = 0) -> Draft:
    """Untrained draft experts of a target."""
    return random_draft(
        target.config, DraftConfig(width=width), seed=seed, identity=target.identity
    )


def with_eos(target: Target, *eos_ids: int) -> Target:
    """The same target with other end tokens."""
    config = dataclasses.replace(target.config, eos_ids=eos_ids)
    return dataclasses.replace(target, config=config)


def store_of(target: Target, folder=None) -> ExpertStore:
    """An expert store of the target's experts, in a folder or in memory."""
    assert target.routed is not None
    some = target.routed[target.config.moe_layers[0]]
    with ExpertStoreWriter(
        folder,
        layers=target.config.moe_layers,
        num_experts=target.config.moe.num_experts,
        shape=some.shape[1:],
        dtype=some.dtype.name,
        identity=target.identity,
    ) as writer:
        for layer, stack in target.routed.items():
            for expert, record in enumerate(np.asarray(jax.device_get(stack))):
                writer.write(layer, expert, record)
        return writer.finish()


def random_prompt(length: int, *, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Token ids of a prompt; equal lengths and seeds give equal prompts."""
    return np.random.default_rng([seed, length]).integers(0, vocab, length).tolist()
