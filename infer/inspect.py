"""`dejax inspect MODEL [--draft D]`: the tables of `infer.inspection`.

Publishers count the parameters that a token uses in three ways: with the embedding and the head
(Mixtral, Qwen3, OLMoE), without the embedding (DeepSeek, gpt-oss), without both (GLM, Moonlight).
"""

from dataclasses import dataclass

from dejax.ckpt.draft_state import resolve_draft
from dejax.config import MLAConfig, ModelConfig
from dejax.draft.expert import Draft
from dejax.target import read_outline
from infer.argument_types import DraftSpec, Model, OutputFile, Positional
from infer.arguments import parse
from infer.console import print_table
from infer.inspection import CONTEXT, Inspection, Part, inspect, inspect_draft
from infer.output import report
from infer.units import format_bytes, format_count, format_decimal_bytes

NOTE = (
    "Always there: {parts}, KV cache of {tokens} tokens (bfloat16). Activations come on top. "
    "Weights count as stored; `generate` computes in float32, where what is not quantised takes "
    "4 bytes a number (the rest less with --dtype)."
)
"""Below the last table."""


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
