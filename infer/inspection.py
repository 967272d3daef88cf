"""What a target is, what it weighs, and what of it fits where.

Without weights (a folder that has only its `config.json`) sizes are those of bfloat16. Parameters
are counted on the abstract model, so that nothing is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dejax.ckpt.draft_state import draft_facts, draft_tensors, head_tensors
from dejax.ckpt.expert_codec import OPTIONS, record_bytes
from dejax.ckpt.expert_store import ExpertStore
from dejax.ckpt.gguf_weights import GGUFFile
from dejax.ckpt.hf_weights import abstract_model, plan_checkpoint
from dejax.ckpt.tensor_files import INDEX_FILE, SINGLE_FILE
from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.nn.attention import init_cache
from dejax.target import (
    STORE_DIR,
    checkpoint_identity,
    gguf_identity,
    is_gguf,
    load_config,
    model_folder,
)

ASSUMED = jnp.dtype(jnp.bfloat16)
"""What weights count as where there are none."""
DEVICES_GB = (8, 24, 80)
CONTEXT = 4096
"""Tokens of KV cache that a device is to hold, where the context has as many."""


@dataclass(frozen=True)
class Part:
    """Some of the weights: how many, the dtypes they are stored in, and their bytes."""

    params: int
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Fit:
    """What a device of `memory_bytes` holds beside the weights that are always resident.

    Attributes:
      fixed_bytes: resident weights, draft experts and KV cache.
      experts: routed experts that fit in the rest; None if the fixed part alone does not.
    """

    memory_bytes: int
    fixed_bytes: int
    experts: int | None


@dataclass(frozen=True)
class Inspection:
    """Everything `dejax inspect` tells of a target.

    Attributes:
      name: of the folder or file; kind: "config", "checkpoint", "converted" or "gguf".
      identity: what adapters are bound to; None without weights.
      total, active: parameters in all and for one token (embedding and head counted).
      active_top1: the same when a layer runs its top-1 expert alone.
      embedding, head: parameters of the two; the head has none of its own where they are tied.
      routed, rest: the routed experts, and the resident weights.
      expert: one routed expert; layer_experts: their number over all layers.
      stored_expert_bytes: of one expert, by the encodings that `dejax convert` knows.
      drafts: draft experts of one routed expert's width, one a MoE layer.
      kv_bytes_per_token: by the dtype of the cache.
    """

    name: str
    kind: str
    identity: str | None
    config: ModelConfig
    total: int
    active: int
    active_top1: int
    embedding: int
    head: int
    routed: Part
    rest: Part
    expert: Part
    layer_experts: int
    stored_expert_bytes: Mapping[str, int]
    drafts: Part
    kv_bytes_per_token: Mapping[str, int]
    fits: tuple[Fit, ...]

    @property
    def routed_share(self) -> float:
        """Routed parameters as a part of all."""
        return self.routed.params / self.total

    def to_json(self) -> dict[str, Any]:
        """Every figure by name, for `--json`."""
        return vars(self) | {"routed_share": self.routed_share}


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def cache_size(config: ModelConfig) -> int:
    """Numbers that the KV cache keeps for one token, over all layers."""
    layer = jax.eval_shape(partial(init_cache, config.attention, 1, jnp.float32))
    return config.num_layers * _count(layer)


def resident_params(config: ModelConfig) -> int:
    """Parameters beside the routed experts.

    One layer of each kind is traced: all layers of a deep model would take half a minute.
    """
    moe = config.experts and replace(config.experts, dense_layers=(0,))
    few = replace(config, num_layers=2, experts=moe)
    whole = nnx.to_pure_dict(abstract_model(few)[1])
    dense, last = (_count(layer) for layer in whole.pop("layers").values())
    routing = len(config.moe_layers)
    return _count(whole) + (config.num_layers - routing) * dense + routing * last


@dataclass(frozen=True)
class _Stored:
    """What is on disk: the kind of model, its identity, and its two parts as they are stored."""

    kind: str
    identity: str | None
    rest: Part
    routed: Part


def _stored_gguf(file: GGUFFile, params: int) -> _Stored:
    return _Stored("gguf", gguf_identity(file), Part(params, *file.stored()), Part(0, "", 0))


def _stored_folder(folder: Path, config: ModelConfig, params: tuple[int, int]) -> _Stored:
    """`params` are those of the two parts."""
    if (folder / STORE_DIR).exists():
        store = ExpertStore.open(folder / STORE_DIR)
        plan = plan_checkpoint(folder, config, resident_only=True)
        routed = (store.encoding, len(store.pairs) * store.bytes_per_expert)
        kind = "converted"
    elif (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        plan = plan_checkpoint(folder, config)
        entries = [entry for expert in plan.experts.values() for entry in expert]
        routed = (_dtypes(entries), sum(entry.nbytes for entry in entries))
        kind = "checkpoint"
    else:
        rest, routed = (Part(n, ASSUMED.name, n * ASSUMED.itemsize) for n in params)
        return _Stored("config", None, rest, routed)
    resident = list(plan.resident.values())
    rest = Part(params[0], _dtypes(resident), sum(entry.nbytes for entry in resident))
    return _Stored(kind, checkpoint_identity(plan), rest, Part(params[1], *routed))


def _dtypes(entries: Any) -> str:
    return " and ".join(sorted({entry.dtype.name for entry in entries}))


def inspect(path: str | Path) -> Inspection:
    """Counts a target: a Hugging Face folder (its config suffices), a converted one, a GGUF file,
    or "tiny".

    Raises:
      UsageError: the folder or file, its configuration or its tensors are not what is expected.
    """
    if is_gguf(path):
        file, name = GGUFFile(Path(path)), Path(path).name
        config = file.config()
        resident = resident_params(config)
        stored = _stored_gguf(file, resident)
    else:
        folder = model_folder(path)
        name = "tiny" if str(path) == "tiny" else folder.resolve().name
        config = load_config(folder)
        resident = resident_params(config)
        stored = _stored_folder(folder, config, (resident, config.routed_params))
    rest, routed = stored.rest, stored.routed
    layers, moe = len(config.moe_layers), config.experts
    layer_experts = layers * moe.num_experts if moe else 0
    expert_bytes = routed.bytes // layer_experts if layer_experts else 0
    expert_params = config.expert_params if moe else 0
    draft_params = layers * expert_params
    drafts = Part(draft_params, ASSUMED.name, draft_params * ASSUMED.itemsize)
    kv = {name: cache_size(config) * jnp.dtype(name).itemsize for name in ("bfloat16", "float32")}
    fixed = rest.bytes + drafts.bytes + kv["bfloat16"] * min(config.context, CONTEXT)
    fits = [_fit(gb * 10**9, fixed, expert_bytes, layer_experts) for gb in DEVICES_GB]
    return Inspection(
        name=name,
        kind=stored.kind,
        identity=stored.identity,
        config=config,
        total=resident + config.routed_params,
        active=resident + config.routes_per_token * expert_params,
        active_top1=resident + layers * expert_params,
        embedding=config.vocab_size * config.width,
        head=0 if config.tied else config.vocab_size * config.width,
        routed=routed,
        rest=rest,
        expert=Part(expert_params, routed.dtype, expert_bytes),
        layer_experts=layer_experts,
        stored_expert_bytes=_stored_bytes(config),
        drafts=drafts,
        kv_bytes_per_token=kv,
        fits=tuple(fits),
    )


def _stored_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one expert in a store, by what `--experts` says."""
    if config.experts is None:
        return {}
    shape = config.expert_shape
    return {name: record_bytes(encoding, shape) for name, encoding in OPTIONS.items()}


def _fit(memory: int, fixed: int, expert_bytes: int, layer_experts: int) -> Fit:
    if fixed > memory:
        return Fit(memory, fixed, None)
    room = (memory - fixed) // max(expert_bytes, 1)
    return Fit(memory, fixed, min(room, layer_experts))


def inspect_draft(draft: Draft) -> dict[str, Any]:
    """What draft experts are, for `--json`; `confidence_head` is None where they have none."""
    head = None
    if draft.head is not None:
        arrays = head_tensors(draft.head).values()
        size = sum(array.nbytes for array in arrays)
        head = {"positions": draft.head.biases.shape[1], "bytes": size}
    size = sum(array.nbytes for array in draft_tensors(draft).values())
    facts = draft_facts(draft.config) | {"layers": len(draft.experts), "bytes": size}
    return facts | {"averaged": draft.raw is not None, "confidence_head": head}
