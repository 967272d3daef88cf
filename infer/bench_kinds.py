"""Acceptance by kind of prompt: `python -m infer.bench_kinds [MODEL] --draft D`.

The same prompts greedily and at a temperature, with no expert cached and with half of them, each
run held against autoregressive decoding. Drafts have a fixed length, so that acceptance is of the
draft experts alone and not of what stops a draft.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dejax.ckpt.draft_state import resolve_draft
from dejax.cli import run_module
from dejax.errors import FailedError
from dejax.target import read_outline
from infer.argument_types import (
    DraftedTokens,
    DraftSpec,
    InputFile,
    OutputFile,
    Positional,
    PositiveFloat,
    PositiveInt,
)
from infer.arguments import parse
from infer.console import print_table
from infer.link import parse_link
from infer.loading import load_shown
from infer.output import report
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from infer.report import stats
from infer.suite import Result, Run, Suite, run_all
from infer.units import format_percent

NO_KIND = "prompts"
"""Kind of prompts whose record has no `category`."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of the measurement."""

    draft: DraftSpec
    """Draft experts."""
    model: Positional[str] = "tiny"
    """A model, as for `dejax generate`."""
    prompts: InputFile | None = None
    """Prompts as JSON lines, with their kind as `category`; those that come with dejax unless
    given."""
    per_kind: PositiveInt = 4
    """Prompts of each kind, at most."""
    max_new_tokens: DraftedTokens = 48
    """New tokens of a prompt at most."""
    draft_length: PositiveInt = 4
    """Tokens of a draft."""
    temperature: PositiveFloat = 0.8
    """Of the sampled runs."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def first_of_each_kind(
    records: Sequence[dict[str, Any]], count: int
) -> dict[str, list[dict[str, Any]]]:
    """The first `count` prompts of every kind, by kind."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        kind = str(record.get("category", NO_KIND))
        if len(found[kind]) < count:
            found[kind].append(record)
    return dict(found)


def runs(draft_length: int, temperature: float) -> list[Run]:
    """Autoregressive decoding and drafts, greedy and sampled, at cache 0 and half."""
    draft = Run("draft experts", "draft-expert", draft_length=draft_length, prefetch=True)
    return [
        replace(run, name=f"{run.name}, {_way(t, cache)}", temperature=t, cache=cache)
        for t in (0.0, temperature)
        for run, cache in ((Run("AR", "ar"), 0.0), (draft, 0.0), (draft, 0.5))
    ]


def _way(temperature: float, cache: float) -> str:
    law = f"T={temperature:g}" if temperature else "greedy"
    return f"{law}, {'half cached' if cache else 'cache 0'}"


def by_kind(result: Result, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each kind of prompt, and one for all of them."""
    rows = []
    for kind in (*dict.fromkeys(kinds), "all"):
        mine = [i for i, own in enumerate(kinds) if kind in (own, "all")]
        found = stats([record for i in mine for record in result.traces[i]])
        moved = sum(loads["bytes"] for loads in found["loads"].values())
        rows.append(
            {
                "run": result.run.name,
                "kind": kind,
                "prompts": len(mine),
                "temperature": result.run.temperature,
                "cache": result.run.cache,
                "identical_to_ar": result.row["identical_to_ar"],
                "divergences": result.row["divergences"] if kind == "all" else [],
                "bytes_per_token": moved / found["emitted"],
            }
            | {key: found[key] for key in ("acceptance_rate", "tokens_per_round", "alpha_pos")}
            | {key: found[key] for key in ("unique_layer_experts", "prefetch_recall", "emitted")}
        )
    return rows


def measure(args: Arguments) -> dict[str, Any]:
    """All rows of the measurement.

    Raises:
      UsageError: model, draft experts or prompts are not there or do not fit.
    """
    grouped = first_of_each_kind(read_prompts(args.prompts or DEMO_PROMPTS), args.per_kind)
    draft = resolve_draft(args.draft, read_outline(args.model))
    target = load_shown(args.model, "float32")
    encoded = encode_prompts(target, [r for own in grouped.values() for r in own], chat=True)
    prompts = [(str(record["id"]), ids) for record, ids in encoded]
    kinds = [kind for kind, own in grouped.items() for _ in own]
    suite = Suite(target, draft, prompts, args.max_new_tokens, parse_link("real"), kinds=kinds)
    results = run_all(suite, runs(args.draft_length, args.temperature))
    rows = [row for result in results for row in by_kind(result, kinds)]
    options = {"draft_length": args.draft_length, "max_new_tokens": args.max_new_tokens}
    facts = {"width": draft.config.width, "top_r": draft.config.top_r}
    facts["steps"] = draft.training.get("loop", {}).get("steps")
    found = {"model": target.name, "identity": target.identity, "draft": str(args.draft)}
    return found | {"draft_experts": facts, "options": options, "rows": rows}


def main(argv: list[str]) -> int:
    """Runs the measurement."""
    about = "Measure acceptance of draft experts by kind of prompt, and that tokens are the same."
    args = parse(Arguments, argv, prog="python -m infer.bench_kinds", description=about)
    found = measure(args)
    report(args.json, found, lambda: _show(found))
    bad = {row["run"] for row in found["rows"] for d in row["divergences"] if _is_real(d)}
    if bad:
        raise FailedError(f"tokens differ from autoregressive decoding in: {', '.join(bad)}")
    return 0


def _is_real(divergence: dict[str, Any]) -> bool:
    return divergence["float64_verdict"] == "real"


def _show(found: dict[str, Any]) -> None:
    drafted = [row for row in found["rows"] if row["acceptance_rate"] is not None]
    table = [
        [
            row["run"],
            row["kind"],
            row["prompts"],
            format_percent(row["acceptance_rate"]),
            f"{row['tokens_per_round']:.2f}",
            f"{row['bytes_per_token'] / 1e6:.3f}",
            "yes" if row["identical_to_ar"] else "no",
        ]
        for row in drafted
    ]
    columns = ["run", "kind", "prompts", "accepted", "tokens a round", "MB a token", "= AR"]
    note = f"drafts of {found['options']['draft_length']}; = AR: of all prompts of the run"
    print_table(f"{found['model']}: acceptance by kind of prompt", columns, table, note)


if __name__ == "__main__":
    sys.exit(run_module("bench_kinds", main))
