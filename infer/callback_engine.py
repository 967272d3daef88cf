"""The callback engine: one jitted step a pass, which asks the host for its experts from inside.

At every MoE layer a `jax.experimental.io_callback` takes the chosen ids to the host, where the
residency waits for what is missing, and brings back the unique ids (padded with -1) and their
weights, out of host memory. A layer that may use more than `GROUP` experts asks for one group after
another in a loop, so that a step holds the weights of one group at a time. A request needs what the
one before it brought: their order needs no token (`ordered=True`), whose making is an implicit copy
to the device at every pass. A step with callbacks is compiled anew in every process.

Three things about callbacks that this file gets around:

- The thread that a callback runs in does not have `jax.enable_x64`, and what it returns is narrowed
  to 32 bits: float64 weights cross as pairs of uint32.
- An exception in a callback comes out as an error of the runtime, and may leave the step's later
  callbacks in any state: a failed request is noted, answered with zeros, and raised after the step.
- A jitted step may only call what it was traced with: a step is shared by engines, so the engine is
  looked up by a number that is an argument of the step.
"""

import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int

from dejax.ckpt.expert_codec import Packing, unpack
from dejax.config import ClampedSwiGLU
from dejax.nn.experts import experts_of_rows, unique_weights
from infer.routed_experts import residents_first
from infer.whole_pass import ExpertsOf, WholePassEngine

GROUP = 8
"""Most experts of a layer that one callback brings."""

_NUMBERS = itertools.count()
_ENGINES: "weakref.WeakValueDictionary[int, CallbackEngine]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Asked:
    """Experts by callback.

    Attributes:
      num_experts: of a layer; shape: of an expert as it arrives; dtype: the same, by name.
      group: most experts that one callback brings.
      packing: given, experts arrive as bytes.
    """

    num_experts: int
    shape: tuple[int, ...]
    dtype: str
    packing: Packing | None
    activation: ClampedSwiGLU | None
    group: int

    def __call__(
        self,
        layer: int,
        h: Float[Array, "R D"],
        ids: Int[Array, "R K"],
        gates: Float[Array, "R K"],
        given: Int[Array, ""],
        *,
        drafts: bool,
    ) -> Float[Array, "R D"]:
        most = min(ids.size, self.num_experts)
        size = min(most, self.group)
        wide = np.dtype(self.dtype).itemsize == 8
        # As in the residency: bytes, or three arrays.
        shape, parts = (self.shape, 1) if self.packing is not None else (self.shape[1:], 3)
        crossing = ((*shape, 2), np.dtype(np.uint32)) if wide else (shape, np.dtype(self.dtype))
        kind = "draft" if drafts else "demand"
        ask = partial(_answer, layer, kind, size, crossing, parts)
        shapes = (
            jax.ShapeDtypeStruct((size,), jnp.int32),
            ((jax.ShapeDtypeStruct(*crossing),) * parts,) * size,
            jax.ShapeDtypeStruct((), jnp.int32),
        )

        def add_group(state):
            first, _, y = state
            unique, records, left = io_callback(ask, shapes, given, ids, first)
            experts = tuple(self._numbers(record, h.dtype, wide=wide) for record in records)
            weights = unique_weights(ids, gates, unique)
            y = experts_of_rows(h, weights, experts, before=y, activation=self.activation)
            return first + np.int32(size), left, y

        state = (jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32), jnp.zeros_like(h))
        if most <= size:
            return add_group(state)[2]
        return jax.lax.while_loop(lambda state: state[1] > 0, add_group, state)[2]

    def prefer(
        self,
        layer: int,
        ids: Int[Array, "R K"],
        gates: Float[Array, "R K"],
        given: Int[Array, ""],
        *,
        r: int,
        ratio: float,
    ) -> Int[Array, "R K"]:
        ask = partial(_order, layer, r, ratio)
        shape = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
        return io_callback(ask, shape, given, ids, gates.astype(jnp.float32))

    def _numbers(self, record: tuple[Array, ...], dtype: Any, *, wide: bool) -> Any:
        if self.packing is not None:
            return unpack(self.packing, record[0], dtype)
        if not wide:
            return record
        return tuple(jax.lax.bitcast_convert_type(part, np.dtype(self.dtype)) for part in record)


def _answer(
    layer: int, kind: Any, size: int, crossing: Any, parts: int, engine: Any, ids: Any, first: Any
):
    """The callback: asks the engine of this number."""
    number, ids, first = jax.device_get((engine, ids, first))
    return _ENGINES[int(number)].answer(layer, kind, size, crossing, parts, ids, int(first))


def _order(layer: int, r: int, ratio: float, engine: Any, ids: Any, gates: Any):
    """The callback of a draft pass that prefers residents."""
    number, ids, gates = jax.device_get((engine, ids, gates))
    residency = _ENGINES[int(number)].residency
    return residents_first(residency, layer, ids, gates, r=r, ratio=ratio).astype(np.int32)


class CallbackEngine(WholePassEngine):
    """One jitted step a pass, with experts from the residency through callbacks."""

    def __post_init__(self):
        self._number = next(_NUMBERS)
        _ENGINES[self._number] = self
        self._failure: BaseException | None = None
        super().__post_init__()

    def experts_of(self) -> ExpertsOf:
        moe, form = self.target.config.experts, self.residency.form
        if moe is None:
            return Asked(0, (), "float32", None, None, GROUP)
        made = (form.shape, form.dtype.name, form.packing)
        return Asked(moe.num_experts, *made, moe.activation, GROUP)

    def given(self) -> Array:
        return jax.device_put(np.int32(self._number))

    def answer(
        self,
        layer: int,
        kind: Any,
        size: int,
        crossing: tuple[tuple[int, ...], np.dtype],
        parts: int,
        ids: Int[np.ndarray, "R K"],
        first: int,
    ) -> tuple[np.ndarray, tuple[Any, ...], np.ndarray]:
        """Up to `size` unique ids from the `first` on, their weights, and how many are left.

        Called from the step, in a thread of the runtime. Raises nothing: the pass does.
        """
        unique, arrays, left = [], (), 0
        try:
            if self._failure is None:
                every = np.unique(ids[ids >= 0]).tolist()
                unique = every[first : first + size]
                arrays = self._weights(layer, unique, kind)
                left = len(every) - first - len(unique)
        except BaseException as error:  # an interrupt too: it is the pass that raises it
            self._failure, unique, arrays, left = error, [], (), 0
        shape, dtype = crossing
        arrays = [
            tuple(part.view(dtype).reshape(shape) for part in jax.tree.leaves(expert))
            for expert in arrays
        ]
        padding = [(np.zeros(shape, dtype),) * parts] * (size - len(unique))
        padded = np.array([*unique, *[-1] * (size - len(unique))], np.int32)
        return padded, (*arrays, *padding), np.array(left, np.int32)

    def _weights(self, layer: int, unique: list[int], kind: Any) -> Sequence[Any]:
        if not unique:  # a pass that warms up
            return ()
        began = time.perf_counter()
        try:
            experts = self.residency.acquire(layer, unique, kind=kind)
        finally:
            self.clock.loads += time.perf_counter() - began
        arrays = jax.device_get(experts)
        if kind == "demand":  # the arrays live on until the step has copied them
            self.residency.release(layer)
        return arrays

    def _run(self, *args: Any, **options: Any):
        self._failure = None
        found = super()._run(*args, **options)
        if self._failure is not None:
            raise self._failure
        return found
