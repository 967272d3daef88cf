"""Hugging Face safetensors folders: strict reading and writing of a target's weights.

Every tensor of the folder must be one the family knows, with its shape; every tensor the configuration
needs must be there once. Violations are collected and reported together. Nothing is unpickled.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dejax.config import ModelConfig
from dejax.errors import UsageError
from dejax.families import family_of
from dejax.model import Transformer

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHOWN = 12  # problems listed before "and N more"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, byte range in it, shape and dtype."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UsageError when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; expected a model folder with {path.name}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Entries of one safetensors file; UsageError when the file is cut short or malformed."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else None
    except (OSError, struct.error, ValueError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path}: not a safetensors file, or cut short in its header")
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = info["dtype"], tuple(info["shape"])
            start, end = info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise UsageError(f"{path}: the header entry of {name} is malformed") from None
        if dtype not in DTYPES:
            raise UsageError(
                f"{path}: {name} has dtype {dtype}; supported: {', '.join(sorted(DTYPES))}"
            )
        count = int(np.prod(shape, dtype=np.int64))
        if end - start != count * DTYPES[dtype].itemsize:
            raise UsageError(
                f"{path}: {name} has {end - start} bytes, not those of {shape} {dtype}"
            )
        if 8 + length + end > size:
            raise UsageError(
                f"{path}: cut short: {name} ends at byte {8 + length + end}, the file has {size}"
            )
        yield name, TensorEntry(path, 8 + length + start, shape, DTYPES[dtype])


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder (single file or sharded with an index), each exactly once."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise UsageError(f"{index}: expected an object weight_map from tensor to file name")
        files = sorted({folder / name for name in weight_map.values()})
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise UsageError(f"{index}: shards listed but missing: {', '.join(missing)}")
    else:
        weight_map, files = None, [folder / SINGLE_FILE]
        if not files[0].exists():
            raise UsageError(
                f"{folder}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards"
            )
    entries: dict[str, TensorEntry] = {}
    problems = []
    for file in files:
        for name, entry in _header(file):
            if name in entries:
                problems.append(f"{name}: in both {entries[name].file.name} and {file.name}")
            elif weight_map is not None and weight_map.get(name) != file.name:
                listed = weight_map.get(name, "nowhere")
                problems.append(f"{name}: in {file.name}, but the index lists it in {listed}")
            entries[name] = entry
    if weight_map is not None:
        problems += [
            f"{name}: in the index, but in no shard" for name in weight_map.keys() - entries
        ]
    _raise_all(folder, problems)
    return entries


def _raise_all(folder: Path, problems: list[str]) -> None:
    if problems:
        shown = "; ".join(sorted(problems)[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UsageError(f"{folder}: {len(problems)} bad tensors: {shown}{more}")


def read_tensor(entry: TensorEntry) -> np.ndarray:
    """One tensor, read from its byte range."""
    count = int(np.prod(entry.shape, dtype=np.int64))
    flat = np.fromfile(entry.file, dtype=entry.dtype, count=count, offset=entry.start)
    return flat.reshape(entry.shape)


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Definition and abstract state (shapes, no memory) of the resident model."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return nnx.split(model)


def resident_keys(config: ModelConfig) -> dict[str, str]:
    """Checkpoint key -> dotted path in `Transformer`, for all resident weights."""
    family = family_of(config.family)
    keys = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm.weight"}
    if not config.tied:
        keys["lm_head.weight"] = "head"
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
    experts: dict[tuple[int, int], tuple[TensorEntry, ...]]


def _expert_entries(
    config: ModelConfig, family: ModuleType, entries: dict[str, TensorEntry], problems: list[str]
) -> tuple[dict[tuple[int, int], tuple[TensorEntry, ...]], set[str]]:
    """Entries of the routed experts in either disk layout, and the keys they use up."""
    width, moe = config.width, config.moe
    experts, used = {}, set()

    def take(key: str, shape: tuple[int, ...]) -> TensorEntry | None:
        used.add(key)
        entry = entries.get(key)
        if entry is None:
            problems.append(f"{key}: missing")
        elif entry.shape != shape:
            problems.append(f"{key}: shape {list(entry.shape)}, expected {list(shape)}")
        return entry

    for layer in config.moe_layers:
        prefix = f"model.layers.{layer}."
        fused = [prefix + key for key in family.FUSED_KEYS]
        f, e = moe.expert_width, moe.num_experts
        if any(key in entries for key in fused):
            pair = (take(fused[0], (e, 2 * f, width)), take(fused[1], (e, width, f)))
            experts[layer, -1] = pair
            continue
        for expert in range(e):
            gate, up, down = (prefix + key for key in family.expert_keys(expert))
            experts[layer, expert] = (
                take(gate, (f, width)),
                take(up, (f, width)),
                take(down, (width, f)),
            )
    return experts, used


def plan_checkpoint(
    folder: Path, config: ModelConfig, *, resident_only: bool = False
) -> CheckpointPlan:
    """Checks every tensor of a folder against the configuration, before reading any weight.

    `resident_only` is for a converted folder, whose routed experts lie in a store.

    Raises:
      UsageError: listing every missing, unknown, doubled or misshapen tensor.
    """
    entries = list_tensors(folder)
    _, state = abstract_model(config)
    shapes = {path: tuple(leaf.shape) for path, leaf in _paths(state).items()}
    problems: list[str] = []
    resident = {}
    keys = resident_keys(config)
    for key, path in keys.items():
        entry = entries.get(key)
        if entry is None:
            problems.append(f"{key}: missing")
        elif entry.shape != shapes[path]:
            problems.append(f"{key}: shape {list(entry.shape)}, expected {list(shapes[path])}")
        else:
            resident[path] = entry
    experts, used = {}, set()
    if not resident_only:
        experts, used = _expert_entries(config, family_of(config.family), entries, problems)
    problems += [f"{key}: unknown" for key in entries.keys() - keys.keys() - used]
    _raise_all(folder, problems)
    return CheckpointPlan(config, resident, experts)


def pack_expert(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """One expert record [3, F, D] from gate and up [F, D] and down [D, F]."""
    return np.stack([gate, up, down.T])


def read_layer_experts(plan: CheckpointPlan, layer: int) -> Iterator[tuple[int, np.ndarray]]:
    """(expert, record [3, F, D]) of one MoE layer in ascending order, in the stored dtype."""
    for expert in range(plan.config.moe.num_experts):
        if (layer, -1) not in plan.experts:
            yield expert, pack_expert(*(read_tensor(e) for e in plan.experts[layer, expert]))
            continue
        gate_up, down = (_expert_slice(entry, expert) for entry in plan.experts[layer, -1])
        yield expert, pack_expert(*np.split(gate_up, 2), down)


def _expert_slice(entry: TensorEntry, expert: int) -> np.ndarray:
    """Row `expert` of a fused tensor, without reading the others."""
    size = int(np.prod(entry.shape[1:], dtype=np.int64)) * entry.dtype.itemsize
    return read_tensor(
        TensorEntry(entry.file, entry.start + expert * size, entry.shape[1:], entry.dtype)
    )


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
    """Writes a Hugging Face folder (config, weights in `dtype`, tokenizer files), whole or not at all.

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
    config = raw_config | {"dtype": jnp.dtype(dtype).name}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        shutil.copytree(tokenizer, partial, dirs_exist_ok=True)
    partial.rename(folder)
