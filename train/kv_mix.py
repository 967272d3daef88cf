"""Which keys and values a drafted token sees in training: the target's before its block.

When decoding, the draft reads the target's cache up to the token that its round began with, and its
own keys and values from there. In training every row is cut into blocks, each as if a round had
begun there: inside its block a token sees the draft's own, before it the target's.
"""

import numpy as np
from jaxtyping import Int


def draw_blocks(
    rows: range, length: int, *, block: int, seed: int, step: int
) -> Int[np.ndarray, "B T"]:
    """The block that each token belongs to; a row's first block is of random length.

    Args:
      rows: places of the rows in the batch of `step`: a row's blocks do not depend on who asks.
      block: tokens of a block.
    """
    offsets = [np.random.default_rng([seed, step, row]).integers(block) for row in rows]
    places = np.arange(length)[None, :] + np.asarray(offsets, np.int64).reshape(-1, 1)
    return (places // block).astype(np.int32)
