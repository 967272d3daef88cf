"""One budget of memory for all of a decode: `--memory BYTES`.

Planned before a weight is read, and refused with what would do if it cannot work. On a CPU it is
the memory of the process; elsewhere that of the accelerator, and `--host-cache` bounds the host's.

    process        what it has before a weight is read, and what compiled steps take
    weights        everything of the target but its routed experts; a store in memory
    draft experts  and a trained predictor of experts
    KV cache       for the requested context and the scratch rows of a pass
    activations    of the widest pass
    staging        experts on their way: as stored, and as the device has them
    experts        what remains: those that a pass holds, prefetched ones, and the device cache
"""

import math
import os
import resource
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from dejax.ckpt.expert_store import ExpertStore
from dejax.config import ModelConfig
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import UsageError
from dejax.nn.attention import init_cache
from dejax.target import STORE_DIR, Outline
from infer.buckets import PREFILL_ROWS
from infer.decoder import readers_of
from infer.inspection import resident_params
from infer.staging import DeviceForm, device_form
from infer.units import format_bytes

COMPILED = 320 * 2**20
"""What compiling and the compiled steps add to the process."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part of a decode's memory, as in the module's list.

    Attributes:
      experts: of it, `prefetch` at most for experts that nobody has asked for yet.
    """

    process: int
    weights: int
    draft_experts: int
    kv_cache: int
    activations: int
    staging: int
    experts: int
    prefetch: int

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "prefetch")

    def describe(self) -> str:
        """One line, the parts in order."""
        names = {f.name: f.name.replace("_", " ") for f in fields(self) if f.name != "prefetch"}
        names["kv_cache"] = "KV cache"
        parts = [f"{names[name]} {format_bytes(getattr(self, name))}" for name in names]
        return f"{format_bytes(self.total)}: {', '.join(parts)}"


def resident_now() -> int:
    """Bytes that this process has in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss() -> int:
    """Most bytes that this process had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_memory(
    config: ModelConfig,
    form: DeviceForm,
    *,
    budget: int,
    weights: int,
    record_bytes: int,
    draft_experts: int,
    capacity: int,
    compute_dtype: DTypeLike,
    draft_length: int,
    r: int,
    readers: int,
) -> MemoryPlan:
    """Deals out a budget.

    Args:
      form: of an expert on the device; record_bytes: of one as it is stored.
      weights: bytes of resident weights, and of a store in memory.
      draft_experts: bytes of those.
      capacity: committed tokens that a sequence may have.
      draft_length: tokens of a draft, 0 for none; r: routed experts that the drafter keeps.
      readers: transfers at the same time.

    Raises:
      UsageError: it is too small for a pass; says what is needed, and what would do with less.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = np.dtype(compute_dtype).itemsize
    fixed = dict(
        process=resident_now() + COMPILED if on_cpu else 0,
        weights=weights,
        draft_experts=draft_experts,
        kv_cache=_kv_bytes(config, capacity + PREFILL_ROWS, compute_dtype),
        activations=_activation_bytes(config, capacity + PREFILL_ROWS, size),
        staging=readers * (form.bytes + (record_bytes if on_cpu else 0)),
    )
    every = len(config.moe_layers) * config.moe.num_experts * form.bytes
    # A layer's experts in a prefill, and what a round's draft passes keep until its end.
    drafts = (draft_length + 1) * len(config.moe_layers) * r if draft_length else 0
    held = config.moe.num_experts * form.bytes
    least = held + drafts * form.bytes
    rest = budget - sum(fixed.values())
    if rest < min(least, every):
        needed = sum(fixed.values()) + min(least, every)
        raise UsageError(
            f"--memory {format_bytes(budget)} does not do: a pass needs {format_bytes(needed)} "
            f"({MemoryPlan(**fixed, experts=min(least, every), prefetch=0).describe()}); give "
            "more, a shorter context or --draft-length, or experts of fewer bytes "
            "(dejax convert --experts int4)"
        )
    experts = min(rest, every)
    wanted = 4 * config.routes_per_token * form.bytes
    prefetch = every if experts == every else min(wanted, max(0, experts - least))
    return MemoryPlan(**fixed, experts=experts, prefetch=prefetch)


def _kv_bytes(config: ModelConfig, slots: int, dtype: Any) -> int:
    cache = jax.eval_shape(lambda: init_cache(config.attention, slots, dtype))
    leaves = jax.tree.leaves(cache)
    return config.num_layers * sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _activation_bytes(config: ModelConfig, slots: int, size: int) -> int:
    """Of the widest step of a prefill block: scores of all heads, or a feed-forward's neurons."""
    neurons = max(config.dense_width, config.moe.shared_width, config.moe.expert_width)
    scores = 3 * config.attention.heads * slots
    return PREFILL_ROWS * size * (8 * config.width + max(3 * neurons, scores)) + 4 * (
        config.vocab_size * 16
    )


def plan_decode(
    outline: Outline,
    folder: Path,
    *,
    budget: int,
    held: np.dtype,
    capacity: int,
    draft: Draft | None,
    predictor: ExpertPredictor | None = None,
    draft_length: int,
    r: int,
) -> MemoryPlan:
    """`plan_memory` of a converted folder, of which no weight is loaded yet.

    Args:
      held: dtype that weights are to be held in.
      draft, predictor: draft experts and a trained predictor, or None; the other arguments are
        those of `plan_memory`.

    Raises:
      UsageError: as `plan_memory`, or the folder is not converted.
    """
    if not outline.converted:
        raise UsageError(
            f"--memory: {outline.name} is not converted, so that all of its experts are in memory; "
            f"run: dejax convert {outline.name} --out DIR"
        )
    store = ExpertStore.open(folder / STORE_DIR)
    compute = np.promote_types(held, np.float32)
    form = device_form(store, compute, None)
    drafting: list[Any] = [] if predictor is None else [predictor.params]
    if draft is not None:
        drafting += [draft.layer_params(layer) for layer in outline.config.moe_layers]
    return plan_memory(
        outline.config,
        form,
        budget=budget,
        weights=resident_params(outline.config) * held.itemsize,
        record_bytes=store.bytes_per_expert,
        draft_experts=sum(leaf.nbytes for leaf in jax.tree.leaves(drafting)),
        capacity=capacity,
        compute_dtype=compute,
        draft_length=draft_length,
        r=r,
        readers=readers_of(None, form.bytes),
    )
