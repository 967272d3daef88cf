"""A trigram model over the same tokens: the baseline that a trained target has to beat.

    python -m train.trigram DIR [--split heldout]

reads the arrays that `train.data` wrote to DIR, fits the model on DIR/train and writes the bits
per byte of each kind of DIR/heldout to DIR/trigram.json. The model is interpolated Kneser-Ney
(Chen and Goodman, "An empirical study of smoothing techniques for language modeling", 1998,
section 2.7) with one discount an order, down to the uniform distribution, so that no token has
probability zero. A document's first token is a context and is never predicted, as in `train.data`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64

from dejax.cli import run_module
from dejax.errors import UsageError
from infer.argument_types import InputFolder, Positional
from infer.arguments import parse
from infer.output import write_json
from train.data import TokenArrays, load_tokens
from train.text import KINDS
from train.tokenizer import load_tokenizer, token_lengths

BITS = 20  # of a packed token id: three of them fit 64 bits
FIRST_CONTEXT = 0  # stands before a document's first token
FIT_SHARE = 20  # one training document in this many fits the discounts


@dataclass(frozen=True)
class Order:
    """Counts of one order, found by binary search.

    Attributes:
      keys: UInt64[n], sorted: (context << BITS) | token.
      counts: Int[n], occurrences (highest order) or distinct left neighbours (lower orders).
      contexts: UInt64[m], sorted; totals: Int[m], sum of the counts; types: Int[m], tokens seen.
    """

    keys: UInt64[np.ndarray, " n"]
    counts: Int[np.ndarray, " n"]
    contexts: UInt64[np.ndarray, " m"]
    totals: Int[np.ndarray, " m"]
    types: Int[np.ndarray, " m"]


@dataclass(frozen=True)
class Trigram:
    """A fitted model: `orders` and `discounts` are for one, two and three tokens, in this order."""

    orders: tuple[Order, Order, Order]
    discounts: tuple[float, float, float]
    vocab_size: int

    def probabilities(
        self,
        first: Int[np.ndarray, " n"],
        second: Int[np.ndarray, " n"],
        token: Int[np.ndarray, " n"],
    ) -> Float[np.ndarray, " n"]:
        """Return P(token | first, second) elementwise; over all tokens it sums to one."""
        grams = _pack(first, second, token)
        return _interpolate(_look_up(self.orders, grams), self.discounts, self.vocab_size)


def fit_trigram(arrays: TokenArrays, *, vocab_size: int) -> Trigram:
    """Count `arrays`; the discounts are the likeliest on every 20th document, left out at first.

    Raises `UsageError` if the vocabulary does not fit a packed key or there are too few documents.
    """
    n_documents = len(arrays.kinds)
    if not 0 < vocab_size <= 1 << BITS or n_documents < 2:
        raise UsageError(
            f"trigram: vocabulary {vocab_size}, {n_documents} documents; expected at most "
            f"{1 << BITS} tokens and at least 2 documents"
        )
    grams, document = _grams(arrays)
    fits = document % FIT_SHARE == FIT_SHARE - 1 if n_documents >= FIT_SHARE else document == 0
    parts = _look_up(count_orders(grams[~fits]), grams[fits])
    discounts = _fit_discounts(parts, vocab_size)
    return Trigram(count_orders(grams), discounts, vocab_size)


def bits_per_byte(
    model: Trigram,
    arrays: TokenArrays,
    lengths: Int[np.ndarray, " V"],
) -> dict[str, dict[str, float]]:
    """Return bits_per_byte, predicted tokens and their UTF-8 bytes, by kind and for "all".

    `lengths` are the bytes of each token (`tokenizer.token_lengths`).
    """
    grams, document = _grams(arrays)
    token = grams & np.uint64((1 << BITS) - 1)
    parts = _look_up(model.orders, grams)
    bits = -np.log2(_interpolate(parts, model.discounts, model.vocab_size))
    n_bytes, kinds = lengths[token.astype(np.int64)], arrays.kinds[document]
    masks = {kind: kinds == i for i, kind in enumerate(KINDS)} | {"all": kinds >= 0}
    return {
        kind: {
            "bits_per_byte": round(float(bits[m].sum() / max(1, n_bytes[m].sum())), 4),
            "tokens": int(m.sum()),
            "bytes": int(n_bytes[m].sum()),
        }
        for kind, m in masks.items()
        if m.any()
    }


def _pack(first, second, token) -> UInt64[np.ndarray, " n"]:
    a, b, c = (np.asarray(x).astype(np.uint64) for x in (first, second, token))
    return (a << np.uint64(2 * BITS)) | (b << np.uint64(BITS)) | c


def _grams(arrays: TokenArrays):
    """Every predicted token packed with the two before it, and its document's index."""
    tokens = np.asarray(arrays.tokens)
    document = np.repeat(np.arange(len(arrays.kinds)), np.diff(arrays.offsets))
    place = np.arange(len(tokens)) - arrays.offsets[document]
    two_back = np.where(place >= 2, np.roll(tokens, 2), FIRST_CONTEXT)
    predicted = place >= 1
    grams = _pack(two_back, np.roll(tokens, 1), tokens)[predicted]
    return grams, document[predicted]


def count_orders(grams: UInt64[np.ndarray, " n"]) -> tuple[Order, Order, Order]:
    """Count packed trigrams; a lower order counts distinct entries of the order above."""
    orders = []
    keys, counts = np.unique(grams, return_counts=True)
    for n in (3, 2, 1):
        if n < 3:
            shorter = orders[-1].keys & np.uint64((1 << n * BITS) - 1)
            keys, counts = np.unique(shorter, return_counts=True)
        contexts, start = np.unique(keys >> np.uint64(BITS), return_index=True)
        totals = np.add.reduceat(counts, start)
        orders.append(Order(keys, counts, contexts, totals, np.diff([*start, len(keys)])))
    return orders[2], orders[1], orders[0]


def _look_up(orders: Sequence[Order], grams: UInt64[np.ndarray, " n"]):
    """(count, total, types) of each gram in each order, lowest first; zeros where unseen."""
    parts = []
    for n, order in enumerate(orders, start=1):
        keys = grams & np.uint64((1 << n * BITS) - 1)
        counts = _values(order.keys, order.counts, keys)
        contexts = keys >> np.uint64(BITS)
        totals = _values(order.contexts, order.totals, contexts)
        parts.append((counts, totals, _values(order.contexts, order.types, contexts)))
    return parts


def _values(keys, values, wanted):
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def _interpolate(parts, discounts: Sequence[float], vocab_size: int):
    """Give what the discount takes from the seen tokens to the order below."""
    p = np.full(len(parts[0][0]), 1.0 / vocab_size)
    for (counts, totals, types), discount in zip(parts, discounts, strict=True):
        seen = np.maximum(totals, 1)
        p = np.where(
            totals > 0,
            (np.maximum(counts - discount, 0.0) + discount * types * p) / seen,
            p,
        )
    return p


def _fit_discounts(parts, vocab_size: int) -> tuple[float, float, float]:
    """Coordinate search in steps of 0.05, each order in turn, twice over."""
    discounts = [0.75, 0.75, 0.75]
    grid = np.arange(0.05, 1.0, 0.05)
    for order in (2, 1, 0) * 2:

        def loss(d, order=order):
            tried = [*discounts[:order], d, *discounts[order + 1 :]]
            return -np.log(_interpolate(parts, tried, vocab_size)).mean()

        discounts[order] = round(float(min(grid, key=loss)), 2)
    return discounts[0], discounts[1], discounts[2]


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.trigram`."""

    data: Positional[InputFolder]
    """Folder written by `python -m train.data`."""
    split: str = "heldout"
    """Split to evaluate on."""


def main(argv: list[str]) -> int:
    """Runs `python -m train.trigram`: fits, evaluates, prints the table, writes trigram.json."""
    about = "Fit a trigram model, and evaluate it, in bits a byte."
    args = parse(Arguments, argv, prog="python -m train.trigram", description=about)
    folder = args.data
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = fit_trigram(load_tokens(folder / "train"), vocab_size=len(tokenizer))
    result = bits_per_byte(model, load_tokens(folder / args.split), token_lengths(tokenizer))
    write_json(folder / "trigram.json", result)
    print("discounts", *model.discounts)
    for kind, row in result.items():
        print(f"{kind:8}", *(f"{k} {v:>9}" for k, v in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(run_module("trigram", main))
