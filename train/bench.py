"""`dejax bench SUITE`: this machine's links, steps and decoding speed, each beside its limit.

What is compared is measured in turns in one process, and told as medians with their spread;
compiling is left out. Everything goes into a table, a plot, and JSON whose rows have one form
(`infer.bench_rows`). The project's docs/performance.md is written from such files.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dejax.ckpt.draft_state import resolve_draft
from dejax.ckpt.expert_codec import OPTIONS
from dejax.ckpt.predictor_file import load_predictor
from dejax.config import DraftConfig
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import FailedError, UsageError
from dejax.target import Outline, Target, read_outline
from infer.argument_types import (
    DraftSpec,
    InputFile,
    Model,
    NonNegativeFloat,
    OutputFile,
    OutputFolder,
    ParsedBy,
    Positional,
    PositiveInt,
    choice,
)
from infer.arguments import parse
from infer.bench_budget import ROWS, bench_budget, count_steps
from infer.bench_decode import (
    LOADS,
    baselines,
    bench_decode,
    cache_sizes,
    draft_lengths,
    drafting,
    half_cached,
    over_links,
    seeded,
)
from infer.bench_limits import measure_limits
from infer.bench_link import bench_link, count_cases
from infer.bench_plots import plot_suite
from infer.bench_rows import Row, document, show
from infer.bench_steps import WIDTHS, bench_draft, bench_verify
from infer.bench_trees import bench_trees, in_all_places
from infer.console import progress, say
from infer.decoder import Offload, expert_store
from infer.link import parse_link
from infer.loading import load_shown
from infer.memory import peak_rss
from infer.output import check_output_folder, report, write_json
from infer.prompts import DEMO_PROMPTS, encode_prompt, read_prompts
from infer.suite import LOAD_TO_COMPUTE, Result, Run, Suite, choose_link
from infer.synthetic import PREFIX, prompts_of_random_tokens, synthetic_config, synthetic_target
from train.distill_config import DistillConfig
from train.step_cost import step_cost

SUITES = ("link", "decode", "trees", "draft", "verify", "cache", "budget", "train")
FEWEST = {"verify": WIDTHS[-1] + 1, "budget": ROWS + 1, "train": 1}
"""New tokens below which a suite has no pass or round to measure; 2 for those not named."""
RANDOM_PROMPT = 32
"""Tokens of a prompt for a target without a tokenizer."""


def _link(text: str) -> str:
    if text != "auto":
        parse_link(text)
    return text


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax bench`."""

    suite: Positional[Annotated[str, ParsedBy(choice(SUITES), "|".join(SUITES))]]
    """What to measure: link, decode(ing), trees (systems of draft trees side by side), passes of
    draft(ing) and verify(ing), cache (sizes), budget (what a lossy verification costs), or train
    (a step of distillation)."""
    model: Model = "tiny"
    """A Hugging Face or converted folder, tiny, or synthetic:CONFIG[:layers=N] (random weights of a
    true shape, for transfers and computation only)."""
    draft: DraftSpec | None = None
    """Draft experts: a folder from `dejax distill`, or untrained ones (init)."""
    predictor: InputFile | None = None
    """Suite trees: a trained predictor of experts, to compare too."""
    link: Annotated[str, ParsedBy(_link, "auto|real|disk|sim:GBPS[,LATENCY_US]")] = "auto"
    """What experts cross; auto is a simulated link on which loads take 3 times the computation."""
    prompts: InputFile | None = None
    """Prompts as JSON lines; those that come with dejax unless given."""
    count: PositiveInt = 6
    """Prompts at most."""
    max_new_tokens: PositiveInt = 48
    """New tokens of a prompt; end tokens do not stop it."""
    temperature: NonNegativeFloat = 0.0
    """Also decode at this temperature; 0 is greedy alone."""
    repeats: PositiveInt = 3
    """Times that everything is measured, in turns."""
    experts: Annotated[str | None, ParsedBy(choice(OPTIONS), "|".join(OPTIONS))] = None
    """What a synthetic model's experts are stored as; bf16 unless given."""
    store: OutputFolder | None = None
    """Where a synthetic model's experts are written, for the disk link; in memory unless given."""
    out: OutputFolder | None = None
    """Write SUITE.json and plots into this folder."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""

    def __post_init__(self):
        fewest = FEWEST.get(self.suite, 2)
        if self.max_new_tokens < fewest:
            raise UsageError(
                f"--max-new-tokens {self.max_new_tokens}: expected {fewest} or more for bench "
                f"{self.suite}, which would have nothing to measure"
            )
        if self.predictor is not None and self.suite != "trees":
            raise UsageError("--predictor is for the suite trees")
        synthetic = self.model.startswith(PREFIX)
        if self.predictor is not None and synthetic:
            raise UsageError("--predictor: a synthetic model has no trained predictor")
        for name in ("experts", "store"):
            if getattr(self, name) is not None and not synthetic:
                raise UsageError(f"--{name} is for --model synthetic:CONFIG[:layers=N]")
        if self.link == "disk" and synthetic and self.store is None:
            raise UsageError("--link disk reads experts from a store: give --store DIR too")


def main(argv: list[str]) -> int:
    """Runs `dejax bench`."""
    about = "Measure links, steps and decoding here, beside what this machine allows."
    args = parse(Arguments, argv, prog="dejax bench", description=about)
    if args.out is not None:
        check_output_folder(args.out)
    rows, more, bad = _SUITES[args.suite](args)
    result = document(args.suite, argv, rows, **more)
    title = f"{args.suite}: {args.model}"
    report(args.json, result, lambda: show(title, rows, _caption(rows)))
    if args.out is not None:
        write_json(args.out / f"{args.suite}.json", result)
        plot_suite(args.suite, result["rows"], args.out / f"{args.suite}.png")
    if bad:
        raise FailedError(f"tokens differ from autoregressive decoding in: {', '.join(bad)}")
    return 0


Found = tuple[list[Row], dict[str, Any], list[str]]
"""Rows of a suite, what else its JSON holds, and runs whose tokens were wrong."""


def _caption(rows: list[Row]) -> str:
    links = {row.link for row in rows if row.link}
    parts = ["medians; spread: (largest - smallest) / median"]
    parts += [f"links: {', '.join(sorted(links))}"] if links else []
    stored = {row.options["encoding"] for row in rows if "encoding" in row.options}
    parts += [f"experts stored as {', '.join(sorted(stored))}"] if stored else []
    held = [row for row in rows if "identical_to_ar" in row.options]
    other = [row.name for row in held if not row.options["identical_to_ar"]]
    parts += [f"not the tokens of AR: {', '.join(other)}"] if other else []
    parts += ["all have the tokens of AR"] if held and not other else []
    return "; ".join(parts)


def _outline(args: Arguments) -> Outline:
    """What is known of a target in a folder before it is loaded."""
    outline = read_outline(args.model)
    if args.link == "disk" and not outline.converted:
        raise UsageError(
            f"--link disk reads the store of a converted target, and {args.model} is none; run: "
            f"dejax convert {args.model} --out DIR"
        )
    if not outline.config.moe_layers and args.suite != "verify":
        raise UsageError(f"{args.model} has no MoE layers; only bench verify takes a dense target")
    return outline


def _loaded(args: Arguments) -> tuple[Target, Draft | None]:
    """The target and its draft experts, which are read first: a target takes longer."""
    bound: Outline | Target
    if args.model.startswith(PREFIX):
        encoding = OPTIONS[args.experts or "bf16"]
        bound = synthetic_target(args.model, experts=encoding, out=args.store)
    else:
        bound = _outline(args)
    draft = None if args.draft is None else resolve_draft(args.draft, bound)
    return bound if isinstance(bound, Target) else load_shown(args.model), draft


def _with_link(
    args: Arguments,
    target: Target,
    draft: Draft | None,
    loads: float = LOAD_TO_COMPUTE,
    cache: float = 0.0,
) -> Suite:
    """Prompts and link for a target; `loads`, `cache` are for `--link auto`."""
    if target.tokenizer is None:
        ids = prompts_of_random_tokens(target.config, args.count, RANDOM_PROMPT)
        prompts = [(str(index), tokens, "") for index, tokens in enumerate(ids)]
    else:
        records = read_prompts(args.prompts or DEMO_PROMPTS)
        prompts = [
            (str(r["id"]), encode_prompt(target, r["prompt"]), str(r.get("category", "")))
            for r in records
        ]
    room = target.config.context - args.max_new_tokens
    fits = [prompt for prompt in prompts if len(prompt[1]) <= room][: args.count]
    if not fits:
        raise UsageError(f"no prompt fits the context of {target.config.context} tokens")
    if not target.config.moe_layers:
        link = parse_link("real")
    elif args.link == "auto":
        link = choose_link(target, fits[0][1], loads=loads, cache=cache)
    else:
        link = parse_link(args.link)
    say(f"{len(fits)} prompts of {args.max_new_tokens} new tokens; {link.describe()}")
    named = [(name, ids) for name, ids, _ in fits]
    kinds = tuple(kind for *_, kind in fits)
    return Suite(target, draft, named, args.max_new_tokens, link, kinds=kinds if all(kinds) else ())


def _bench_link(args: Arguments) -> Found:
    target, draft = _loaded(args)
    store = expert_store(target, Offload())
    with progress("link", count_cases(store) * args.repeats, "figures") as bar:
        rows = bench_link(store, target.name, repeats=args.repeats, bar=bar)
    bad: list[str] = []
    for loads in LOADS if args.link == "auto" else ():
        suite = _with_link(args, target, draft, loads)
        runs = over_links(loads, drafts=suite.draft is not None)
        more, _, wrong = _decode(args, suite, runs)
        rows, bad = rows + more, bad + wrong
    if args.link == "auto":
        suite = _with_link(args, target, draft, cache=0.5)
        more, _, wrong = _decode(args, suite, half_cached(drafts=suite.draft is not None))
        rows, bad = rows + more, bad + wrong
    return rows, {"expert_bytes": store.bytes_per_expert}, bad


def _decode(args: Arguments, suite: Suite, runs: list[Run]) -> Found:
    """Every run, greedy and at the temperature that was asked for."""
    say("measuring what this machine allows")
    store = expert_store(suite.target, Offload(link=suite.link))
    limits = measure_limits(suite.target, store, suite.prompts[0][1])
    if args.temperature:
        runs = runs + seeded(runs, args.temperature)
    rows, results = bench_decode(suite, runs, limits, store=store, repeats=args.repeats)
    return rows, {"limits": dataclasses.asdict(limits)}, _wrong(results)


def _wrong(results: Sequence[Result]) -> list[str]:
    """The runs with a token that no near-tie explains."""
    return [
        result.run.name
        for result in results
        if any(found["float64_verdict"] == "real" for found in result.row["divergences"])
    ]


def _bench_decode(args: Arguments) -> Found:
    suite = _with_link(args, *_loaded(args))
    top_k = suite.target.config.moe.top_k
    runs = baselines(top_k) + (drafting() if suite.draft is not None else [])
    if args.model.startswith(PREFIX):  # what random weights accept says nothing
        runs = [run for run in runs if run.mode == "ar"]
    return _decode(args, suite, runs)


def _check_drafts(args: Arguments) -> None:
    """Refuses a suite that is about draft experts without any."""
    if args.draft is None:
        raise UsageError(f"bench {args.suite} verifies drafts of draft experts: give --draft")


def _trained_predictor(args: Arguments) -> ExpertPredictor | None:
    """What `--predictor` names, read before the target's weights are."""
    if args.predictor is None:
        return None
    outline = _outline(args)
    draft = None if args.draft is None else resolve_draft(args.draft, outline)
    return load_predictor(args.predictor, outline, draft)


def _bench_trees(args: Arguments) -> Found:
    _check_drafts(args)
    predictor = _trained_predictor(args)
    suite = dataclasses.replace(_with_link(args, *_loaded(args)), predictor=predictor)
    runs = in_all_places(trained=predictor is not None)
    if args.temperature:
        runs += seeded(runs, args.temperature)
    store = expert_store(suite.target, Offload(link=suite.link))
    rows, results = bench_trees(suite, runs, store=store, repeats=args.repeats)
    return rows, {}, _wrong(results)


def _bench_cache(args: Arguments) -> Found:
    suite = _with_link(args, *_loaded(args))
    return _decode(args, suite, cache_sizes(drafts=suite.draft is not None))


def _bench_verify(args: Arguments) -> Found:
    suite = _with_link(args, *_loaded(args))
    store = expert_store(suite.target, Offload(link=suite.link))
    settings = 2 if suite.target.config.moe_layers else 1
    with progress("verify", settings * len(suite.prompts), "prompts") as bar:
        return bench_verify(suite, store, bar=bar), {}, []


def _bench_draft(args: Arguments) -> Found:
    suite = _with_link(args, *_loaded(args))
    store = expert_store(suite.target, Offload(link=suite.link))
    with progress("draft", 2 * len(suite.prompts), "prompts") as bar:
        rows = bench_draft(suite, store, bar=bar)
    if suite.draft is None:
        return rows, {}, []
    more, limits, bad = _decode(args, suite, draft_lengths())
    return rows + more, limits, bad


def _bench_budget(args: Arguments) -> Found:
    _check_drafts(args)
    suite = _with_link(args, *_loaded(args))
    store = expert_store(suite.target, Offload(link=suite.link))
    say("NOT lossless: under a budget, tokens are not those of autoregressive decoding")
    with progress("budget", count_steps(suite, args.repeats), "runs") as bar:
        return bench_budget(suite, store, repeats=args.repeats, bar=bar), {}, []


def _bench_train(args: Arguments) -> Found:
    synthetic = args.model.startswith(PREFIX)
    model = synthetic_config(args.model) if synthetic else _outline(args).config
    length = min(256, model.context)
    config = DistillConfig(
        draft=DraftConfig(width=model.moe.expert_width), seq_len=length, batch_size=4
    )
    tokens = 4 * length
    say(f"a distillation step over {tokens} tokens, random weights, and its parts")
    found = step_cost(model, config, repeats=args.repeats)
    floor = tokens / (found["seconds"]["target"] * found["floor"])
    rows = [
        Row(
            name=name,
            model=args.model,
            mode="distill",
            options={"tokens": tokens, "times_target": seconds / found["seconds"]["target"]},
            tps=tokens / seconds if name == "step" else None,
            limit_tps=floor if name == "step" else None,
            share_of_limit=1 / found["ratio_to_floor"] if name == "step" else None,
            seconds=seconds,
            peak_rss_bytes=peak_rss(),
            repeats=args.repeats,
            spread=found["spread"][name] / seconds,
        )
        for name, seconds in found["seconds"].items()
    ]
    return rows, {"floor": found["floor"], "flops_per_second": found["flops_per_second"]}, []


_SUITES: dict[str, Callable[[Arguments], Found]] = {
    "link": _bench_link,
    "decode": _bench_decode,
    "trees": _bench_trees,
    "draft": _bench_draft,
    "verify": _bench_verify,
    "cache": _bench_cache,
    "budget": _bench_budget,
    "train": _bench_train,
}
