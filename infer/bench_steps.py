"""`dejax bench verify` and `draft`: what one pass costs, by its rows and by its drafter.

Passes run over real text, the target's own continuation of a prompt: experts that a block of
unrelated tokens would need are others, and more.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from dejax.draft.expert import Draft
from infer.bench_rows import Row, spread
from infer.console import Advance
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.memory import peak_rss
from infer.passes import Drafting
from infer.suite import Suite

Case = tuple[str, int, Draft | None]
"""A drafter: its name, how many routed experts it keeps, its draft experts."""
WIDTHS = (1, 2, 3, 5, 7, 9)
"""Rows of a verification: a draft's tokens and the pending one."""


def own_text(decoder: Decoder, suite: Suite) -> list[list[int]]:
    """Every prompt with the target's own continuation."""
    options = DecodeOptions(mode="ar", max_new_tokens=suite.max_new_tokens, stop_at_eos=False)
    return [
        [*ids, *(token for record in decoder.run(ids, options) for token in record.emitted)]
        for _, ids in suite.prompts
    ]


def bench_verify(suite: Suite, store: Any, *, bar: Advance) -> list[Row]:
    """Seconds and experts of a target pass over 1 to 9 rows, nothing cached and all cached.

    A dense target has nothing to cache.
    """
    rows: list[Row] = []
    moe: list[tuple[str, int | None]] = [("nothing cached", 0), ("all cached", None)]
    for cached, cache in moe if suite.target.config.moe_layers else [("dense", None)]:
        offload = suite.offload(cache)
        with Decoder(
            suite.target, offload=offload, capacity=suite.capacity, store=store
        ) as decoder:
            engine, residency = decoder.engine, decoder.residency
            texts = own_text(decoder, suite)
            with bar.aside("compiling"):
                engine.warm_up(rows=WIDTHS[-1])
            seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
            unique: dict[int, list[int]] = {width: [] for width in WIDTHS}
            moved: dict[int, list[int]] = {width: [] for width in WIDTHS}
            for (_, ids), text in zip(suite.prompts, texts, strict=True):
                engine.begin()
                engine.prefill(ids)
                residency.take_events()
                for start in range(len(ids), len(text) - WIDTHS[-1], WIDTHS[-1]):
                    for width in WIDTHS:  # in turns, over the same text
                        residency.begin_round()
                        began = time.perf_counter()
                        result = engine.target_rows(text[start : start + width], start=start)
                        seconds[width].append(time.perf_counter() - began)
                        residency.end_round()
                        unique[width].append(len(result.used))
                        moved[width].append(sum(e.bytes for e in residency.take_events()))
                    # The cache holds the target's own KV up to the next block.
                    engine.target_rows(text[start : start + WIDTHS[-1]], start=start)
                    residency.take_events()
                bar.advance(1)
        rows += _width_rows(suite, cached, store, seconds, unique, moved)
    return rows


def _width_rows(
    suite: Suite,
    cached: str,
    store: Any,
    seconds: dict[int, list[float]],
    unique: dict[int, list[int]],
    moved: dict[int, list[int]],
) -> list[Row]:
    one = statistics.median(seconds[1])
    return [
        Row(
            name=f"{width} rows, {cached}" if width > 1 else f"1 row, {cached}",
            model=suite.target.name,
            mode="verify",
            options={
                "rows": width,
                "unique_layer_experts": statistics.mean(unique[width]),
                "encoding": store.encoding,
            },
            link=suite.link.describe(),
            simulated=suite.link.simulated,
            cost_verify=statistics.median(seconds[width]) / one,
            bytes_per_token=statistics.mean(moved[width]) / width,
            seconds=statistics.median(seconds[width]),
            peak_rss_bytes=peak_rss(),
            repeats=len(seconds[width]),
            spread=spread(_quartiles(seconds[width])),
        )
        for width in WIDTHS
    ]


def _quartiles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values


def bench_draft(suite: Suite, store: Any, *, bar: Advance) -> list[Row]:
    """Seconds of a draft pass with shared + top-r experts, and with draft experts, in turns."""
    target = suite.target
    ranks = [r for r in (1, 2, 3) if r <= target.config.moe.top_k]
    cases: list[Case] = [(f"shared + top-{r}", r, None) for r in ranks]
    if suite.draft is not None:
        cases.append(("shared + top-1 + draft expert", 1, suite.draft))
    rows: list[Row] = []
    for cached, cache in (("nothing cached", 0), ("all cached", None)):
        seconds: dict[str, list[float]] = {"target": []} | {name: [] for name, _, _ in cases}
        offload = suite.offload(cache)
        options: Any = dict(offload=offload, capacity=suite.capacity, store=store)
        with (
            Decoder(target, **options) as plain,
            Decoder(target, draft=suite.draft, **options) as drafter,
        ):
            texts = own_text(plain, suite)
            with bar.aside("compiling"):
                for r in ranks:
                    plain.engine.warm_up(rows=1, drafting=Drafting(r))
                drafter.engine.warm_up(rows=1, drafting=Drafting(r=1))
            for (_, ids), text in zip(suite.prompts, texts, strict=True):
                for decoder in (plain, drafter):
                    decoder.engine.begin()
                    decoder.engine.prefill(ids)
                for start in range(len(ids), len(text) - 1):
                    for name, r, draft in cases:
                        decoder = plain if draft is None else drafter
                        decoder.residency.begin_round()
                        began = time.perf_counter()
                        decoder.engine.draft_row(text[start], start=start, drafting=Drafting(r))
                        seconds[name].append(time.perf_counter() - began)
                        decoder.residency.end_round()
                    for decoder in (drafter, plain):
                        decoder.residency.begin_round()
                        began = time.perf_counter()
                        decoder.engine.target_rows(text[start : start + 1], start=start)
                        spent = time.perf_counter() - began
                        decoder.residency.end_round()
                    seconds["target"].append(spent)
                bar.advance(1)
        rows += _draft_rows(suite, cached, store, cases, seconds)
    return rows


def _draft_rows(
    suite: Suite,
    cached: str,
    store: Any,
    cases: Sequence[tuple[str, int, Any]],
    seconds: dict[str, list[float]],
) -> list[Row]:
    first = statistics.median(seconds[cases[0][0]])
    step = statistics.median(seconds["target"])
    return [
        Row(
            name=f"{name}, {cached}",
            model=suite.target.name,
            mode="draft",
            options={
                "r": r,
                "draft_expert": draft is not None,
                "share_of_ar_step": median / step,
                "encoding": store.encoding,
            },
            link=suite.link.describe(),
            simulated=suite.link.simulated,
            cost_draft=median / first,
            seconds=median,
            peak_rss_bytes=peak_rss(),
            repeats=len(seconds[name]),
            spread=spread(_quartiles(seconds[name])),
        )
        for name, r, draft in cases
        for median in [statistics.median(seconds[name])]
    ]
