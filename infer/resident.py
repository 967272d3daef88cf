"""The resident engine: every expert on the device, one jitted step a pass, no host in between.

It computes what the host-driven engine computes, from the same layer functions, with the chosen
experts taken from one [E, 3, F, D] array a layer inside the step. On a CPU that copies the weights
it takes: on models of true width the host-driven engine is the faster one there.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dejax.ckpt.expert_codec import Packing
from dejax.ckpt.expert_store import ExpertStore
from dejax.config import ClampedSwiGLU
from dejax.errors import FailedError, UsageError
from dejax.nn.experts import expert_output, experts_of_tokens
from dejax.shapes import Pair
from dejax.target import Target
from infer.buckets import PREFILL_ROWS
from infer.console import progress
from infer.link import parse_link
from infer.prefetch import Arrivals, Slot
from infer.residency import Residency
from infer.staging import DeviceForm
from infer.units import format_bytes
from infer.whole_pass import ExpertsOf, WholePassEngine

LAYOUT = "stacks [E, 3, F, D]: gate and up [F, D], down transposed [F, D]"


class ResidentExperts:
    """A residency that holds every expert on the device and moves none: `ResidencyLike`.

    Attributes:
      stacks: layer -> [E, 3, F, D] in the compute dtype.
      form: of an expert.
    """

    packing: Packing | None = None

    def __init__(self, stacks: dict[int, Float[Array, "E 3 _F _D"]]) -> None:
        self.stacks = stacks
        some = next(iter(stacks.values()), None)
        shape, dtype = ((), np.float32) if some is None else (some.shape[1:], some.dtype)
        self.form = DeviceForm(None, np.dtype(dtype), tuple(shape))
        self.bytes_per_expert = self.form.bytes
        self._pairs = {(layer, e) for layer, stack in stacks.items() for e in range(len(stack))}

    @property
    def device_bytes(self) -> int:
        """Bytes of all experts on the device."""
        return sum(stack.nbytes for stack in self.stacks.values())

    peak_device_bytes = device_bytes

    def acquire(self, layer: int, ids: Sequence[int], *, kind: Any) -> list[Array]:
        """Experts `ids` of `layer`, in that order."""
        return self.request(layer, ids, kind=kind).take(len(ids))

    def request(self, layer: int, ids: Sequence[int], *, kind: Any) -> Arrivals:
        """The same, arrived already."""
        slots = [Slot((layer, expert), kind, 0.0) for expert in ids]
        for slot in slots:
            slot.array = self.stacks[layer][slot.pair[1]]
            slot.done.set()
        return Arrivals(slots)

    def prefetch(self, pairs: Iterable[Pair], *, ahead: bool = False) -> None:
        """Nothing is to be moved."""

    def release(self, layer: int) -> None:
        """Nothing is let go of; so with `end_pass` and `end_round`."""

    def end_pass(self) -> None: ...

    def begin_round(self) -> None:
        """Raises FailedError if the experts were dropped."""
        if len(self.stacks) == 0 < len(self._pairs):
            raise FailedError("the residency is closed")

    def end_round(self) -> None: ...

    def close(self) -> None:
        """Drops the experts."""
        self.stacks.clear()

    def is_available(self, pair: Pair) -> bool:
        """Whether there is such an expert; so with `is_resident`."""
        return pair in self._pairs

    is_resident = is_available

    def available(self) -> set[Pair]:
        """All pairs; so with `resident`."""
        return set(self._pairs)

    def resident(self) -> set[Pair]:
        return set(self._pairs)

    def prefetched(self) -> set[Pair]:
        """None."""
        return set()

    def take_events(self) -> list[Any]:
        """None: nothing is loaded."""
        return []


def check_resident(name: str, size: int, cache: int | None) -> None:
    """Refuses a device cache that does not hold all routed experts, `size` bytes as computed with.

    Raises:
      UsageError: it does not (None holds any number).
    """
    if cache is not None and size > cache:
        raise UsageError(
            f"engine resident keeps all experts of {name} on the device ({format_bytes(size)}), "
            f"--device-cache allows {format_bytes(cache)}; give --device-cache all, or take "
            "--engine host"
        )


def load_resident(
    target: Target, *, store: ExpertStore | None = None, device_cache: int | None = None
) -> ResidentExperts:
    """All routed experts of a target on the device, from the store if it has one.

    Raises:
      UsageError: they are more bytes than the device cache may hold (None: any).
      FailedError: an expert cannot be read (names layer, expert and file).
    """
    config, dtype = target.config, np.dtype(target.compute_dtype)
    check_resident(target.name, config.routed_params * dtype.itemsize, device_cache)
    store = target.store if store is None else store
    if store is None or not config.moe_layers:
        stacks = (target.routed or {}).items()
        return ResidentExperts({layer: stack.astype(dtype) for layer, stack in stacks})
    # Through a residency that keeps nothing: reads are checked, tried again and reported there.
    loader = Residency(
        store,
        device_cache_bytes=0,
        host_cache_bytes=0,
        link=parse_link("real"),
        compute_dtype=dtype,
        prefetch_bytes=0,
        unpack="host",
    )
    loaded, experts = {}, range(config.moe.num_experts)
    with loader, progress("load experts", len(store.pairs), "experts") as bar:
        for layer in config.moe_layers:
            loaded[layer] = _stack(*loader.acquire(layer, experts, kind="demand"))
            loader.end_pass()
            bar.advance(len(experts))
    return ResidentExperts(loaded)


@jax.jit
def _stack(*experts: tuple[Array, ...]) -> Array:
    return jnp.stack([jnp.stack(parts) for parts in experts])


@dataclass(frozen=True)
class Gathered:
    """Experts from the stacks, added in ascending id as everywhere."""

    activation: ClampedSwiGLU | None

    def __call__(
        self,
        layer: int,
        h: Float[Array, "R D"],
        ids: Int[Array, "R K"],
        gates: Float[Array, "R K"],
        given: dict[int, Float[Array, "E 3 _F _D"]],
        *,
        drafts: bool,
    ) -> Float[Array, "R D"]:
        stack = given[layer]
        if len(h) == 1:
            return self._one_row(h, ids[0], gates[0], stack)
        if len(h) == PREFILL_ROWS:
            return experts_of_tokens(h, ids, gates, stack, block=16, activation=self.activation)
        return self._few_rows(h, ids, gates, stack)

    def prefer(self, layer: int, ids: Any, gates: Any, given: Any, **how: Any) -> Int[Array, "R K"]:
        """The router's own order: all experts are resident."""
        return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    def _one_row(self, h, ids, gates, stack):
        """Slices of the chosen experts, without a loop."""
        order, y = jnp.argsort(ids), jnp.zeros_like(h)
        for index in range(len(ids)):
            chosen = order[index]
            record, weights = stack[ids[chosen]], gates[chosen][None]
            y = y + expert_output(h, record, weights=weights, activation=self.activation)
        return y

    def _few_rows(self, h, ids, gates, stack):
        """A loop over the unique experts, each read once for all rows."""
        experts = len(stack)
        hit = jnp.zeros(experts + 1, bool).at[jnp.where(ids < 0, experts, ids)].set(True)[:-1]
        (unique,) = jnp.nonzero(hit, size=min(ids.size, experts), fill_value=0)

        def add(index, y):
            weights = jnp.sum(jnp.where(ids == unique[index], gates, 0), axis=1)
            record = stack[unique[index]]
            return y + expert_output(h, record, weights=weights, activation=self.activation)

        count = jnp.sum(hit, dtype=jnp.int32)
        return jax.lax.fori_loop(jnp.zeros_like(count), count, add, jnp.zeros_like(h))


class ResidentEngine(WholePassEngine):
    """One jitted step a pass over `ResidentExperts`, which its `residency` must be."""

    layout = LAYOUT

    def experts_of(self) -> ExpertsOf:
        experts = self.target.config.experts
        return Gathered(None if experts is None else experts.activation)

    def given(self) -> dict[int, Array]:
        assert isinstance(self.residency, ResidentExperts)
        return self.residency.stacks


class ResidentDecoder:
    """Greedy autoregressive decoding with one jitted step a token, without the decode loop.

    The reference for what loop and host cost.

    Raises:
      AssertionError: the target's experts are not loaded (`target.routed` is None).
    """

    def __init__(self, target: Target, capacity: int):
        assert target.routed is not None
        self._engine = ResidentEngine(target, load_resident(target), None, capacity)

    def decode(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation, `new_tokens` long, and the seconds all but its first token took.

        End tokens do not stop it.
        """
        engine, tokens = self._engine, list(prompt)
        engine.begin()
        result, began = engine.prefill(tokens), time.perf_counter()
        for _ in range(new_tokens - 1):
            tokens.append(int(np.argmax(result.logits[0])))
            result = engine.target_rows(tokens[-1:], start=len(tokens) - 1)
        tokens.append(int(np.argmax(result.logits[0])))
        return tokens[len(prompt) :], time.perf_counter() - began
