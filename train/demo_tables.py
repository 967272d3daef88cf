"""The demo's tables: DraftExpert's Tables 2 to 5 (arXiv 2607.24434), as measured here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.console import print_table
from infer.units import format_percent

Row = dict[str, Any]


def _is_greedy(row: Row) -> bool:
    return row["options"]["temperature"] == 0


def _find(rows: Sequence[Row], name: str, *, greedy: bool = True) -> Row:
    return next(row for row in rows if row["name"] == name and _is_greedy(row) == greedy)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def print_arms(arms: Sequence[Row]) -> None:
    """Table 5: what each way of making draft experts gives, teacher-forced."""
    base = arms[0]["agreement"]
    rows = [
        [
            arm["name"],
            arm["kl"],
            format_percent(arm["agreement"]),
            f"{100 * (arm['agreement'] - base):+.1f}",
            format_percent(arm["router_agreement"]),
            format_percent(arm["prefetch_recall"]),
        ]
        for arm in arms
    ]
    print_table(
        "Draft path against the target, teacher-forced on held-out text",
        ["arm", "KL (nats)", "agreement", "gain", "router agreement", "prefetch recall"],
        rows,
        "agreement: share of tokens with the same most likely successor. router agreement: "
        "share of the top-k experts in common.",
    )


def print_drafts(rows: Sequence[Row]) -> None:
    """Table 3: what drafting K = 4 tokens costs and how much is accepted (greedy, no cache)."""
    chosen = [row for row in rows if _is_greedy(row) and row["name"].endswith("K=4")]
    base = chosen[0]["stats"]["draft_pass_seconds"]
    print_table(
        "Drafting 4 tokens: experts read, acceptance, cost (greedy, no expert cache)",
        ["drafter", "draft experts", "verify experts", "accepted/drafted", "draft cost"],
        [
            [
                row["name"],
                row["stats"]["draft_layer_experts"],
                row["stats"]["unique_layer_experts"],
                format_percent(row["stats"]["acceptance_rate"]),
                _ratio(row["stats"]["draft_pass_seconds"], base),
            ]
            for row in chosen
        ],
        "experts: mean distinct layer-experts a round. draft cost: time of a draft pass over that "
        f"of top-1. Loads cross {chosen[0]['options']['link']}.",
    )


def print_verify(rows: Sequence[Row]) -> None:
    """Table 4: what verification costs relative to an autoregressive step."""
    step = _find(rows, "AR")["stats"]["target_pass_seconds"]
    chosen = [
        row
        for row in rows
        if _is_greedy(row) and row["mode"] == "draft-expert" and row["options"]["cache"] == 0
    ]
    print_table(
        "Verification (greedy, no expert cache)",
        ["run", "verify cost", "tokens/round", "prefetch recall", "prefetch precision"],
        [
            [
                row["name"],
                row["stats"]["target_pass_seconds"] / step,
                row["stats"]["tokens_per_round"],
                format_percent(row["stats"]["prefetch_recall"]),
                format_percent(row["stats"]["prefetch_precision"]),
            ]
            for row in chosen
        ],
        f"verify cost: time of a target pass over that of an AR step, both over "
        f"{chosen[0]['options']['link']}.",
    )


def print_speed(rows: Sequence[Row]) -> None:
    """Table 2: tokens per second of AR, top-r and draft experts, greedy and seeded."""
    shown = []
    for row in rows:
        greedy = _is_greedy(row)
        cached = row["options"]["cache"] > 0 and greedy
        base = _find(rows, "AR, half cached" if cached else "AR", greedy=greedy)["stats"]
        stats = row["stats"]
        moved = sum(kind["bytes"] for kind in stats["loads"].values())
        shown.append(
            [
                row["name"],
                "greedy" if greedy else f"T={row['options']['temperature']}",
                stats["decode_tps"],
                _ratio(stats["decode_tps"], base["decode_tps"]),
                stats["tokens_per_round"],
                moved / max(stats["emitted"], 1) / 1e6,
                format_percent(stats["distinct_4grams"]),
                "yes" if row["identical_to_ar"] else "NO",
            ]
        )
    print_table(
        "Decoding speed with offloaded experts",
        ["run", "rule", "tokens/s", "x AR", "tokens/round", "MB/token", "distinct", "= AR"],
        shown,
        f"Loads cross {rows[0]['options']['link']}. x AR: against AR with the same cache and rule. "
        "distinct: share of distinct 4-grams in the output; loops flatter a drafter.",
    )


def print_summary(
    rows: Sequence[Row], resident: dict[str, Any], *, seconds: float, paths: Sequence[Path]
) -> None:
    """The closing lines: exactness, host overhead, time, files."""
    equal = sum(row["identical_to_ar"] for row in rows)
    prompts = len(rows[0]["prompts"])
    print(f"{equal} of {len(rows)} runs emitted the autoregressive tokens ({prompts} prompts).")
    for row in rows:
        for found in row["divergences"]:
            print(f"  {row['name']}: {found}")
    if resident:
        print(
            f"AR with every expert resident: host loop {resident['host_loop_tps']:.0f} tokens/s, "
            f"one jitted step {resident['resident_step_tps']:.0f} tokens/s "
            f"(ratio {resident['ratio']:.2f}); "
            f"{resident['host_share']:.0%} of the host loop's time lies outside jitted steps."
        )
    print(f"Took {seconds:.0f} s. Results and plots: {paths[0].parent}/")
