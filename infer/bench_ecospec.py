"""What choosing drafts by expert cost gives: `python -m infer.bench_ecospec [MODEL] --draft D`.

Host seconds of a choice among many nodes at the dimensions of a large model, without a model. Then
the same recorded rounds, in which all nodes of a tree were verified, under different choices: by
confidence, by expert cost with each predictor, and with the routes that the verification really had
(the most that a predictor could give). Decodes under each choice: `dejax bench trees`.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dejax.ckpt.draft_state import resolve_draft
from dejax.ckpt.predictor_file import load_predictor
from dejax.cli import run_module
from dejax.config import ModelConfig
from dejax.spec.ecospec import (
    PREDICTORS,
    Candidates,
    EcoConfig,
    ExpertCost,
    Predictor,
    path_greedy,
)
from dejax.spec.expert_use import ExpertGrid, ExpertUse
from dejax.spec.tree import Node, Paid, accepted_path, depths, full_tree, most_confident
from dejax.target import read_outline
from infer.argument_types import (
    DraftedTokens,
    DraftSpec,
    InputFile,
    Model,
    OutputFile,
    Positional,
)
from infer.arguments import parse
from infer.console import print_table
from infer.link import parse_link
from infer.loading import load_shown
from infer.output import report
from infer.prompts import DEMO_PROMPTS, encode_prompts, read_prompts
from infer.suite import Run, Suite, run_all
from infer.trace import Round
from infer.units import format_percent

WHOLE, MOST = "2x3", 8
"""The tree that is recorded, and how many of its nodes are chosen at most."""
COSTS = (0.3, 1.0, 3.0)
SIZES = (4, 5, 6)
"""Trees by confidence that are as small as those by expert cost come out."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of the measurement."""

    draft: DraftSpec
    """Draft experts."""
    model: Positional[Model] = "tiny"
    """A model, as for `dejax generate`."""
    prompts: InputFile | None = None
    """Prompts as JSON lines; those that come with dejax unless given."""
    max_new_tokens: DraftedTokens = 64
    """New tokens of a prompt at most."""
    predictor: InputFile | None = None
    """A trained predictor of experts, to measure beside the others."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def choosing_seconds(*, repeats: int = 50) -> list[dict[str, Any]]:
    """Median seconds of choosing 16 of 64 nodes, 58 layers of 256 experts, top-8.

    A node shares a part of its experts with its parent; with none all costs differ, which is the
    most work there is.
    """
    layers, experts, top_k, count, most = 58, 256, 8, 64, 16
    generator = np.random.default_rng(0)
    parents = full_tree(2, 6)[:count]
    result = []
    for shared in (0.0, 0.5):
        routes: list[np.ndarray] = []
        gains: list[float] = []
        for parent in parents:
            drawn = generator.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)[:, :top_k]
            own = (drawn + experts * np.arange(layers)[:, None]).ravel()
            if parent:
                kept = generator.random(own.size) < shared
                own = np.where(kept, routes[parent - 1], own)
            routes.append(own)
            gains.append(generator.beta(3, 1) * (gains[parent - 1] if parent else 1.0))
        price = 1.0 / (layers * top_k)
        nodes = Candidates(parents, np.array(gains), np.array(routes, np.int32), 2.0, price)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            chosen = path_greedy(nodes, most)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds)
        result.append({"shared": shared, "chosen": len(chosen), "seconds": median})
    return result


def replayed(
    traces: Sequence[Sequence[Round]],
    config: ModelConfig,
    choose: Callable[[Sequence[Node], Paid, ExpertUse], Collection[int]],
    *,
    true_routes: bool = False,
) -> dict[str, float]:
    """Recorded rounds, each with all nodes verified, had only the chosen ones been.

    Nothing is cached. Where a choice accepts less, the recorded rounds still go on from where they
    did: all choices see the same rounds. `true_routes`: nodes are predicted to use what they used.
    """
    use = ExpertUse(ExpertGrid(config.moe_layers, config.moe.num_experts, config.moe.top_k))
    tokens = verified = 0
    unique: list[int] = []
    for before, record in (pair for trace in traces for pair in itertools.pairwise(trace)):
        if not record.drafted:
            continue
        routes = record.rows_routes
        # The rows that were passed are those with children.
        predicted = dict(zip(sorted(set(record.parents)), record.draft_routes, strict=True))
        if true_routes:
            predicted = dict(enumerate(routes))
        used = record.draft_used
        nodes = _nodes(record, predicted, use.grid)
        kept = choose(nodes, Paid(predicted[0], used, available=used), use)
        path = accepted_path(record.drafted, record.parents, record.emitted[: record.accepted])
        accepted = next((i for i, row in enumerate(path) if row not in kept), len(path))
        tokens += accepted + (len(record.emitted) > accepted)
        verified += len(kept)
        unique.append(len(frozenset().union(*(routes[row] for row in (0, *kept)))))
        use.observe([before.emitted[-1], *record.drafted], routes, (0, *path))
    return {
        "nodes": verified / len(unique),
        "tokens_per_round": tokens / len(unique),
        "unique_layer_experts": statistics.mean(unique),
        "unique_per_token": sum(unique) / tokens,
    }


def _nodes(record: Round, predicted: dict[int, frozenset], grid: ExpertGrid) -> list[Node]:
    nodes: list[Node] = []
    deep = depths(record.parents)
    for row, (token, parent, own) in enumerate(
        zip(record.drafted, record.parents, record.confidences, strict=True), start=1
    ):
        confidence = min(own, 1.0) * (nodes[parent - 1].confidence if parent else 1.0)
        routes = predicted.get(row)
        told = grid.flat(record.predicted[row - 1]) if record.predicted else None
        nodes.append(Node(token, parent, int(deep[row]), own, confidence, routes, told))
    return nodes


def choices(traces: Sequence[Sequence[Round]], config: ModelConfig) -> list[dict[str, Any]]:
    """A row a choice, over the same recorded rounds."""
    rows = []
    for most in (MOST, *SIZES):
        found = replayed(traces, config, lambda nodes, paid, use, n=most: most_confident(nodes, n))
        rows.append({"name": f"confidence, {most}"} | found)
    known: list[tuple[bool, Predictor]] = [(False, predictor) for predictor in PREDICTORS[::-1]]
    if any(record.predicted for trace in traces for record in trace):
        known.append((False, "trained"))
    known.append((True, "router"))
    for true, predictor in known:
        for cost in COSTS:
            eco = EcoConfig(cost, predictor)
            found = replayed(
                traces,
                config,
                lambda nodes, paid, use, eco=eco: ExpertCost(eco, use)(nodes, MOST, paid),
                true_routes=true,
            )
            name = f"expert cost {cost:g}, {'true routes' if true else predictor}"
            rows.append({"name": name} | found)
    return rows


def main(argv: list[str]) -> int:
    """Runs the measurement."""
    about = "Measure what choosing draft trees by expert cost gives."
    args = parse(Arguments, argv, prog="python -m infer.bench_ecospec", description=about)
    records = read_prompts(DEMO_PROMPTS if args.prompts is None else args.prompts)
    outline = read_outline(args.model)
    draft = resolve_draft(args.draft, outline)
    trained = None
    if args.predictor is not None:
        trained = load_predictor(args.predictor, outline, draft)
    choosing = choosing_seconds()
    target = load_shown(args.model, "float32")
    prompts = [(record["id"], ids) for record, ids in encode_prompts(target, records, chat=True)]
    suite = Suite(
        target, draft, prompts, args.max_new_tokens, parse_link("real"), predictor=trained
    )
    whole = Run("all nodes", "draft-expert", tree=WHOLE, prefetch=True)
    if trained is not None:  # the same drafts, with what it expects of each node
        whole = replace(whole, mode="ecospec", expert_cost=0.0, predictor="trained")
    recorded, _ = run_all(suite, [whole, Run("AR", "ar")])
    found = {
        "choosing": choosing,
        "choices": choices(recorded.traces, target.config),
    }
    report(args.json, found, lambda: _show(found))
    return 0


def _show(found: dict[str, Any]) -> None:
    rows = [
        [format_percent(c["shared"]), c["chosen"], f"{c['seconds'] * 1e3:.2f}"]
        for c in found["choosing"]
    ]
    print_table(
        "choosing 16 of 64 nodes, 58 layers of 256 experts, top-8",
        ["experts shared with the parent", "nodes chosen", "ms"],
        rows,
        "medians, on the host",
    )
    names = ["nodes", "tokens_per_round", "unique_layer_experts"]
    headings = ["nodes", "tokens a round", "unique experts"]
    more = [*names, "unique_per_token"]
    rows = [[r["name"], *(f"{r[k]:.2f}" for k in more)] for r in found["choices"]]
    print_table(
        "the same recorded rounds under different choices",
        ["choice", *headings, "a token"],
        rows,
        "unique layer-experts of a verification, nothing cached",
    )


if __name__ == "__main__":
    sys.exit(run_module("bench_ecospec", main))
