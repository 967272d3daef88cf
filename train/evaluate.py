"""The quality of draft experts: `dejax evaluate MODEL --draft D [--data FILE.jsonl] [--json F]`.

Teacher-forced: target and draft network over the same held-out text, the draft attending to its own
KV. Beside the draft stand the arms without training (DraftExpert, arXiv 2607.24434, section 6):
shared experts alone, top-1 to top-3, and top-1 plus the mean of what it leaves out. In the loop:
accepted / drafted tokens and what was prefetched, from real decoding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dejax.ckpt.draft_state import resolve_draft
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.model import Params
from dejax.target import Target, load_target, read_outline
from infer.argument_types import (
    DraftSpec,
    InputFile,
    Model,
    NonNegativeInt,
    OutputFile,
    ParsedBy,
    Positional,
    PositiveInt,
)
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.generate import generate
from infer.output import report
from infer.prompts import read_prompts
from infer.report import stats
from infer.units import format_percent
from train.beside_original import beside_original
from train.closed_form import mean_missing
from train.distill_step import Batch, LayerPair, compare_vocabulary, paired_forward, route_overlap
from train.document_files import HUB, find_files
from train.losses import Total, add_up
from train.packed_rows import PackedRows, split_documents
from train.stacked import StackedDef, StackedParams
from train.teacher import Teacher, as_teacher, drafting
from train.token_cache import check_vocabulary, open_documents

ROUND_ROWS = 5
"""Rows of a verification in the teacher-forced prefetch figures: one pending, four drafted."""

Metrics = dict[str, float]


def _chosen(ids: Int[Array, "L B W N K"], experts: int) -> Bool[Array, "L B W E"]:
    """Whether any row of a round uses an expert; rounds are windows of N rows."""
    return jax.nn.one_hot(ids, experts, dtype=bool).any(axis=(-3, -2))


def prefetch_overlap(
    pairs: LayerPair, segment_ids: Int[Array, "B T"], *, experts: int, r: int, rows: int
) -> tuple[Total, Total]:
    """Recall and precision of prefetching what the draft's routers choose, in rounds of `rows`.

    As if a round began at every `rows`-th token with nothing resident. The top-r experts of the
    draft rows are loaded by the draft passes themselves and count on neither side. Rounds that
    cross into another document are left out.
    """
    windows = segment_ids.shape[1] // rows

    def cut(a):
        return a[..., : windows * rows, :].reshape(*a.shape[:-2], windows, rows, a.shape[-1])

    segments = cut(segment_ids[..., None])[..., 0]
    whole = (segments[..., 0] == segments[..., -1]) & (segments[..., 0] > 0)
    loaded = _chosen(cut(pairs.draft_routes[..., :r]), experts) if r else False
    open_ = whole[None, :, :, None] & ~jnp.asarray(loaded)
    wanted = _chosen(cut(pairs.routes), experts) & open_
    fetched = _chosen(cut(pairs.draft_routes), experts) & open_
    both = (wanted & fetched).sum()
    return Total(both, wanted.sum()), Total(both, fetched.sum())


@partial(jax.jit, static_argnames=("definition", "r", "rows", "dtype"))
def _batch_totals(
    definition: StackedDef,
    params: StackedParams,
    draft: Params | None,
    batch: Batch,
    *,
    r: int,
    rows: int,
    dtype: Any,
) -> dict[str, Total]:
    """Every total of one batch."""
    outer, full, drafted, pairs = paired_forward(definition, params, draft, batch, r=r, dtype=dtype)
    _, vocabulary = compare_vocabulary(outer, full, drafted, batch)
    overlap, first = route_overlap(pairs, batch["mask"])
    recall, precision = prefetch_overlap(
        pairs, batch["segment_ids"], experts=definition.config.moe.num_experts, r=r, rows=rows
    )
    return {
        "kl": vocabulary.logit,
        "agreement": vocabulary.agreement,
        "router_agreement": overlap,
        "router_top1": first,
        "prefetch_recall": recall,
        "prefetch_precision": precision,
        "residual": pairs.residual,
        "loss_full": vocabulary.full,
        "loss_draft": vocabulary.draft,
    }


def teacher_forced(
    target: Target | Teacher,
    draft: Params | None,
    batches: Iterable[Batch],
    *,
    r: int = 1,
    rows: int = ROUND_ROWS,
) -> Metrics:
    """How close the draft network is to the target on the same tokens.

    Args:
      target: a target, or one laid out by `as_teacher` already (its arrays are not copied again).
      draft: stacked draft parameters (`Draft.stacked_params()`), a constant (`mean_missing`), or
      None
        for shared + top-r alone.
      batches: packed rows, all of one shape.
      r: routed experts that the draft path keeps.

    Returns:
      kl (nats a token), agreement (share of tokens with the same most likely successor),
      router_agreement (mean over layers and tokens of |A* and A^d| / k), router_top1,
      prefetch_recall and prefetch_precision (`prefetch_overlap`), residual (mean over layers of the
      squared error over the squared length), loss_full and loss_draft (next token, nats), tokens.

    Raises:
      UsageError: there is no batch.
    """
    teacher = as_teacher(target)

    def totals(batch: Batch) -> dict[str, Total]:
        with jax.set_mesh(teacher.mesh):
            return _batch_totals(
                teacher.definition,
                teacher.params,
                draft,
                batch,
                r=r,
                rows=rows,
                dtype=teacher.dtype,
            )

    sums = add_up(map(totals, batches))
    if not sums:
        raise UsageError("evaluate: there are no rows to evaluate on; give more text")
    metrics = {
        name: float(np.mean(total / np.maximum(count, np.finfo(np.float64).tiny)))
        for name, (total, count) in sums.items()
    }
    return metrics | {"tokens": float(sums["kl"].count)}


def all_arms(
    target: Target | Teacher,
    draft: Draft | None,
    batches: Sequence[Batch],
    calibration: Sequence[Batch],
) -> dict[str, Metrics]:
    """`teacher_forced` for every arm, by name.

    `calibration` are other rows than `batches`, on which the mean of the left-out output is taken.
    """
    teacher = as_teacher(target)
    ranks = [r for r in (1, 2, 3) if r <= teacher.config.moe.top_k]
    results = {}
    with progress("evaluate", len(ranks) + 2 + (draft is not None), "arms") as bar:
        with bar.aside("compiling, and averaging what top-1 leaves out"):
            constant = mean_missing(teacher, calibration, r=1)
        arms: dict[str, tuple[Params | None, int]] = {"shared only": (None, 0)}
        arms |= {f"top-{r}": (None, r) for r in ranks}
        arms["top-1 + mean"] = constant, 1
        if draft is not None:
            arms["draft"] = draft.stacked_params(), draft.config.top_r
        for name, (params, r) in arms.items():
            if draft is not None and name == "draft":
                teacher = drafting(teacher, draft.config)
            results[name] = teacher_forced(teacher, params, batches, r=r)
            bar.advance(1, arm=name)
    return results


def in_loop(
    target: Target, draft: Draft | None, prompts: Sequence[Any], **options: Any
) -> dict[str, Any]:
    """`infer.report.stats` of decoding with `draft` (None: with top-1), over all prompts together.

    `options` are those of `infer.generate.generate`.
    """
    mode = "top-r" if draft is None else "draft-expert"
    every_round: Any = dict(governor=False) | options  # each is measured as it is
    generations = generate(target, prompts, draft=draft, mode=mode, **every_round)
    return stats([record for generation in generations for record in generation.trace])


def documents(text: str) -> str:
    """`--data`: the name of a source of documents."""
    if not text.startswith(HUB):
        find_files(text)
    return text


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax evaluate`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, or tiny."""
    draft: DraftSpec
    """The draft experts: a folder from `dejax distill`, or untrained ones."""
    data: Annotated[str, ParsedBy(documents, "DATA")] = "demo"
    """Documents: JSON lines or Parquet, a folder or pattern of them, hub:NAME, or the demo's."""
    original: Model | None = None
    """The model that MODEL was converted from, to tell what its quantised experts cost."""
    prompts: InputFile | None = None
    """Prompts to decode for in-loop figures, as JSON lines; none are decoded unless given."""
    max_new_tokens: PositiveInt = 64
    """New tokens of a prompt at most."""
    seq_len: PositiveInt | None = None
    """Tokens of a row of text; 256 unless given, or the target's context if that is less."""
    batch_size: PositiveInt = 8
    """Rows of a batch."""
    rows: NonNegativeInt = 64
    """Rows to evaluate on at most; 0 is all."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""


COLUMNS = {
    "kl": "KL",
    "agreement": "agreement",
    "router_agreement": "router",
    "prefetch_recall": "recall",
    "prefetch_precision": "precision",
    "loss_draft": "loss",
}

ORIGINAL_COLUMNS = {
    "perplexity": "perplexity",
    "original_perplexity": "original's",
    "kl": "KL",
    "agreement": "agreement",
}
LOOP_COLUMNS = {
    "drafted": "drafted",
    "accepted": "accepted",
    "acceptance_rate": "acceptance",
    "tokens_per_round": "tokens/round",
    "prefetch_recall": "recall",
    "prefetch_precision": "precision",
}


SHARES = (
    *("agreement", "router_agreement", "acceptance_rate"),
    *("prefetch_recall", "prefetch_precision"),
)
"""What tables show in percent; JSON has it from 0 to 1."""


def evaluation_rows(
    target: Target, data: str, *, seq_len: int, batch_size: int, most: int | None
) -> tuple[list[Batch], list[Batch]]:
    """Rows to score, and as many others (where there are) to calibrate the mean on."""
    documents = open_documents(data, target.tokenizer)
    check_vocabulary(data, documents, target.config.vocab_size)
    trained, held = split_documents(len(documents))
    if data != "demo":
        places = np.arange(len(documents))
        trained, held = places[::2], places[1::2] if len(places) > 1 else places
    scored, other = (PackedRows(documents, part, seq_len=seq_len) for part in (held, trained))
    batches = list(scored.batches(batch_size, most=most))
    return batches, list(other.batches(batch_size, most=len(batches) * batch_size))


def main(argv: list[str]) -> int:
    """Runs `dejax evaluate`."""
    about = "Measure how close draft experts come to their target, and how much is accepted."
    args = parse(Arguments, argv, prog="dejax evaluate", description=about)
    prompts = read_prompts(args.prompts) if args.prompts else []
    outline = read_outline(args.model)
    context = outline.config.context
    if args.seq_len is not None and args.seq_len > context:
        raise UsageError(
            f"--seq-len: {args.seq_len} is beyond the context of {outline.name}; expected at most "
            f"{context}"
        )
    draft = resolve_draft(args.draft, outline)
    say(f"loading {args.model}")
    target = load_target(args.model)
    batches, calibration = evaluation_rows(
        target,
        args.data,
        seq_len=args.seq_len or min(256, context),
        batch_size=args.batch_size,
        most=args.rows or None,
    )
    arms = all_arms(target, draft, batches, calibration)
    result: dict[str, Any] = {"target": target.identity, "teacher_forced": arms}
    if args.original is not None:
        say(f"loading {args.original}")
        result["original"] = beside_original(target, load_target(args.original), batches)
    if prompts:
        say(f"decoding {len(prompts)} prompts")
        result["in_loop"] = in_loop(target, draft, prompts, max_new_tokens=args.max_new_tokens)
    report(args.json, result, lambda: _show(target.name, result))
    return 0


def _cells(metrics: dict[str, Any], columns: Iterable[str]) -> list[Any]:
    return [format_percent(metrics[k]) if k in SHARES else metrics[k] for k in columns]


def _show(name: str, result: dict[str, Any]) -> None:
    arms = result["teacher_forced"]
    rows = [[arm, *_cells(metrics, COLUMNS)] for arm, metrics in arms.items()]
    note = f"{arms['draft']['tokens']:.0f} tokens; the target's own loss is "
    note += f"{arms['draft']['loss_full']:.4g}"
    print_table(f"{name}: teacher-forced", ["arm", *COLUMNS.values()], rows, note)
    if "original" in result:
        row = _cells(result["original"], ORIGINAL_COLUMNS)
        print_table(f"{name}: beside its original", list(ORIGINAL_COLUMNS.values()), [row])
    if "in_loop" in result:
        row = _cells(result["in_loop"], LOOP_COLUMNS)
        print_table(f"{name}: in the loop", list(LOOP_COLUMNS.values()), [row])
