"""`dejax bench trees`: chains, trees by confidence and EcoSpec in one run, offloaded and resident.

The tables of EcoSpec: autoregressive decoding, DraftExpert's chains, trees of the most confident
nodes, EcoSpec, and EcoSpec with the routes that its nodes really will have. The last is an oracle
(`infer.oracle`): no real system, but the most that a predictor of experts could give. All verify
the same candidates, over the same link; with every expert resident, what counts are the bytes that
passes read.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dejax.ckpt.expert_store import ExpertStore
from infer.bench_decode import FULL, decode_row
from infer.bench_rows import Row
from infer.report import rounds_of
from infer.suite import Result, Run, Suite, run_all

GROWN, MOST = "2x3", 8
"""The tree whose nodes are the candidates, and how many of them are verified at most."""
SIZES = (MOST, 6, 4, 3, 2)
"""Trees by confidence: of EcoSpec's largest size, and as small as EcoSpec's come out."""
COSTS = (0.3, 1.0)
PLACES: dict[str, dict[str, Any]] = {
    "": {},
    ", half cached": dict(cache=0.5),
    ", resident": dict(cache=1.0, engine="resident"),
}
"""Where the experts are: name -> what of a `Run` says so."""


def systems(*, trained: bool = False) -> list[Run]:
    """What is compared in one place; `trained`: with EcoSpec by a trained predictor too."""
    chain: Any = dict(FULL, mode="draft-expert")
    tree: Any = dict(tree=f"{GROWN}:{MOST}", prefetch=True, mode="ecospec")
    return [
        Run("AR", "ar"),
        Run("chain, K=6", **chain),
        Run("chain, K=6, cost", **chain | dict(controller="cost")),
        Run("chain, K=6, governed", governor=True, **chain),
        *(
            Run(
                f"tree by confidence, {size}", "draft-expert", prefetch=True, tree=f"{GROWN}:{size}"
            )
            for size in SIZES
        ),
        *(Run(f"EcoSpec, cost {cost:g}", expert_cost=cost, **tree) for cost in COSTS),
        Run(f"EcoSpec, cost {COSTS[0]:g}, table", predictor="table", **tree),
        Run(f"EcoSpec, cost {COSTS[0]:g}, persistence", predictor="persistence", **tree),
        *(
            [Run(f"EcoSpec, cost {COSTS[0]:g}, trained", predictor="trained", **tree)]
            if trained
            else []
        ),
        *(
            Run(
                f"EcoSpec by oracle (no real system), cost {cost:g}",
                oracle=True,
                **tree | dict(expert_cost=cost),
            )
            for cost in COSTS
        ),
    ]


def in_all_places(*, trained: bool = False) -> list[Run]:
    """The systems offloaded (nothing cached), half cached, and with every expert resident."""
    return [
        replace(run, name=run.name + name, **place)
        for name, place in PLACES.items()
        for run in systems(trained=trained)
    ]


def bench_trees(
    suite: Suite, runs: Sequence[Run], *, store: ExpertStore, repeats: int
) -> tuple[list[Row], list[Result]]:
    """A row a run, and what the runs gave; no repeat knows what an earlier one has learned."""
    results = run_all(suite, runs, repeats=repeats, afresh=True)
    rows = [_row(suite, store, result, results) for result in results]
    return [beside_same_size(row, rows) for row in rows], results


def _row(suite: Suite, store: ExpertStore, result: Result, results: Sequence[Result]) -> Row:
    rate = suite.link.bytes_per_second
    row = decode_row(suite, result, results, store=store, rate=rate)
    run, found = result.run, result.row["stats"]
    rounds = rounds_of(r for traces in result.repeats for trace in traces for r in trace)
    read = sum(len(record.required) + len(record.draft_used) for record in rounds)
    told = {"real_system": False, "oracle_passes": result.oracle_passes} if run.oracle else {}
    return replace(
        row,
        options=row.options | told,
        nodes_per_round=found["drafted"] / found["rounds"],
        read_per_token=read * _expert_bytes(suite) / found["emitted"],
    )


def _expert_bytes(suite: Suite) -> float:
    """Bytes of one expert as it is computed with."""
    config = suite.target.config
    pairs = len(config.moe_layers) * config.moe.num_experts
    return config.routed_params / pairs * np.dtype(suite.target.compute_dtype).itemsize


def _size_and_bytes(row: Row) -> tuple[float, float]:
    """Nodes a round, and the bytes a token that count where the row was measured."""
    count = row.read_per_token if row.bytes_per_token is None else row.bytes_per_token
    assert count is not None and row.nodes_per_round is not None
    return row.nodes_per_round, count


def beside_same_size(row: Row, rows: Sequence[Row]) -> Row:
    """With the bytes of confidence trees of as many nodes, interpolated; else None."""
    if row.mode != "ecospec":
        return row
    same = ("cache", "engine", "temperature")
    points = sorted(
        _size_and_bytes(other)
        for other in rows
        if other.mode == "draft-expert"
        and other.options["tree"] != "chain"
        and all(other.options[name] == row.options[name] for name in same)
    )
    sizes, moved = zip(*points, strict=True)
    size, mine = _size_and_bytes(row)
    ratio = mine / float(np.interp(size, sizes, moved, left=np.nan, right=np.nan))
    return replace(row, bytes_to_same_size=None if np.isnan(ratio) else ratio)
