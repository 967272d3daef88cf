"""Meshes and shardings: the only place that writes a PartitionSpec.

Four axes. Rows of a batch are split over `data`, `fsdp` and `expert`; the weights of a target over
`fsdp`, `expert` and `tensor`. A layer's weights are gathered over `fsdp` when it runs; a routed
expert stays where it is, and the rows of an `expert` group go to all of its devices and come back
as sums; embedding and head are split by vocabulary over all three and never gathered. Whoever runs
a function on a mesh enters it (`jax.set_mesh`); without one, all of this does nothing.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dejax.config import ModelConfig
from dejax.errors import UsageError

AnyMesh = Mesh | AbstractMesh
"""Of devices, or of the mere sizes of its axes."""

AXES = DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
_ROWS = (DATA, FSDP, EXPERT)
_GROUP = (FSDP, EXPERT)
_VOCABULARY = (FSDP, EXPERT, TENSOR)
_EXPERTS = (EXPERT, FSDP)

# Of a weight's last axes; leading ones (a stack's layers) are not split. The first match counts.
_RULES = (
    (r"routed$", (_EXPERTS, None, TENSOR, None)),
    (r"(embedding|head)$", (_VOCABULARY, None)),
    (r"(q|k|v|q_b|kv_b|gate|up)_proj\.weight$", (TENSOR, FSDP)),
    (r"(o|down)_proj\.weight$", (FSDP, TENSOR)),
    (r"(q_a_proj|kv_a_proj_with_mqa)\.weight$", (None, FSDP)),
)
_DRAFT_RULES = ((r"weights$", (None, None, FSDP)),)


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; `data` 0 takes all that the others leave."""

    data: int = 0
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self):
        if self.data < 0 or min(self.fsdp, self.expert, self.tensor) < 1:
            raise UsageError(f"mesh: {self}; expected data 0 or more, the others at least 1")


def make_mesh(config: MeshConfig = MeshConfig(), devices: Sequence[Any] | None = None) -> Mesh:  # noqa: B008
    """A mesh of all devices, or of these.

    Raises:
      UsageError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    others = config.fsdp * config.expert * config.tensor
    data = config.data or max(1, len(devices) // others)
    shape = (data, config.fsdp, config.expert, config.tensor)
    if math.prod(shape) != len(devices):
        sizes = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise UsageError(f"mesh: {sizes} is not {len(devices)}, the number of devices")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """A mesh of devices that need not be there, to trace or lower a step on; `data` must be set."""
    shape = (max(1, config.data), config.fsdp, config.expert, config.tensor)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)


def row_shards(mesh: AnyMesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in _ROWS)


def check_divides(config: ModelConfig, mesh: AnyMesh) -> None:
    """Refuses a mesh that does not divide a target.

    Raises:
      UsageError: naming every dimension that it does not divide.
    """
    size = lambda axes: math.prod(mesh.shape[axis] for axis in axes)  # noqa: E731
    dimensions = [
        ("vocabulary", config.vocab_size, _VOCABULARY),
        ("width", config.width, (FSDP,)),
        ("attention heads", config.attention.heads, (TENSOR,)),
    ]
    if (experts := config.experts) is not None:
        dimensions.append(("routed experts", experts.num_experts, _EXPERTS))
        if config.expert_shape[-1] == config.width:  # with biases they are not split
            dimensions.append(("neurons of an expert", experts.expert_width, (TENSOR,)))
        if experts.shared_width:
            dimensions.append(("neurons of the shared experts", experts.shared_width, (TENSOR,)))
    if len(config.moe_layers) < config.num_layers:
        dimensions.append(("neurons of a dense layer", config.dense_width, (TENSOR,)))
    bad = [
        f"{name} {count} over {' x '.join(axes)} = {size(axes)}"
        for name, count, axes in dimensions
        if count % size(axes)
    ]
    if bad:
        raise UsageError(f"mesh: does not divide the target: {', '.join(bad)}; choose other axes")


# --- placing arrays --------------------------------------------------------------------------


def _spec(path: str, shape: tuple[int, ...], rules: Any) -> P:
    for pattern, axes in rules:
        if re.search(pattern, path) and len(axes) <= len(shape):
            if path.endswith("routed") and shape[-2] % 2:  # [.., 3, F + 1, D + 1]: with biases
                axes = (axes[0], None, None, None)
            return P(*(None,) * (len(shape) - len(axes)), *axes)
    return P()


def _shardings(tree: Any, mesh: Any, rules: Any) -> Any:
    def of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return NamedSharding(mesh, _spec(name, tuple(leaf.shape), rules))

    return jax.tree_util.tree_map_with_path(of, tree)


def target_shardings(tree: Any, mesh: AnyMesh) -> Any:
    """How the weights of a target lie: for a tree of arrays or shapes, one sharding each."""
    return _shardings(tree, mesh, _RULES)


def draft_shardings(tree: Any, mesh: AnyMesh, *, split: bool) -> Any:
    """How draft parameters, their optimizer's state and the like lie: whole everywhere, or split.

    `split` divides a draft expert's weights over `fsdp`.
    """
    return _shardings(tree, mesh, _DRAFT_RULES if split else ())


def place(tree: Any, shardings: Any) -> Any:
    """Host arrays (equal in all processes) as arrays on the devices; each takes its own part."""

    def put(leaf, sharding):
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def layer_sharding(sharding: NamedSharding) -> NamedSharding:
    """How one layer's array of a stack lies that is laid out by `sharding`."""
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, P())


def on_host(tree: Any) -> Any:
    """The whole arrays of `tree` in every process, wherever their parts lie."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(jax.device_get(leaf))
        if not leaf.is_fully_replicated:
            assert isinstance(leaf.sharding, NamedSharding)
            leaf = _replicate(leaf.sharding.mesh)(leaf)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Array], Array]:
    return jax.jit(lambda a: a, out_shardings=replicated(mesh))


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """How the arrays of a batch lie: their first axis split over data, fsdp and expert."""
    return NamedSharding(mesh, P(_ROWS))


def own_rows(mesh: Mesh, rows: int) -> range:
    """The rows of a batch of `rows` that this process holds.

    Raises:
      UsageError: they are not next to each other: the mesh mixes the devices of processes.
    """
    index = row_sharding(mesh).addressable_devices_indices_map((rows,))
    parts = {(s[0].start or 0, rows if s[0].stop is None else s[0].stop) for s in index.values()}  # type: ignore[union-attr]
    first, last = min(a for a, _ in parts), max(b for _, b in parts)
    if sum(b - a for a, b in parts) != last - first:
        raise UsageError("mesh: a process's rows of a batch are not neighbours; reorder the axes")
    return range(first, last)


def place_rows(batch: Any, mesh: Mesh, rows: int) -> Any:
    """This process's rows of a batch (`own_rows`), as arrays [rows, ...] on the mesh."""
    sharding, mine = row_sharding(mesh), own_rows(mesh, rows)

    def put(part):
        def piece(index):
            start, stop = index[0].start or 0, index[0].stop
            return part[start - mine.start : (rows if stop is None else stop) - mine.start]

        return jax.make_array_from_callback((rows, *part.shape[1:]), sharding, piece)

    return jax.tree.map(put, batch)


# --- inside a jitted function ----------------------------------------------------------------


def _mesh() -> Any:
    """The mesh that the function being traced runs on; None without one, or within a shard."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or any(t != AxisType.Auto for t in mesh.axis_types) else mesh


def split_rows(x: Array) -> Array:
    """`x` [B, ...], kept split by rows."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, P(_ROWS))


def gather_layer(params: Any) -> Any:
    """A layer's resident weights, gathered over `fsdp` for its computation."""
    if _mesh() is None:
        return params

    def gather(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        spec = (None if axis == FSDP else axis for axis in _spec(name, leaf.shape, _RULES[2:]))
        return jax.lax.with_sharding_constraint(leaf, P(*spec))

    return jax.tree_util.tree_map_with_path(gather, params)


def over_experts(
    fn: Callable[..., Float[Array, "*parts T D"]],
    h: Float[Array, "B T D"],
    ids: Int[Array, "B T K"],
    gates: Float[Array, "*parts B T K"],
    stack: Float[Array, "E 3 _F _D"],
) -> Float[Array, "*parts B T D"]:
    """`fn(h, ids, gates, stack)` over flat rows, every device with its own experts of the stack.

    The rows of an `expert` group meet on each of its devices, which adds what its experts give;
    `ids` are places in the device's part of the stack, or outside it (`experts_of_tokens`).
    """
    mesh = _mesh()

    def flat(h, ids, gates, stack):
        batch = h.shape[:2]
        rows = (a.reshape(*a.shape[:-3], -1, a.shape[-1]) for a in (h, ids, gates))
        y = fn(*rows, stack)
        return y.reshape(*y.shape[:-2], *batch, -1)

    if mesh is None:
        return flat(h, ids, gates, stack)
    parts = gates.ndim - 3
    rows, lifted = P(_ROWS), P(*(None,) * parts, _ROWS)
    spec = _spec("routed", tuple(stack.shape), _RULES)

    def local(h, ids, gates, stack):
        if mesh.shape[FSDP] > 1:  # gathering from one device would copy a layer's experts
            stack = jax.lax.all_gather(stack, FSDP, axis=0, tiled=True)
        gather = partial(jax.lax.all_gather, axis_name=EXPERT, tiled=True)
        first = jax.lax.axis_index(EXPERT) * stack.shape[0]
        y = flat(gather(h), gather(ids) - first, gather(gates, axis=parts), stack)
        if TENSOR in spec:
            y = jax.lax.psum(y, TENSOR)
        return jax.lax.psum_scatter(y, EXPERT, scatter_dimension=parts, tiled=True)

    sharded = jax.shard_map(
        local, in_specs=(rows, rows, lifted, spec), out_specs=lifted, check_vma=False
    )
    return sharded(h, ids, gates, stack)


@dataclass(frozen=True)
class VocabularyPart:
    """A device's part of the vocabulary, and what joins it with the others' parts.

    Attributes:
      first: token id of its first row; gather: rows of this device -> those of its whole group,
      all of whose devices then do the same rows; scatter: sums over the group's devices, of the own
      rows alone; add, most: sum and maximum over the group's devices; total: sum over all rows.
    """

    first: Any = 0
    gather: Callable[[Array], Array] = lambda a: a
    scatter: Callable[[Array], Array] = lambda a: a
    add: Callable[[Array], Array] = lambda a: a
    most: Callable[[Array], Array] = lambda a: a
    total: Callable[[Array], Array] = lambda a: a


def over_vocabulary(
    fn: Callable[..., Any], table: Any, rows: Any, shared: Any = (), *, out_rows: Any
) -> Any:
    """`fn(part, table, rows, shared)`: every device with its part of a [V, D] table and its rows.

    `table` may be several of them. `shared` is whole everywhere. `out_rows` has the structure of
    the result: true where an array is split by rows (its first axis), false where it is equal on
    all devices.
    """
    mesh = _mesh()
    if mesh is None:
        return fn(VocabularyPart(), table, rows, shared)

    def local(table, rows, shared):
        part = VocabularyPart(
            first=jax.lax.axis_index(_VOCABULARY) * jax.tree.leaves(table)[0].shape[0],
            gather=partial(jax.lax.all_gather, axis_name=_GROUP, tiled=True),
            scatter=lambda a: jax.lax.psum_scatter(
                jax.lax.psum(a, TENSOR), _GROUP, scatter_dimension=0, tiled=True
            ),
            add=lambda a: jax.lax.psum(a, _VOCABULARY),
            most=lambda a: jax.lax.pmax(a, _VOCABULARY),
            total=lambda a: jax.lax.psum(a, DATA),
        )
        return fn(part, table, rows, shared)

    out_specs = jax.tree.map(lambda split: P(_ROWS) if split else P(), out_rows)
    sharded = jax.shard_map(
        local, in_specs=(P(_VOCABULARY), P(_ROWS), P()), out_specs=out_specs, check_vma=False
    )
    return sharded(table, rows, shared)


def look_up(table: Float[Array, "V D"], ids: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """`table[ids]`, wherever its rows lie."""

    def local(part: VocabularyPart, table, ids, _):
        places = part.gather(ids) - part.first
        here = (places >= 0) & (places < len(table))
        rows = table[jnp.clip(places, 0, len(table) - 1)]
        return part.scatter(jnp.where(here[..., None], rows, 0))

    return table[ids] if _mesh() is None else over_vocabulary(local, table, ids, out_rows=True)


# --- data parallelism by hand ----------------------------------------------------------------


def add_shards(tree: Any) -> Any:
    """Inside `per_shard`: the arrays of `tree` added over all shards."""
    return jax.lax.psum(tree, _ROWS)


def per_shard(fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`fn(replicated, batch)` run on each shard of the batch; its results are equal on all shards.

    What `fn` returns must have been summed by `add_shards`.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(_ROWS)), out_specs=P(), check_vma=False)
