"""A target ready to decode: its expert store, residency and engine, over many prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from dejax.ckpt.expert_store import ExpertStore, ExpertStoreWriter
from dejax.ckpt.predictor_file import check_predictor
from dejax.draft.expert import Draft
from dejax.draft.predictor import ExpertPredictor
from dejax.errors import UsageError
from dejax.spec.budget import VerifyBudget
from dejax.spec.governor import Decision, Governor
from dejax.target import Target
from infer.callback_engine import CallbackEngine
from infer.decode import decode, make_drafter
from infer.decode_options import PATH_MODES, DecodeOptions
from infer.engine import Engine
from infer.engines import EngineLike, EngineName, OnLogits, Watched, check_engine
from infer.link import Link, parse_link
from infer.node_predictor import NodePredictor
from infer.passes import Drafting
from infer.residency import Residency
from infer.resident import ResidentEngine, load_resident
from infer.staging import device_form
from infer.timing import Pace
from infer.trace import Round
from infer.tree_drafter import Foresee
from infer.units import format_bytes

LARGE_EXPERT = 2**20
"""Bytes from which reading and casting take longer than handing over to a thread."""


@dataclass(frozen=True)
class Offload:
    """Where experts live, and how they get to the device.

    Engine `resident` keeps all experts on the device: its `device_cache` holds them all, and links,
    readers and looking ahead do not matter.

    Attributes:
      device_cache, host_cache: bytes of the two caches (None: unlimited).
      link: what experts cross.
      unpack: where experts become numbers of the compute dtype, as in `Residency`.
      readers: threads that make transfers; None is four for large experts, one for small ones, for
        which more threads would only be in the way of each other.
      prefetch: most bytes of prefetched experts that nobody has asked for yet; None is about what
        the rows of a draft of six need (more is rarely predicted right).
      look_ahead: whether target passes ask for what the next layer will probably use.
      engine: how passes run (`infer.engines`).
    """

    device_cache: int | None = 0
    host_cache: int | None = None
    link: Link = field(default_factory=lambda: parse_link("real"))
    unpack: Literal["host", "device"] | None = None
    readers: int | None = None
    prefetch: int | None = None
    look_ahead: bool = False
    engine: EngineName = "host"


def expert_store(target: Target, offload: Offload) -> ExpertStore:
    """The target's store; an unconverted target's experts are put into a store in memory.

    A dense target's is empty: what asks it for experts never does.

    Raises:
      UsageError: an unconverted target's experts do not fit the host cache, or it has none.
    """
    if not target.config.moe_layers:
        return ExpertStore.empty(target.identity)
    if target.store is not None:
        return target.store
    assert target.routed is not None
    config = target.config
    some = target.routed[config.moe_layers[0]]
    # The store knows no float16; float32 holds it exactly.
    dtype = some.dtype if some.dtype != np.float16 else np.dtype(np.float32)
    size = sum(stack.size * dtype.itemsize for stack in target.routed.values())
    check_host_cache(target.name, size, offload.host_cache)
    shape = tuple(some.shape[1:])
    with ExpertStoreWriter(
        None,
        layers=config.moe_layers,
        num_experts=config.moe.num_experts,
        shape=shape,
        dtype=dtype.name,
        identity=target.identity,
    ) as writer:
        for layer, stack in target.routed.items():
            for expert, record in enumerate(np.asarray(jax.device_get(stack))):
                writer.write(layer, expert, record.astype(dtype, copy=False))
        return writer.finish()


def check_host_cache(name: str, size: int, host_cache: int | None) -> None:
    """Refuses an unconverted target whose experts, of `size` bytes, exceed the host cache.

    Raises:
      UsageError: they do.
    """
    if host_cache is not None and size > host_cache:
        raise UsageError(
            f"{name} is not converted and its experts ({format_bytes(size)}) exceed the host cache "
            f"({format_bytes(host_cache)}); run: dejax convert {name} --out DIR"
        )


def check_budget(engine: EngineName, budget: VerifyBudget | None, *, strict: bool) -> None:
    """Refuses a verification budget where it cannot be kept.

    Raises:
      UsageError: another engine than `host`, or strict decoding.
    """
    if budget is not None and (engine != "host" or strict):
        raise UsageError(
            "a verification budget is for engine host, and not for --strict, which promises the "
            "target's own logits"
        )


def _host_device() -> Any:
    """Where host memory is a device of its own; None on a CPU, which is the default device."""
    return None if jax.default_backend() == "cpu" else jax.local_devices(backend="cpu")[0]


def readers_of(readers: int | None, expert_bytes: int) -> int:
    """The number of threads that make transfers of experts of this size."""
    if readers is not None:
        return readers
    return 4 if expert_bytes >= LARGE_EXPERT else 1


def _residency(target: Target, store: ExpertStore, offload: Offload) -> Residency:
    dtype = np.dtype(target.compute_dtype)
    size = device_form(store, dtype, offload.unpack).bytes
    return Residency(
        store,
        device_cache_bytes=offload.device_cache,
        # A store in memory is the host tier already: a cache before it would hold bytes twice.
        host_cache_bytes=offload.host_cache if store.path is not None else 0,
        link=offload.link,
        compute_dtype=dtype,
        unpack=offload.unpack,
        readers=readers_of(offload.readers, size),
        # A callback hands host memory over: on an accelerator its experts must not go there first.
        device=_host_device() if offload.engine == "callback" else None,
        prefetch_bytes=(
            4 * target.config.routes_per_token * size
            if offload.prefetch is None
            else offload.prefetch
        ),
    )


class Decoder:
    """Engine and residency of one target, for many prompts. A context manager.

    Raises:
      UsageError: draft experts or predictor are another target's, the experts do not fit the host
        cache, or the engine cannot do what is asked of it.
    """

    def __init__(
        self,
        target: Target,
        *,
        draft: Draft | None = None,
        offload: Offload | None = None,
        capacity: int | None = None,
        store: ExpertStore | None = None,
        strict_rows: int | None = None,
        verify_budget: VerifyBudget | None = None,
        predictor: ExpertPredictor | None = None,
        on_decision: Callable[[Decision], None] = lambda decision: None,
    ):
        """A decoder of one target.

        `strict_rows`: every target pass is padded to so many rows (`infer.strict`).
        `verify_budget`: of mode moe-spec, whose tokens are not those of the target. `predictor`: of
        mode ecospec, trained with these draft experts. `on_decision` is told what the governor of a
        decode with one makes of drafting.
        """
        if draft is not None and draft.identity != target.identity:
            raise UsageError(
                f"the draft experts were trained for target {draft.identity}, not for "
                f"{target.name} ({target.identity}); distill draft experts for this one"
            )
        if predictor is not None:
            check_predictor(predictor, target, draft)
        predicts = None if predictor is None else NodePredictor(target, predictor)
        offload = Offload() if offload is None else offload
        check_engine(offload.engine, strict=strict_rows is not None)
        check_budget(offload.engine, verify_budget, strict=strict_rows is not None)
        context = target.config.context
        capacity = context if capacity is None else min(capacity, context)
        self.residency: Any
        self.engine: EngineLike
        if offload.engine == "resident":
            cache = offload.device_cache
            self.residency = load_resident(target, store=store, device_cache=cache)
            given: Any = (target, self.residency, draft, capacity)
            self.engine = ResidentEngine(*given, predictor=predicts)
        else:
            store = expert_store(target, offload) if store is None else store
            self.residency = _residency(target, store, offload)
            given = (target, self.residency, draft, capacity)
            if offload.engine == "callback":
                self.engine = CallbackEngine(*given, predictor=predicts)
            else:
                limits: Any = dict(rows=strict_rows, budget=verify_budget, predictor=predicts)
                self.engine = Engine(*given, look_ahead=offload.look_ahead, **limits)
        self.offload = offload
        self._warm: set[tuple[int, Drafting | None, int]] = set()
        self._on_decision = on_decision
        self._paces: dict[DecodeOptions, Pace] = {}

    def warm_up(self, options: DecodeOptions) -> None:
        """Compiles what these options need, once."""
        make_drafter(self.engine, options)  # checks the options, so before compiling
        drafts = options.mode in PATH_MODES
        drafting = Drafting(options.r, resident=options.draft_resident) if drafts else None
        draft_rows = max(options.draft_tree.pass_rows(), default=0) if options.branches else 0
        # A tree of one level has its accepted row moved too.
        draft_rows = max(draft_rows, 1) if options.branches else 0
        key = (options.draft_nodes + 1, drafting, draft_rows)
        if key not in self._warm:
            self.engine.warm_up(rows=key[0], drafting=drafting, draft_rows=draft_rows)
            self._warm.add(key)
        if options.predicts and self.engine.predictor is not None:
            self.engine.predictor.warm_up(sum(options.draft_tree.widths()))

    def run(
        self,
        prompt: Sequence[int],
        options: DecodeOptions,
        *,
        sample: int = 0,
        on_round: Callable[[Round], None] = lambda record: None,
        on_logits: OnLogits | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[Round, ...]:
        """Decodes one prompt and returns its trace; `on_round` sees each record as it comes.

        `on_logits` sees the logits of target passes (`Watched`); `foresee` tells trees their true
        routes, for measurements.
        """
        drafter = make_drafter(self.engine, options)
        self.warm_up(options)
        records = []
        pace = self._pace(options)
        engine = self.engine if on_logits is None else Watched(self.engine, on_logits)
        given: Any = dict(sample=sample, drafter=drafter, pace=pace, foresee=foresee)
        for record in decode(engine, prompt, options, **given):
            records.append(record)
            on_round(record)
        return tuple(records)

    def _pace(self, options: DecodeOptions) -> Pace:
        """What earlier prompts decoded in the same way have taught."""
        way = replace(options, max_new_tokens=1, stop_at_eos=True)
        if way not in self._paces:
            governor = Governor(on_decision=self._on_decision) if options.governor else None
            self._paces[way] = Pace(governor=governor)
        return self._paces[way]

    def forget(self) -> None:
        """Drops what earlier prompts have taught; what was compiled stays."""
        self._paces.clear()

    def close(self) -> None:
        """Ends the transfer thread and drops the experts."""
        self.residency.close()

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
