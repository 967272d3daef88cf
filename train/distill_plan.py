"""What a distillation would train, and the memory it takes, from a target's configuration alone.

The step is compiled for arrays that do not exist, and XLA says what it needs: no weight is read.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.config import DraftConfig, ModelConfig
from dejax.errors import UsageError
from dejax.sharding import draft_shardings, row_sharding, row_shards, target_shardings
from infer.console import print_table
from infer.units import format_bytes
from train.distill_config import DistillConfig, draft_config, loss_options
from train.distill_step import Batch
from train.flops import step_flops
from train.gradient_step import DistillState, make_step
from train.optimizer import make_optimizer
from train.stacked import StackedDef
from train.teacher import abstract_target

PER_DEVICE = ("target_bytes", "state_bytes", "batch_bytes", "step_bytes")
"""Parts of a device's memory: weights, draft with optimizer, rows, and what a step takes beside."""


def abstract_draft(config: ModelConfig, draft: DraftConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of stacked draft parameters."""
    layers = len(config.moe_layers)
    return {
        "weights": jax.ShapeDtypeStruct((layers, 3, draft.width, config.width), jnp.float32),
        "gamma": jax.ShapeDtypeStruct((layers,), jnp.float32),
    }


def abstract_batch(rows: int, seq_len: int, *, blocks: bool = False) -> Batch:
    """Shapes of a batch of packed rows, with numbered blocks or not."""
    kinds: dict[str, Any] = dict.fromkeys(
        ("tokens", "targets", "segment_ids", "positions"), jnp.int32
    )
    kinds |= {"blocks": jnp.int32} if blocks else {}
    kinds["mask"] = jnp.float32
    return {key: jax.ShapeDtypeStruct((rows, seq_len), kind) for key, kind in kinds.items()}


def lying(tree: Any, shardings: Any) -> Any:
    """Abstract arrays, each where its sharding says."""
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), tree, shardings
    )


def abstract_step(
    model: ModelConfig, config: DistillConfig, mesh: Any
) -> tuple[StackedDef, Any, tuple[Any, ...]]:
    """The target's definition, the jitted step, and the arguments it takes on a mesh, abstract."""
    definition, params = abstract_target(model, jnp.dtype(config.dtype))
    draft: Any = abstract_draft(model, draft_config(config, model))
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    opt_state = jax.eval_shape(optimizer.init, draft)
    average = draft if config.ema else None
    state = DistillState(draft=draft, opt_state=opt_state, average=average)
    step = make_step(
        optimizer,
        accumulate=config.accumulate,
        ema=config.ema,
        definition=definition,
        dtype=jnp.dtype(config.compute),
        **loss_options(config, model),
    )

    blocks = config.kv == "mixed"
    batch = abstract_batch(config.batch_size, config.seq_len, blocks=blocks)
    arguments = (
        lying(params, target_shardings(params, mesh)),
        lying(state, draft_shardings(state, mesh, split=config.split_draft)),
        lying(batch, jax.tree.map(lambda _: row_sharding(mesh), batch)),
        jax.ShapeDtypeStruct((4,), jnp.float32),
    )
    return definition, step, arguments


def step_bytes(step: Any, arguments: tuple[Any, ...], mesh: Any) -> int:
    """Bytes of a device that the compiled step takes beside its arguments."""
    with jax.set_mesh(mesh):
        analysis = step.lower(*arguments).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0


def count_params(tree: Any) -> int:
    """Numbers in a tree of arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of a tree of abstract arrays."""
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in jax.tree.leaves(tree))
    return sum(int(np.prod(shape)) * leaf.dtype.itemsize for shape, leaf in shapes)


def plan_distillation(model: ModelConfig, config: DistillConfig, mesh: Any) -> dict[str, Any]:
    """Counts, and bytes of each device by part.

    `trained_params`, `frozen_params`, `tokens`, `flops_per_token`, `devices`; `target_bytes`,
    `state_bytes` (draft parameters and optimizer), `batch_bytes`, and `step_bytes`, what the
    compiled step takes beside them.
    """
    _, step, arguments = abstract_step(model, config, mesh)
    params, state, batch, _ = arguments
    flops = step_flops(model, draft_config(config, model), config.seq_len)
    return {
        "trained_params": count_params(state.draft),
        "frozen_params": count_params(params),
        "tokens": config.loop.steps * config.batch_size * config.seq_len,
        "flops_per_token": flops.total,
        "devices": mesh.size,
        "target_bytes": device_bytes(params),
        "state_bytes": device_bytes(state),
        "batch_bytes": device_bytes(batch),
        "step_bytes": step_bytes(step, arguments, mesh),
    }


def written_bytes(model: ModelConfig, config: DistillConfig) -> int:
    """What a run has on disk at most: checkpoints kept, the one being written, and the adapter."""
    draft: Any = abstract_draft(model, draft_config(config, model))
    optimizer = make_optimizer(config.optimizer, config.loop.steps)
    state = (draft, jax.eval_shape(optimizer.init, draft), draft if config.ema else None)
    checkpoints = config.loop.keep + 1 if config.loop.save_every else 1
    return checkpoints * _bytes(state) + _bytes(draft)


def estimate_step_bytes(model: ModelConfig, config: DistillConfig, mesh: Any) -> int:
    """What a step takes of a device beside its arguments, by a formula (`docs/distillation.md`).

    For remat=layer. A layer's experts as the scan hands them on, and gathered over fsdp; the rows
    of a grouped product before, within and after it; what each layer leaves for the backward pass;
    attention scores; gradients. Or, if it is more, the logits of a chunk.
    """
    fsdp, expert, tensor = (mesh.shape[axis] for axis in ("fsdp", "expert", "tensor"))
    size, wide = jnp.dtype(config.compute).itemsize, 4
    length, width = config.seq_len, model.width
    batch = -(-config.batch_size // (row_shards(mesh) * config.accumulate))
    rows, experts = batch * length, model.moe.num_experts
    held = jnp.dtype(config.dtype).itemsize
    layer = experts * int(np.prod(model.expert_shape)) * held // (expert * tensor)
    layer_bytes = layer + (layer // fsdp if fsdp > 1 else 0)
    assigned = rows * expert * model.moe.top_k + 128 * experts // expert
    kept = len(model.moe_layers) * rows * (3 * width * size + experts * wide)
    scores = 2 * batch * model.attention.heads // tensor * length * length * size
    draft = draft_config(config, model)
    gradients = len(model.moe_layers) * 3 * draft.width * width * wide
    gradients //= fsdp if config.split_draft else 1
    chunk = min(512, rows) * fsdp * expert
    logits = 3 * chunk * (model.vocab_size // (fsdp * expert * tensor)) * wide
    passing = layer_bytes + 3 * assigned * width * size + scores
    return kept + gradients + max(passing, logits)


def device_memory() -> int:
    """Bytes of a device's memory; virtual CPU devices share this machine's."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


DRAFTS_LESS_MEMORY = {
    "target_bytes": "split the target over more devices (mesh.fsdp, mesh.expert), or hold it in "
    "dtype=bfloat16",
    "state_bytes": "set split_draft=true, or a smaller draft.width",
    "step_bytes": "set remat=layer, accumulate, or a smaller batch_size or seq_len",
    "batch_bytes": "set a smaller batch_size",
}
"""What helps where a part of `PER_DEVICE` is the largest."""


def check_memory(plan: dict[str, Any], less: dict[str, str] = DRAFTS_LESS_MEMORY) -> None:
    """Refuses a plan that the devices have no room for.

    Raises:
      UsageError: with what it takes and what would help.
    """
    needed, there = sum(plan[part] for part in PER_DEVICE), device_memory()
    if needed > there:
        largest = max(PER_DEVICE, key=lambda part: plan[part])
        raise UsageError(
            f"the run takes {format_bytes(needed)} of each device, which has "
            f"{format_bytes(there)}; {less[largest]}"
        )


def show_plan(what: str, plan: dict[str, Any]) -> None:
    """Prints the plan of `what` as a table."""
    rows = []
    for name, value in plan.items():
        words = name.replace("_", " ").removesuffix(" bytes")
        shown = format_bytes(value) if name.endswith("_bytes") else f"{value:,.0f}"
        rows.append((f"memory of a device: {words}" if name in PER_DEVICE else words, shown))
    total = sum(plan[part] for part in PER_DEVICE)
    rows.append(("memory of a device: all", format_bytes(total)))
    print_table(f"plan: {what}", ("what", "how much"), rows)
