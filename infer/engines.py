"""What the decode loop needs of an engine, and which engines there are.

The loop, the drafters and `infer.decoder` know the protocols alone. `host` drives the layers from
Python (`infer.engine`), `callback` runs a pass as one jitted step that asks for experts from inside
(`infer.callback_engine`), `resident` has every expert on the device (`infer.resident`). All emit
the same tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from dejax.ckpt.expert_codec import Packing
from dejax.draft.expert import Draft
from dejax.errors import UsageError
from dejax.shapes import Pair
from dejax.spec.budget import VerifyBudget
from dejax.target import Target
from infer.node_predictor import NodePredictor
from infer.passes import Drafting, PassResult
from infer.prefetch import Arrivals
from infer.staging import DeviceForm

EngineName = Literal["host", "callback", "resident"]
ENGINES: tuple[EngineName, ...] = ("host", "callback", "resident")


DeviceCache = int | None | Literal["auto"]
"""Bytes of the device cache, None for all; "auto" is nothing, with engine `resident` all."""


def device_cache_bytes(cache: DeviceCache, engine: EngineName) -> int | None:
    """What a cache is with an engine."""
    if cache != "auto":
        return cache
    return None if engine == "resident" else 0


def check_engine(engine: EngineName, *, strict: bool) -> None:
    """Refuses what an engine cannot do.

    Raises:
      UsageError: the engine is unknown, or is to be strict and cannot.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is unknown; expected one of {', '.join(ENGINES)}")
    if strict and engine != "host":
        raise UsageError(f"--strict is for --engine host, not {engine}; leave one of them out")


def check_draft_resident(engine: EngineName, ratio: float | None) -> None:
    """Refuses drafting by resident experts where all of them are resident.

    Raises:
      UsageError: the engine keeps every expert on the device.
    """
    if ratio is not None and engine == "resident":
        raise UsageError("--draft-resident is for engines that load experts, not resident")


@runtime_checkable
class ResidencyLike(Protocol):
    """Where experts are, as engine and decode loop see it; documented at `Residency`."""

    packing: Packing | None
    bytes_per_expert: int
    form: DeviceForm

    def acquire(self, layer: int, ids: Sequence[int], *, kind: Any) -> list[Any]: ...

    def request(self, layer: int, ids: Sequence[int], *, kind: Any) -> Arrivals: ...

    def prefetch(self, pairs: Iterable[Pair], *, ahead: bool = False) -> None: ...

    def release(self, layer: int) -> None: ...

    def end_pass(self) -> None: ...

    def begin_round(self) -> None: ...

    def end_round(self) -> None: ...

    def close(self) -> None: ...

    def is_available(self, pair: Pair) -> bool: ...

    def is_resident(self, pair: Pair) -> bool: ...

    def available(self) -> set[Pair]: ...

    def resident(self) -> set[Pair]: ...

    def prefetched(self) -> set[Pair]: ...

    def take_events(self) -> list[Any]: ...


@runtime_checkable
class EngineLike(Protocol):
    """Runs passes of one target over one sequence at a time; documented at `Engine`."""

    @property
    def target(self) -> Target: ...

    @property
    def residency(self) -> Any: ...

    @property
    def draft(self) -> Draft | None: ...

    @property
    def capacity(self) -> int: ...

    @property
    def budget(self) -> VerifyBudget | None: ...

    @property
    def predictor(self) -> NodePredictor | None: ...

    @property
    def clock(self) -> Any: ...

    @property
    def layout(self) -> str: ...

    def begin(self) -> None: ...

    def prefill(self, tokens: Sequence[int], *, start: int = 0) -> PassResult: ...

    def warm_up(
        self, *, rows: int, drafting: Drafting | None = None, draft_rows: int = 0
    ) -> None: ...

    def target_rows(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int] | None = None
    ) -> PassResult: ...

    def keep_rows(self, rows: Sequence[int], *, start: int) -> None: ...

    def draft_row(self, token: int, *, start: int, drafting: Drafting) -> PassResult: ...

    def draft_level(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int], drafting: Drafting
    ) -> PassResult: ...


OnLogits = Callable[[int, Float[np.ndarray, " V"]], None]


class Watched:
    """An engine whose target passes tell their logits: `EngineLike`.

    `on_logits` is called with a position and the logits [V] for the token there. A position is told
    again if a later pass covers it: what counts is the last time.
    """

    def __init__(self, engine: EngineLike, on_logits: OnLogits):
        self._engine, self._on_logits = engine, on_logits
        self.target, self.residency, self.draft = engine.target, engine.residency, engine.draft
        self.capacity, self.clock, self.layout = engine.capacity, engine.clock, engine.layout
        self.budget, self.predictor = engine.budget, engine.predictor
        self.begin, self.warm_up, self.draft_row = engine.begin, engine.warm_up, engine.draft_row
        self.draft_level = engine.draft_level
        self._tree_logits: Any = ()

    def prefill(self, tokens: Sequence[int], *, start: int = 0) -> PassResult:
        """As `Engine.prefill`."""
        result = self._engine.prefill(tokens, start=start)
        self._on_logits(start + len(tokens), result.logits[0])
        return result

    def target_rows(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int] | None = None
    ) -> PassResult:
        """As `Engine.target_rows`; a tree's logits are told by `keep_rows`."""
        result = self._engine.target_rows(tokens, start=start, parents=parents)
        self._tree_logits = result.logits
        if parents is None:
            self._tell(range(len(tokens)), start)
        return result

    def keep_rows(self, rows: Sequence[int], *, start: int) -> None:
        """As `Engine.keep_rows`."""
        self._engine.keep_rows(rows, start=start)
        self._tell((0, *rows), start)

    def _tell(self, rows: Sequence[int], start: int) -> None:
        for depth, row in enumerate(rows):
            self._on_logits(start + 1 + depth, self._tree_logits[row])
