"""Statistics of decodes, computed from traces and from nothing else.

Definitions follow the field's: acceptance_rate is accepted / drafted (bonus tokens and dropped
tokens excluded); tokens_per_round is emitted / rounds, the prefill's token excluded from both;
alpha_pos[i] is the share of drafts whose i-th token was accepted among those whose first i were;
of trees, i is the depth, and a draft counts where something hangs below the last accepted token.
A tree's acceptance_rate is at most depth / nodes: compare trees by alpha_pos and tokens_per_round.
With P the pairs prefetched in a round and R those that verification required, were not resident at
its start and were not loaded by the draft passes for themselves, prefetch_recall is |P n R| / |R|
and prefetch_precision |P n required| / |P|, each summed over rounds before dividing.
shuffled_recall and shuffled_precision are those of a control: every round is given what was
prefetched in another one, so they say how much of the two any guess of that size would reach.

controller_share is the part of the time in which the host decided what to draft and verify.
governed_rounds are rounds in which a mode that drafts was kept from it (`infer.trace.Round`); they
count as rounds everywhere else too.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dejax.shapes import Pair
from dejax.spec.tree import accepted_path, is_chain
from infer.trace import Round

LOAD_KINDS = ("draft", "prefetch", "demand")


def _ratio(part: int | float, whole: int | float) -> float | None:
    """part / whole, or None where nothing was counted."""
    return part / whole if whole else None


def rounds_of(trace: Iterable[Round]) -> list[Round]:
    """The rounds of a trace, without prefills."""
    return [record for record in trace if record.kind == "round"]


def alpha_by_position(rounds: Sequence[Round]) -> list[float]:
    """P(a drafted token i deep accepted | those above it accepted), for i = 1, 2, ...

    A round counts at a depth where something was drafted below the last accepted token.
    """
    reached: list[int] = []
    for record in rounds:
        parents = record.parents or range(len(record.drafted))
        path = (0, *accepted_path(record.drafted, parents, record.emitted[: record.accepted]))
        if is_chain(parents):
            path = range(record.accepted + 1)
        # Where a generation ended within its accepted path, the last of it was not emitted.
        open_end = len(path) > record.accepted and path[record.accepted] in parents
        reached.append(record.accepted + open_end)
    result = []
    for depth in range(max(reached, default=0)):
        there = [r for r, reach in zip(rounds, reached, strict=True) if reach > depth]
        result.append(sum(r.accepted > depth for r in there) / len(there))
    return result


def acceptance_by_rank(rounds: Iterable[Round]) -> list[float]:
    """Of accepted rows with children, the share of which the child of rank 1, 2, ... was accepted.

    Rank is the drafter's order of choice. What the best static tree is computed from
    (`dejax.spec.sequoia`).
    """
    tried: list[int] = []
    accepted: list[int] = []
    for record in rounds:
        parents = record.parents
        path = (0, *accepted_path(record.drafted, parents, record.emitted))
        for row, after in zip(path, (*path[1:], None), strict=True):
            children = [child for child, p in enumerate(parents, start=1) if p == row]
            for rank, child in enumerate(children):
                if rank == len(tried):
                    tried.append(0)
                    accepted.append(0)
                tried[rank] += 1
                accepted[rank] += child == after
    return [part / whole for part, whole in zip(accepted, tried, strict=True)]


def prefetch_quality(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
    """Recall and precision of prefetching over rounds."""
    return _quality([(record, record.prefetched) for record in rounds])


def shuffled_quality(rounds: Sequence[Round]) -> tuple[float | None, float | None]:
    """Recall and precision if every round had been given the prefetches of another one.

    In an order that has nothing to do with theirs, and is always the same.
    """
    guesses = [record.prefetched for record in rounds if record.prefetched]
    if len(guesses) < 2:
        return None, None
    others = iter(random.Random(0).sample(guesses, len(guesses)))
    return _quality([(r, next(others) if r.prefetched else frozenset()) for r in rounds])


def _quality(
    given: Sequence[tuple[Round, frozenset[Pair]]],
) -> tuple[float | None, float | None]:
    hits = needed = used = predicted = 0
    for record, guess in given:
        missing = record.required - record.resident - record.draft_used
        hits += len(guess & missing)
        needed += len(missing)
        used += len(guess & record.required)
        predicted += len(guess)
    return (_ratio(hits, needed) if predicted else None), _ratio(used, predicted)


def loads_by_kind(trace: Iterable[Round]) -> dict[str, dict[str, int | float]]:
    """Completed transfers of each kind: count, bytes moved, seconds on the link."""
    result = {kind: {"count": 0, "bytes": 0, "seconds": 0.0} for kind in LOAD_KINDS}
    for record in trace:
        for load in record.loads:
            entry = result[load.kind]
            entry["count"] += 1
            entry["bytes"] += load.bytes
            entry["seconds"] += load.end - load.start
    return result


def _mean(values: Sequence[int | float]) -> float | None:
    return _ratio(sum(values), len(values))


def stats(trace: Sequence[Round]) -> dict[str, Any]:
    """The statistics of one or several decodes (their traces joined)."""
    rounds = rounds_of(trace)
    drafted = sum(len(r.drafted) for r in rounds)
    accepted = sum(r.accepted for r in rounds)
    emitted = sum(len(r.emitted) for r in rounds)
    decode_seconds = sum(r.total_seconds for r in rounds)
    recall, precision = prefetch_quality(rounds)
    shuffled_recall, shuffled_precision = shuffled_quality(rounds)
    waiting = sum(r.device_seconds + r.load_seconds for r in rounds)
    passes = sum(r.draft_passes for r in rounds)
    drafting = [r for r in rounds if r.drafted]
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": _ratio(accepted, drafted),
        "rounds": len(rounds),
        "governed_rounds": sum(r.governed for r in rounds),
        "emitted": emitted,
        "tokens_per_round": _ratio(emitted, len(rounds)),
        "alpha_pos": alpha_by_position(rounds),
        "unique_layer_experts": _mean([len(r.required) for r in rounds]),
        "draft_layer_experts": _mean([len(r.draft_used) for r in drafting]),
        "prefetch_recall": recall,
        "prefetch_precision": precision,
        "shuffled_recall": shuffled_recall,
        "shuffled_precision": shuffled_precision,
        "loads": loads_by_kind(rounds),
        "prefill_loads": loads_by_kind(r for r in trace if r.kind == "prefill"),
        "prefill_seconds": sum(r.total_seconds for r in trace if r.kind == "prefill"),
        "decode_seconds": decode_seconds,
        "decode_tps": _ratio(emitted, decode_seconds),
        "draft_seconds": sum(r.draft_seconds for r in rounds),
        "target_seconds": sum(r.target_seconds for r in rounds),
        "draft_pass_seconds": _ratio(sum(r.draft_seconds for r in rounds), passes),
        "target_pass_seconds": _mean([r.target_seconds for r in rounds]),
        "host_share": _ratio(decode_seconds - waiting, decode_seconds),
        "controller_share": _ratio(sum(r.control_seconds for r in rounds), decode_seconds),
    }


def identity(of: Mapping[str, Any], ar: Mapping[str, Any]) -> dict[str, float | None]:
    """Why a mode is as fast as it is: its parts in autoregressive (AR) steps.

    speedup = tokens_per_round / (cost_verify + cost_draft_total + cost_other), where a round's
    target pass, draft passes and the rest of it are each divided by the seconds of an AR token.
    `predicted_speedup` is the right side, `measured_speedup` the ratio of tokens a second: of the
    same traces they are equal but for rounding.

    Args:
      of: `stats` of the mode; ar: `stats` of autoregressive decoding, best of the same prompts.

    Returns:
      The six numbers, None where something was not measured.
    """
    step = _ratio(ar["decode_seconds"], ar["emitted"])
    rounds, whole = of["rounds"], of["decode_seconds"]
    parts = {
        "cost_verify": of["target_seconds"],
        "cost_draft_total": of["draft_seconds"],
        "cost_other": whole - of["target_seconds"] - of["draft_seconds"],
    }
    costs = {name: _ratio(part, rounds * step) if step else None for name, part in parts.items()}
    known = [cost for cost in costs.values() if cost is not None]
    tokens, rate = of["tokens_per_round"], of["decode_tps"]
    return {
        "tokens_per_round": tokens,
        **costs,
        "predicted_speedup": None if tokens is None else _ratio(tokens, sum(known)),
        "measured_speedup": None if rate is None or not step else rate * step,
    }


def distinct_ngrams(sequences: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Share of distinct n-grams among all n-grams of the sequences: low where text loops."""
    grams = [tuple(s[i : i + n]) for s in sequences for i in range(len(s) - n + 1)]
    return _ratio(len(set(grams)), len(grams))
