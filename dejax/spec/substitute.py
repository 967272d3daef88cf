"""Which experts a draft pass reads, where those on the device will do as well as the router's own.

A draft is never trusted, so its passes may take another expert than the target would: one that is
on the device already, if the router gave it nearly as large a gate. Verification is unchanged.
"""

import numpy as np
from jaxtyping import Bool, Float, Int


def prefer_resident(
    gates: Float[np.ndarray, "R K"], resident: Bool[np.ndarray, "R K"], *, r: int, ratio: float
) -> Int[np.ndarray, "R K"]:
    """A row's chosen experts in another order, so that the first r are those to read.

    Each of the first r that is not resident changes places with the best-ranked resident one behind
    them whose gate is at least `ratio` times its own, if there is one.

    Args:
      gates: of the experts that the router chose, best-ranked first.
      resident: which of them are on the device.
    """
    order = np.tile(np.arange(gates.shape[1]), (len(gates), 1))
    for row in range(len(gates)):
        free = [place for place in range(r, gates.shape[1]) if resident[row, place]]
        for kept in range(r):
            if resident[row, kept]:
                continue
            least = ratio * gates[row, kept]
            found = next((place for place in free if gates[row, place] >= least), None)
            if found is not None:
                order[row, [kept, found]] = found, kept
                free.remove(found)
    return order
