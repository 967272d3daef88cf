"""Drafting without a model: what followed the same few tokens before (prompt lookup).

The field's baseline for text that repeats itself: code, summaries, answers on a document. Source:
A. Saxena, Prompt Lookup Decoding (2023), and the candidate generator of Hugging Face transformers
that came of it: the longest suffix first, and of its earlier places the first.
"""

from collections.abc import Sequence

import numpy as np

LONGEST = 3
"""Tokens of the longest suffix that is looked for."""


def lookup(tokens: Sequence[int], limit: int, *, longest: int = LONGEST) -> list[int]:
    """At most `limit` tokens that may follow `tokens`; none where the last token is new.

    The suffix of `longest` tokens is looked for among all earlier places, then shorter ones down to
    one token. What follows the first place found is the answer; it may run into the suffix itself.
    """
    sequence = np.asarray(tokens)
    for size in range(min(longest, len(sequence) - 1), 0, -1):
        # The last window is the suffix itself.
        windows = np.lib.stride_tricks.sliding_window_view(sequence[:-1], size)
        places = np.flatnonzero((windows == sequence[-size:]).all(axis=1))
        if len(places):
            after = int(places[0]) + size
            return sequence[after : after + limit].tolist()
    return []
