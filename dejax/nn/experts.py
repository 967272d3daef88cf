"""Routed experts: one function for a few decode rows, one for long sequences.

An expert is one array [3, F, D]: gate projection, up projection, and the down projection
transposed, so that it is loaded, checked and moved as one record. With biases it is [3, F + 1,
D + 1]: the last column has the biases of gate and up, the last row that of down, and zeros fill the
rest. In decoding its three parts are arrays of their own: on CPU, a product with a part of a larger
array copies that part first (three to six times as long at DeepSeek-V2-Lite's width).

Both functions add a row's experts in ascending expert id; padding has weight zero. A row's sum
therefore depends neither on which other experts the pass uses nor on the size bucket.
"""

from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dejax.config import ClampedSwiGLU

Expert = Float[Array, "3 _F _D"] | tuple[Array, ...]
"""An array, or its three parts. The last two axes are one longer than the neurons and the width
where it has biases."""


def glu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], activation: ClampedSwiGLU | None
) -> Float[Array, "*rows F"]:
    """What the down projection gets: silu(gate) * up, or gpt-oss's clamped form."""
    if activation is None:
        return jax.nn.silu(gate) * up
    limit = jnp.asarray(activation.limit, gate.dtype)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)


def has_bias(expert: Expert | Float[Array, "*stack 3 _F _D"], width: int) -> bool:
    """Whether experts of this shape hold biases, for a model of this width."""
    some = expert[0] if isinstance(expert, tuple) else expert
    return some.shape[-1] == width + 1


def inner_outputs(
    h: Float[Array, "*rows D"], expert: Expert, activation: ClampedSwiGLU | None = None
) -> Float[Array, "*rows F"]:
    """Activations of an expert's neurons, before the down projection."""
    gate, up = expert[0].astype(h.dtype), expert[1].astype(h.dtype)
    if not has_bias(expert, h.shape[-1]):
        return glu(h @ gate.T, h @ up.T, activation)
    # A feature that is always 1 meets the biases. Weights are used whole: a product with a part of
    # them copies it first (twice the time and more, at gpt-oss's width).
    h = jnp.concatenate([h, jnp.ones_like(h[..., :1])], axis=-1)
    return glu(h @ gate.T, h @ up.T, activation)[..., :-1]


def expert_output(
    h: Float[Array, "*rows D"],
    expert: Expert,
    *,
    weights: Float[Array, "*rows"] | None = None,
    activation: ClampedSwiGLU | None = None,
) -> Float[Array, "*rows D"]:
    """One expert applied to every row: (silu(h g^T) * (h u^T)) d, times the row's weight if given.

    A weight goes in before the down projection. Applied to its result, the compiler would round
    that product and the sum over experts once or twice, depending on how many experts a pass has.
    """
    inner = inner_outputs(h, expert, activation)
    down, biased = expert[2].astype(h.dtype), has_bias(expert, h.shape[-1])
    if biased:  # the last row of `down` is its bias: a neuron that is always 1
        inner = jnp.concatenate([inner, jnp.ones_like(inner[..., :1])], axis=-1)
    output = (inner if weights is None else inner * weights[..., None].astype(h.dtype)) @ down
    return output[..., :-1] if biased else output


def unique_weights(
    ids: Int[Array, "R K"], gates: Float[Array, "R K"], unique_ids: Int[Array, " U"]
) -> Float[Array, "R U"]:
    """Gate of each unique expert in each row, zero where a row does not use it (padding id -1)."""
    hit = ids[:, :, None] == unique_ids[None, None, :]
    return jnp.sum(jnp.where(hit, gates[:, :, None], 0), axis=1)


def experts_of_rows(
    h: Float[Array, "R D"],
    weights: Float[Array, "R U"],
    experts: tuple[Expert, ...],
    *,
    before: Float[Array, "R D"] | None = None,
    activation: ClampedSwiGLU | None = None,
) -> Float[Array, "R D"]:
    """Weighted sum over the unique experts of a pass, each read once (`experts` ascending by id).

    `before` is the sum over experts with lower ids, where a pass has more than one group of them.
    """
    y = jnp.zeros_like(h) if before is None else before
    for index, expert in enumerate(experts):
        y = y + expert_output(h, expert, weights=weights[:, index], activation=activation)
    return y


def _blocks_output(
    x: Float[Array, "N B D"], weights: Float[Array, "N 3 _F _D"], activation: ClampedSwiGLU | None
) -> Float[Array, "N B D"]:
    """Every block of rows through its own expert."""
    if not has_bias(weights, x.shape[-1]):
        gate = jnp.einsum("nbd,nfd->nbf", x, weights[:, 0])
        up = jnp.einsum("nbd,nfd->nbf", x, weights[:, 1])
        return jnp.einsum("nbf,nfd->nbd", glu(gate, up, activation), weights[:, 2])
    inner, bias = weights[:, :2, :-1, :-1], weights[:, :2, None, :-1, -1]
    gate = jnp.einsum("nbd,nfd->nbf", x, inner[:, 0]) + bias[:, 0]
    up = jnp.einsum("nbd,nfd->nbf", x, inner[:, 1]) + bias[:, 1]
    down = weights[:, 2, :, :-1]
    out = jnp.einsum("nbf,nfd->nbd", glu(gate, up, activation), down[:, :-1])
    return out + down[:, -1:]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks_in_turn(
    x: Float[Array, "N B D"],
    owner: Int[Array, " N"],
    stack: Float[Array, "E 3 _F _D"],
    activation: ClampedSwiGLU | None,
) -> Float[Array, "N B D"]:
    """`_blocks_output` one block after another, without a copy of the weights for each of them.

    Blocks that no expert owns (`owner` is E) cost nothing. The backward pass computes a block
    again: differentiated as it stands, the loop would keep a stack for every block.
    """

    def step(_, piece):
        rows, expert = piece
        used = lambda: expert_output(rows, stack[expert], activation=activation)  # noqa: E731
        return None, jax.lax.cond(expert < len(stack), used, partial(jnp.zeros_like, rows))

    return jax.lax.scan(step, None, (x, owner))[1]


def _blocks_in_turn_fwd(x, owner, stack, activation):
    y = _blocks_in_turn(x.value, owner.value, stack.value, activation)
    return y, (x.value, owner.value, stack.value, stack.perturbed)


def _blocks_in_turn_bwd(activation, residual, grad):
    x, owner, stack, trained = residual

    def step(total, piece):
        rows, expert, slope = piece

        def used(total):
            def output(rows, weights):
                return expert_output(rows, weights, activation=activation)

            d_rows, d_weights = jax.vjp(output, rows, stack[expert])[1](slope)
            return total.at[expert].add(d_weights) if trained else total, d_rows

        return jax.lax.cond(
            expert < len(stack), used, lambda total: (total, jnp.zeros_like(rows)), total
        )

    zero = jnp.zeros(stack.shape if trained else (), stack.dtype)
    total, d_x = jax.lax.scan(step, zero, (x, owner, grad))
    return d_x, None, total if trained else None


_blocks_in_turn.defvjp(_blocks_in_turn_fwd, _blocks_in_turn_bwd, symbolic_zeros=True)


def _ragged_output(
    x: Float[Array, "N D"],
    counts: Int[Array, " E"],
    stack: Float[Array, "E 3 _F _D"],
    activation: ClampedSwiGLU | None,
) -> Float[Array, "N D"]:
    """Rows sorted by expert, `counts` of them each, as one grouped product (for accelerators)."""
    stack = stack.astype(x.dtype)
    biased = has_bias(stack, x.shape[-1])
    weights = stack[:, :, :-1, :-1] if biased else stack
    out_in = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    product = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=out_in)
    gate, up = (product(x, weights[:, i], counts) for i in (0, 1))
    if not biased:
        return jax.lax.ragged_dot(glu(gate, up, activation), weights[:, 2], counts)
    ends, rows = jnp.cumsum(counts), jnp.arange(len(x), dtype=counts.dtype)
    owner = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), len(stack) - 1)
    gate, up = gate + stack[owner, 0, :-1, -1], up + stack[owner, 1, :-1, -1]
    out = jax.lax.ragged_dot(glu(gate, up, activation), weights[:, 2], counts)
    return out + stack[owner, 2, -1, :-1]


@jax.custom_vjp
def _dispatch(h, source, slot_of):
    """Rows of `h` [T, D] in slot order: [slots, D]; `source` [slots] names each slot's token."""
    return h[source]


def _dispatch_fwd(h, source, slot_of):
    return h[source], slot_of


def _dispatch_bwd(slot_of, grad):
    # A token's gradient is the sum over its own slots: a gather, where autodiff would scatter.
    return _rows_or_zero(grad, slot_of).sum(axis=1), None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


def _rows_or_zero(rows, index):
    """`rows[index]`, zero where an index lies beyond the last row."""
    return rows.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(out, source_rank, slot_of, filled):
    """Outputs [slots, D] of each token's experts: [T, K, D], zero where an expert is elsewhere."""
    return _rows_or_zero(out, slot_of)


def _collect_fwd(out, source_rank, slot_of, filled):
    return _rows_or_zero(out, slot_of), (source_rank, filled, slot_of.shape)


def _collect_bwd(residual, grad):
    source_rank, filled, (tokens, k) = residual
    rows = grad.reshape(tokens * k, -1)[source_rank]
    return jnp.where(filled[:, None], rows, 0), None, None, None


_collect.defvjp(_collect_fwd, _collect_bwd)


Method = Literal["blocks", "ragged"]
"""How a long sequence's grouped product is made: by blocks of rows, or by `jax.lax.ragged_dot`."""

_COPIED_BYTES = 64 * 2**20
"""Up to so many bytes, the weights of all blocks are copied side by side for one product."""
_ROWS_IN_TURN = 32
"""Least rows of a block that reads its expert's weights by itself: fewer cost as much to read."""


@partial(jax.jit, static_argnames=("block", "activation", "method"))
def experts_of_tokens(
    h: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    gates: Float[Array, "*parts T K"],
    stack: Float[Array, "E 3 _F _D"],
    *,
    block: int = 64,
    activation: ClampedSwiGLU | None = None,
    method: Method | None = None,
) -> Float[Array, "*parts T D"]:
    """Weighted sums of each token's routed experts over a long sequence; never drops a token.

    Assignments are sorted by expert. By blocks, every expert's group is padded to whole blocks of
    `block` rows; a block belongs to one expert, so the products are at most ceil(T K / block) + E
    blocks, whatever the load: no capacity is chosen, and none can be exceeded. `method` None takes
    blocks on a CPU, where `ragged_dot` multiplies by every expert, and `ragged` elsewhere.

    Args:
      ids: experts by their place in `stack`; any other number is an expert that another device has
        (`dejax.sharding.over_experts`), whose output is left out.
      gates: weights; with leading axes, one sum for each of their entries from the same outputs.
    """
    tokens, k = ids.shape
    num_experts = stack.shape[0]
    method = method or ("blocks" if jax.default_backend() == "cpu" else "ragged")
    spare = num_experts * (method == "blocks")  # blocks that are not full
    copied = (-(-tokens * k // block) + spare) * stack[0].size * h.dtype.itemsize <= _COPIED_BYTES
    block = 1 if method == "ragged" else block if copied else max(block, _ROWS_IN_TURN)
    order = jnp.argsort(ids, axis=1)
    ids = jnp.take_along_axis(ids, order, 1)
    gates = jnp.take_along_axis(gates, jnp.broadcast_to(order, gates.shape), -1)
    flat = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    rank = jnp.argsort(flat, stable=True).astype(jnp.int32)  # rank[i]: the i-th when sorted
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)
    padded = -(-counts // block) * block
    blocks = -(-tokens * k // block) + spare
    first_slot = jnp.cumsum(padded) - padded
    first_place = jnp.cumsum(counts) - counts
    by_expert = flat[rank]
    places = jnp.arange(tokens * k, dtype=jnp.int32)
    slots = first_slot[by_expert] + places - first_place[by_expert]
    slots = jnp.where(by_expert < num_experts, slots, blocks * block)  # beyond the last one
    source_rank = jnp.zeros(blocks * block, jnp.int32).at[slots].set(rank, mode="drop")
    filled = jnp.zeros(blocks * block, bool).at[slots].set(True, mode="drop")
    slot_of = jnp.zeros(tokens * k, jnp.int32).at[rank].set(slots).reshape(tokens, k)

    x = _dispatch(h, source_rank // k, slot_of)
    if method == "ragged":
        out = _ragged_output(x, counts[:-1], stack, activation)
    else:
        starts = jnp.arange(blocks, dtype=jnp.int32) * block
        owner = jnp.searchsorted(jnp.cumsum(padded[:-1]), starts, side="right")
        x = x.reshape(blocks, block, -1)
        if copied:
            weights = stack[jnp.minimum(owner, num_experts - 1)].astype(h.dtype)
            out = _blocks_output(x, weights, activation)
        else:
            out = cast(Array, _blocks_in_turn(x, owner, stack, activation))
        out = out.reshape(blocks * block, -1)
    per_token = _collect(out, source_rank, slot_of, filled)
    y = jnp.zeros((*gates.shape[:-2], *h.shape), h.dtype)
    for column in range(k):  # ascending expert id, one at a time: the order of `experts_of_rows`
        y = y + gates[..., column, None].astype(h.dtype) * per_token[:, column]
    return y
