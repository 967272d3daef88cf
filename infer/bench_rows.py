"""What `dejax bench` reports: rows of one form for every suite, and what they were measured on."""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import jax

import dejax
from infer.console import print_table
from infer.units import format_percent

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tensorstore")


@dataclass(frozen=True)
class Row:
    """One measured thing; None where a number does not apply.

    Attributes:
      name, model, mode, options: what was run.
      link: what experts crossed; simulated: whether its times are made, not measured.
      tps: tokens a second of decoding, prefill excluded; ratio_to_ar: over autoregressive decoding
        without a cache over the same link.
      limit_tps: what the link and this machine's computation allow (`infer.bench_limits`);
        share_of_limit: tps over it.
      link_utilisation: bytes moved over (rate of the link x time).
      load_share: of the decode's time, spent waiting for loads (Figure 1b).
      tokens_per_round: emitted / rounds; nodes_per_round: tokens verified beside the pending one.
      cost_verify: a target pass over an autoregressive one; cost_draft: a draft pass over one of
        shared + top-1.
      acceptance_rate: accepted / drafted.
      unique_layer_experts: those that a round's target pass reads, mean.
      bytes_per_token: bytes of experts moved, as stored, over emitted tokens; read_per_token: bytes
        of experts read from the device's memory: a round's target pass reads each distinct one
        once, so do all draft passes of the round together.
      bytes_to_same_size: the bytes that count in this place (moved; read where nothing is) over
        those of trees by confidence of the same mean size, between the two nearest measured.
      accepted_per_expert_loaded: emitted tokens over experts moved.
      ratio_to_same_cache: tps over autoregressive decoding with the same cache (LRU).
      kl, flip_rate: of a lossy verification, on equal prefixes: mean KL from the exact laws (nats),
        share of rows whose likeliest token is another; perplexity: of what was emitted, under the
        exact target; first_divergence: mean place of the first other token.
      prefetch_recall, prefetch_precision, shuffled_recall, shuffled_precision: as `infer.report`
        has them.
      controller_share: of the decode's time, spent on deciding what to draft and to verify.
      seconds: of one thing where the row is about a step or a transfer, median.
      bytes_per_second: of moved bytes.
      peak_rss_bytes: most memory that the process had resident, up to here.
      repeats, spread: how often it was measured; (largest - smallest) / median.
      factors: of the identity speedup = tokens a round / costs (algorithms, section 0).
    """

    name: str
    model: str
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    link: str | None = None
    simulated: bool = False
    tps: float | None = None
    ratio_to_ar: float | None = None
    ratio_to_same_cache: float | None = None
    limit_tps: float | None = None
    share_of_limit: float | None = None
    link_utilisation: float | None = None
    load_share: float | None = None
    tokens_per_round: float | None = None
    nodes_per_round: float | None = None
    cost_verify: float | None = None
    cost_draft: float | None = None
    acceptance_rate: float | None = None
    unique_layer_experts: float | None = None
    bytes_per_token: float | None = None
    read_per_token: float | None = None
    bytes_to_same_size: float | None = None
    accepted_per_expert_loaded: float | None = None
    kl: float | None = None
    flip_rate: float | None = None
    perplexity: float | None = None
    first_divergence: float | None = None
    prefetch_recall: float | None = None
    prefetch_precision: float | None = None
    shuffled_recall: float | None = None
    shuffled_precision: float | None = None
    controller_share: float | None = None
    seconds: float | None = None
    bytes_per_second: float | None = None
    peak_rss_bytes: int | None = None
    repeats: int = 1
    spread: float | None = None
    factors: dict[str, float | None] | None = None


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None for a single value."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and how busy it was."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of dejax, Python and what computes."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"dejax": dejax.__version__, "python": platform.python_version()} | found


def document(suite: str, argv: Sequence[str], rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """The JSON of a suite."""
    return {
        "suite": suite,
        "command": " ".join(["dejax", "bench", *argv]),
        "versions": versions(),
        "machine": machine(),
        **more,
        "rows": [asdict(row) for row in rows],
    }


def _times(factor: float) -> Callable[[float], float]:
    return lambda value: factor * value


COLUMNS: dict[str, tuple[str, Callable[[float], float | str]]] = {
    "tps": ("tokens/s", _times(1.0)),
    "ratio_to_ar": ("x AR", _times(1.0)),
    "ratio_to_same_cache": ("x AR, same cache", _times(1.0)),
    "share_of_limit": ("of limit", format_percent),
    "link_utilisation": ("link in use", format_percent),
    "load_share": ("waiting for loads", format_percent),
    "tokens_per_round": ("tokens a round", _times(1.0)),
    "nodes_per_round": ("nodes a round", _times(1.0)),
    "acceptance_rate": ("accepted", format_percent),
    "cost_verify": ("verify/AR", _times(1.0)),
    "cost_draft": ("draft/top-1", _times(1.0)),
    "unique_layer_experts": ("unique experts", _times(1.0)),
    "bytes_per_token": ("MB a token", _times(1e-6)),
    "read_per_token": ("MB read a token", _times(1e-6)),
    "bytes_to_same_size": ("bytes/tree of its size", _times(1.0)),
    "kl": ("KL", _times(1.0)),
    "flip_rate": ("flips", format_percent),
    "perplexity": ("perplexity", _times(1.0)),
    "first_divergence": ("same tokens", _times(1.0)),
    "prefetch_recall": ("recall", format_percent),
    "prefetch_precision": ("precision", format_percent),
    "shuffled_recall": ("recall, shuffled", format_percent),
    "shuffled_precision": ("precision, shuffled", format_percent),
    "controller_share": ("controller", format_percent),
    "seconds": ("ms", _times(1e3)),
    "bytes_per_second": ("GB/s", _times(1e-9)),
    "spread": ("spread", format_percent),
}
"""Columns of the table, in order: field -> heading, and its value as it is shown."""


def show(title: str, rows: Sequence[Row], caption: str) -> None:
    """The rows as a table of the columns in which any of them has a number."""
    kept = [name for name in COLUMNS if any(getattr(row, name) is not None for row in rows)]
    table = [[row.name, *(_cell(getattr(row, name), name) for name in kept)] for row in rows]
    print_table(title, ["run", *(COLUMNS[name][0] for name in kept)], table, caption)


def _cell(value: float | None, name: str) -> float | str | None:
    return None if value is None else COLUMNS[name][1](value)
