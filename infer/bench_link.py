"""`dejax bench link`: what the links of this machine give, per expert.

Real ones: the store's files, read cold through the page cache (which is dropped after every read,
and looked at), and host memory to the device. Simulated ones: what is left of the stated rate.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from dejax.ckpt.expert_store import ExpertStore
from dejax.shapes import Pair
from infer.bench_rows import Row, spread
from infer.console import Advance
from infer.link import Link, parse_link
from infer.memory import peak_rss
from infer.prefetch import Arrivals
from infer.residency import Residency

READERS = (1, 2, 4, 8)
SIMULATED = {
    "PCIe 5.0 x16": "sim:55",
    "PCIe 4.0 x16": "sim:25",
    "UFS 4.0": "sim:4",
    "slow flash": "sim:1",
}
"""Links of machines that people have (DraftExpert's settings), by the rate of each."""
WAVE = 4
"""Experts that are asked for at once, while as many before them are on their way."""
MOVED_BYTES = 2**29
"""About so many bytes are moved for one figure."""


def sample(store: ExpertStore, size: int, seed: int) -> list[Pair]:
    """Layer-experts in random order, about `MOVED_BYTES` of them, `size` bytes each; at least 8."""
    count = min(len(store.pairs), max(8, MOVED_BYTES // size))
    return random.Random(seed).sample(store.pairs, count)


def plain_reads(store: ExpertStore, pairs: Sequence[Pair]) -> float:
    """Bytes a second of a loop that reads the same files, cold, into one buffer, and no more."""
    buffer = np.empty(store.bytes_per_expert, np.uint8)
    for pair in pairs:
        store.forget(*pair)
    began = time.perf_counter()
    for pair in pairs:
        handle = os.open(store.locate(*pair), os.O_RDONLY)
        os.preadv(handle, [buffer.data], 0)
        os.close(handle)
    seconds = time.perf_counter() - began
    for pair in pairs:
        store.forget(*pair)
    return len(pairs) * store.bytes_per_expert / seconds


def most_of_link(store: ExpertStore, link: Link, *, repeats: int) -> float | None:
    """Bytes a second that a link gives at most, median; None where nothing is known of it.

    Of a simulated one it is the stated rate, of the disk what `plain_reads` reach.
    """
    if not link.cold:
        return link.bytes_per_second
    size = store.bytes_per_expert
    return statistics.median(
        plain_reads(store, sample(store, size, repeat)) for repeat in range(repeats)
    )


def moved_rate(store: ExpertStore, pairs: Sequence[Pair], link: Link, readers: int) -> float:
    """Bytes a second, as stored, of experts that are brought to the device over a link."""
    with Residency(
        store,
        device_cache_bytes=0,
        host_cache_bytes=0,
        link=link,
        compute_dtype=np.float32,
        prefetch_bytes=0,
        readers=readers,
    ) as residency:
        waves = [pairs[first : first + WAVE] for first in range(0, len(pairs), WAVE)]
        # The first ones make the memory that the others use again.
        for wave in (waves[0], waves[0]):
            _finish(residency, _ask(residency, wave))
        began, asked = time.perf_counter(), _ask(residency, waves[0])
        for wave in [*waves[1:], None]:
            coming = _ask(residency, wave) if wave else []
            _finish(residency, asked)
            asked = coming
        return len(pairs) * store.bytes_per_expert / (time.perf_counter() - began)


def _ask(residency: Residency, wave: Sequence[Pair]) -> list[Arrivals]:
    return [residency.request(layer, [expert], kind="demand") for layer, expert in wave]


def _finish(residency: Residency, asked: Sequence[Arrivals]) -> None:
    """Waits for a wave, and lets go of it: what was asked for after it is on its way still."""
    for arrivals in asked:
        arrivals.take(1)
    residency.end_pass()


def bench_link(store: ExpertStore, model: str, *, repeats: int, bar: Advance) -> list[Row]:
    """A row a link and number of readers; all of them in turn, `repeats` times."""
    cases: list[tuple[str, str, int, Callable[[Sequence[Pair]], float]]] = []
    if store.path is not None:
        cases.append(
            ("disk, cold, plain preadv", "disk", 1, lambda pairs: plain_reads(store, pairs))
        )
        cases += [_case(store, "disk, cold", "disk", readers) for readers in READERS]
        cases += [_case(store, "page cache", "real", readers) for readers in (1, 2)]
    else:
        cases += [_case(store, "host memory", "real", readers) for readers in (1, 2)]
    cases += [_case(store, name, link, 2) for name, link in SIMULATED.items()]
    found: list[list[float]] = [[] for _ in cases]
    for repeat in range(repeats):
        pairs = sample(store, store.bytes_per_expert, repeat)
        for rates, (name, _, _, run) in zip(found, cases, strict=True):
            rates.append(run(pairs))
            bar.advance(1, link=name)
    rows = []
    for rates, (name, text, readers, _) in zip(found, cases, strict=True):
        link, rate = parse_link(text), statistics.median(rates)
        rows.append(
            Row(
                name=name,
                model=model,
                options={"readers": readers, "encoding": store.encoding},
                link=link.describe(),
                simulated=link.simulated,
                link_utilisation=rate / link.bytes_per_second if link.bytes_per_second else None,
                seconds=store.bytes_per_expert / rate,
                bytes_per_second=rate,
                peak_rss_bytes=peak_rss(),
                repeats=repeats,
                spread=spread(rates),
            )
        )
    return rows


def count_cases(store: ExpertStore) -> int:
    """How many figures `bench_link` measures in a turn."""
    return (1 + len(READERS) if store.path is not None else 0) + 2 + len(SIMULATED)


def _case(
    store: ExpertStore, name: str, link: str, readers: int
) -> tuple[str, str, int, Callable[[Sequence[Pair]], float]]:
    def run(pairs: Sequence[Pair]) -> float:
        if link == "real" and store.path is not None:  # cold reads may have been there before
            moved_rate(store, pairs, parse_link(link), readers)
        return moved_rate(store, pairs, parse_link(link), readers)

    return f"{name}, {readers} readers" if readers > 1 else f"{name}, 1 reader", link, readers, run
