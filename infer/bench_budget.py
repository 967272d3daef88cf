"""`dejax bench budget`: what a lossy verification (mode moe-spec) gains, and what it costs.

Quality is measured on equal prefixes, the target's own continuations: one pass over a block of
rows, exact and under the budget, gives two laws for every next token. What the budget emits when it
decodes for itself is then judged by the exact target.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from dejax.spec.budget import Rank, VerifyBudget
from dejax.spec.control import ControlConfig
from infer.bench_rows import Row, spread
from infer.bench_steps import own_text
from infer.console import Advance
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.memory import peak_rss
from infer.passes import Drafting
from infer.report import stats
from infer.suite import Suite
from infer.trace import Round

ROWS = 7
"""Rows of a verification on equal prefixes: six drafted tokens and the pending one."""
CONTROL = ControlConfig(draft_length=ROWS - 1, truncate=False)


def budgets(top_k: int, experts: int) -> list[VerifyBudget]:
    """Those that are compared: sizes by both rankings, and at one size other choices."""
    sizes = sorted({round(top_k * times) for times in (1, 1.5, 2, 3, 4)})
    sizes = [size for size in sizes if size < experts]  # with all of them nothing is left out
    some = VerifyBudget(max((size for size in sizes if size <= 2 * top_k), default=experts))
    others = [
        replace(some, select="truncation"),
        replace(some, weights="raw"),
        replace(some, exact_every=4),
    ]
    ranked = [VerifyBudget(size, rank=rank) for rank in get_args(Rank) for size in sizes]
    return [*ranked, *others, VerifyBudget(experts)]


def name_of(budget: VerifyBudget, experts: int) -> str:
    """What tables call it."""
    parts = [f"B={budget.experts}" + (" (all)" if budget.experts == experts else "")]
    parts += [budget.select] if budget.select != "substitution" else []
    parts += ["gates as they are"] if budget.weights == "raw" else []
    parts += ["by residency"] if budget.rank == "residency" else []
    parts += [f"exact every {budget.exact_every}"] if budget.exact_every else []
    return ", ".join(parts)


def log_law(logits: Float[np.ndarray, "R V"]) -> Float[np.ndarray, "R V"]:
    """Log-probabilities of rows of logits, in float64."""
    shifted = logits.astype(np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def on_equal_prefixes(
    exact: Decoder, limited: Decoder, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[str, float]:
    """Mean KL(exact || limited) in nats, and the share of rows whose likeliest token is another."""
    kl, flips = [], []
    for ids, text in zip(prompts, texts, strict=True):
        for decoder in (exact, limited):
            decoder.engine.begin()
            decoder.engine.prefill(ids)
        for start in range(len(ids), len(text) - ROWS, ROWS):
            rows, laws = text[start : start + ROWS], []
            for decoder in (exact, limited):
                decoder.residency.begin_round()
                _as_drafted(decoder, rows, start)
                laws.append(log_law(decoder.engine.target_rows(rows, start=start).logits))
                decoder.residency.end_round()
            p, q = laws
            kl += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
            flips += (p.argmax(axis=-1) != q.argmax(axis=-1)).tolist()
            # Both go on from exact KV: errors of earlier blocks are measured in the text.
            limited.engine.prefill(rows, start=start)
    return {"kl": statistics.fmean(kl), "flip_rate": statistics.fmean(flips)}


def _as_drafted(decoder: Decoder, rows: Sequence[int], start: int) -> None:
    """Where a budget goes by what is on the device: brings there what a draft of the rows would."""
    engine = decoder.engine
    if engine.budget is not None and engine.budget.rank == "residency":
        drafting = Drafting(r=1, prefetch=True)
        for row, token in enumerate(rows[:-1]):
            engine.draft_row(token, start=start + row, drafting=drafting)


def surprises(exact: Decoder, ids: list[int], emitted: Sequence[int]) -> list[float]:
    """Negative log-probabilities that the exact target gives emitted tokens."""
    engine = exact.engine
    engine.begin()
    found = [-log_law(engine.prefill(ids).logits)[0, emitted[0]]]
    for first in range(0, len(emitted) - 1, ROWS):
        rows = list(emitted[first : first + ROWS])
        laws = log_law(engine.target_rows(rows, start=len(ids) + first).logits)
        following = emitted[first + 1 : first + 1 + len(rows)]
        found += [-laws[row, token] for row, token in enumerate(following)]
    return found


def _tokens(trace: Sequence[Round]) -> list[int]:
    return [token for record in trace for token in record.emitted]


def _divergence(reference: Sequence[int], other: Sequence[int]) -> int:
    """The first place in which two texts differ; their length if in none."""
    pairs = enumerate(zip(reference, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(reference), len(other)))


def count_steps(suite: Suite, repeats: int) -> int:
    """How often `bench_budget` advances its bar."""
    moe = suite.target.config.moe
    return (2 + len(budgets(moe.top_k, moe.num_experts))) * (repeats + 1)


def bench_budget(suite: Suite, store: Any, *, repeats: int, bar: Advance) -> list[Row]:
    """A row a budget, beside autoregressive decoding and the same drafts verified exactly."""
    config, offload = suite.target.config, suite.offload(0)
    place: Any = dict(offload=offload, capacity=suite.capacity, store=store)
    prompts = [ids for _, ids in suite.prompts]
    options = DecodeOptions(
        mode="ar", max_new_tokens=suite.max_new_tokens, control=CONTROL, stop_at_eos=False
    )
    experts = config.moe.num_experts
    cases: list[tuple[str, Any, VerifyBudget | None]] = [
        ("AR", "ar", None),
        ("draft-expert, exact", "draft-expert", None),
    ]
    cases += [
        (name_of(budget, experts), "moe-spec", budget)
        for budget in budgets(config.moe.top_k, experts)
    ]
    traces: list[list[list[tuple[Round, ...]]]] = [[] for _ in cases]
    with ExitStack() as stack:
        exact = stack.enter_context(Decoder(suite.target, **place))
        texts = own_text(exact, suite)
        with bar.aside("compiling"):
            exact.engine.warm_up(rows=ROWS)
        decoders = [
            stack.enter_context(
                Decoder(
                    suite.target,
                    draft=None if mode == "ar" else suite.draft,
                    verify_budget=budget,
                    **place,
                )
            )
            for _, mode, budget in cases
        ]
        for repeat in range(repeats):  # all in turns, then all again
            for (name, mode, _), decoder, runs in zip(cases, decoders, traces, strict=True):
                chosen = replace(options, mode=mode)
                if not repeat:
                    with bar.aside("compiling"):
                        decoder.warm_up(chosen)
                runs.append([decoder.run(ids, chosen) for ids in prompts])
                bar.advance(1, run=name)
        reference = [_tokens(trace) for trace in traces[0][0]]
        quality = []
        for (_, _, budget), decoder, runs in zip(cases, decoders, traces, strict=True):
            emitted = [_tokens(trace) for trace in runs[0]]
            found: dict[str, float] = {"kl": 0.0, "flip_rate": 0.0}
            if budget is not None:
                found = on_equal_prefixes(exact, decoder, prompts, texts)
            surprise = [
                value
                for ids, mine in zip(prompts, emitted, strict=True)
                for value in surprises(exact, ids, mine)
            ]
            found["perplexity"] = math.exp(statistics.mean(surprise))
            found["first_divergence"] = statistics.fmean(
                _divergence(a, b) for a, b in zip(reference, emitted, strict=True)
            )
            quality.append(found)
            bar.advance(1)
    ar = statistics.median(_rates(traces[0]))
    return [
        _row(suite, *case, runs, ar, found)
        for case, runs, found in zip(cases, traces, quality, strict=True)
    ]


def _rates(runs: Sequence[Sequence[Sequence[Round]]]) -> list[float]:
    """Tokens a second of every repeat."""
    return [stats([r for trace in traces for r in trace])["decode_tps"] for traces in runs]


def _row(
    suite: Suite,
    name: str,
    mode: str,
    budget: VerifyBudget | None,
    runs: Sequence[Sequence[Sequence[Round]]],
    ar: float,
    quality: dict[str, float],
) -> Row:
    joined, rates = [record for trace in runs[0] for record in trace], _rates(runs)
    found = stats(joined)
    moved = sum(kind["bytes"] for kind in found["loads"].values())
    return Row(
        name=name,
        model=suite.target.name,
        mode=mode,
        options={
            "lossless": budget is None,
            "budget": None if budget is None else vars(budget),
            "rescued_rows": sum(record.rescued for record in joined),
            "draft_length": CONTROL.draft_length,
        },
        link=suite.link.describe(),
        simulated=suite.link.simulated,
        tps=statistics.median(rates),
        ratio_to_ar=statistics.median(rates) / ar,
        tokens_per_round=found["tokens_per_round"],
        acceptance_rate=found["acceptance_rate"],
        bytes_per_token=moved / found["emitted"],
        unique_layer_experts=found["unique_layer_experts"],
        peak_rss_bytes=peak_rss(),
        repeats=len(rates),
        spread=spread(rates),
        kl=quality["kl"],
        flip_rate=quality["flip_rate"],
        perplexity=quality["perplexity"],
        first_divergence=quality["first_divergence"],
    )
