"""Routed experts: both functions give the weighted sum, whatever else the pass computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.nn import experts as experts_module
from dejax.nn.experts import expert_output, experts_of_rows, experts_of_tokens, unique_weights

E, F, D = 6, 5, 8
METHODS = ["blocks", "ragged"]


def stack_of(shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


@pytest.fixture(scope="module")
def stack():
    return stack_of((E, 3, F, D))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biased"])
def any_stack(request):
    return stack_of((E, 3, F + request.param, D + request.param))


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(h, ids, gates, stack):
    """sum_k gate_k * down(silu(gate h) * up h) in float64, row by row; ids elsewhere left out."""
    h, gates, stack = (np.asarray(a, np.float64) for a in (h, gates, stack))
    rows = np.zeros(h.shape)
    for row, (x, experts, weights) in enumerate(zip(h, ids, gates, strict=True)):
        for expert, weight in zip(np.asarray(experts), weights, strict=True):
            if not 0 <= expert < E:
                continue
            gate, up, down = stack[expert]
            biases = 0, 0, 0
            if stack.shape[-1] == D + 1:
                biases = gate[:-1, -1], up[:-1, -1], down[-1, :-1]
                gate, up, down = gate[:-1, :-1], up[:-1, :-1], down[:-1, :-1]
            inner = silu(gate @ x + biases[0]) * (up @ x + biases[1])
            rows[row] += weight * (inner @ down + biases[2])
    return rows


# Eager operations compile one by one.
sum_of_rows, weights_of = jax.jit(experts_of_rows), jax.jit(unique_weights)


def routed(rows, k, seed):
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((rows, D), np.float32)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(rows)]).astype(np.int32)
    return jnp.asarray(h), jnp.asarray(ids), jnp.asarray(rng.random((rows, k), np.float32))


def test_one_expert(stack):
    h, _, _ = routed(4, 1, 0)
    expected = by_hand(h, np.full((4, 1), 2), np.ones((4, 1)), stack)
    np.testing.assert_allclose(jax.jit(expert_output)(h, stack[2]), expected, atol=1e-5)


def test_weights_of_unique_experts():
    ids, gates = jnp.array([[3, 1], [1, 5]]), jnp.array([[0.5, 0.25], [2.0, 4.0]])
    weights = weights_of(ids, gates, jnp.array([1, 3, 5, -1]))
    np.testing.assert_array_equal(weights, [[0.25, 0.5, 0, 0], [2, 0, 4, 0]])


@pytest.mark.parametrize("rows, k, block", [(1, 3, 1), (7, 1, 16), (20, E, 16), (20, 2, 4)])
def test_both_functions_are_the_sum(stack, rows, k, block):
    h, ids, gates = routed(rows, k, seed=rows)
    expected = by_hand(h, ids, gates, stack)
    tokens = experts_of_tokens(h, ids, gates, stack, block=block)
    np.testing.assert_allclose(tokens, expected, atol=2e-5)
    weights = weights_of(ids, gates, np.arange(E))
    np.testing.assert_allclose(sum_of_rows(h, weights, tuple(stack)), expected, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("favourite", [0, 3, E - 1])
def test_no_token_is_dropped_when_all_want_the_same_expert(stack, favourite, method):
    h, ids, gates = routed(40, 1, 0)
    ids = jnp.full_like(ids, favourite)
    expected = by_hand(h, ids, gates, stack)
    sums = experts_of_tokens(h, ids, gates, stack, block=4, method=method)
    np.testing.assert_allclose(sums, expected, atol=2e-5)


def test_a_row_knows_nothing_of_the_other_experts_of_the_pass(stack):
    """Bit for bit: the union, its padding, and how it is cut into groups change no row."""
    h, ids, gates = routed(3, 2, 1)
    ids = jnp.broadcast_to(jnp.array([1, 4]), ids.shape)

    def output(unique, before=None):
        experts = tuple(stack[max(expert, 0)] for expert in unique)
        weights = weights_of(ids, gates, np.array(unique))
        return sum_of_rows(h, weights, experts, before=before)

    alone = output((1, 4))
    np.testing.assert_array_equal(alone, output((0, 1, 2, 3, 4, 5)))
    np.testing.assert_array_equal(alone, output((1, 4, -1, -1)))
    np.testing.assert_array_equal(alone, output((3, 4), before=output((0, 1))))


def test_order_of_the_choice_does_not_matter(stack):
    h, ids, gates = routed(9, 3, 2)
    one = experts_of_tokens(h, ids, gates, stack, block=4)
    other = experts_of_tokens(h, ids[:, ::-1], gates[:, ::-1], stack, block=4)
    np.testing.assert_array_equal(one, other)


def test_gradients_of_the_grouped_product(stack):
    """Its own backward pass is the derivative of the plain sum."""
    h, ids, gates = routed(20, 3, 3)

    def grouped(h, gates, stack):
        return jnp.sin(experts_of_tokens(h, ids, gates, stack, block=8)).sum()

    def plain(h, gates, stack):
        weights = unique_weights(ids, gates, jnp.arange(E))
        return jnp.sin(experts_of_rows(h, weights, tuple(stack))).sum()

    ours = jax.jit(jax.grad(grouped, (0, 1, 2)))(h, gates, stack)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(h, gates, stack)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# --- the ways to make the grouped product ----------------------------------------------------


def elsewhere(rows, k, seed):
    """Rows some of whose experts another device has, on either side of ours."""
    h, ids, gates = routed(rows, k, seed)
    ids = ids.at[0].set(-1).at[1].set(E).at[2, 0].set(-7).at[3, -1].set(E + 40)
    return h, ids, gates


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", [routed, elsewhere])
def test_each_method_is_the_sum_by_hand(any_stack, method, case):
    h, ids, gates = case(20, 3, 5)
    sums = experts_of_tokens(h, ids, gates, any_stack, block=4, method=method)
    np.testing.assert_allclose(sums, by_hand(h, ids, gates, any_stack), atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_experts_all_elsewhere_give_zero(stack, method):
    h, ids, gates = routed(5, 2, 6)
    sums = experts_of_tokens(h, ids + E, gates, stack, block=4, method=method)
    np.testing.assert_array_equal(sums, np.zeros((5, D)))


def gradients_of(h, ids, gates, stack, **options):
    """Those of a weighted sum of the outputs, with respect to h, gates and the stack."""

    def objective(h, gates, stack):
        return weighted(experts_of_tokens(h, ids, gates, stack, block=4, **options))

    return jax.jit(jax.grad(objective, (0, 1, 2)))(h, gates, stack)


def weighted(outputs):
    """A sum in which every output has another weight."""
    slopes = np.random.default_rng(1).standard_normal(outputs.shape, np.float32)
    return jnp.vdot(outputs, slopes)


@pytest.mark.slow
def test_ragged_and_blocks_have_the_same_gradients(any_stack):
    rows = elsewhere(20, 3, 7)
    ragged, blocks = (gradients_of(*rows, any_stack, method=method) for method in METHODS)
    for one, other in zip(ragged, blocks, strict=True):
        assert jnp.any(one != 0)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def in_turn(monkeypatch):
    """From its call on, blocks go one after another; returns how often that was traced."""
    traced = []

    def begin():
        plain = experts_module._blocks_in_turn

        def counted(*args):
            traced.append(args)
            return plain(*args)

        monkeypatch.setattr(experts_module, "_COPIED_BYTES", 0)
        monkeypatch.setattr(experts_module, "_blocks_in_turn", counted)
        experts_of_tokens.clear_cache()
        return traced

    yield begin
    monkeypatch.undo()
    experts_of_tokens.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("case", [routed, elsewhere])
def test_blocks_in_turn_are_blocks_side_by_side(any_stack, in_turn, case):
    h, ids, gates = rows = case(20, 3, 8)
    together = experts_of_tokens(h, ids, gates, any_stack, block=4, method="blocks")
    slopes = gradients_of(*rows, any_stack, method="blocks")
    traced = in_turn()
    apart = experts_of_tokens(h, ids, gates, any_stack, block=4, method="blocks")
    assert len(traced) == 1
    np.testing.assert_allclose(apart, together, atol=1e-4)
    for one, other in zip(gradients_of(*rows, any_stack, method="blocks"), slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_blocks_in_turn_pass_gradients_by_a_frozen_stack(any_stack, in_turn):
    h, ids, gates = rows = elsewhere(20, 3, 9)
    expected = gradients_of(*rows, any_stack, method="blocks")[:2]
    traced = in_turn()

    @jax.jit
    def slopes(h, gates):
        def objective(h, gates):
            return weighted(experts_of_tokens(h, ids, gates, any_stack, block=4))

        return jax.grad(objective, (0, 1))(h, gates)

    for one, other in zip(slopes(h, gates), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert traced


@pytest.mark.parametrize("method", METHODS)
def test_several_sets_of_gates_are_a_call_for_each(stack, method):
    h, ids, gates = elsewhere(9, 3, 10)
    sets = jnp.stack([gates, 1 - gates, gates * (jnp.arange(3) == 0)])
    sums = experts_of_tokens(h, ids, sets, stack, block=4, method=method)
    assert sums.shape == (3, 9, D)
    for one, alone in zip(sums, sets, strict=True):
        expected = experts_of_tokens(h, ids, alone, stack, block=4, method=method)
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-6)


def test_short_weights_are_widened(stack):
    h, ids, gates = routed(3, 2, 4)
    short = stack.astype(jnp.bfloat16)
    y = experts_of_tokens(h, ids, gates, short, block=4)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, by_hand(h, ids, gates, short.astype(jnp.float32)), atol=2e-5)
