"""What a dense model becomes: the layout of its neurons, and a `glm4_moe` checkpoint.

GLM-4.5's decoder without its peculiarities is a Llama with shared and routed experts: all of a head
rotated, no biases, normed heads or not. So the result is an ordinary checkpoint of that family,
which other programs read too.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from dejax.ckpt.gguf_weights import GGUFFile
from dejax.ckpt.hf_weights import abstract_model, array_paths
from dejax.config import GQAConfig, ModelConfig, RopeConfig
from dejax.errors import UsageError
from dejax.model import Transformer
from dejax.target import is_gguf, load_config, model_folder
from train.upcycle_layers import RoutedLayer

SOURCES = ("llama", "qwen3")
"""Families whose dense models can be upcycled."""
BLOCK = 32
"""Expert widths are multiples of it: GGUF quantises blocks of so many weights."""
MOST_UNITS = 64
"""Experts of the default width that would hold all neurons, at most."""


@dataclass(frozen=True)
class Layout:
    """How a dense layer's neurons are dealt out.

    Attributes:
      shared: neurons that are always on; experts, width: routed experts and their neurons; top_k:
      experts of a token; first_dense: leading layers that stay dense.
    """

    shared: int
    experts: int
    width: int
    top_k: int
    first_dense: int

    @property
    def active_share(self) -> float:
        """Neurons that a token uses in a MoE layer, of all."""
        return (self.shared + self.top_k * self.width) / (self.shared + self.experts * self.width)


def dense_config(path: str | Path) -> ModelConfig:
    """The configuration of a dense model that can be upcycled; no weights are read.

    Raises:
      UsageError: it is a MoE, of another family, or has what `glm4_moe` lacks.
    """
    config = GGUFFile(Path(path)).config() if is_gguf(path) else load_config(model_folder(path))
    if config.experts is not None:
        raise UsageError(
            f"{path}: {config.family} is a mixture of experts already; expected a dense model"
        )
    attention = config.attention
    if config.family not in SOURCES or not isinstance(attention, GQAConfig):
        raise UsageError(f"{path}: {config.family}; expected one of {', '.join(SOURCES)}")
    lacking = {
        "biases": attention.bias or attention.out_bias or config.mlp_bias,
        "a sliding window": bool(attention.windowed),
        "its own divisors of the rotary frequencies": attention.rope.divisors is not None,
    }
    for what, there in lacking.items():
        if there:
            raise UsageError(
                f"{path}: the model has {what}, which a glm4_moe checkpoint cannot have; expected "
                "one without"
            )
    return config


def choose_layout(
    neurons: int,
    layers: int,
    *,
    shared: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    first_dense: int = 1,
) -> Layout:
    """The layout of `neurons` a layer; what is not given follows from the rest.

    By default a quarter of the neurons is shared, the experts are as narrow as they may be, and
    half of them are chosen.

    Raises:
      UsageError: the numbers do not divide as they must.
    """
    default = next(
        (
            w
            for w in range(BLOCK, neurons + 1, BLOCK)
            if neurons % w == 0 and neurons // w <= MOST_UNITS
        ),
        BLOCK,
    )
    shared = neurons // default // 4 * default if shared is None else shared
    experts = max(1, (neurons - shared) // default) if experts is None else experts
    width = max(0, neurons - shared) // experts
    if width == 0 or shared + experts * width != neurons or width % BLOCK:
        raise UsageError(
            f"{neurons} neurons less {shared} shared ones over {experts} experts are "
            f"{(neurons - shared) / experts:g} each; expected a multiple of {BLOCK}"
        )
    if shared % width or not shared:
        raise UsageError(
            f"--shared: {shared} is not a multiple of the experts' width {width}; expected one, as "
            "a glm4_moe checkpoint counts shared experts of that width"
        )
    top_k = max(1, experts // 2) if top_k is None else top_k
    if top_k > experts:
        raise UsageError(f"--top-k: {top_k} of {experts} experts; expected at most all of them")
    if first_dense >= layers:
        raise UsageError(
            f"--first-dense: {first_dense} of {layers} layers; expected fewer than there are"
        )
    return Layout(shared, experts, width, top_k, first_dense)


def raw_config(dense: ModelConfig, layout: Layout) -> dict[str, Any]:
    """`config.json` of the MoE.

    Gates are the chosen scores over their sum, times `top_k`: their mean is 1, the weight that an
    expert's neurons have in the dense model.
    """
    attention = dense.attention
    assert isinstance(attention, GQAConfig)
    eos = dense.eos_ids
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": dense.vocab_size,
        "hidden_size": dense.width,
        "intermediate_size": dense.dense_width,
        "moe_intermediate_size": layout.width,
        "num_hidden_layers": dense.num_layers,
        "first_k_dense_replace": layout.first_dense,
        "n_routed_experts": layout.experts,
        "num_experts_per_tok": layout.top_k,
        "n_shared_experts": layout.shared // layout.width,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(layout.top_k),
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": False,
        "use_qk_norm": attention.norm == "head",
        "partial_rotary_factor": 1.0,
        "rope_parameters": _rope_parameters(attention.rope),
        "max_position_embeddings": dense.context,
        "rms_norm_eps": dense.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": dense.tied,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "num_nextn_predict_layers": 0,
    }


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    common = {"rope_theta": rope.theta, "partial_rotary_factor": 1.0}
    names = {"original_context": "original_max_position_embeddings"}
    for kind, scaling in (("llama3", rope.llama3), ("yarn", rope.yarn)):
        if scaling is not None:
            # What is 0 or None is what a file does not say.
            told = {names.get(key, key): v for key, v in asdict(scaling).items() if v}
            if rope.yarn is not None:
                told["truncate"] = rope.yarn.truncate
            return common | told | {"rope_type": kind}
    return common | {"rope_type": "default"}


def assemble(
    dense: Transformer, config: ModelConfig, layers: dict[int, RoutedLayer], dtype: Any
) -> tuple[Transformer, dict[int, Array]]:
    """The MoE in `dtype`: resident weights, and the routed experts [E, 3, F, D] of each layer.

    Args:
      dense: the original model; config: the MoE's; layers: its upcycled layers, by their place.
    """
    definition, state = abstract_model(config)
    arrays = array_paths(nnx.split(dense)[1])
    shared, routed = config.moe.shared_width, {}
    for place, layer in layers.items():
        mlp, prefix = f"layers.{place}.mlp", f"layers.{place}"
        gate, up = (
            np.asarray(arrays.pop(f"{mlp}.{name}.weight").astype(dtype))[layer.order]
            for name in ("gate_proj", "up_proj")
        )
        arrays |= {
            f"{prefix}.router.weight": layer.router,
            f"{prefix}.router.selection_bias": layer.selection_bias,
            f"{prefix}.shared.gate_proj.weight": gate[:shared],
            f"{prefix}.shared.up_proj.weight": up[:shared],
            f"{prefix}.shared.down_proj.weight": layer.down[:, :shared],
        }
        parts = np.stack([gate[shared:], up[shared:], layer.down[:, shared:].T])
        stack = parts.reshape(3, config.moe.num_experts, config.moe.expert_width, config.width)
        routed[place] = jnp.asarray(stack.swapaxes(0, 1))

    def load(path: Any, leaf: Any) -> Array:
        name = ".".join(str(part.key) for part in path)
        kept = jnp.float32 if "selection_bias" in name else dtype
        return jnp.asarray(arrays[name]).astype(kept)

    pure = nnx.to_pure_dict(state)
    return nnx.merge(definition, jax.tree_util.tree_map_with_path(load, pure)), routed
