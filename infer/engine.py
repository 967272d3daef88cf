"""The host-driven engine: jitted steps over rows, with routed experts that arrive from a residency.

A pass runs layer by layer: attention, router and shared experts on the device
(`layer_step`), the chosen ids to the host, the residency waits for what is missing, then the
experts (`add_experts`). Rows and unique experts are padded to a small grid of sizes, so that after
`warm_up` nothing compiles.

Host/device copies, all explicit: the pass's tokens, positions and mask go in with one `device_put`;
a layer's expert ids come out, its unique ids go in; the logits come out.
"""

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.model import Params, split_layer, split_outer
from dejax.nn.attention import Cache
from dejax.shapes import Pair
from dejax.target import Target
from infer.engines import ResidencyLike
from infer.steps import (
    add_experts,
    empty_cache,
    layer_step,
    outer_steps,
    sum_experts,
    take_row,
    visible,
)

PREFILL_ROWS = 128
ROW_BUCKETS = (1, 2, 3, 5, 9, 17, 33)
EXPERT_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LAYOUT = "gate and up [F, D], down transposed [F, D]"
"""Layout of an expert on the device, named in the stats."""


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count`."""
    return sizes[bisect.bisect_left(sizes, count)]


@dataclass
class Clock:
    """Seconds of a decode spent waiting: for jitted steps, and for loads."""

    device: float = 0.0
    loads: float = 0.0


@dataclass(frozen=True)
class PassResult:
    """What one pass gives.

    Attributes:
      logits: [R, V] on the host, in the compute dtype.
      routes: for each row, its top-k experts in every MoE layer, as pairs.
      gates: for each row, the top-1 gate in every MoE layer.
      used: the pairs whose weights the pass read.
    """

    logits: Float[np.ndarray, "R V"]
    routes: tuple[frozenset[Pair], ...]
    gates: Float[np.ndarray, "R L"]
    used: frozenset[Pair]


@dataclass(eq=False)
class Engine:
    """Runs passes of one target over one sequence at a time.

    Attributes:
      target: resident weights and rules; its experts come from `residency`.
      residency: where experts are.
      draft: draft experts, or None.
      capacity: committed tokens a sequence may have (prompt and new tokens together).
      clock: waiting times, reset by the caller.
      rows: given, every target pass is padded to so many rows (`infer.strict`).
      layout: how experts lie on the device, named in the stats.
    """

    target: Target
    residency: ResidencyLike
    draft: Draft | None
    capacity: int
    clock: Clock = field(default_factory=Clock)
    rows: int | None = None
    layout = LAYOUT

    def __post_init__(self):
        model, config = self.target.model, self.target.config
        # One split per layer: the loop passes plain arrays, never walks the module graph.
        splits = [split_layer(layer) for layer in model.layers]
        self._layers = [(layer_step(definition), params) for definition, params in splits]
        definition, self._outer = split_outer(model)
        self._embed, self._logits = outer_steps(definition)
        self._draft_params = {}
        if self.draft is not None:
            for layer in config.moe_layers:
                self._draft_params[layer] = jax.device_put(self.draft.layer_params(layer))
        # Scratch rows of the widest block lie behind the last committed slot.
        self._slots = self.capacity + PREFILL_ROWS
        self._like = jax.device_put(np.zeros((), self.target.compute_dtype))
        self._visible = visible(config, self._slots)
        self._windowed = [config.is_windowed(index) for index in range(config.num_layers)]
        self._moe_layers = config.moe_layers
        most, activation = 1, None
        if config.experts is not None:
            most = min(config.experts.num_experts, EXPERT_BUCKETS[-1])
            activation = config.experts.activation
        options: Any = dict(activation=activation, packing=self.residency.packing)
        self._add_experts = partial(add_experts, **options)
        self._sum_experts = partial(sum_experts, **options)
        self._buckets = (*(b for b in EXPERT_BUCKETS if b < most), most)
        self._caches: list[Cache] = []

    def begin(self) -> None:
        """Empties the KV cache for a new sequence."""
        config, dtype = self.target.config, self.target.compute_dtype
        self._caches = [empty_cache(config.attention, self._slots, dtype) for _ in self._layers]

    def prefill(self, tokens: Sequence[int], *, start: int = 0) -> PassResult:
        """Fills the cache with a prompt, in blocks; the result describes its last row.

        Raises:
          UsageError: the prompt is empty or longer than the capacity.
        """
        if not tokens:
            raise UsageError("the prompt has no tokens; expected at least one")
        if start + len(tokens) > self.capacity:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.capacity}"
            )
        result = None
        for first in range(0, len(tokens), PREFILL_ROWS):
            block = tokens[first : first + PREFILL_ROWS]
            result = self._pass(
                block, start=start + first, rows_wanted=1, kind="demand", size=PREFILL_ROWS
            )
            self.residency.end_pass()
        assert result is not None
        return result

    def warm_up(self, *, rows: int, r: int | None = None) -> None:
        """Compiles what passes of up to `rows` rows, drafts with top-r, and prefill need.

        Runs them on zeros; the experts' store is not touched, and a sequence under way is lost.
        """
        self.begin()
        for size in [*self._sizes(rows, drafts=r is not None), PREFILL_ROWS]:
            x, routed = self._warm_layers(size)
            if routed:
                self._warm_buckets(routed, size, r=r)
            self._rows_logits(x, size, 1 if size == PREFILL_ROWS else size)

    def _sizes(self, rows: int, *, drafts: bool) -> list[int]:
        """The row counts that passes of up to `rows` rows are padded to, drafts included."""
        if self.rows is not None:
            return [1, self.rows] if drafts and self.rows > 1 else [self.rows]
        return [size for size in ROW_BUCKETS if size < rows] + [bucket(rows, ROW_BUCKETS)]

    def _warm_buckets(self, routed: tuple, size: int, *, r: int | None) -> None:
        """Compiles the expert steps that passes of `size` rows can need."""
        moe, prefill = self.target.config.moe, size == PREFILL_ROWS
        # With more experts than a group holds, what is left for the last one may be any number.
        most = min(moe.top_k * size, moe.num_experts)
        grouped = most > self._buckets[-1]
        low = 1 if grouped else bucket(moe.top_k, self._buckets)
        high = bucket(min(most, self._buckets[-1]), self._buckets)
        counts = [b for b in self._buckets if low <= b <= high]
        for count in self._buckets[-1:] if prefill else counts:
            self._warm_experts(routed, count, grouped=grouped)
        if size == 1 and r is not None:
            draft = self._draft_params.get(self._moe_layers[0])
            self._warm_experts(routed, bucket(r, self._buckets), draft=draft)

    def _warm_layers(self, size: int) -> tuple[Array, tuple]:
        """One run of each kind of layer over `size` rows; the last residual stream and routing."""
        inputs = self._inputs([0] * size, 0, None, size)
        tokens, positions, start, ancestors = inputs
        x = self._embed(self._outer, tokens, self._like)
        masks = self._visible(start, positions, ancestors)
        routed = ()
        for index in {0, *self._moe_layers[:1]}:
            step, params = self._layers[index]
            mask = masks.of_layer(self._windowed[index])
            out, self._caches[index] = step(params, x, self._caches[index], start, positions, mask)
            routed = out if index in self._moe_layers else routed
        return x, routed

    def _warm_experts(
        self, routed: tuple, count: int, *, grouped: bool = False, draft: Params | None = None
    ) -> None:
        config = self.target.config
        zero = np.zeros(config.expert_shape, self._like.dtype)
        if self.residency.packing is not None:
            zero = np.zeros(self.residency.bytes_per_expert, np.uint8)
        zero = jax.device_put(zero)
        ids = jax.device_put(np.full(count, -1, np.int32))
        self._add_experts(*routed, ids, (zero,) * count, None, draft)
        if grouped:
            before = routed[2]  # any array of a sum's shape
            self._add_experts(*routed, ids, (zero,) * count, before, draft)
            if count == self._buckets[-1]:
                self._sum_experts(*routed[2:], ids, (zero,) * count, None)
                self._sum_experts(*routed[2:], ids, (zero,) * count, before)

    def target_rows(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int] | None = None
    ) -> PassResult:
        """The full MoE over a block of rows whose KV goes to slots start, start + 1, ...

        `parents[i]` is the row that row i follows (-1: the committed sequence); default a chain.
        """
        rows = len(tokens)
        block: Any = dict(rows_wanted=rows, kind="demand", parents=parents, size=self.rows)
        result = self._pass(tokens, start=start, **block)
        self.residency.end_pass()
        return result

    def draft_row(self, token: int, *, start: int, r: int) -> PassResult:
        """The draft path over one token at slot `start`: shared + top-r (+ draft expert)."""
        return self._pass([token], start=start, rows_wanted=1, kind="draft", r=r)

    def _pass(
        self,
        tokens: Sequence[int],
        *,
        start: int,
        rows_wanted: int,
        kind: Any,
        parents: Sequence[int] | None = None,
        r: int | None = None,
        size: int | None = None,
    ) -> PassResult:
        rows = len(tokens)
        size = bucket(rows, ROW_BUCKETS) if size is None else size
        tokens_in, positions, start_in, ancestors = self._inputs(tokens, start, parents, size)
        x = self._embed(self._outer, tokens_in, self._like)
        masks = self._visible(start_in, positions, ancestors)
        routed_ids, top_gates, used = {}, [], set()
        for index, (step, params) in enumerate(self._layers):
            mask = masks.of_layer(self._windowed[index])
            out, self._caches[index] = step(
                params, x, self._caches[index], start_in, positions, mask
            )
            if index not in self._moe_layers:
                x = out
                continue
            x, ids, gates, unique = self._experts(index, out, rows, kind=kind, r=r)
            routed_ids[index] = ids
            top_gates.append(gates)
            used.update((index, e) for e in unique)
        logits = self._rows_logits(x, rows, rows_wanted)
        shown = range(rows - rows_wanted, rows)
        routes = tuple(
            frozenset((layer, e) for layer, ids in routed_ids.items() for e in ids[row].tolist())
            for row in shown
        )
        gates = (
            np.stack(top_gates, axis=1)[list(shown)] if top_gates else np.zeros((rows_wanted, 0))
        )
        return PassResult(logits=logits, routes=routes, gates=gates, used=frozenset(used))

    def _inputs(
        self, tokens: Sequence[int], start: int, parents: Sequence[int] | None, size: int
    ) -> tuple[Array, Array, Array, Array]:
        """Padded tokens, positions, start and ancestor matrix on the device, in one transfer."""
        ancestors = np.eye(size, dtype=bool)
        depth = np.arange(size, dtype=np.int32)
        if parents is None:
            ancestors = np.tri(size, dtype=bool)
        else:
            for row, parent in enumerate(parents):
                if parent >= 0:
                    ancestors[row] |= ancestors[parent]
                depth[row] = 0 if parent < 0 else depth[parent] + 1
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        return jax.device_put((padded, start + depth, np.int32(start), ancestors))

    def _experts(self, layer: int, routed: tuple, rows: int, *, kind: Any, r: int | None):
        """Acquires a layer's experts and adds them: new residual stream, ids, top gates, unique."""
        x, always, h, ids, gates = routed
        began = time.perf_counter()
        ids_host, gates_host = jax.device_get((ids, gates))
        self.clock.device += time.perf_counter() - began
        ids_host = ids_host[:rows]
        unique = np.unique(ids_host if r is None else ids_host[:, :r]).tolist()
        draft = self._draft_params.get(layer) if kind == "draft" else None
        group, before, first = self._buckets[-1], None, 0
        while len(unique) - first > group:
            part = self._acquire(layer, unique[first : first + group], kind, group)
            before = self._sum_experts(h, ids, gates, *part, before)
            first += group
        # A prefill block may use any number of experts: one size keeps it to one compilation.
        rest = len(unique) - first
        size = group if h.shape[0] == PREFILL_ROWS else bucket(rest, self._buckets)
        acquired = self._acquire(layer, unique[first:], kind, size)
        x = self._add_experts(x, always, h, ids, gates, *acquired, before, draft)
        if kind == "demand":
            self.residency.release(layer)
        return x, ids_host, gates_host[:rows, 0], unique

    def _acquire(self, layer: int, unique: list[int], kind: Any, size: int):
        """Unique ids (padded with -1) on the device, and the experts (padded with the last one)."""
        began = time.perf_counter()
        experts = self.residency.acquire(layer, unique, kind=kind)
        self.clock.loads += time.perf_counter() - began
        padding = size - len(unique)
        unique_ids = jax.device_put(np.array(unique + [-1] * padding, np.int32))
        return unique_ids, (*experts, *experts[-1:] * padding)

    def _rows_logits(self, x: Array, rows: int, wanted: int) -> Float[np.ndarray, "R V"]:
        """Logits of the last `wanted` rows, on the host."""
        if x.shape[0] == PREFILL_ROWS:  # of a prefill block one row is wanted
            x = take_row(x, jax.device_put(np.int32(rows - 1)))
        logits = self._logits(self._outer, x)
        began = time.perf_counter()
        host = jax.device_get(logits)
        self.clock.device += time.perf_counter() - began
        return host[:wanted]
