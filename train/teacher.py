"""A target laid out for training: what distillation and evaluation run over whole sequences.

`load_teacher` brings a folder's weights straight to a mesh: every process reads the experts of its
own devices, a layer at a time, and no host ever holds a copy of the model.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dejax.ckpt import hf_weights
from dejax.ckpt.expert_store import ExpertStore
from dejax.config import DraftConfig, ModelConfig
from dejax.errors import UsageError
from dejax.model import Transformer
from dejax.sharding import check_divides, layer_sharding, make_mesh, place, target_shardings
from dejax.target import (
    STORE_DIR,
    Target,
    check_dtype,
    checkpoint_identity,
    is_gguf,
    load_config,
    load_target,
    load_tokenizer,
    model_folder,
)
from infer.console import progress
from train.stacked import StackedDef, StackedParams, stack_target

ReadExpert = Callable[[int, int], np.ndarray]
"""(decoder layer, expert) -> its record [3, F, D], in the dtype that it is held in."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen target with its layers stacked, on a mesh.

    Attributes:
      definition, params: as `stack_target` gives them, each array where the mesh has it; mesh: on
      which what uses them is run (`jax.set_mesh`); dtype: of the activations; identity, name,
      tokenizer: the target's.
    """

    definition: StackedDef
    params: StackedParams
    mesh: Mesh
    dtype: Any
    identity: str
    name: str
    tokenizer: Any

    @property
    def config(self) -> ModelConfig:
        """The target's configuration."""
        return self.definition.config


def one_device() -> Mesh:
    """The mesh of this process's first device alone."""
    return make_mesh(devices=jax.local_devices()[:1])


def drafting(teacher: Teacher, draft: DraftConfig) -> Teacher:
    """The same, with the gates that this draft path has."""
    definition = replace(teacher.definition, plain=draft.gates == "plain")
    return replace(teacher, definition=definition)


def as_teacher(target: Target | Teacher, mesh: Mesh | None = None) -> Teacher:
    """`target` laid out for training on a mesh, one device's unless given.

    Arrays are copied, and experts read if they lie in a store.

    Raises:
      UsageError: the target is dense, or the mesh does not divide it.
    """
    if isinstance(target, Teacher):
        return target
    _check_moe(target.config)
    return _lay_out(target, one_device() if mesh is None else mesh, target.compute_dtype)


def _check_moe(config: ModelConfig) -> None:
    if not config.moe_layers:
        raise UsageError(f"{config.family}: no layer has routed experts; expected a MoE")


def _lay_out(target: Target, mesh: Mesh, dtype: Any) -> Teacher:
    """A target, dense or not, on a mesh, for activations in `dtype`."""
    routed = {layer: target.layer_experts(layer) for layer in target.config.moe_layers}
    definition, params = stack_target(target.model, routed)
    check_divides(target.config, mesh)
    params = place(params, target_shardings(params, mesh))
    return Teacher(
        definition=definition,
        params=params,
        mesh=mesh,
        dtype=dtype,
        identity=target.identity,
        name=target.name,
        tokenizer=target.tokenizer,
    )


def abstract_target(config: ModelConfig, dtype: Any) -> tuple[StackedDef, StackedParams]:
    """Definition and shapes of a stacked target, without arrays."""
    definitions = []

    def build() -> StackedParams:
        model = Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))
        routed = {}
        if config.moe_layers:
            stack = jnp.zeros((config.moe.num_experts, *config.expert_shape), dtype)
            routed = dict.fromkeys(config.moe_layers, stack)
        definition, params = stack_target(model, routed)
        definitions.append(definition)
        return _routers_widened(params)

    params = jax.eval_shape(build)
    return definitions[0], params


def _routers_widened(params: StackedParams) -> StackedParams:
    """Routers in at least float32, as they are read."""

    def widen(path, leaf):
        if "router" not in jax.tree_util.keystr(path):
            return leaf
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    return jax.tree_util.tree_map_with_path(widen, params)


def load_teacher(
    path: str | Path,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    compute: str | None = None,
) -> Teacher:
    """Loads a target from a folder (Hugging Face or converted) or by name, onto a mesh.

    Args:
      dtype: what weights are held in; compute: dtype of the activations, at least float32 unless
      given.

    Raises:
      UsageError: the folder, its configuration or its tensors are not what is expected, the target
        is dense, or the mesh does not divide it.
    """
    held = check_dtype(dtype)
    _check_moe(load_config(model_folder(path)))
    return _read(path, mesh, held, _compute_dtype(held, compute))


def load_dense(
    path: str | Path, mesh: Mesh, *, dtype: str = "float32", compute: str | None = None
) -> Teacher:
    """As `load_teacher`, of a dense model: a Hugging Face folder, or a GGUF file of a Llama.

    A file is read whole by every process before it goes to the mesh.

    Raises:
      UsageError: as `load_teacher`, or the model is a mixture of experts.
    """
    held = check_dtype(dtype)
    if is_gguf(path):
        return _lay_out(load_target(path, dtype), mesh, _compute_dtype(held, compute))
    config = load_config(model_folder(path))
    if config.moe_layers:
        raise UsageError(f"{path}: {config.family} is a mixture of experts; expected a dense model")
    return _read(path, mesh, held, _compute_dtype(held, compute))


def _compute_dtype(held: Any, compute: str | None) -> Any:
    return jnp.promote_types(held, jnp.float32) if compute is None else check_dtype(compute)


def _read(path: str | Path, mesh: Mesh, held: Any, compute: Any) -> Teacher:
    """A folder's weights, in `held`, straight to the mesh."""
    folder = model_folder(path)
    config = load_config(folder)
    check_divides(config, mesh)
    converted = (folder / STORE_DIR).exists()
    plan = hf_weights.plan_checkpoint(folder, config, resident_only=converted)
    identity = checkpoint_identity(plan)
    read = functools.partial(hf_weights.read_expert, plan, dtype=held)
    if converted:
        store = ExpertStore.open(folder / STORE_DIR)
        store.check_fits(config)
        if store.identity != identity:
            raise UsageError(
                f"{folder}: the expert store is of target {store.identity}, the resident weights "
                f"of {identity}; convert the model again"
            )
        read = lambda layer, expert: store.decode(store.read(layer, expert)).astype(held)  # noqa: E731
    definition, shapes = abstract_target(config, held)
    return Teacher(
        definition=definition,
        params=_load(plan, read, definition, shapes, mesh),
        mesh=mesh,
        dtype=compute,
        identity=identity,
        name="tiny" if str(path) == "tiny" else folder.resolve().name,
        tokenizer=load_tokenizer(folder),
    )


def _load(
    plan: hf_weights.CheckpointPlan,
    read: ReadExpert,
    definition: StackedDef,
    shapes: StackedParams,
    mesh: Mesh,
) -> StackedParams:
    """Every array of a stacked target, on the mesh."""
    shardings = target_shardings(shapes, mesh)
    places, dense = definition.stacked_layers, definition.dense_layers

    def name_of(path) -> str:
        return ".".join(str(part.key) for part in path)

    def outer(path, shape, sharding):
        name = name_of(path)
        if name.startswith("layers."):
            _, place_, rest = name.split(".", 2)
            name = f"layers.{dense[int(place_)]}.{rest}"
        array = hf_weights.read_array(plan, name, shape.dtype)
        return jax.make_array_from_callback(shape.shape, sharding, lambda index: array[index])

    def stacked(path, shape, sharding):
        rest = name_of(path)

        @functools.cache  # one for all devices; dropped with the array
        def layer_array(layer):
            return hf_weights.read_array(plan, f"layers.{layer}.{rest}", shape.dtype)

        def part(index):
            return np.stack([layer_array(layer)[index[1:]] for layer in places[index[0]]])

        return jax.make_array_from_callback(shape.shape, sharding, part)

    moe = definition.config.moe_layers
    with progress("load", max(1, len(moe)), "layers") as bar:
        with bar.aside("reading resident weights"):
            walk = jax.tree_util.tree_map_with_path
            resident = walk(outer, shapes.outer, shardings.outer)
            layers = walk(stacked, shapes.layers, shardings.layers)
        routed = _load_experts(read, moe, shapes.routed, shardings.routed, bar.advance)
    return StackedParams(outer=resident, layers=layers, routed=routed)


def _load_experts(
    read: ReadExpert,
    layers: tuple[int, ...],
    shape: Any,
    sharding: Any,
    advance: Callable[[int], None],
) -> jax.Array:
    """The routed experts [L, E, 3, F, D], one layer's part of this process in host memory."""
    of_layer = layer_sharding(sharding)
    zeros = functools.partial(jnp.zeros, shape.shape, shape.dtype)
    stack = jax.jit(zeros, out_shardings=sharding)()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def put(stack, layer, place_):
        return jax.lax.dynamic_update_index_in_dim(stack, layer, place_, axis=0)

    for place_, layer in enumerate(layers):
        parts: dict[str, np.ndarray] = {}  # devices that hold the same part share one reading

        def part(index, layer=layer, parts=parts):
            if str(index) not in parts:
                experts = range(shape.shape[1])[index[0]]
                records = (read(layer, expert)[index[1:]] for expert in experts)
                parts[str(index)] = np.stack(list(records))
            return parts[str(index)]

        array = jax.make_array_from_callback(shape.shape[1:], of_layer, part)
        stack = put(stack, array, place_)
        jax.block_until_ready(stack)
        advance(1)
    return stack
