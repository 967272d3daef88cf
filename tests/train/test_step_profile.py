"""Where a step's time goes, by kind of operation."""

import jax
import jax.numpy as jnp
import pytest

from train.step_profile import REST, kind_of, own_times, profile


def test_an_operation_counts_only_what_is_not_inside_of_it():
    events = [
        ("loop", 0.0, 10.0),
        ("a", 1.0, 3.0),
        ("b", 4.0, 4.0),
        ("a", 5.0, 1.0),
        ("c", 10.0, 2.0),
    ]
    assert own_times(events) == {"loop": 3.0, "a": 4.0, "b": 3.0, "c": 2.0}


def test_kinds():
    step = "jit(step)/jvp()/while/body/closed_call/"
    assert kind_of(step + "jit(experts_of_tokens)/nbd,nfd->nbf/dot_general").endswith("experts")
    assert kind_of(step + "jit(experts_of_tokens)/gather").startswith("rows")
    assert kind_of(step + "nv,vd->nd/dot_general") == "other products"
    assert kind_of(step + "top_k").startswith("choosing")
    assert kind_of("") == kind_of(step + "mul") == REST


def test_a_product_is_seen():
    product = jax.jit(lambda a: jnp.sin(a @ a))
    a = jnp.ones((512, 512))
    product(a).block_until_ready()
    found = profile(lambda: product(a), product.lower(a).compile().as_text())
    assert {row["kind"] for row in found} == {"other products", REST}
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert [row["seconds"] for row in found] == sorted((r["seconds"] for r in found), reverse=True)
