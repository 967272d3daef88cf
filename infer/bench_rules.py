"""What rules and trees cost and give: `python -m infer.bench_rules [MODEL] [--draft D]`.

Host seconds of choosing tokens in a round, at a large vocabulary and without a model; then the
acceptance of every rule and some trees on a model's drafts, and the static tree that its measured
acceptance by rank and its measured times call for (`dejax.spec.sequoia`).
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.ckpt.draft_state import resolve_draft
from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.spec.control import ControlConfig
from dejax.spec.rules import Drafted, Rule, make_rule
from dejax.spec.sampling import SamplingConfig
from dejax.spec.sequoia import StaticTree, best_static_tree
from dejax.spec.tree_options import parse_tree
from dejax.target import read_outline
from infer.argument_types import DraftSpec, InputFile, Model, OutputFile, Positional, PositiveInt
from infer.arguments import parse
from infer.console import print_table, progress, say
from infer.generate import generate
from infer.loading import load_shown
from infer.output import report
from infer.prompts import DEMO_PROMPTS, read_prompts
from infer.report import acceptance_by_rank, rounds_of, stats
from infer.trace import Round
from infer.units import format_percent

LENGTH = 4
WIDE = "4x2"
"""The tree whose drafts measure acceptance by rank."""
RUNS: tuple[tuple[Rule, str, float], ...] = (
    ("match", "chain", 1.0),
    ("R1", "chain", 1.0),
    ("R4", "chain", 1.0),
    ("match", "2x3", 1.0),
    ("R2", "2x3", 1.0),
    ("R3", "2x3", 1.0),
    ("R4", "2x3", 1.0),
    ("match", "chain", 0.0),
    ("match", "2x3", 0.0),
    ("match", "best8", 0.0),
    ("match", "eagle:8", 0.0),
    ("match", WIDE, 0.0),
)
SAMPLINGS = {
    "R0": SamplingConfig(),
    "R5": SamplingConfig(temperature=1.0),
    "R5, top-p 0.9": SamplingConfig(temperature=1.0, top_p=0.9),
    "R5, top-k 50": SamplingConfig(temperature=1.0, top_k=50),
}


@dataclass(frozen=True)
class Arguments:
    """Arguments of the measurement."""

    model: Positional[Model] = "tiny"
    """A model, as for `dejax generate`."""
    draft: DraftSpec | None = None
    """Draft experts; without them the draft is top-1."""
    prompts: InputFile | None = None
    """Prompts as JSON lines; those that come with dejax unless given."""
    max_new_tokens: PositiveInt = 64
    """New tokens of a prompt at most."""
    vocabulary: PositiveInt = 200_000
    """Tokens of the vocabulary at which choosing is timed."""
    rows: PositiveInt = 9
    """Rows of the round that is timed."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def choosing_seconds(vocabulary: int, rows: int, *, repeats: int = 20) -> list[dict[str, Any]]:
    """Median seconds of choosing the tokens of a round of so many rows, all of them accepted.

    Draft and target agree, so that the verification visits every row: the most a round can cost.
    """
    logits = np.random.default_rng(0).normal(size=(rows, vocabulary)).astype(np.float32) * 2
    result = []
    for name, sampling in SAMPLINGS.items():
        rule = make_rule("match", sampling, sample=0, vocab_size=vocabulary)
        draft, verify = [], []
        for repeat in range(repeats):
            first = 1000 * repeat
            began = time.perf_counter()
            tokens = []
            for row in range(rows - 1):
                tokens.append(rule.draft.pick(logits[row], position=first + row))
                rule.draft.confidence(logits[row])
            drafted = time.perf_counter()
            rule.accept(Drafted(tokens, range(rows - 1)), logits, position=first)
            verify.append(time.perf_counter() - drafted)
            draft.append(drafted - began)
        medians = statistics.median(draft), statistics.median(verify)
        result.append({"rule": name, "draft_seconds": medians[0], "verify_seconds": medians[1]})
    return result


def decoded(
    target: Any, prompts: Sequence[Any], draft: Any, *, rule: Rule, tree: str, temperature: float
) -> Callable[[int], list[Round]]:
    """The rounds of decoding prompts in one way, given the number of new tokens."""
    return lambda new: [
        record
        for generation in generate(
            target,
            prompts,
            draft=draft,
            mode="top-r" if draft is None else "draft-expert",
            max_new_tokens=new,
            temperature=temperature,
            control=ControlConfig(draft_length=LENGTH, truncate=False),
            tree=parse_tree(tree),
            rule=rule,
            governor=False,
            engine="resident",
        )
        for record in rounds_of(generation.trace)
    ]


def check_drafted(rounds: Sequence[Round]) -> None:
    """Refuses rounds that nothing can be measured on.

    Raises:
      UsageError: none of them drafted a token.
    """
    if not any(record.drafted for record in rounds):
        raise UsageError(
            "no token was drafted: the answers are too short; give --max-new-tokens 3 or more, or "
            "other --prompts"
        )


def static_tree(chain: Sequence[Round], wide: Sequence[Round]) -> StaticTree:
    """The tree that measured rounds call for; seconds of a target pass are a line through both."""

    def rows_and_seconds(rounds: Sequence[Round]) -> tuple[int, float]:
        rows = max(len(record.drafted) for record in rounds) + 1
        full = [r.target_seconds for r in rounds if len(r.drafted) + 1 == rows]
        return rows, statistics.median(full)

    (few, short), (many, long) = rows_and_seconds(chain), rows_and_seconds(wide)
    slope = (long - short) / (many - few)
    passes = sum(record.draft_passes for record in wide)
    return best_static_tree(
        acceptance_by_rank(wide),
        draft_seconds=sum(record.draft_seconds for record in wide) / passes,
        verify_seconds=lambda rows: short + slope * (rows - few),
        most_nodes=32,
        most_levels=8,
    )


def main(argv: list[str]) -> int:
    """Runs the measurement."""
    about = "Measure what acceptance rules and draft trees cost and give."
    args = parse(Arguments, argv, prog="python -m infer.bench_rules", description=about)
    prompts = read_prompts(DEMO_PROMPTS if args.prompts is None else args.prompts)
    draft = None if args.draft is None else resolve_draft(args.draft, read_outline(args.model))
    choosing = choosing_seconds(args.vocabulary, args.rows)
    target = load_shown(args.model, "float32")
    rows, traces = [], {}
    with progress("decode", len(RUNS), "runs") as bar:
        for rule, tree, temperature in RUNS:
            way: Any = dict(rule=rule, tree=tree, temperature=temperature)
            run = decoded(target, prompts, draft, **way)
            traces[rule, tree, temperature] = rounds = run(args.max_new_tokens)
            check_drafted(rounds)
            names = ("acceptance_rate", "tokens_per_round", "alpha_pos")
            rows.append(way | {name: stats(rounds)[name] for name in names})
            bar.advance(1)
    chain, wide = traces["match", "chain", 0.0], traces["match", WIDE, 0.0]
    best = static_tree(chain, wide)
    found = {"choosing": choosing, "runs": rows, "by_rank": acceptance_by_rank(wide)}
    report(args.json, found | {"static_tree": best}, lambda: _show(args, found, best))
    return 0


def _show(args: Arguments, found: dict[str, Any], best: StaticTree) -> None:
    table = [
        [c["rule"], f"{c['draft_seconds'] * 1e3:.1f}", f"{c['verify_seconds'] * 1e3:.1f}"]
        for c in found["choosing"]
    ]
    title = f"choosing the tokens of a round of {args.rows} rows, {args.vocabulary} tokens, ms"
    print_table(title, ["rule", "draft", "verification"], table, "medians, on the host")
    table = [
        [row["rule"], row["tree"], row["temperature"], format_percent(row["acceptance_rate"])]
        + [f"{row['tokens_per_round']:.2f}", " ".join(f"{a:.2f}" for a in row["alpha_pos"])]
        for row in found["runs"]
    ]
    columns = ["rule", "draft", "temperature", "accepted", "tokens a round", "by depth"]
    print_table(f"{args.model}: acceptance", columns, table, f"chains of {LENGTH}")
    say(f"accepted by rank in {WIDE}: {', '.join(f'{share:.3f}' for share in found['by_rank'])}")
    names = ",".join(map(str, best.parents))
    say(
        f"best static tree: {f'--tree static:{names}' if names else 'none'}, "
        f"{best.tokens_per_round:.2f} tokens a round expected"
    )


if __name__ == "__main__":
    sys.exit(run_module("bench_rules", main))
