"""How much of its experts a token shares with its neighbours: statistics on recorded expert ids.

What a verification of T rows has to load is U(T), the distinct experts of T adjacent tokens, and
U(2) = (2 - o_1) k with o_1 the overlap of two neighbours. Both are compared with what they would be
if tokens had nothing to do with each other. There are two such nulls, and they differ:

- *independent*: every token draws its experts anew, each expert with its measured share;
- *shuffled*: real tokens, but of different documents, each at the position it stands in for.

The first knows that some experts are popular; the second also knows which ones are chosen together
and where in a text. What is left above the second is the text itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from dejax.errors import UsageError

ATTEMPTS = 50
"""Draws of a token of another document before its block is given up."""


@dataclass(frozen=True)
class RoutingRecord:
    """The experts that every layer chose for a text, in reading order.

    Attributes:
      ids: [L, N, K], distinct experts of each token; documents: [N], the document each token is of;
      positions: [N], its place there (two tokens are neighbours if they follow each other here, are
      of one document, and their positions do so too); num_experts: E.

    Raises:
      UsageError: an id is outside the experts, or a token has one twice.
    """

    ids: Int[np.ndarray, "L N K"]
    documents: Int[np.ndarray, " N"]
    positions: Int[np.ndarray, " N"]
    num_experts: int

    def __post_init__(self):
        if self.ids.size and not 0 <= self.ids.min() <= self.ids.max() < self.num_experts:
            raise UsageError(
                f"routing: ids from {self.ids.min()} to {self.ids.max()}; expected 0 to "
                f"{self.num_experts - 1}"
            )
        ordered = np.sort(self.ids, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise UsageError("routing: a token has the same expert twice; expected distinct ids")

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self.ids.shape[-1]

    def where(self, mask: Bool[np.ndarray, " N"]) -> "RoutingRecord":
        """The record of some of the tokens."""
        return replace(
            self,
            ids=self.ids[:, mask],
            documents=self.documents[mask],
            positions=self.positions[mask],
        )

    def membership(self, layer: int) -> Bool[np.ndarray, "N E"]:
        """Whether each token uses each expert of a layer (`layer` counts the record's own)."""
        member = np.zeros((self.ids.shape[1], self.num_experts), bool)
        np.put_along_axis(member, self.ids[layer], True, axis=1)
        return member


# --- load ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """How evenly the experts of each layer are used.

    Attributes:
      max_over_mean, min_over_mean: [L], tokens of the busiest and of the idlest expert over the
      mean; dead: [L], experts that no token uses.
    """

    max_over_mean: Float[np.ndarray, " L"]
    min_over_mean: Float[np.ndarray, " L"]
    dead: Int[np.ndarray, " L"]


def expert_shares(record: RoutingRecord) -> Float[np.ndarray, "L E"]:
    """f_e, the share of tokens that use expert e; a layer's shares add up to K."""
    tokens = max(record.ids.shape[1], 1)
    counts = [np.bincount(ids.ravel(), minlength=record.num_experts) for ids in record.ids]
    return np.stack(counts) / tokens


def expert_load(shares: Float[np.ndarray, "L E"]) -> Load:
    """The load figures of `expert_shares`."""
    mean = shares.mean(axis=1)
    return Load(shares.max(axis=1) / mean, shares.min(axis=1) / mean, (shares == 0).sum(axis=1))


# --- overlap ---------------------------------------------------------------------------------


def overlap(record: RoutingRecord, *, distance: int = 1) -> Float[np.ndarray, " L"]:
    """o_d = E |A_t n A_{t+d}| / K over tokens `distance` apart in one document; nan without any."""
    return _overlap_of(record, _adjacent(record, (0, distance)))


def independent_overlap(shares: Float[np.ndarray, "L E"]) -> Float[np.ndarray, " L"]:
    """The overlap of tokens that draw independently: sum_e f_e^2 / K, or K / E if all are equal."""
    return np.square(shares).sum(axis=1) / shares.sum(axis=1)


def shuffled_overlap(
    record: RoutingRecord, *, distance: int = 1, seed: int = 0
) -> Float[np.ndarray, " L"]:
    """`overlap`, the later token taken from another document at the same position."""
    return _overlap_of(record, _foreign(record, (0, distance), seed))


# --- unique experts --------------------------------------------------------------------------


def unique_experts(record: RoutingRecord, *, rows: int) -> Float[np.ndarray, " L"]:
    """U(rows): mean number of distinct experts over sliding blocks of adjacent tokens."""
    return _unique_of(record, _adjacent(record, range(rows)))


def independent_unique(shares: Float[np.ndarray, "L E"], *, rows: int) -> Float[np.ndarray, " L"]:
    """Distinct experts of tokens that draw independently: sum_e 1 - (1 - f_e)^rows."""
    return (1 - (1 - shares) ** rows).sum(axis=1)


def shuffled_unique(record: RoutingRecord, *, rows: int, seed: int = 0) -> Float[np.ndarray, " L"]:
    """`unique_experts` of blocks whose tokens are all of different documents, positions kept."""
    return _unique_of(record, _foreign(record, range(rows), seed))


# --- which tokens make a block ---------------------------------------------------------------


def _adjacent(record: RoutingRecord, offsets: Sequence[int]) -> Int[np.ndarray, "W T"]:
    """Tokens at `offsets` (ascending from 0) from each token that has so many after it."""
    last = max(offsets)
    if min(offsets) < 0 or last >= max(len(record.documents), 1):
        return np.zeros((0, len(offsets)), int)
    starts = np.arange(len(record.documents) - last)
    whole = record.documents[starts] == record.documents[starts + last]
    whole &= record.positions[starts + last] - record.positions[starts] == last
    return starts[whole, None] + np.asarray(offsets)


def _foreign(record: RoutingRecord, offsets: Sequence[int], seed: int) -> Int[np.ndarray, "W T"]:
    """The blocks of `_adjacent` with every token but the first replaced.

    The stand-in is a token at the same position, of a document that the block does not have yet,
    drawn evenly. Blocks for which none is found are left out.
    """
    rng = np.random.default_rng(seed)
    real = _adjacent(record, offsets)
    by_position = np.argsort(record.positions, kind="stable")
    ordered = record.positions[by_position]
    chosen = real[:, :1]
    for column in range(1, len(offsets)):
        wanted = record.positions[real[:, column]]
        low, high = (np.searchsorted(ordered, wanted, side) for side in ("left", "right"))
        drawn = np.full(len(real), -1)
        open_ = np.arange(len(real))
        for _ in range(ATTEMPTS):
            if not len(open_):
                break
            token = by_position[rng.integers(low[open_], high[open_])]
            taken = record.documents[chosen[open_]] == record.documents[token][:, None]
            new = ~taken.any(axis=1)
            drawn[open_[new]] = token[new]
            open_ = open_[~new]
        found = drawn >= 0
        real = real[found]
        chosen = np.concatenate([chosen[found], drawn[found, None]], axis=1)
    return chosen


def _overlap_of(record: RoutingRecord, pairs: Int[np.ndarray, "W 2"]) -> Float[np.ndarray, " L"]:
    """Mean share of experts that the two tokens of a pair have in common."""

    def both(member: Bool[np.ndarray, "N E"]) -> Shaped[np.ndarray, "W E"]:
        return member[pairs[:, 0]] & member[pairs[:, 1]]

    return _mean_count(record, both, len(pairs)) / record.top_k


def _unique_of(record: RoutingRecord, blocks: Int[np.ndarray, "W T"]) -> Float[np.ndarray, " L"]:
    """Mean number of experts that any token of a block uses."""

    def any_(member: Bool[np.ndarray, "N E"]) -> Shaped[np.ndarray, "W E"]:
        used = member[blocks[:, 0]]
        for column in range(1, blocks.shape[1]):
            used |= member[blocks[:, column]]
        return used

    return _mean_count(record, any_, len(blocks))


def _mean_count(record: RoutingRecord, select, blocks: int) -> Float[np.ndarray, " L"]:
    """Mean number of experts that `select` marks in a block, layer by layer; nan without blocks."""
    layers = range(len(record.ids))
    if not blocks:
        return np.full(len(layers), np.nan)
    return np.array([select(record.membership(i)).sum() / blocks for i in layers])
