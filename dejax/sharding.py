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


def per_shard(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fn(replicated, batch)` run on each shard of the batch; its results are equal on all shards.

    Inside, `jax.lax.psum(x, DATA)` adds over shards; what `fn` returns must have been summed so.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(DATA)), out_specs=P(), check_vma=False)
