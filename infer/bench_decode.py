"""`dejax bench decode`, `cache` and `draft`: every way to decode, beside autoregressive decoding.

All runs decode the same prompts in turn, then again, so that what else the machine does falls on
all of them; every run's tokens are held against the autoregressive ones.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejax.ckpt.expert_store import ExpertStore
from infer.bench_limits import Limits
from infer.bench_link import most_of_link
from infer.bench_rows import Row, spread
from infer.decode_options import PATH_MODES
from infer.memory import peak_rss
from infer.report import identity, rounds_of
from infer.suite import LOAD_TO_COMPUTE, Result, Run, Suite, run_all

FULL: dict[str, Any] = dict(draft_length=6, truncate=True, prefetch=True)
LOOK = "look-ahead"
ORACLE = "oracle prefetch (not a real system)"
TREES = ("2x3", "best8")


def _full(**changes: Any) -> dict[str, Any]:
    return FULL | changes


def baselines(top_k: int) -> list[Run]:
    """Autoregressive decoding in the ways that others do it, and shared + top-r drafting."""
    runs = [
        Run("AR", "ar"),
        Run(f"AR, {LOOK}", "ar", look_ahead=True),
        Run("AR, half cached (LRU)", "ar", cache=0.5),
        Run(f"AR, half cached (LRU), {LOOK}", "ar", cache=0.5, look_ahead=True),
        Run("n-gram, K=6", "n-gram", draft_length=6),
        Run("n-gram, K=6, governed", "n-gram", draft_length=6, governor=True),
    ]
    runs += [
        Run(f"top-{r}, K={k}", "top-r", r=r, draft_length=k)
        for r in (1, 2, 3)
        for k in (2, 4)
        if r <= top_k
    ]
    return runs


def drafting() -> list[Run]:
    """DraftExpert step by step (its Tables 2 to 4), then what is ours."""
    mode: Any = "draft-expert"
    return [
        Run("draft-expert, K=4", mode),
        Run("draft-expert, K=6, truncated", mode, draft_length=6, truncate=True),
        Run("draft-expert, K=6, truncated, prefetch", mode, **FULL),
        Run(f"draft-expert, K=6, truncated, prefetch, {LOOK}", mode, look_ahead=True, **FULL),
        Run(f"draft-expert, K=6, truncated, {ORACLE}", mode, prefetch_oracle=True, **FULL),
        Run("draft-expert, K=6, cost, prefetch", mode, **_full(controller="cost")),
        Run("draft-expert, K=6, random, prefetch", mode, **_full(controller="random")),
        Run("draft-expert, K=6, confidence only, prefetch", mode, **_full(budget="off")),
        Run("draft-expert, K=6, half cached, prefetch", mode, cache=0.5, **FULL),
        Run(
            f"draft-expert, K=6, half cached, prefetch, {LOOK}",
            mode,
            cache=0.5,
            look_ahead=True,
            **FULL,
        ),
        Run(
            "draft-expert, K=6, half cached, prefetch, drafts by residents",
            mode,
            cache=0.5,
            draft_resident=0.6,
            **FULL,
        ),
        Run(
            f"draft-expert, K=6, half cached, {ORACLE}",
            mode,
            cache=0.5,
            prefetch_oracle=True,
            **FULL,
        ),
        *(Run(f"draft-expert, tree {t}, prefetch", mode, prefetch=True, tree=t) for t in TREES),
        Run("draft-expert, K=6, prefetch, governed", mode, governor=True, **FULL),
        Run(
            "draft-expert, K=6, half cached, prefetch, governed",
            mode,
            cache=0.5,
            governor=True,
            **FULL,
        ),
        *_by_expert_cost(),
    ]


def _by_expert_cost() -> list[Run]:
    """EcoSpec's tree beside the confidence tree of the same size, at cache 0 and half."""
    tree: Any = dict(tree=TREES[1], prefetch=True)
    return [
        Run(f"ecospec, tree {TREES[1]}, prefetch", "ecospec", **tree),
        Run(f"draft-expert, tree {TREES[1]}, half cached", "draft-expert", cache=0.5, **tree),
        Run(f"ecospec, tree {TREES[1]}, half cached", "ecospec", cache=0.5, **tree),
    ]


def cache_sizes(*, drafts: bool) -> list[Run]:
    """Autoregressive decoding and, with draft experts, DraftExpert, by the share that is cached."""
    runs = []
    for cache in (0.0, 0.25, 0.5, 0.75, 1.0):
        name = f"{cache:.0%} cached"
        runs.append(Run("AR" if not cache else f"AR, {name}", "ar", cache=cache))
        if drafts:
            runs.append(Run(f"draft-expert, {name}", "draft-expert", cache=cache, **FULL))
    return runs


def draft_lengths() -> list[Run]:
    """DraftExpert by the longest draft that it may make, with and without the stop rule."""
    mode: Any = "draft-expert"
    runs = [Run("AR", "ar")]
    for length in (1, 2, 4, 6, 8):
        runs.append(Run(f"K={length}, prefetch", mode, draft_length=length, prefetch=True))
        options = _full(draft_length=length)
        runs.append(Run(f"K={length}, truncated, prefetch", mode, **options))
    return runs


def over_links(loads: float, *, drafts: bool) -> list[Run]:
    """What is compared over links of different rates; `loads` names the rate."""
    name = f"loads {loads:g} x computation"
    runs = [Run("AR", "ar"), Run(f"AR, {LOOK}", "ar", look_ahead=True)]
    if drafts:
        runs.append(Run("draft-expert", "draft-expert", look_ahead=True, **FULL))
    return [replace(run, name=f"{run.name}, {name}") for run in runs]


def half_cached(*, drafts: bool) -> list[Run]:
    """What is compared where a cache of half the experts leaves loads that are worth hiding."""
    name = f"loads {LOAD_TO_COMPUTE:g} x computation when half cached"
    runs = [Run("AR", "ar"), Run("AR, half cached (LRU)", "ar", cache=0.5)]
    if drafts:
        ways: dict[str, dict[str, Any]] = {
            "K=6": {},
            "K=4": dict(draft_length=4),
            "K=6, surer than 0.5": dict(budget="off", tau=0.5),
            "K=6, cost": dict(controller="cost"),
        }
        for way, options in ways.items():
            run = Run(f"draft-expert, half cached, {way}", "draft-expert", cache=0.5)
            runs.append(replace(run, **_full(**options)))
    return [replace(run, name=f"{run.name}, {name}") for run in runs]


LOADS = (0.3, 1.0, 3.0, 10.0)
"""How many times its computation a step's loads take, over the links of `over_links`."""


def seeded(runs: Sequence[Run], temperature: float) -> list[Run]:
    """The same runs at a temperature."""
    return [
        replace(run, name=f"{run.name}, T={temperature:g}", temperature=temperature) for run in runs
    ]


def bench_decode(
    suite: Suite, runs: Sequence[Run], limits: Limits, *, store: ExpertStore, repeats: int
) -> tuple[list[Row], list[Result]]:
    """Decodes every run `repeats` times; a row a run, and what the runs gave."""
    rate = most_of_link(store, suite.link, repeats=max(3, repeats))
    results = run_all(suite, runs, repeats=repeats)
    rows = [
        decode_row(suite, result, results, store=store, rate=rate, limits=limits)
        for result in results
    ]
    for result in results:
        if result.run.governor:
            rows += _by_kind(suite, result, results)
    return rows, results


def _plain(run: Run, results: Sequence[Result], cache: float) -> Result | None:
    """Autoregressive decoding at the temperature and in the engine of `run`, with such a cache."""
    same = (
        other
        for other in results
        if other.run.mode == "ar"
        and other.run.engine == run.engine
        and not other.run.look_ahead
        and other.run.temperature == run.temperature
        and other.run.cache == cache
    )
    return next(same, None)


def _by_kind(suite: Suite, result: Result, results: Sequence[Result]) -> list[Row]:
    """A governed run on each kind of prompt: what it must not lose, it must lose nowhere."""
    base = _plain(result.run, results, result.run.cache)
    rows: list[Row] = []
    if base is None:
        return rows
    for kind in dict.fromkeys(suite.kinds):
        mine = [index for index, of in enumerate(suite.kinds) if of == kind]
        rates = result.rates(mine)
        ratio = statistics.median(rates) / statistics.median(base.rates(mine))
        rows.append(
            Row(
                name=f"{result.run.name}: {kind}",
                model=suite.target.name,
                mode=result.run.mode,
                options=result.row["options"] | {"kind": kind, "prompts": len(mine)},
                link=suite.link.describe(),
                simulated=suite.link.simulated,
                tps=statistics.median(rates),
                ratio_to_same_cache=ratio,
                repeats=len(rates),
                spread=spread(rates),
            )
        )
    return rows


def decode_row(
    suite: Suite,
    result: Result,
    results: Sequence[Result],
    *,
    store: ExpertStore,
    rate: float | None,
    limits: Limits | None = None,
) -> Row:
    """A run's row, beside autoregressive decoding among `results`.

    An engine that holds all experts has autoregressive decoding of its own, no link and no loads.
    `rate` is that of `most_of_link`.
    """
    run, found = result.run, result.row["stats"]
    link = None if run.engine == "resident" else suite.link
    reference = _plain(run, results, 0.0 if link else run.cache)
    same = _plain(run, results, run.cache) if link else None
    assert reference is not None
    ar = reference.row["stats"]
    rates = result.rates()
    tps = statistics.median(rates)
    moved = sum(kind["bytes"] for kind in found["loads"].values())
    count = sum(kind["count"] for kind in found["loads"].values())
    seconds = sum(kind["seconds"] for kind in found["loads"].values())
    limit = None
    # Looking ahead, loads do not wait for their layer: that limit does not hold.
    if limits is not None and run.mode == "ar" and not run.look_ahead:
        least = seconds if rate is None else count * suite.link.latency_seconds + moved / rate
        limit = 1 / limits.offloaded(least / found["emitted"] / limits.moe_layers)
    first_drafter = next(
        (other.row["stats"] for other in results if other.run.mode == "top-r" and other.run.r == 1),
        None,
    )
    drafts = run.mode in PATH_MODES
    return Row(
        name=run.name,
        model=suite.target.name,
        mode=run.mode,
        options=result.row["options"]
        | {
            "identical_to_ar": result.row["identical_to_ar"],
            "link_bytes_per_second": rate,
            "encoding": store.encoding,
        },
        link=None if link is None else link.describe(),
        simulated=link is not None and link.simulated,
        tps=tps,
        ratio_to_ar=tps / statistics.median(reference.rates()),
        ratio_to_same_cache=tps / statistics.median(same.rates()) if same else None,
        limit_tps=limit,
        share_of_limit=None if limit is None else tps / limit,
        link_utilisation=_share(moved, rate and rate * found["decode_seconds"]) if link else None,
        load_share=_load_share(result) if link else None,
        tokens_per_round=found["tokens_per_round"],
        cost_verify=_share(found["target_pass_seconds"], ar["target_pass_seconds"])
        if run.mode != "ar"
        else None,
        cost_draft=_share(found["draft_pass_seconds"], first_drafter["draft_pass_seconds"])
        if drafts and first_drafter
        else None,
        acceptance_rate=found["acceptance_rate"],
        unique_layer_experts=found["unique_layer_experts"],
        bytes_per_token=moved / found["emitted"] if link else None,
        accepted_per_expert_loaded=_share(found["emitted"], count),
        prefetch_recall=found["prefetch_recall"],
        prefetch_precision=found["prefetch_precision"],
        shuffled_recall=found["shuffled_recall"],
        shuffled_precision=found["shuffled_precision"],
        controller_share=None if run.mode == "ar" else found["controller_share"],
        peak_rss_bytes=peak_rss(),
        repeats=len(rates),
        spread=spread(rates),
        factors=None if run.mode == "ar" else identity(found, ar),
    )


def _load_share(result: Result) -> float:
    """Of the time of all rounds, the part in which the loop waited for experts."""
    rounds = rounds_of(r for traces in result.repeats for trace in traces for r in trace)
    return sum(r.load_seconds for r in rounds) / sum(r.total_seconds for r in rounds)


def _share(part: float | int | None, whole: float | int | None) -> float | None:
    return part / whole if part is not None and whole else None
