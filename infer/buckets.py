"""The small grid of sizes that steps are compiled for: rows, experts, and slots of a KV cache."""

import bisect
from collections.abc import Sequence

from dejax.config import ModelConfig

PREFILL_ROWS = 128
ROW_BUCKETS = (1, 2, 3, 5, 9, 17, 33)
EXPERT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PIECE_BYTES = 5 * 2**19
"""Experts of so many bytes are worth a step of their own as soon as they have arrived."""
PIECES = (1, 2, 4)
"""How many of them, if one alone is large enough."""
CAPACITY_STEP = 256
"""Committed tokens that a KV cache has room for are a multiple of it."""


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count`."""
    return sizes[bisect.bisect_left(sizes, count)]


def expert_buckets(config: ModelConfig, expert_bytes: int) -> tuple[int, ...]:
    """Numbers of experts that the expert steps are compiled for, ascending."""
    most = min(config.experts.num_experts, EXPERT_BUCKETS[-1]) if config.experts else 1
    if expert_bytes >= PIECE_BYTES:  # more would only be compiled longer
        most = min(most, PIECES[-1])
    return (*(b for b in EXPERT_BUCKETS if b < most), most)


def expert_groups(config: ModelConfig, expert_bytes: int, count: int) -> list[tuple[int, int]]:
    """How `count` experts at hand are computed: for each step how many, and its compiled size."""
    sizes = expert_buckets(config, expert_bytes)
    groups = [(sizes[-1], sizes[-1])] * ((count - 1) // sizes[-1])
    rest = count - sum(size for size, _ in groups)
    return [*groups, (rest, bucket(rest, sizes))]


def piece_sizes(buckets: Sequence[int], expert_bytes: int) -> tuple[int, ...]:
    """Numbers of experts that are computed before the others of a layer have arrived, ascending.

    Fewer bytes than `PIECE_BYTES` would take longer to ask for than to compute.
    """
    least = -(-PIECE_BYTES // max(expert_bytes, 1))
    if least == 1:
        return tuple(b for b in buckets if b in PIECES)
    return tuple(b for b in buckets if b >= least)[:1]


def capacity_of(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Committed tokens that the longest prompt may come to, in steps that calls have in common."""
    longest = max(map(len, prompts), default=1) + max_new_tokens
    return -(-longest // CAPACITY_STEP) * CAPACITY_STEP
