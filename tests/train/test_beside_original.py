"""A converted target beside its original."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.errors import UsageError
from tests.infer.random_target import random_target
from tests.train.rows import random_batch
from train.beside_original import beside_original


@pytest.fixture(scope="module")
def target():
    return random_target("shared", dtype=jnp.float32)


@pytest.fixture(scope="module")
def batches(target):
    return [random_batch(target.config, rows=2, length=20, seed=seed) for seed in range(2)]


def moved(target, size):
    """The same target with noise on its experts."""
    rng = np.random.default_rng(0)
    routed = {
        layer: stack * (1 + size * rng.standard_normal(stack.shape).astype(np.float32))
        for layer, stack in target.routed.items()
    }
    return dataclasses.replace(target, routed=routed)


@pytest.mark.slow
def test_the_same_weights_cost_nothing(target, batches):
    found = beside_original(target, target, batches)
    assert found["agreement"] == 1 and abs(found["kl"]) < 1e-6
    assert found["loss"] == pytest.approx(found["original_loss"])
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    counted = sum(float(batch["mask"].sum()) for batch in batches)
    assert found["tokens"] == counted


@pytest.mark.slow
def test_the_further_off_the_worse(target, batches):
    near, far = (beside_original(moved(target, size), target, batches) for size in (0.02, 0.5))
    assert 0 < near["kl"] < far["kl"] and near["agreement"] > far["agreement"]
    assert near["original_loss"] == pytest.approx(far["original_loss"])


def test_another_target_is_refused(target, batches):
    other = dataclasses.replace(target, identity="another")
    with pytest.raises(UsageError, match="another target than"):
        beside_original(target, other, batches)
