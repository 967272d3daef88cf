"""`dejax inspect MODEL [--draft D]`: what a target is, what it weighs, what of it fits where.

Without weights (a folder that has only its `config.json`) sizes are those of bfloat16. Parameters
are counted on the abstract model, so that nothing is allocated.

Publishers count the parameters that a token uses in three ways: with the embedding and the head
(Mixtral, Qwen3, OLMoE), without the embedding (DeepSeek, gpt-oss), without both (GLM, Moonlight).
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

from dejax.ckpt.draft_state import draft_facts, draft_tensors, head_tensors, resolve_draft
from dejax.ckpt.expert_codec import OPTIONS, record_bytes
from dejax.ckpt.expert_store import ExpertStore
from dejax.ckpt.gguf_weights import GGUFFile
from dejax.ckpt.hf_weights import abstract_model, plan_checkpoint
from dejax.ckpt.tensor_files import INDEX_FILE, SINGLE_FILE
from dejax.config import MLAConfig, ModelConfig
from dejax.draft.expert import Draft
from dejax.nn.attention import init_cache
from dejax.target import (
    STORE_DIR,
    checkpoint_identity,
    gguf_identity,
    is_gguf,
    load_config,
    model_folder,
    read_outline,
)
from infer.arguments import DraftSpec, Model, OutputFile, Positional, parse
from infer.console import print_table
from infer.output import report
from infer.units import format_bytes, format_count, format_decimal_bytes

ASSUMED = jnp.dtype(jnp.bfloat16)
"""What weights count as where there are none."""
DEVICES_GB = (8, 24, 80)
CONTEXT = 4096
"""Tokens of KV cache that a device is to hold, where the context has as many."""
NOTE = (
    "Always there: {parts}, KV cache of {tokens} tokens (bfloat16). Activations come on top. "
    "Weights count as stored; `generate` computes in float32, where what is not quantised takes "
    "4 bytes a number (the rest less with --dtype)."
)
"""Below the last table."""


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


# What is printed.


def _dimension_rows(config: ModelConfig) -> list[tuple[str, str]]:
    moe, rope = config.experts, config.attention.rope
    dense = config.num_layers - len(config.moe_layers)
    extended = ""
    if rope.yarn:
        extended = f" (YaRN: {rope.yarn.factor:g} times {rope.yarn.original_context})"
    if rope.llama3:
        extended = f" (Llama 3: {rope.llama3.factor:g} times {rope.llama3.original_context})"
    routing = len(config.moe_layers)
    kinds = f"{dense} dense, {routing} MoE" if routing else "all dense"
    rows = [
        ("layers", f"{config.num_layers} ({kinds})"),
        ("width", f"{config.width} (dense feed-forward {config.dense_width})"),
    ]
    if moe is not None:
        groups = f", {moe.groups_kept} of {moe.groups} groups" if moe.groups > 1 else ""
        routed = f"{moe.num_experts} of width {moe.expert_width}, top-{moe.top_k}{groups}"
        shared = f"width {moe.shared_width}" if moe.shared_width else "none"
        rows += [("routed experts", routed), ("shared experts", shared)]
    return [
        *rows,
        ("attention", _attention(config)),
        ("vocabulary", f"{config.vocab_size}{' (tied head)' if config.tied else ''}"),
        ("context", f"{config.context}{extended}"),
    ]


def _attention(config: ModelConfig) -> str:
    attention = config.attention
    if isinstance(attention, MLAConfig):
        query = attention.query_rank or "full"
        return f"MLA, {attention.heads} heads, ranks: query {query}, KV {attention.kv_rank}"
    window = ""
    if config.window is not None:
        window = f", window {config.window} in {len(attention.windowed)} layers"
    heads = f"{attention.heads} heads of {attention.head_dim}"
    return f"GQA, {heads} on {attention.kv_heads} key heads{window}"


def _size_rows(found: Inspection) -> list[tuple[str, ...]]:
    def row(name: str, part: Part, share: str = "") -> tuple[str, ...]:
        sizes = (format_bytes(part.bytes), format_decimal_bytes(part.bytes))
        return (name, format_count(part.params), share, part.dtype, *sizes)

    share = found.routed_share
    whole = Part(found.total, "", found.routed.bytes + found.rest.bytes)
    if not found.layer_experts:
        return [row("all", found.rest)]
    return [
        row("routed experts", found.routed, f"{share:.1%}"),
        row("the rest", found.rest, f"{1 - share:.1%}"),
        row("all", whole),
        row("one expert", found.expert),
        row("draft experts, on top", found.drafts),
    ]


def _fit_rows(found: Inspection) -> list[tuple[str, ...]]:
    rows = []
    for fit in found.fits:
        experts = "what is always there does not fit"
        if not found.layer_experts:
            experts = "no" if fit.experts is None else "yes"
        elif fit.experts == found.layer_experts:
            experts = f"all {fit.experts}"
        elif fit.experts is not None:
            part = fit.experts / found.layer_experts
            experts = f"{fit.experts} of {found.layer_experts} ({part:.0%})"
        rows.append(
            (format_decimal_bytes(fit.memory_bytes), format_decimal_bytes(fit.fixed_bytes), experts)
        )
    return rows


def show(found: Inspection) -> None:
    """Prints the tables."""
    kinds = {"config": "no weights here; sizes as bfloat16", "gguf": "GGUF"}
    title = f"{found.name}: {found.config.family} ({kinds.get(found.kind, found.kind)})"
    per_token = ", ".join(
        f"{format_decimal_bytes(n)} in {name}" for name, n in found.kv_bytes_per_token.items()
    )
    rows = _dimension_rows(found.config)
    rows += [("parameters", format_count(found.total)), *_active_rows(found)]
    rows += [("KV cache a token", per_token)]
    if found.stored_expert_bytes:
        sizes = found.stored_expert_bytes.items()
        stored = ", ".join(f"{format_decimal_bytes(n)} as {name}" for name, n in sizes)
        rows += [("one expert, converted", stored)]
    rows += [("identity", found.identity)] if found.identity else []
    print_table(title, ("property", "value"), rows)
    columns = ("part", "parameters", "share", "stored as", "size", "decimal")
    print_table("Sizes", columns, _size_rows(found))
    tokens = min(found.config.context, CONTEXT)
    last, parts = "fits", "the weights"
    if found.layer_experts:
        last, parts = "routed experts beside it", "the rest, draft experts"
    note = NOTE.format(parts=parts, tokens=tokens)
    print_table("What fits where", ("device memory", "always there", last), _fit_rows(found), note)


def _active_rows(found: Inspection) -> list[tuple[str, str]]:
    """Parameters that one token uses, as the publishers count them."""
    without = found.active - found.embedding
    text = f"{format_count(without)} without the embedding"
    if found.head:
        text += f", {format_count(without - found.head)} without the head too"
    rows = [("active a token", f"{format_count(found.active)} ({text})")]
    if found.layer_experts:
        rows += [("with the top-1 expert", format_count(found.active_top1))]
    return rows


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


def _draft_rows(draft: Draft) -> list[tuple[str, str]]:
    told = inspect_draft(draft)
    head = told["confidence_head"]
    about = "none"
    if head is not None:
        about = f"for drafts of {head['positions']} tokens ({format_decimal_bytes(head['bytes'])})"
    return [
        ("layers", str(told["layers"])),
        ("width", str(told["width"])),
        ("routed experts beside", str(told["top_r"])),
        ("size in float32", format_decimal_bytes(told["bytes"])),
        ("confidence head", about),
    ]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax inspect`."""

    model: Positional[Model]
    """A Hugging Face folder (its config.json suffices), a converted folder, a GGUF file (dense
    Llama), or tiny."""
    draft: DraftSpec | None = None
    """Draft experts of MODEL, to be told of too: a folder or file, or untrained ones (init)."""
    json: OutputFile | None = None
    """Write every figure here as JSON; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs `dejax inspect`."""
    about = "Tell what a target is, what it weighs, and what of it fits where."
    args = parse(Arguments, argv, prog="dejax inspect", description=about)
    draft = None if args.draft is None else resolve_draft(args.draft, read_outline(args.model))
    found = inspect(args.model)
    told = {} if draft is None else {"draft": inspect_draft(draft)}

    def show_all() -> None:
        show(found)
        if draft is not None:
            print_table(f"{args.draft}: draft experts", ("property", "value"), _draft_rows(draft))

    report(args.json, found.to_json() | told, show_all)
    return 0
