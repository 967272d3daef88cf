"""Confidence heads that say something different at every row."""

from dataclasses import replace

import numpy as np

from dejax.draft.confidence import ConfidenceHead, head_shapes
from dejax.draft.expert import Draft
from dejax.target import Target
from tests.infer.random_target import draft_of


def random_head(width: int, *, positions: int = 3, seed: int = 0) -> ConfidenceHead:
    """Random weights, whose estimates spread over (0, 1)."""
    rng = np.random.default_rng(seed)
    shapes = head_shapes(width, positions)
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["hidden"] *= width**-0.5
    arrays["embedding"] *= width**-0.5
    arrays["law"] *= 0.3
    arrays["temperatures"] = 0.5 + rng.random(shapes["temperatures"])
    return ConfidenceHead(**{name: a.astype(np.float32) for name, a in arrays.items()})


def headed(target: Target, *, seed: int = 0) -> Draft:
    """Untrained draft experts with such a head."""
    return replace(draft_of(target), head=random_head(target.config.width, seed=seed))
