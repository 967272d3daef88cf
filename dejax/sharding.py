"""Meshes and shardings: the only place that writes a PartitionSpec.

One axis so far, `data`: batches are split over it, parameters are replicated. On a CPU two virtual
devices also use two cores better than one device does.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA = "data"


def data_mesh() -> Mesh:
    """All devices on one axis, `data`."""
    return jax.make_mesh((len(jax.devices()),), (DATA,), axis_types=(AxisType.Auto,))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The arrays of `tree`, whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def split_batch(batch: Any, mesh: Mesh) -> Any:
    """The arrays of `batch`, split over `data` along their first axis."""
    return jax.device_put(batch, NamedSharding(mesh, P(DATA)))


def unreplicate(tree: Any) -> Any:
    """The replicated arrays of `tree` on the default device alone."""
    return jax.device_put(jax.device_get(tree))


def add_shards(tree: Any) -> Any:
    """Inside `per_shard`: the arrays of `tree` added over all shards."""
    return jax.lax.psum(tree, DATA)


def per_shard(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fn(replicated, batch)` run on each shard of the batch; its results are equal on all shards.

    What `fn` returns must have been summed by `add_shards`.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(DATA)), out_specs=P(), check_vma=False)
