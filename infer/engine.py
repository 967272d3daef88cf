"""The host-driven engine: jitted steps over rows, with routed experts that arrive from a residency.

A pass runs layer by layer: attention and router on the device (`layer_step`), the chosen ids to the
host, which asks the residency for what is missing; meanwhile the shared experts (`shared_step`),
then the routed ones (`infer.routed_experts`). Rows and unique experts are padded to a small grid of
sizes, so that after `warm_up` nothing compiles.

With `look_ahead`, a target pass also asks for the experts that the next layer's router would choose
on the residual stream as it is before this layer's experts: a guess, which costs nothing when wrong
but bytes on the link.

Host/device copies, all explicit: the pass's tokens, positions and mask go in with one `device_put`;
a layer's expert ids come out (where a draft prefers residents its gates too, and both go in again
if one is taken), its unique ids go in; the logits come out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.model import Masks, split_layer, split_outer
from dejax.nn.attention import Cache
from dejax.spec.budget import VerifyBudget
from dejax.target import Target
from infer.blocks import Block, block_of, level_of
from infer.buckets import PREFILL_ROWS, ROW_BUCKETS, bucket
from infer.engines import ResidencyLike
from infer.node_predictor import NodePredictor
from infer.passes import Drafting, PassResult, pass_result
from infer.routed_experts import RoutedExperts
from infer.steps import (
    empty_cache,
    keep_rows,
    layer_step,
    next_router,
    outer_steps,
    score_step,
    shared_step,
    take_row,
    visible,
)
from infer.timing import Clock
from infer.warm_up import warm_up

LAYOUT = "gate and up [F, D], down transposed [F, D]"
"""Layout of an expert on the device, named in the stats."""


@dataclass(eq=False)
class Engine:
    """Runs passes of one target over one sequence at a time.

    Attributes:
      target: resident weights and rules; its experts come from `residency`.
      residency: where experts are.
      draft: draft experts, or None.
      capacity: committed tokens a sequence may have (prompt and new tokens together).
      look_ahead: whether target passes ask for what the next layer will probably use.
      clock: waiting times, reset by the caller.
      rows: given, every target pass is padded to so many rows (`infer.strict`).
      budget: given, target passes over a draft use few experts, and are not exact
        (`dejax.spec.budget`); prefills are.
      predictor: given, draft passes give what it needs.
      layout: how experts lie on the device, named in the stats.
    """

    target: Target
    residency: ResidencyLike
    draft: Draft | None
    capacity: int
    look_ahead: bool = False
    clock: Clock = field(default_factory=Clock)
    rows: int | None = None
    budget: VerifyBudget | None = None
    predictor: NodePredictor | None = None
    layout = LAYOUT

    def __post_init__(self):
        model, config = self.target.model, self.target.config
        # One split per layer: the loop passes plain arrays, never walks the module graph. Steps are
        # found here, because a definition is slow to hash.
        self._moe_layers = config.moe_layers
        self._layers, self._shared, self._ahead = [], {}, {}
        plain = self.draft is not None and self.draft.plain
        for index, layer in enumerate(model.layers):
            definition, params = split_layer(layer)
            steps = layer_step(definition), layer_step(definition, plain=plain)
            self._layers.append((steps, params, None))
            if layer.router is not None and layer.shared is not None:
                part, state = nnx.split(layer.shared)
                self._shared[index] = shared_step(part), nnx.to_pure_dict(state)
            if {index, index + 1} <= set(self._moe_layers):
                ahead, ahead_params = next_router(model.layers[index + 1])
                steps = layer_step(definition, ahead), layer_step(definition, ahead, plain=plain)
                self._ahead[index] = steps, params, ahead_params
        definition, self._outer = split_outer(model)
        self._embed, self._logits = outer_steps(definition)
        self._score, self._head = score_step(definition), None
        self._draft_params = {}
        if self.draft is not None:
            for layer in config.moe_layers:
                self._draft_params[layer] = jax.device_put(self.draft.layer_params(layer))
            if self.draft.head is not None:
                self._head = jax.device_put(self.draft.head.device_params())
        # Scratch rows of the widest block lie behind the last committed slot.
        self._slots = self.capacity + PREFILL_ROWS
        self._like = jax.device_put(np.zeros((), self.target.compute_dtype))
        self._visible = visible(config, self._slots)
        self._windowed = [config.is_windowed(index) for index in range(config.num_layers)]
        self.experts = RoutedExperts(
            config,
            self.residency,
            self.clock,
            draft_params=self._draft_params,
            strict=self.rows is not None,
        )
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
            inputs = block_of(block, start + first, None, PREFILL_ROWS)
            result = self._pass(block, inputs, rows_wanted=1)
            self.residency.end_pass()
        assert result is not None
        return result

    def warm_up(self, *, rows: int, drafting: Drafting | None = None, draft_rows: int = 0) -> None:
        """Compiles what passes of up to `rows` rows, draft passes and prefill need.

        `drafting`: how draft passes run, if there are any. `draft_rows`: rows of a draft pass after
        the first, of trees; 0: drafts are chains. Runs them on zeros; the experts' store is not
        touched, and a sequence under way is lost.
        """
        self.begin()
        warm_up(
            self,
            [*self._sizes(rows, drafts=drafting is not None), PREFILL_ROWS],
            levels=self._draft_sizes(draft_rows),
            r=None if drafting is None else drafting.r,
        )
        self._warm_moves(draft_rows)

    def _warm_moves(self, draft_rows: int) -> None:
        if draft_rows:
            self.keep_rows((2,), start=0)

    def _sizes(self, rows: int, *, drafts: bool) -> list[int]:
        """The row counts that passes of up to `rows` rows are padded to, drafts included."""
        if self.rows is not None:
            return [1, self.rows] if drafts and self.rows > 1 else [self.rows]
        return [size for size in ROW_BUCKETS if size < rows] + [bucket(rows, ROW_BUCKETS)]

    def _draft_sizes(self, rows: int) -> list[int]:
        """The row counts that a tree's draft passes of up to `rows` rows are padded to."""
        return [size for size in ROW_BUCKETS if size <= bucket(rows, ROW_BUCKETS)] if rows else []

    def target_rows(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int] | None = None
    ) -> PassResult:
        """The full MoE over a block of rows whose KV goes to slots start, start + 1, ...

        `parents[i]` is the row that row i follows (-1: the committed sequence); default a chain.
        """
        rows = len(tokens)
        size = bucket(rows, ROW_BUCKETS) if self.rows is None else self.rows
        block = block_of(tokens, start, parents, size)
        result = self._pass(tokens, block, rows_wanted=rows)
        self.residency.end_pass()
        return result

    def keep_rows(self, rows: Sequence[int], *, start: int) -> None:
        """Moves the KV of accepted rows of the block at `start` behind that of its row 0.

        `rows` ascend, each >= 1; of a chain nothing moves.
        """
        if list(rows) == list(range(1, len(rows) + 1)):
            return
        kept = np.arange(ROW_BUCKETS[-1], dtype=np.int32)
        kept[1 : len(rows) + 1] = rows
        caches, self._caches = self._caches, []  # they are donated
        self._caches = keep_rows(caches, *jax.device_put((kept, np.int32(start))))

    def draft_row(self, token: int, *, start: int, drafting: Drafting) -> PassResult:
        """The draft path over one token at slot `start`: shared + top-r (+ draft expert)."""
        block = block_of([token], start, None, 1)
        return self._pass([token], block, rows_wanted=1, drafting=drafting)

    def draft_level(
        self,
        tokens: Sequence[int],
        *,
        start: int,
        parents: Sequence[int],
        drafting: Drafting,
    ) -> PassResult:
        """As `draft_row`, over the last rows of a block at `start` whose other rows have been.

        `parents` are those of all its rows, as for `target_rows`.
        """
        rows = len(tokens)
        block = level_of(tokens, start, parents, bucket(rows, ROW_BUCKETS))
        return self._pass(tokens, block, rows_wanted=rows, drafting=drafting)

    def embed(self, block: Block) -> Array:
        """The residual stream that enters the first layer."""
        return self._embed(self._outer, block.tokens, self._like)

    def masks(self, block: Block) -> Masks:
        """Who sees whom in a pass."""
        return self._visible(block.base, block.positions, block.ancestors, block.block_positions)

    def _pass(
        self,
        tokens: Sequence[int],
        block: Block,
        *,
        rows_wanted: int,
        drafting: Drafting | None = None,
    ) -> PassResult:
        """A pass of the target or, with `drafting`, of the drafter."""
        rows, drafts = len(tokens), drafting is not None
        ahead = self.look_ahead if drafting is None else drafting.asks_ahead
        entered, masks = self.embed(block), self.masks(block)
        x = entered
        ids, read, top_gates, rescued = {}, {}, [], 0
        for index in range(len(self._layers)):
            out = self.layer(index, x, block, masks, ahead=ahead, drafting=drafts)
            if index not in self._moe_layers:
                x = out
                continue
            top_gates.append(out[3])
            if self.budget is not None and not drafts and x.shape[0] < PREFILL_ROWS:
                out, saved = self.experts.restrict(index, out, rows, self.budget)
                rescued += saved
            always = self.always(index, out[1])  # on its way while the ids come
            added = self.experts.add(index, out, always, rows, drafting)
            x, ids[index], read[index] = added
        hidden = x if self.predictor is not None and drafts else None
        scores = self.scores(x, entered) if drafts else None
        more = (top_gates, hidden, scores)
        logits, (gates, hidden, scores) = self.rows_logits(x, rows, rows_wanted, more)
        return pass_result(
            logits,
            range(rows - rows_wanted, rows),
            ids=ids,
            read=read,
            gates=[layer[:, 0] for layer in gates],
            rescued=rescued,
            hidden=None if hidden is None else hidden[:rows],
            scores=None if scores is None else scores[:rows],
        )

    def layer(
        self, index: int, x: Array, block: Block, masks: Masks, *, ahead: bool, drafting: bool
    ) -> Any:
        """One `layer_step`; of a dense layer the residual stream, else what is to be routed."""
        known = self._ahead if ahead and index in self._ahead else self._layers
        steps, params, ahead_params = known[index]
        mask = masks.of_layer(self._windowed[index])
        given = (self._caches[index], block.start, block.positions, mask)
        out, self._caches[index] = steps[drafting](params, ahead_params, x, *given)
        return out

    def always(self, layer: int, h: Array) -> Array | None:
        """What the shared experts give, None where there are none."""
        if layer not in self._shared:
            return None
        step, params = self._shared[layer]
        return step(params, h)

    def scores(self, x: Array, entered: Array) -> Array | None:
        """A draft pass's scores by the confidence head, from its residual stream at both ends."""
        if self._head is None:
            return None
        return self._score(self._outer, self._head, x, entered)

    def rows_logits(
        self, x: Array, rows: int, wanted: int, more: Any = ()
    ) -> tuple[Float[np.ndarray, "R V"], Any]:
        """Logits of the last `wanted` rows, on the host, and `more` arrays."""
        if x.shape[0] == PREFILL_ROWS:  # of a prefill block one row is wanted
            x = take_row(x, jax.device_put(np.int32(rows - 1)))
        logits = self._logits(self._outer, x)
        began = time.perf_counter()
        host, more = jax.device_get((logits, more))
        self.clock.device += time.perf_counter() - began
        return host[:wanted], more
