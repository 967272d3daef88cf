"""Hugging Face safetensors folders: strict reading and writing of a target's weights.

Every tensor of the folder must be one the family knows, with its shape; every tensor the
configuration needs must be there once. Violations are collected and reported together. Nothing is
unpickled.
"""

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float
from safetensors.numpy import save_file

from dejax.block_scaled import FP8, tiles
from dejax.ckpt.tensor_files import (
    SINGLE_FILE,
    TensorEntry,
    bad_tensors,
    equal_tensors,
    list_tensors,
    read_json,
    read_tensor,
)
from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.families import family_of
from dejax.families.expert_forms import FusedExperts, pack_expert
from dejax.model import Transformer
from dejax.shapes import Pair

__all__ = [
    "CheckpointPlan",
    "abstract_model",
    "array_paths",
    "checkpoint_tensors",
    "plan_checkpoint",
    "read_json",
    "read_array",
    "read_expert",
    "read_layer_experts",
    "read_resident",
    "resident_keys",
    "write_checkpoint",
]

_EMBEDDING_KEY = "model.embed_tokens.weight"
_HEAD_KEY = "lm_head.weight"


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


def _aliases(config: ModelConfig) -> dict[str, str]:
    """Checkpoint key -> its other name, for all layers."""
    names = getattr(family_of(config.family), "ALIASES", {})
    layers = [f"model.layers.{index}." for index in range(config.num_layers)]
    return {layer + key: layer + alias for layer in layers for alias, key in names.items()}


def array_paths(state: nnx.State) -> dict[str, Any]:
    """Dotted path -> abstract array of every parameter."""
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))
    return {".".join(str(part.key) for part in path): leaf for path, leaf in flat}


@dataclass(frozen=True)
class CheckpointPlan:
    """A checked folder: where each resident array and each routed expert lies.

    Attributes:
      resident: dotted path in `Transformer` -> entry.
      experts: (layer, expert) -> the entries gate, up, down; or (layer, -1) -> those of the layer's
        fused form, which `forms` names.
    """

    config: ModelConfig
    resident: dict[str, TensorEntry]
    experts: dict[Pair, tuple[TensorEntry, ...]]
    forms: dict[int, FusedExperts]

    @property
    def expert_dtype(self) -> np.dtype:
        """What the routed experts are stored as; where that differs, what holds all exactly."""
        stored = {form.numbers for form in self.forms.values() if form.numbers is not None}
        for (layer, expert), entries in self.experts.items():
            if expert >= 0 or self.forms[layer].numbers is None:
                stored |= {entry.numbers for entry in entries}
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

    def take(
        self, key: str, shape: tuple[int, ...], *, alias: str | None = None, packed: bool = False
    ) -> TensorEntry:
        """The entry of `key`, or of its other name where the folder has that one alone.

        `packed` tensors may be bytes. An FP8 matrix takes its scales along.
        """
        if alias is not None and key not in self.entries and alias in self.entries:
            key = alias
        self.left.discard(key)
        entry = self.entries.get(key)
        if entry is None:
            self.problems.append(f"{key}: missing")
            return TensorEntry(self.folder, 0, shape, np.dtype(np.float32))  # never read
        if entry.shape != shape:
            self.problems.append(f"{key}: shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype == FP8 and len(shape) != 2:
            self.problems.append(f"{key}: FP8 {list(shape)}, expected a matrix")
        elif entry.dtype == FP8:
            scale = self.take(f"{key}_scale_inv", tiles(shape))
            return replace(entry, scale=scale)
        elif entry.dtype == np.uint8 and not packed:
            self.problems.append(f"{key}: bytes, expected numbers")
        return entry

    def finish(self, ignored: tuple[str, ...] = (), cause: str = "") -> None:
        """Raises UsageError with every problem, the keys nobody took included.

        Keys that begin with one of `ignored` are no part of the target; `cause` is what a message
        tells before the tensors.
        """
        # The reference writes empty tensors for shared experts of width 0: they hold nothing.
        left = (key for key in self.left if not key.startswith(ignored))
        unknown = [key for key in left if self.entries[key].size]
        problems = self.problems + [f"{key}: unknown" for key in unknown]
        if problems:
            told = "; ".join(filter(None, [cause, bad_tensors(problems)]))
            raise UsageError(f"{self.folder}: {told}")


def _take_experts(
    taker: _Taker, config: ModelConfig
) -> tuple[dict[Pair, tuple[TensorEntry, ...]], dict[int, FusedExperts]]:
    """Entries of the routed experts in whichever disk layout a layer has; the fused layouts."""
    if not config.moe_layers:
        return {}, {}
    family = family_of(config.family)
    e, f, d = config.moe.num_experts, config.moe.expert_width, config.width
    experts, used = {}, {}
    forms = (family.FUSED, *getattr(family, "OTHER_FORMS", ()))
    single = getattr(family, "expert_keys", None)
    for layer in config.moe_layers:
        prefix = f"model.layers.{layer}."
        there = [sum(prefix + key in taker.entries for key in form.keys) for form in forms]
        if single is None or any(there):  # forms share some keys: the fullest one is meant
            form = forms[there.index(max(there))]
            take = partial(taker.take, packed=form.numbers is not None)
            keys = [prefix + key for key in form.keys]
            experts[layer, -1], used[layer] = tuple(map(take, keys, form.shapes(config))), form
            continue
        for expert in range(e):
            keys = [prefix + key for key in single(expert)]
            shapes = ((f, d), (f, d), (d, f))
            experts[layer, expert] = tuple(map(taker.take, keys, shapes))
    return experts, used


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


def _other_experts(config: ModelConfig, resident: dict[str, TensorEntry]) -> str:
    """Tells where all routers have rows for another number of experts than configured."""
    routers = [entry for path, entry in resident.items() if path.endswith("router.weight")]
    rows, count = {entry.shape[:1] for entry in routers}, config.moe.num_experts
    if len(rows) != 1 or (count,) in rows or () in rows:
        return ""
    return f"the files have {rows.pop()[0]} experts, config.json says {count}"


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
    shapes = {path: tuple(leaf.shape) for path, leaf in array_paths(state).items()}
    aliases = _aliases(config)
    resident = {
        path: taker.take(key, shapes[path], alias=aliases.get(key))
        for key, path in resident_keys(config).items()
    }
    experts, forms = ({}, {}) if resident_only else _take_experts(taker, config)
    if config.tied:
        _take_tied_head(taker)
    ignored = getattr(family_of(config.family), "ignored", None)
    cause = _other_experts(config, resident) if config.moe_layers else ""
    taker.finish(ignored(config) if ignored else (), cause)
    return CheckpointPlan(config, resident, experts, forms)


def read_expert(
    plan: CheckpointPlan, layer: int, expert: int, *, dtype=None
) -> Float[np.ndarray, "3 _F _D"]:
    """The record of one routed expert, of the shape `ModelConfig.expert_shape`.

    `dtype` defaults to that of the checkpoint (`plan.expert_dtype`).
    """
    dtype = plan.expert_dtype if dtype is None else dtype
    if (layer, -1) in plan.experts:
        rows = [read_tensor(entry.row(expert)) for entry in plan.experts[layer, -1]]
        return plan.forms[layer].pack(rows, dtype)
    matrices = tuple(read_tensor(entry) for entry in plan.experts[layer, expert])
    return pack_expert(*matrices, dtype=dtype)


def read_layer_experts(
    plan: CheckpointPlan, layer: int, *, dtype=None
) -> Iterator[tuple[int, Float[np.ndarray, "3 _F _D"]]]:
    """(expert, `read_expert`) of one MoE layer in ascending order, one in memory at a time."""
    for expert in range(plan.config.moe.num_experts):
        yield expert, read_expert(plan, layer, expert, dtype=dtype)


def read_array(plan: CheckpointPlan, path: str, dtype: Any) -> np.ndarray:
    """One resident array by its dotted path, in `dtype`; a router's keeps at least float32."""
    kept = jnp.promote_types(dtype, jnp.float32) if "router" in path else dtype
    return read_tensor(plan.resident[path]).astype(kept)


def read_resident(
    plan: CheckpointPlan, dtype, on_bytes: Callable[[int], None] = lambda count: None
) -> Transformer:
    """The resident model with its weights in `dtype` (`read_array`), each told by its bytes."""
    definition, state = abstract_model(plan.config)
    pure = nnx.to_pure_dict(state)

    def load(path, leaf):
        name = ".".join(str(part.key) for part in path)
        array = jax.device_put(read_array(plan, name, dtype))
        on_bytes(array.nbytes)
        return array

    return nnx.merge(definition, jax.tree_util.tree_map_with_path(load, pure))


def checkpoint_tensors(
    config: ModelConfig, model: Transformer, routed: dict[int, Any]
) -> dict[str, np.ndarray]:
    """The checkpoint's tensors from arrays: the exact inverse of reading.

    Experts lie one by one where the family has that form.
    """
    family = family_of(config.family)
    arrays = array_paths(nnx.split(model)[1])
    tensors = {key: np.asarray(arrays[path]) for key, path in resident_keys(config).items()}
    single = getattr(family, "expert_keys", None)
    for layer in config.moe_layers:
        stack, prefix = np.asarray(routed[layer]), f"model.layers.{layer}."
        if single is None:
            assert family.FUSED.unpack is not None
            parts = zip(*map(family.FUSED.unpack, stack), strict=True)
            for key, part in zip(family.FUSED.keys, parts, strict=True):
                # The order in memory counts: safetensors writes it as it is, whatever the strides.
                tensors[prefix + key] = np.ascontiguousarray(np.stack(part))
            continue
        for expert, (gate, up, down) in enumerate(stack):
            for key, value in zip(single(expert), (gate, up, down.T), strict=True):
                tensors[prefix + key] = np.ascontiguousarray(value)
    return tensors


def write_checkpoint(
    folder: Path,
    raw_config: dict[str, Any],
    model: Transformer,
    routed: dict[int, Any],
    *,
    dtype,
    tokenizer: Path | None = None,
    replace: bool = False,
) -> None:
    """Writes a Hugging Face folder (config, weights in `dtype`, tokenizer), whole or not at all.

    Raises:
      UsageError: the folder exists already, and is not to be replaced.
    """
    if folder.exists() and not replace:
        raise UsageError(f"{folder}: exists already; remove it or choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = checkpoint_tensors(model.config, model, routed)
    kept = {key for key, path in resident_keys(model.config).items() if "selection_bias" in path}
    tensors = {key: a if key in kept else a.astype(dtype) for key, a in tensors.items()}
    save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
    (partial / SINGLE_FILE).chmod(0o644)  # safetensors makes files for the owner alone
    config = raw_config | {"dtype": jnp.dtype(dtype).name}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
        return
    partial.rename(folder)
