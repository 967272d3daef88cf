"""`dejax inspect MODEL`: what a target is, what it weighs, and what of it fits where.

Without weights (a folder that has only its `config.json`) sizes are those of bfloat16. Parameters
are counted on the abstract model, so that nothing is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dejax.ckpt.expert_store import ExpertStore
from dejax.ckpt.hf_weights import CheckpointPlan, abstract_model, plan_checkpoint
from dejax.ckpt.tensor_files import INDEX_FILE, SINGLE_FILE
from dejax.config import ModelConfig
from dejax.nn.mla import init_cache
from dejax.target import STORE_DIR, checkpoint_identity, load_config, model_folder
from infer.arguments import Positional, parse, write_json
from infer.console import print_table

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
      name: of the folder; kind: "config", "checkpoint" or "converted".
      identity: what adapters are bound to; None without weights.
      total, active: parameters in all and for one token (embedding and head counted).
      active_top1: the same when a layer runs its top-1 expert alone.
      routed, rest: the routed experts, and the resident weights.
      expert: one routed expert; layer_experts: their number over all layers.
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
    routed: Part
    rest: Part
    expert: Part
    layer_experts: int
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


def _stored_parts(
    folder: Path, config: ModelConfig, params: tuple[int, int]
) -> tuple[str, CheckpointPlan | None, Part, Part]:
    """Kind of folder, its plan, and the parts that are resident and routed as they are stored."""
    if (folder / STORE_DIR).exists():
        store = ExpertStore.open(folder / STORE_DIR)
        plan = plan_checkpoint(folder, config, resident_only=True)
        routed = (store.dtype.name, len(store.pairs) * store.bytes_per_expert)
        kind = "converted"
    elif (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        plan = plan_checkpoint(folder, config)
        entries = [entry for expert in plan.experts.values() for entry in expert]
        routed = (_dtypes(entries), sum(entry.nbytes for entry in entries))
        kind = "checkpoint"
    else:
        rest, routed = (Part(n, ASSUMED.name, n * ASSUMED.itemsize) for n in params)
        return "config", None, rest, routed
    resident = list(plan.resident.values())
    rest = Part(params[0], _dtypes(resident), sum(entry.nbytes for entry in resident))
    return kind, plan, rest, Part(params[1], *routed)


def _dtypes(entries: Any) -> str:
    return " and ".join(sorted({entry.dtype.name for entry in entries}))


def inspect(path: str | Path) -> Inspection:
    """Counts a target: a Hugging Face folder (its config suffices), a converted one, or "tiny".

    Raises:
      UsageError: the folder, its configuration or its tensors are not what is expected.
    """
    folder = model_folder(path)
    config = load_config(folder)
    resident = _count(abstract_model(config)[1])
    kind, plan, rest, routed = _stored_parts(folder, config, (resident, config.routed_params))
    layers = len(config.moe_layers)
    layer_experts = layers * config.moe.num_experts
    expert_bytes = routed.bytes // layer_experts if layer_experts else 0
    draft_params = layers * config.expert_params
    drafts = Part(draft_params, ASSUMED.name, draft_params * ASSUMED.itemsize)
    kv = {name: cache_size(config) * jnp.dtype(name).itemsize for name in ("bfloat16", "float32")}
    fixed = rest.bytes + drafts.bytes + kv["bfloat16"] * min(config.context, CONTEXT)
    fits = [_fit(gb * 10**9, fixed, expert_bytes, layer_experts) for gb in DEVICES_GB]
    return Inspection(
        name="tiny" if str(path) == "tiny" else folder.resolve().name,
        kind=kind,
        identity=None if plan is None else checkpoint_identity(plan),
        config=config,
        total=resident + config.routed_params,
        active=resident + layers * config.moe.top_k * config.expert_params,
        active_top1=resident + layers * config.expert_params,
        routed=routed,
        rest=rest,
        expert=Part(config.expert_params, routed.dtype, expert_bytes),
        layer_experts=layer_experts,
        drafts=drafts,
        kv_bytes_per_token=kv,
        fits=tuple(fits),
    )


def _fit(memory: int, fixed: int, expert_bytes: int, layer_experts: int) -> Fit:
    if fixed > memory:
        return Fit(memory, fixed, None)
    room = (memory - fixed) // max(expert_bytes, 1)
    return Fit(memory, fixed, min(room, layer_experts))


# What is printed.


def _scaled(value: int, base: int, units: tuple[str, ...]) -> str:
    """`value` with three digits in the largest of `units` that it reaches."""
    power = max((p for p in range(1, len(units)) if value >= base**p), default=0)
    scaled = value / base**power
    return f"{scaled:.0f}{units[power]}" if scaled >= 999.5 else f"{scaled:.3g}{units[power]}"


def _params(count: int) -> str:
    """`15706484224` -> `"15.7 B"`."""
    return _scaled(count, 1000, ("", " k", " M", " B", " T"))


def _binary(size: int) -> str:
    """Bytes by 1024, as memory is counted: `28789702656` -> `"26.8 GiB"`."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _decimal(size: int) -> str:
    """Bytes by 1000, as transfers and devices are counted: `17301504` -> `"17.3 MB"`."""
    return _scaled(size, 1000, (" B", " kB", " MB", " GB", " TB"))


def _dimension_rows(config: ModelConfig) -> list[tuple[str, str]]:
    attention, moe = config.attention, config.moe
    dense = config.num_layers - len(config.moe_layers)
    groups = f", {moe.groups_kept} of {moe.groups} groups" if moe.groups > 1 else ""
    query = attention.query_rank or "full"
    yarn = attention.rope.yarn
    extended = f", YaRN {yarn.factor:g} x {yarn.original_context}" if yarn else ""
    return [
        ("layers", f"{config.num_layers} ({dense} dense, {len(config.moe_layers)} MoE)"),
        ("width", f"{config.width} (dense feed-forward {config.dense_width})"),
        (
            "routed experts",
            f"{moe.num_experts} of width {moe.expert_width}, top-{moe.top_k}{groups}",
        ),
        ("shared experts", f"width {moe.shared_width}" if moe.shared_width else "none"),
        (
            "attention",
            f"MLA, {attention.heads} heads, ranks: query {query}, KV {attention.kv_rank}",
        ),
        ("vocabulary", f"{config.vocab_size}{' (tied head)' if config.tied else ''}"),
        ("context", f"{config.context}{extended}"),
    ]


def _size_rows(found: Inspection) -> list[tuple[str, ...]]:
    def row(name: str, part: Part, share: str = "") -> tuple[str, ...]:
        sizes = (_binary(part.bytes), _decimal(part.bytes))
        return (name, _params(part.params), share, part.dtype, *sizes)

    share = found.routed_share
    whole = Part(found.total, "", found.routed.bytes + found.rest.bytes)
    return [
        row("routed experts", found.routed, f"{share:.1%}"),
        row("the rest", found.rest, f"{1 - share:.1%}"),
        row("all", whole),
        row("one expert", found.expert),
        row("draft experts", found.drafts),
    ]


def _fit_rows(found: Inspection) -> list[tuple[str, ...]]:
    rows = []
    for fit in found.fits:
        experts = "the resident part alone does not fit"
        if fit.experts == found.layer_experts:
            experts = f"all {fit.experts}"
        elif fit.experts is not None:
            part = fit.experts / found.layer_experts
            experts = f"{fit.experts} of {found.layer_experts} ({part:.0%})"
        rows.append((_decimal(fit.memory_bytes), _decimal(fit.fixed_bytes), experts))
    return rows


def show(found: Inspection) -> None:
    """Prints the tables."""
    stored = {"config": "no weights here; sizes as bfloat16", "converted": "converted"}
    title = f"{found.name}: {found.config.family} ({stored.get(found.kind, 'checkpoint')})"
    per_token = ", ".join(
        f"{_decimal(n)} in {name}" for name, n in found.kv_bytes_per_token.items()
    )
    active = f"{_params(found.active)} (top-1 expert alone: {_params(found.active_top1)})"
    rows = _dimension_rows(found.config)
    rows += [("parameters", _params(found.total)), ("active a token", active)]
    rows += [("KV cache a token", per_token)]
    rows += [("identity", found.identity)] if found.identity else []
    print_table(title, ("property", "value"), rows)
    columns = ("part", "parameters", "share", "stored as", "size", "bytes")
    print_table("Sizes", columns, _size_rows(found))
    tokens = min(found.config.context, CONTEXT)
    print_table(
        "What fits where",
        ("device memory", "always there", "routed experts in the rest"),
        _fit_rows(found),
        f"Always there: the rest, draft experts, KV cache of {tokens} tokens (bfloat16). "
        "Activations come on top.",
    )


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax inspect`."""

    model: Positional[str]
    """A Hugging Face folder (its config.json suffices), a converted folder, or tiny."""
    json: str | None = None
    """Write every figure as JSON here; - is standard output."""


def main(argv: list[str]) -> int:
    """Runs `dejax inspect`."""
    about = "Tell what a target is, what it weighs, and what of it fits where."
    args = parse(Arguments, argv, prog="dejax inspect", description=about)
    found = inspect(args.model)
    if args.json is not None:
        write_json(args.json, found.to_json())
    if args.json != "-":
        show(found)
    return 0
