"""A layer's routed experts in a pass that the host drives: chosen, brought, and added.

The ids come to the host, which asks the residency for what is missing and runs the steps over what
has come (`sum_experts`, `add_experts`). Large experts are computed as they arrive, in ascending
order, so that after the last one there is only that one to compute.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.model import Params
from dejax.spec.budget import VerifyBudget, restrict
from dejax.spec.substitute import prefer_resident
from infer.buckets import PREFILL_ROWS, bucket, expert_buckets, piece_sizes
from infer.engines import ResidencyLike
from infer.passes import Drafting
from infer.prefetch import Arrivals
from infer.steps import add_experts, sum_experts
from infer.timing import Clock

Routed = tuple[Any, ...]
"""Of a MoE layer, what `infer.steps.layer_step` gives: x, h, ids, gates, scores, guess."""


@dataclass(eq=False)
class RoutedExperts:
    """Brings and computes the routed experts of a target's layers, for `infer.engine`.

    Attributes:
      config: of the target.
      residency: where experts are.
      clock: told how long device and loads were waited for.
      draft_params: those of the draft experts, by layer; empty without any.
      strict: how experts are grouped does not depend on when they come.
      buckets: numbers of experts that steps are compiled for.
      pieces: numbers of experts that are computed before the others have come.
      add_step, sum_step: `add_experts` and `sum_experts` for this target.
    """

    config: ModelConfig
    residency: ResidencyLike
    clock: Clock
    draft_params: Mapping[int, Params]
    strict: bool

    def __post_init__(self):
        activation = self.config.experts.activation if self.config.experts else None
        options: Any = dict(activation=activation, packing=self.residency.packing)
        self.add_step = partial(add_experts, **options)
        self.sum_step = partial(sum_experts, **options)
        self.buckets = expert_buckets(self.config, self.residency.bytes_per_expert)
        pieces = piece_sizes(self.buckets, self.residency.bytes_per_expert)
        self.pieces = () if self.strict else pieces

    def restrict(
        self, layer: int, routed: Routed, rows: int, budget: VerifyBudget
    ) -> tuple[Routed, int]:
        """A layer's routing under the budget, and the rows that were rescued."""
        x, h, *routing, guess = routed
        began = time.perf_counter()
        ids, gates, scores = (np.array(part) for part in jax.device_get(routing))
        self.clock.device += time.perf_counter() - began
        resident = []
        if budget.rank == "residency":
            resident = [expert for at, expert in self.residency.resident() if at == layer]
        found = restrict(ids[:rows], gates[:rows], scores[:rows], budget, resident=resident)
        ids[:rows], gates[:rows] = found.ids, found.gates
        return (x, h, *jax.device_put((ids, gates)), routing[2], guess), found.rescued

    def add(
        self, layer: int, routed: Routed, always: Array | None, rows: int, drafting: Drafting | None
    ) -> tuple[Array, Int[np.ndarray, "R K"], Int[np.ndarray, " U"]]:
        """Acquires a layer's experts and adds them: new residual stream, ids, unique ids.

        `always` is what the shared experts give; `rows` are in use, the others are padding.
        """
        x, h, ids, gates, _, guess = routed
        prefers = drafting is not None and drafting.resident is not None
        began = time.perf_counter()
        wanted = (ids, guess, gates if prefers else None)
        ids_host, guess_host, gates_host = jax.device_get(wanted)
        self.clock.device += time.perf_counter() - began
        read = ids_host = ids_host[:rows]
        if drafting is None:
            unique = np.unique(read).tolist()
            arrivals = self.residency.request(layer, unique, kind="demand")
            if guess_host is not None:
                found = np.unique(guess_host[:rows]).tolist()
                self.residency.prefetch([(layer + 1, expert) for expert in found], ahead=True)
        else:
            if prefers:
                read, ids, gates = self._prefer(layer, ids_host, (ids, gates), gates_host, drafting)
            unique = np.unique(read[:, : drafting.r]).tolist()
            arrivals = self.residency.request(layer, unique, kind="draft")
            if drafting.prefetch:
                self._ask_ahead(layer, ids_host, guess_host, drafting)
        r, draft = None, None
        if drafting is not None:
            r, draft = drafting.r, self.draft_params.get(layer)
        # A prefill block may use any number of experts: one size keeps it to one compilation.
        group, prefill = self.buckets[-1], h.shape[0] == PREFILL_ROWS
        before, first = None, 0
        while (count := self._piece(arrivals)) < len(arrivals):
            part = self._take(arrivals, unique[first : first + count], count)
            before = self.sum_step(h, ids, gates, *part, before, r=r)
            first += count
        size = group if prefill else bucket(count, self.buckets)
        last = self._take(arrivals, unique[first:], size)
        x = self.add_step(x, always, h, ids, gates, *last, before, draft, r=r)
        if drafting is None:
            self.residency.release(layer)
        return x, ids_host, np.array(unique)

    def _ask_ahead(self, layer: int, ids: Any, guess: Any, drafting: Drafting) -> None:
        """Asks for what a draft pass predicts for the verification, and for what it needs next."""
        rows = len(ids)
        if guess is not None:  # what this very pass will wait for goes first
            own = dict.fromkeys(guess[:rows, : drafting.r].ravel().tolist())
            self.residency.request(layer + 1, list(own), kind="draft")
        self.residency.prefetch([(layer, expert) for expert in dict.fromkeys(ids.ravel().tolist())])

    def _prefer(self, layer: int, ids: Any, routing: tuple, gates: Any, drafting: Drafting):
        """A draft pass's ids with residents first, on the host; ids and gates on the device."""
        rows, gates = len(ids), np.array(gates)
        how: Any = dict(r=drafting.r, ratio=drafting.resident)
        order = residents_first(self.residency, layer, ids, gates[:rows], **how)
        if (order[:, : drafting.r] < drafting.r).all():
            return ids, *routing
        padded = np.zeros(gates.shape, ids.dtype)
        padded[:rows] = read = np.take_along_axis(ids, order, axis=1)
        gates[:rows] = np.take_along_axis(gates[:rows], order, axis=1)
        return read, *jax.device_put((padded, gates))

    def _piece(self, arrivals: Arrivals) -> int:
        """How many of the experts that are left go into the next step."""
        left, most = len(arrivals), self.buckets[-1]
        at_hand = arrivals.at_hand() if self.pieces else left
        if at_hand == left or left <= min(self.pieces):
            return min(left, most)
        return next((p for p in reversed(self.pieces) if p <= at_hand), min(self.pieces))

    def _take(self, arrivals: Arrivals, unique: list[int], size: int):
        """Unique ids (padded with -1) on the device, and the experts (padded with the last one)."""
        began = time.perf_counter()
        experts = arrivals.take(len(unique))
        self.clock.loads += time.perf_counter() - began
        padding = size - len(unique)
        unique_ids = jax.device_put(np.array(unique + [-1] * padding, np.int32))
        return unique_ids, (*experts, *experts[-1:] * padding)


def residents_first(
    residency: ResidencyLike,
    layer: int,
    ids: Int[np.ndarray, "R K"],
    gates: Float[np.ndarray, "R K"],
    *,
    r: int,
    ratio: float,
) -> Int[np.ndarray, "R K"]:
    """`prefer_resident` by what is on the device now. Gates weigh alike in all engines: float32."""
    held = [[residency.is_resident((layer, e)) for e in row] for row in ids.tolist()]
    return prefer_resident(gates.astype(np.float32), np.array(held), r=r, ratio=ratio)
