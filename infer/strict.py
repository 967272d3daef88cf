"""Strict decoding (tier T2): verification's logits are bitwise those of autoregressive decoding.

A row's logits change in their last bits with the number of rows of its pass: a matrix product of
one row takes another way than that of five. So every target pass, the autoregressive one too, is
padded to one row count, that of the longest draft (`strict_rows`); all passes then run the same
compiled steps. What else could differ does not: prefill has a shape of its own, the KV cache one
capacity, an expert's product is over all padded rows, experts are added in ascending id, the router
is in float32 at least, and logits are computed for all padded rows. It is left to the backend that
a row's result depends neither on its place in the block nor on other rows: `compare_bits` checks.
"""

import hashlib
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from jaxtyping import Float

from dejax.target import Target
from infer.buckets import ROW_BUCKETS, bucket
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder, Offload
from infer.report import stats


def strict_rows(draft_length: int) -> int:
    """Rows of every target pass, for drafts of up to `draft_length` tokens; 2 at least."""
    return bucket(max(1, draft_length) + 1, ROW_BUCKETS)


class Bits:
    """Digests of logits, by prompt and position: equal only where all their bits are."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], bytes] = {}

    def __call__(self, prompt: int, position: int, logits: Float[np.ndarray, " V"]) -> None:
        digest = hashlib.blake2b(np.ascontiguousarray(logits).tobytes(), digest_size=16)
        self.rows[prompt, position] = digest.digest()


def compare_bits(
    reference: Bits, other: Bits, lengths: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Rows compared, and how many of them differ in any bit.

    `lengths` are, prompt by prompt, the tokens of the prompt and the new tokens to compare: those
    that both decodes have in common.
    """
    positions = [
        (prompt, start + index)
        for prompt, (start, new) in enumerate(lengths)
        for index in range(new)
    ]
    differing = sum(reference.rows[at] != other.rows[at] for at in positions)
    return {"logit_rows": len(positions), "logit_rows_differing": differing}


def strict_price(
    target: Target,
    prompts: Sequence[list[int]],
    options: DecodeOptions,
    *,
    offload: Offload,
    capacity: int,
    repeats: int = 3,
) -> dict[str, float]:
    """Autoregressive tokens/s with and without padding, in turn, and the share that is left.

    Medians of `repeats` runs over all prompts, after one that is not counted. `options` are of mode
    `ar`; `options.control.draft_length` gives the rows.
    """
    rows = {"native": None, "strict": strict_rows(options.control.draft_length)}
    rates: dict[str, list[float]] = {name: [] for name in rows}
    with ExitStack() as stack:
        decoders = {
            name: stack.enter_context(
                Decoder(target, offload=offload, capacity=capacity, strict_rows=count)
            )
            for name, count in rows.items()
        }
        for repeat in range(repeats + 1):
            for name, decoder in decoders.items():
                trace = [record for ids in prompts for record in decoder.run(ids, options)]
                if repeat:
                    rates[name].append(stats(trace)["decode_tps"] or float("nan"))
    native, strict = (statistics.median(rates[name]) for name in ("native", "strict"))
    return {"native_tps": native, "strict_tps": strict, "ratio": strict / native}
