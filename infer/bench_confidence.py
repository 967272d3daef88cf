"""What a confidence head gives: `python -m infer.bench_confidence MODEL --draft D [--json F]`.

Decodes the prompts that come with dejax with the head's word and with the draft's largest
probability, under each rule that asks for confidence: `--tau`, at several values and nothing else
(`--budget off`) so that drafts end by confidence alone; `--controller cost`; the tree of the most
confident nodes; and EcoSpec. Figures are of tokens and bytes, which do not depend on how busy the
machine is, but for `cost`, which goes by time. How well survival is told is measured on drafts of
full length.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dejax.ckpt.draft_state import resolve_draft
from dejax.cli import run_module
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.spec.calibration import expected_calibration_error
from dejax.spec.confidence import Confidence
from dejax.spec.control import ControlConfig
from dejax.spec.sampling import SamplingConfig
from dejax.spec.tree_options import parse_tree
from dejax.target import Target, load_target, read_outline
from infer.argument_types import DraftSpec, Model, OutputFile, Positional, PositiveInt
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload, expert_store
from infer.link import Link
from infer.output import report
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from infer.report import rounds_of, stats
from infer.staging import device_form
from infer.suite import choose_link
from infer.trace import Round
from infer.units import format_percent

TAUS = (0.3, 0.6, 0.9)
TEMPERATURES = (0.0, 0.8)
CACHES = (0.0, 0.5)
WORDS: tuple[Confidence, ...] = ("probability", "head")


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m infer.bench_confidence`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, or tiny."""
    draft: DraftSpec
    """Draft experts with a confidence head (`python -m train.confidence`)."""
    count: PositiveInt = 8
    """Prompts to decode."""
    max_new_tokens: PositiveInt = 48
    """New tokens of a prompt."""
    draft_length: PositiveInt = 8
    """Tokens of a draft at most."""
    json: OutputFile | None = None
    """Write the results here as JSON; - is standard output."""


def ways(args: Arguments, temperature: float, confidence: Confidence) -> dict[str, DecodeOptions]:
    """Every rule by name."""
    control = ControlConfig(draft_length=args.draft_length, budget="off")
    base = DecodeOptions(
        mode="draft-expert",
        max_new_tokens=args.max_new_tokens,
        sampling=SamplingConfig(temperature=temperature),
        control=control,
        confidence=confidence,
        stop_at_eos=False,
    )
    found = {"full length": replace(base, control=replace(control, truncate=False))}
    for tau in TAUS:
        found[f"tau {tau:g}"] = replace(base, control=replace(control, tau=tau))
    found["cost"] = replace(base, control=replace(control, controller="cost", budget=None))
    found["eagle:8"] = replace(base, tree=parse_tree("eagle:8"))
    found["ecospec eagle:8"] = replace(base, mode="ecospec", tree=parse_tree("eagle:8"))
    return found


def row_of(trace: Sequence[Round]) -> dict[str, Any]:
    """What a table tells of some traces."""
    rounds = rounds_of(trace)
    found = stats(trace)
    emitted = sum(len(record.emitted) for record in rounds)
    moved = sum(load.bytes for record in rounds for load in record.loads)
    return {
        "drafted_per_round": sum(len(record.drafted) for record in rounds) / len(rounds),
        "tokens_per_round": found["tokens_per_round"],
        "mb_per_token": moved / emitted / 1e6,
        "experts_per_round": sum(len(record.required) for record in rounds) / len(rounds),
    }


def loop_calibration(trace: Sequence[Round]) -> float:
    """Calibration error of survival in chains: products of confidences beside what came."""
    alive, happened = [], []
    for record in rounds_of(trace):
        alive += np.cumprod(record.confidences).tolist()
        happened += [float(place < record.accepted) for place in range(len(record.confidences))]
    return expected_calibration_error(np.array(alive), np.array(happened))


def measure(
    target: Target, draft: Draft, prompts: Sequence[list[int]], link: Link, args: Arguments
) -> list[dict[str, Any]]:
    """A row for every temperature, cache, rule and word; `link` is for what goes by time."""
    store, rows = expert_store(target, Offload()), []
    size = device_form(store, target.compute_dtype, None).bytes
    capacity = max(map(len, prompts)) + args.max_new_tokens
    total = len(TEMPERATURES) * len(CACHES) * (1 + len(WORDS) * len(ways(args, 0.0, "head")))
    with progress("decode", total, "runs") as bar:
        for cache in CACHES:
            held = Offload(device_cache=int(cache * len(store.pairs)) * size)
            given: Any = dict(draft=draft, capacity=capacity, store=store)
            with (
                Decoder(target, offload=held, **given) as free,
                Decoder(target, offload=replace(held, link=link), **given) as linked,
            ):
                for temperature in TEMPERATURES:
                    references = None
                    for name, word, options in _runs(args, temperature):
                        decoder = linked if name == "cost" else free
                        with bar.aside("compiling"):
                            decoder.warm_up(options)
                        traces = [decoder.run(ids, options) for ids in prompts]
                        tokens = [[t for r in trace for t in r.emitted] for trace in traces]
                        references = tokens if references is None else references
                        joined = [record for trace in traces for record in trace]
                        row = {"temperature": temperature, "cache": cache, "rule": name}
                        row |= {"confidence": word, "same_tokens": tokens == references}
                        row |= row_of(joined)
                        if name == "full length":
                            row["ece"] = loop_calibration(joined)
                        rows.append(row)
                        bar.advance(1, run=f"{name} {word}")
    return rows


def _runs(args: Arguments, temperature: float) -> list[tuple[str, str, DecodeOptions]]:
    """Autoregressive decoding, and every rule with each word."""
    by_word = {word: ways(args, temperature, word) for word in WORDS}
    some = by_word["head"]["full length"]
    runs = [("autoregressive", "", replace(some, mode="ar"))]
    for name in by_word["head"]:
        runs += [(name, word, by_word[word][name]) for word in WORDS]
    return runs


def main(argv: list[str]) -> int:
    """Runs `python -m infer.bench_confidence`."""
    about = "Compare a draft's confidence head with its largest probability."
    args = parse(Arguments, argv, prog="python -m infer.bench_confidence", description=about)
    draft = resolve_draft(args.draft, read_outline(args.model))
    if draft.head is None:
        raise UsageError(
            f"--draft {args.draft}: has no confidence head; python -m train.confidence fits one"
        )
    target = load_target(args.model)
    encoded = encode_prompts(target, read_prompts(DEMO_PROMPTS), chat=True, on_bad=_longer)
    most = target.config.context - args.max_new_tokens
    prompts = sorted((ids for _, ids in encoded if len(ids) <= most), key=len)[: args.count]
    if not prompts:
        raise UsageError(f"{target.name}: no prompt that comes with dejax fits its context")
    link = choose_link(target, prompts[0])
    say(f"decoding {len(prompts)} prompts; {link.describe()}")
    rows = measure(target, draft, prompts, link, args)
    result = {"link": link.describe(), "prompts": len(prompts), "rows": rows}
    result |= {"max_new_tokens": args.max_new_tokens, "draft_length": args.draft_length}
    report(args.json, result, lambda: _show(result))
    return 0


def _longer(*_: Any) -> None:
    """A prompt that is longer than the context is left out."""


def _show(result: dict[str, Any]) -> None:
    names = ("drafted_per_round", "tokens_per_round", "mb_per_token", "experts_per_round")
    columns = (
        "rule",
        "confidence",
        "drafted",
        "tokens/round",
        "MB/token",
        "experts",
        "ECE",
        "= AR",
    )
    for temperature in TEMPERATURES:
        for cache in CACHES:
            rows = [
                row
                for row in result["rows"]
                if (row["temperature"], row["cache"]) == (temperature, cache)
            ]
            title = f"T = {temperature:g}, {cache:.0%} cached; {result['link']}"
            cells = [
                [row["rule"], row["confidence"], *(row[name] for name in names)]
                + [format_percent(row["ece"]) if "ece" in row else ""]
                + ["yes" if row["same_tokens"] else "no"]
                for row in rows
            ]
            print_table(title, columns, cells)


if __name__ == "__main__":
    sys.exit(run_module("bench_confidence", main))
