"""Hugging Face safetensors folders: strict reading and writing of a target's weights.

Every tensor of the folder must be one the family knows, with its shape; every tensor the
configuration needs must be there once. Violations are collected and reported together. Nothing is
unpickled.
"""

import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dejax.ckpt.tensor_files import (
    SINGLE_FILE,
    TensorEntry,
    equal_tensors,
    list_tensors,
    read_json,
    read_tensor,
)
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.families import family_of
from dejax.model import Transformer
from dejax.shapes import Pair

__all__ = [
    "CheckpointPlan",
    "abstract_model",
    "checkpoint_tensors",
    "pack_expert",
    "plan_checkpoint",
    "read_json",
    "read_layer_experts",
    "read_resident",
    "resident_keys",
    "write_checkpoint",
]

_EMBEDDING_KEY = "model.embed_tokens.weight"
_HEAD_KEY = "lm_head.weight"
_SHOWN = 12  # problems listed before "and N more"


@functools.lru_cache(maxsize=4)  # tracing a deep model takes seconds, and loading asks twice
def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Definition and abstract state (shapes, no memory) of the resident model; read only."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)


def resident_keys(config: ModelConfig) -> dict[str, str]:
    """Checkpoint key -> dotted path in `Transformer`, for all resident weights."""
    family = family_of(config.family)
    keys = {_EMBEDDING_KEY: "embedding", "model.norm.weight": "norm.weight"}
    if not config.tied:
        keys[_HEAD_KEY] = "head"
    for index in range(config.num_layers):
        for key, path in family.layer_keys(config, index).items():
            keys[f"model.layers.{index}.{key}"] = f"layers.{index}.{path}"
    return keys


def _paths(state: nnx.State) -> dict[str, Any]:
    """Dotted path -> abstract array of every parameter."""
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    return {".".join(str(part.key) for part in path): leaf for path, leaf in flat}


@dataclass(frozen=True)
class CheckpointPlan:
    """A checked folder: where each resident array and each routed expert lies.

    Attributes:
      resident: dotted path in `Transformer` -> entry.
      experts: (layer, expert) -> the three entries gate, up, down; or (layer, -1) -> the two fused.
    """

    config: ModelConfig
    resident: dict[str, TensorEntry]
    experts: dict[Pair, tuple[TensorEntry, ...]]

    @property
    def expert_dtype(self) -> np.dtype:
        """What the routed experts are stored as; where that differs, what holds all exactly."""
        stored = {entry.dtype for entries in self.experts.values() for entry in entries}
        return np.dtype(functools.reduce(jnp.promote_types, stored))

    def resident_entries(self) -> dict[str, TensorEntry]:
        """Checkpoint key -> entry of every resident weight."""
        return {key: self.resident[path] for key, path in resident_keys(self.config).items()}


class _Taker:
    """Hands out entries by key and shape, and keeps account of what is wrong and what is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries, self.problems = list_tensors(folder)
        self.left = set(self.entries)

    def take(self, key: str, shape: tuple[int, ...]) -> TensorEntry:
        self.left.discard(key)
        entry = self.entries.get(key)
        if entry is None:
            self.problems.append(f"{key}: missing")
            return TensorEntry(self.folder, 0, shape, np.dtype(np.float32))  # never read
        if entry.shape != shape:
            self.problems.append(f"{key}: shape {list(entry.shape)}, expected {list(shape)}")
        return entry

    def finish(self) -> None:
        """Raises UsageError with every problem, the keys nobody took included."""
        # The reference writes empty tensors for shared experts of width 0: they hold nothing.
        unknown = [key for key in self.left if self.entries[key].size]
        problems = self.problems + [f"{key}: unknown" for key in unknown]
        if problems:
            shown = "; ".join(sorted(problems)[:_SHOWN])
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise UsageError(f"{self.folder}: {len(problems)} bad tensors: {shown}{more}")


def _take_experts(taker: _Taker, config: ModelConfig) -> dict[Pair, tuple[TensorEntry, ...]]:
    """Entries of the routed experts, in whichever disk layout a layer has."""
    family = family_of(config.family)
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    experts = {}
    for layer in config.moe_layers:
        prefix = f"model.layers.{layer}."
        gate_up, down = (prefix + key for key in family.FUSED_KEYS)
        if gate_up in taker.entries or down in taker.entries:
            fused = (taker.take(gate_up, (e, 2 * f, d)), taker.take(down, (e, d, f)))
            experts[layer, -1] = fused
            continue
        for expert in range(e):
            keys = (prefix + key for key in family.expert_keys(expert))
            shapes = ((f, d), (f, d), (d, f))
            experts[layer, expert] = tuple(map(taker.take, keys, shapes))
    return experts


def _take_tied_head(taker: _Taker) -> None:
    """Lets a tied checkpoint hold a head as well, if it is the embedding.

    Flag and file disagree in published checkpoints; which of the two is meant cannot be known.
    """
    embedding, head = taker.entries.get(_EMBEDDING_KEY), taker.entries.get(_HEAD_KEY)
    if embedding is None or head is None:
        return
    taker.left.discard(_HEAD_KEY)
    if not equal_tensors(embedding, head):
        taker.problems.append(
            f"{_HEAD_KEY}: differs from {_EMBEDDING_KEY}, but tie_word_embeddings is true "
            "(set it to false to use this head, or remove the tensor)"
        )


def plan_checkpoint(
    folder: Path, config: ModelConfig, *, resident_only: bool = False
) -> CheckpointPlan:
    """Checks every tensor of a folder against the configuration, before reading any weight.

    `resident_only` is for a converted folder, whose routed experts lie in a store.

    Raises:
      UsageError: listing every missing, unknown, doubled or misshapen tensor.
    """
    taker = _Taker(folder)
    _, state = abstract_model(config)
    shapes = {path: tuple(leaf.shape) for path, leaf in _paths(state).items()}
    resident = {path: taker.take(key, shapes[path]) for key, path in resident_keys(config).items()}
    experts = {} if resident_only else _take_experts(taker, config)
    if config.tied:
        _take_tied_head(taker)
    taker.finish()
    return CheckpointPlan(config, resident, experts)


def pack_expert(gate: np.ndarray, up: np.ndarray, down: np.ndarray, *, dtype=None) -> np.ndarray:
    """One expert record [3, F, D] from gate and up [F, D] and down [D, F], in `dtype` if given."""
    record = np.empty((3, *gate.shape), gate.dtype if dtype is None else dtype)
    for part, matrix in zip(record, (gate, up, down.T), strict=True):
        part[...] = matrix
    return record


def read_layer_experts(
    plan: CheckpointPlan, layer: int, *, dtype=None
) -> Iterator[tuple[int, np.ndarray]]:
    """(expert, record [3, F, D]) of one MoE layer in ascending order, one in memory at a time.

    `dtype` defaults to that of the checkpoint (`plan.expert_dtype`).
    """
    dtype = plan.expert_dtype if dtype is None else dtype
    for expert in range(plan.config.moe.num_experts):
        if (layer, -1) in plan.experts:
            gate_up, down = (read_tensor(e.row(expert)) for e in plan.experts[layer, -1])
            matrices = (*np.split(gate_up, 2), down)
        else:
            matrices = tuple(read_tensor(entry) for entry in plan.experts[layer, expert])
        yield expert, pack_expert(*matrices, dtype=dtype)


def read_resident(plan: CheckpointPlan, dtype) -> Transformer:
    """The resident model with its weights in `dtype`; the router keeps at least float32."""
    definition, state = abstract_model(plan.config)
    pure = nnx.to_pure_dict(state)

    def load(path, leaf):
        name = ".".join(str(part.key) for part in path)
        kept = jnp.promote_types(dtype, jnp.float32) if "router" in name else dtype
        return jax.device_put(read_tensor(plan.resident[name]).astype(kept))

    return nnx.merge(definition, jax.tree_util.tree_map_with_path(load, pure))


def checkpoint_tensors(
    config: ModelConfig, model: Transformer, routed: dict[int, Any]
) -> dict[str, np.ndarray]:
    """The checkpoint's tensors from arrays: the exact inverse of reading (per-expert layout)."""
    family = family_of(config.family)
    arrays = _paths(nnx.split(model)[1])
    tensors = {key: np.asarray(arrays[path]) for key, path in resident_keys(config).items()}
    for layer in config.moe_layers:
        stack = np.asarray(routed[layer])
        for expert in range(config.moe.num_experts):
            gate, up, down = stack[expert]
            for key, value in zip(family.expert_keys(expert), (gate, up, down.T), strict=True):
                tensors[f"model.layers.{layer}.{key}"] = np.ascontiguousarray(value)
    return tensors


def write_checkpoint(
    folder: Path,
    raw_config: dict[str, Any],
    model: Transformer,
    routed: dict[int, Any],
    *,
    dtype,
    tokenizer: Path | None = None,
) -> None:
    """Writes a Hugging Face folder (config, weights in `dtype`, tokenizer), whole or not at all.

    Raises:
      UsageError: the folder exists already.
    """
    if folder.exists():
        raise UsageError(f"{folder}: exists already; remove it or choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = checkpoint_tensors(model.config, model, routed)
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
    (partial / SINGLE_FILE).chmod(0o644)  # safetensors makes files for the owner alone
    config = raw_config | {"dtype": jnp.dtype(dtype).name}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
    partial.rename(folder)
