"""Fits a confidence head to a draft: `python -m train.confidence --draft DRAFT --out DIR`.

Target and draft stay as they are. The target answers prompts of the data, greedily and sampled;
passes over these answers make the drafts that the decode loop would make (`train.draft_outcomes`);
the head is fitted to which of their tokens are accepted (`train.confidence_fit`), and measured on
answers to other prompts, beside the draft's largest probability. What is written is the same draft
with the head in it (`dejax.spec.confidence` tells what it estimates).
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from dejax.ckpt.draft_state import load_draft, save_draft
from dejax.cli import run_module
from dejax.draft.confidence import ConfidenceHead
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.paths import kind_of, shown
from dejax.spec.calibration import (
    area_under_curve,
    brier_score,
    expected_calibration_error,
    survival,
)
from dejax.spec.confidence import REGIMES
from dejax.target import Target, load_target, load_tokenizer, model_folder, read_outline
from infer.argument_types import (
    Model,
    OutputFile,
    OutputFolder,
    ParsedBy,
    PositiveFloat,
    PositiveInt,
)
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.generate import generate
from infer.output import report
from infer.prompts import Speaker, encode_prompt
from infer.units import format_percent
from train.confidence_fit import Fit, estimates, fit_regime, head_of_fits
from train.distill import Unread
from train.document_files import Document, open_source
from train.draft_outcomes import Outcomes, Text, draft_outcomes
from train.evaluate import documents
from train.packed_rows import split_documents
from train.teacher import Teacher, as_teacher, drafting

LONGEST_PROMPT = 128
"""Tokens of a prompt at most; longer ones are left out, plain text is cut to a beginning."""
BEGINNING = 48
PASSES = 2
"""Of a held-in text, how many of its drafts' beginnings are tried: other texts teach more."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.confidence`."""

    draft: Annotated[str, ParsedBy(str, "DIR")]
    """The draft that is to have a head: a folder from `dejax distill`."""
    out: OutputFolder
    """Folder for the same draft with the head in it; new."""
    target: Model = "tiny"
    """The draft's target: a Hugging Face folder, a converted folder, or tiny."""
    data: Annotated[str, ParsedBy(documents, "DATA")] = "demo"
    """Documents to take prompts from: JSON lines or Parquet, a folder or pattern, or the demo's."""
    prompts: PositiveInt = 128
    """Prompts that the head is fitted to."""
    held_out: PositiveInt = 64
    """Other prompts, that it is measured on."""
    new_tokens: PositiveInt = 64
    """Tokens of an answer at most."""
    draft_length: PositiveInt = 8
    """Tokens of a draft; the head takes those of longer drafts to be as the last."""
    temperature: PositiveFloat = 0.8
    """Temperature of the answers for sampled decoding."""
    json: OutputFile | None = None
    """Write what was measured here as JSON; - is standard output."""

    def __post_init__(self):
        if self.new_tokens < 2:
            raise UsageError("--new-tokens is 1; expected 2 or more, of which one is drafted")


def prompt_of(target: Speaker, document: Document) -> list[int]:
    """A document's question, or the beginning of its text, as token ids."""
    if document.token_ids is not None:
        return list(document.token_ids[0])
    if document.messages is not None:
        return encode_prompt(target, str(document.messages[0]["content"]))
    ids = encode_prompt(target, document.text or "", chat=False)
    return ids[: min(BEGINNING, len(ids) // 2)]


def choose_prompts(
    target: Speaker, data: str, counts: tuple[int, int], *, new_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to fit to, and others to measure on: as many as asked for, where there are.

    They are taken from all over the documents, one in sixteen of which is for measuring, as
    everywhere.

    Raises:
      UsageError: there are none of a kind that fit.
    """
    read = list(open_source(data).documents())
    room = min(LONGEST_PROMPT, target.config.context - new_tokens)
    found = []
    for places, count in zip(split_documents(len(read)), counts, strict=True):
        chosen: list[list[int]] = []
        for place in _all_over(len(places)):
            ids = prompt_of(target, read[places[place]])
            if 0 < len(ids) <= room and max(ids) < target.config.vocab_size:
                chosen.append(ids)
            if len(chosen) == count:
                break
        found.append(chosen)
    if not all(found):
        raise UsageError(
            f"--data {data}: {len(read)} documents gave {len(found[0])} prompts to fit to and "
            f"{len(found[1])} to measure on, of at most {room} tokens; expected one of each, so "
            "16 documents or more"
        )
    return found[0], found[1]


def _all_over(count: int) -> Iterator[int]:
    """0 to count - 1 in an order that goes over all early: by steps that halve."""
    step = 1 << max(0, count - 1).bit_length()
    seen: set[int] = set()
    while step:
        for place in range(0, count, step):
            if place not in seen:
                seen.add(place)
                yield place
        step //= 2


def write_answers(
    target: Target, prompts: Sequence[list[int]], *, new_tokens: int, temperature: float
) -> list[Text]:
    """What the target answers; an answer of one token has no draft and is left out."""
    regime = REGIMES[temperature > 0]
    with progress(f"answers, {regime}", new_tokens * len(prompts), "tokens") as bar:
        written = generate(
            target,
            prompts,
            max_new_tokens=new_tokens,
            temperature=temperature,
            engine="resident",
            on_round=lambda _, round_: bar.advance(len(round_.emitted)),
            aside=bar.aside,
        )
    texts = zip(prompts, (generation.tokens for generation in written), strict=True)
    return [(prompt, answer) for prompt, answer in texts if len(answer) > 1]


def measured(estimated: Float[np.ndarray, "S K"], outcomes: Outcomes) -> dict[str, Any]:
    """How good estimates of c_i are, as survival to each position: overall, and by position."""
    alive, happened = survival(estimated), survival(outcomes.accepted.astype(np.float64))
    inside = outcomes.inside
    columns = [inside[:, place] for place in range(inside.shape[1])]
    return {
        "ece": expected_calibration_error(alive[inside], happened[inside]),
        "ece_by_position": [
            expected_calibration_error(alive[at, place], happened[at, place])
            for place, at in enumerate(columns)
        ],
        "brier": brier_score(alive[inside], happened[inside]),
        "auc": area_under_curve(alive[inside], happened[inside]),
    }


def compare(
    head: ConfidenceHead, regime: int, outcomes: Outcomes, embedding: Float[np.ndarray, "V D"]
) -> dict[str, Any]:
    """The head beside the draft's largest probability."""
    largest = np.exp(outcomes.law[..., 0].astype(np.float64))
    return {
        "drafts": len(outcomes.tokens),
        "survival": [
            float(np.mean(column[at])) if at.any() else None
            for column, at in zip(
                survival(outcomes.accepted.astype(np.float64)).T, outcomes.inside.T, strict=True
            )
        ],
        "probability": measured(largest, outcomes),
        "head": measured(estimates(head, regime, outcomes, embedding), outcomes),
    }


def fit_head(
    target: Target,
    draft: Draft,
    prompts: tuple[Sequence[list[int]], Sequence[list[int]]],
    *,
    new_tokens: int,
    draft_length: int,
    temperature: float,
) -> tuple[ConfidenceHead, dict[str, Any]]:
    """A head for the draft, and how it does on the second kind of prompts, by regime.

    Raises:
      UsageError: the target gives no answer that anything could be drafted for.
    """
    teacher = drafting(as_teacher(target), draft.config)
    embedding = np.asarray(target.model.embedding[...], np.float32)
    fits: list[Fit] = []
    judged: list[Outcomes] = []
    for regime, how in zip(REGIMES, (0.0, temperature), strict=True):
        seen = []
        for some, passes in zip(prompts, (PASSES, None), strict=True):
            texts = write_answers(target, some, new_tokens=new_tokens, temperature=how)
            if not texts:
                raise UsageError(
                    f"{target.name} ends every answer at once ({regime}); give other --data"
                )
            options = dict(draft_length=draft_length, temperature=how, passes=passes)
            seen.append(_outcomes(teacher, draft, texts, options))
        say(f"fitting, {regime}: {len(seen[0].tokens)} drafts")
        fits.append(fit_regime(seen[0], embedding))
        judged.append(seen[1])
    head = head_of_fits(fits)
    found = {
        regime: compare(head, place, outcomes, embedding) | {"penalty": fits[place].penalty}
        for place, (regime, outcomes) in enumerate(zip(REGIMES, judged, strict=True))
    }
    return head, found


def _outcomes(
    teacher: Teacher, draft: Draft, texts: Sequence[Text], options: dict[str, Any]
) -> Outcomes:
    with progress("drafts", len(texts), "texts") as bar:
        given = (teacher, draft.stacked_params(), texts)
        return draft_outcomes(*given, r=draft.config.top_r, **options, on_text=bar.advance)


def main(argv: list[str]) -> int:
    """Runs `python -m train.confidence`."""
    about = "Fit a confidence head to draft experts, and write them with it."
    args = parse(Arguments, argv, prog="python -m train.confidence", description=about)
    if kind_of(args.out) is not None:
        raise UsageError(f"--out: {shown(args.out)} exists; choose a new folder")
    outline = read_outline(args.target)
    draft = load_draft(args.draft, outline)
    speaker = Unread(outline.name, outline.config, load_tokenizer(model_folder(args.target)))
    counts = (args.prompts, args.held_out)
    prompts = choose_prompts(speaker, args.data, counts, new_tokens=args.new_tokens)
    began = time.perf_counter()
    options: Any = dict(
        new_tokens=args.new_tokens, draft_length=args.draft_length, temperature=args.temperature
    )
    target = load_target(args.target)
    head, found = fit_head(target, draft, prompts, **options)
    told = {"data": args.data, "prompts": len(prompts[0])} | options
    training = dict(draft.training) | {"confidence_head": told}
    save_draft(args.out, replace(draft, head=head, training=training), outline.config)
    result = {
        "target": outline.identity,
        "draft": args.draft,
        "out": args.out,
        "settings": told,
        "held_out_prompts": len(prompts[1]),
        "held_out": found,
        "seconds": time.perf_counter() - began,
    }
    report(args.json, result, lambda: _show(result))
    return 0


def _show(result: dict[str, Any]) -> None:
    columns = ("decoding", "confidence", "ECE", "at 1", "at 2", "at 4", "at 8", "Brier", "AUC")
    rows = []
    for regime, found in result["held_out"].items():
        for who in ("probability", "head"):
            row = found[who]
            at = [row["ece_by_position"][i - 1 : i] for i in (1, 2, 4, 8)]
            shares = [format_percent(each[0]) if each else None for each in at]
            rows.append(
                (regime, who, format_percent(row["ece"]), *shares, row["brier"], row["auc"])
            )
    note = (
        f"Of surviving to a position of the draft, on {result['held_out_prompts']} other prompts."
    )
    print_table(f"{result['out']}: written", columns, rows, note)


if __name__ == "__main__":
    sys.exit(run_module("confidence", main))
