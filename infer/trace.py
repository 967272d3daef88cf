"""What happened in a decode, written down once: one record for the prefill, one a round.

Every table and plot of acceptance, expansion, recall and cost is computed from these records by
`infer.report`, never inside the loop. An autoregressive step is a round without a draft.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dejax.errors import UsageError
from dejax.shapes import Pair
from infer.output import write_whole
from infer.prefetch import LoadEvent

SCHEMA = "dejax-trace/1"


@dataclass(frozen=True)
class Round:
    """One prefill or one round.

    Attributes:
      kind: "prefill" or "round".
      committed: committed tokens before it, the pending one included.
      drafted: tokens sent to verification; parents: the row each follows (0 is the pending token).
      confidences: the drafter's confidence in each drafted token; none where it has no idea of
        that (mode n-gram).
      draft_passes: passes run over the pending token, over the drafted ones (the last may go
        without) and over a token that was looked at and dropped.
      draft_routes: the experts that the draft router chose, one list of pairs a pass.
      draft_used: pairs whose weights the draft passes read.
      predicted: of each drafted token, the pairs that a trained predictor expected of its row; none
        without one.
      required: pairs that the target pass used; rows_routes: the same, row by row.
      resident: those of `required` that were on the device when the round began.
      prefetched: pairs whose prefetch began in the round.
      accepted: number of accepted drafted tokens; emitted: tokens that the round emitted.
      finish_reason: why the sequence ended with this record ("eos", "length", "context"), or None.
      loads: every completed transfer, in order.
      top1_gates: mean gate of the top-1 expert in the target pass, layer by layer.
      began: seconds of the clock that loads are booked by.
      draft_seconds, target_seconds, total_seconds: wall time of its parts, in this order.
      device_seconds, load_seconds: of it, time waiting for jitted steps and for loads.
      control_seconds: of it, deciding what to draft and to verify (`infer.timing.Clock`).
      governed: whether a mode that drafts was kept from it in this round, to measure an
        autoregressive step or because drafting does not pay.
      rescued: rows, summed over layers, that a lossy verification left their top-1 in spite of its
        budget (`dejax.spec.budget`).
    """

    kind: Literal["prefill", "round"]
    committed: int
    drafted: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    draft_passes: int = 0
    draft_routes: tuple[frozenset[Pair], ...] = ()
    draft_used: frozenset[Pair] = frozenset()
    predicted: tuple[frozenset[Pair], ...] = ()
    required: frozenset[Pair] = frozenset()
    rows_routes: tuple[frozenset[Pair], ...] = ()
    resident: frozenset[Pair] = frozenset()
    prefetched: frozenset[Pair] = frozenset()
    accepted: int = 0
    emitted: tuple[int, ...] = ()
    finish_reason: str | None = None
    loads: tuple[LoadEvent, ...] = ()
    top1_gates: tuple[float, ...] = ()
    began: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0
    device_seconds: float = 0.0
    load_seconds: float = 0.0
    control_seconds: float = 0.0
    governed: bool = False
    rescued: int = 0


def to_record(round_: Round) -> dict[str, Any]:
    """A round as plain JSON values; sets of pairs become sorted lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted([list(pair) for pair in value])
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return dataclasses.asdict(value) if isinstance(value, LoadEvent) else value

    return {f.name: plain(getattr(round_, f.name)) for f in dataclasses.fields(Round)}


def from_record(record: dict[str, Any]) -> Round:
    """The inverse of `to_record`."""

    def pairs(items: Iterable[Sequence[int]]) -> frozenset[Pair]:
        return frozenset((layer, expert) for layer, expert in items)

    def value(name: str, item: Any) -> Any:
        if name in ("draft_used", "required", "resident", "prefetched"):
            return pairs(item)
        if name in ("draft_routes", "rows_routes", "predicted"):
            return tuple(pairs(part) for part in item)
        if name == "loads":
            return tuple(LoadEvent(**event) for event in item)
        return tuple(item) if isinstance(item, list) else item

    return Round(**{name: value(name, item) for name, item in record.items()})


def write_trace(
    path: Path, header: Mapping[str, Any], traces: Mapping[str, Sequence[Round]]
) -> None:
    """Writes JSON lines: a header (schema, what was run), then one line a record with its id.

    Raises:
      FailedError: the file cannot be written.
    """
    lines = [json.dumps({"schema": SCHEMA, **header})]
    for name, rounds in traces.items():
        lines += [json.dumps({"id": name, **to_record(round_)}) for round_ in rounds]
    write_whole(path, "".join(line + "\n" for line in lines).encode())


def read_trace(path: Path) -> tuple[dict[str, Any], dict[str, list[Round]]]:
    """Header and rounds by id of a trace file.

    Raises:
      UsageError: the file is missing or is not a trace of this schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        header, *records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as a trace ({error})") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise UsageError(f"{path}: not a trace of schema {SCHEMA}")
    traces: dict[str, list[Round]] = {}
    for line, record in enumerate(records, start=2):
        try:
            traces.setdefault(record.pop("id"), []).append(from_record(record))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: line {line} is no record of {SCHEMA} ({error!r})") from None
    return header, traces
