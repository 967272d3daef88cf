"""The confidence head of a draft: its weights, and the part that runs on the device.

What it estimates, and why every lossless rule may use it: `dejax.spec.confidence`.
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Array, Float

from dejax.model import Params
from dejax.spec.confidence import FEATURES, REGIMES, Readout


@dataclass(frozen=True, eq=False)
class ConfidenceHead:
    """Weights for M regimes (`REGIMES`), in float32.

    Attributes:
      hidden, embedding: on the draft's normed final hidden state, and on the embedding of the token
      that its pass consumed; law: on the features of its law; biases, temperatures: by position in
      a draft of up to K tokens.
    """

    hidden: Float[np.ndarray, "M D"]
    embedding: Float[np.ndarray, "M D"]
    law: Float[np.ndarray, "M 3"]
    biases: Float[np.ndarray, "M K"]
    temperatures: Float[np.ndarray, "M K"]

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def device_params(self) -> Params:
        """What `head_scores` takes."""
        return {"hidden": self.hidden, "embedding": self.embedding}

    def readout(self, regime: int) -> Readout:
        """The host's part, of a regime by its place."""
        wide = {name: array.astype(np.float64) for name, array in self.arrays().items()}
        return Readout(wide["law"][regime], wide["biases"][regime], wide["temperatures"][regime])


def head_shapes(width: int, positions: int) -> dict[str, tuple[int, int]]:
    """The shapes of a head's arrays, for a target of that width."""
    count = len(REGIMES)
    return {
        "hidden": (count, width),
        "embedding": (count, width),
        "law": (count, FEATURES),
        "biases": (count, positions),
        "temperatures": (count, positions),
    }


def head_scores(
    params: Params, hidden: Float[Array, "*rows D"], embedded: Float[Array, "*rows D"]
) -> Float[Array, "*rows M"]:
    """w . [h ; emb(x)] of every row and regime, in the rows' dtype."""
    weights = [params[name].astype(hidden.dtype) for name in ("hidden", "embedding")]
    return hidden @ weights[0].T + embedded @ weights[1].T
