"""What the decode loop needs of an engine, and which engines there are.

The loop, the drafters and `infer.decoder` know the protocols alone. `host` drives the layers from
Python (`infer.engine`), `callback` runs a pass as one jitted step that asks for experts from inside
(`infer.callback_engine`), `resident` has every expert on the device (`infer.resident`). All emit
the same tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from dejax.ckpt.expert_codec import Packing
from dejax.draft.expert import Draft
from dejax.shapes import Pair
from dejax.target import Target

EngineName = Literal["host", "callback", "resident"]
ENGINES: tuple[EngineName, ...] = ("host", "callback", "resident")


@runtime_checkable
class ResidencyLike(Protocol):
    """Where experts are, as engine and decode loop see it; documented at `Residency`."""

    packing: Packing | None
    bytes_per_expert: int

    def acquire(self, layer: int, ids: Sequence[int], *, kind: Any) -> list[Any]: ...

    def prefetch(self, pairs: Iterable[Pair]) -> None: ...

    def release(self, layer: int) -> None: ...

    def end_pass(self) -> None: ...

    def begin_round(self) -> None: ...

    def end_round(self) -> None: ...

    def close(self) -> None: ...

    def is_available(self, pair: Pair) -> bool: ...

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
    def clock(self) -> Any: ...

    @property
    def layout(self) -> str: ...

    def begin(self) -> None: ...

    def prefill(self, tokens: Sequence[int]) -> Any: ...

    def warm_up(self, *, rows: int, r: int | None = None) -> None: ...

    def target_rows(
        self, tokens: Sequence[int], *, start: int, parents: Sequence[int] | None = None
    ) -> Any: ...

    def draft_row(self, token: int, *, start: int, r: int) -> Any: ...
