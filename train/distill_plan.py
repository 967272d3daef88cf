"""What a distillation would train, and the memory it takes, from a target's configuration alone.

The step is compiled for arrays that do not exist, and XLA says what it needs: no weight is read.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dejax.config import DraftConfig, ModelConfig
from dejax.model import Transformer
from dejax.sharding import data_mesh
from train.distill_step import Batch, DistillState, make_step
from train.optimizer import OptimizerConfig, make_optimizer
from train.stacked import StackedDef, StackedParams, stack_target


def abstract_target(config: ModelConfig, dtype: Any) -> tuple[StackedDef, StackedParams]:
    """Definition and shapes of a stacked target, without arrays."""
    definitions = []

    def build() -> StackedParams:
        model = Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))
        shape = (config.moe.num_experts, 3, config.moe.expert_width, config.width)
        routed = {layer: jnp.zeros(shape, dtype) for layer in config.moe_layers}
        definition, params = stack_target(model, routed)
        definitions.append(definition)
        return params

    params = jax.eval_shape(build)
    return definitions[0], params


def abstract_draft(config: ModelConfig, draft: DraftConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of stacked draft parameters."""
    layers = len(config.moe_layers)
    return {
        "weights": jax.ShapeDtypeStruct((layers, 3, draft.width, config.width), jnp.float32),
        "gamma": jax.ShapeDtypeStruct((layers,), jnp.float32),
    }


def abstract_batch(batch_size: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of packed rows."""
    kinds: dict[str, Any] = dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions"), jnp.int32
    )
    kinds["mask"] = jnp.float32
    return {k: jax.ShapeDtypeStruct((batch_size, seq_len), kind) for k, kind in kinds.items()}


def _size(tree: Any) -> tuple[int, int]:
    """Elements and bytes of a tree of (abstract) arrays."""
    leaves = jax.tree.leaves(tree)
    counts = [int(np.prod(leaf.shape)) for leaf in leaves]
    return sum(counts), sum(n * leaf.dtype.itemsize for n, leaf in zip(counts, leaves, strict=True))


def plan_distillation(
    config: ModelConfig,
    draft: DraftConfig,
    optimizer_config: OptimizerConfig,
    *,
    steps: int,
    batch_size: int,
    seq_len: int,
    dtype: Any,
    **loss_options: Any,
) -> dict[str, int]:
    """Counts and bytes by name.

    `trained_params`, `frozen_params`, `tokens`; `target_bytes` (once more while it is loaded),
    `state_bytes` (draft parameters and optimizer), `batch_bytes`, and `step_bytes`, what the
    compiled step takes beside them.
    """
    definition, params = abstract_target(config, dtype)
    trained: Any = abstract_draft(config, draft)
    optimizer = make_optimizer(optimizer_config, steps)
    state = DistillState(draft=trained, opt_state=jax.eval_shape(optimizer.init, trained))
    batch: Batch = abstract_batch(batch_size, seq_len)  # type: ignore[assignment]
    step: Any = make_step(
        optimizer, data_mesh(), definition=definition, r=draft.top_r, **loss_options
    )
    analysis = step.lower(params, state, batch).compile().memory_analysis()
    return {
        "trained_params": _size(trained)[0],
        "frozen_params": _size(params)[0],
        "tokens": steps * batch_size * seq_len,
        "target_bytes": _size(params)[1],
        "state_bytes": _size(state)[1],
        "batch_bytes": _size(batch)[1],
        "step_bytes": int(analysis.temp_size_in_bytes) if analysis is not None else 0,
    }
