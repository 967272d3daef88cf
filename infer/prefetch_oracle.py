"""Prefetching by an oracle: what a verification will need, known when its round begins.

Not a real system, but the most that prefetching within a round could give over a link, with the
same drafts (DraftExpert, arXiv 2607.24434, prefetching). The experts are those that a run before
required; drafts that depend on no clock are the same in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dejax.shapes import Pair
from infer.decode import decode, make_drafter
from infer.decode_options import DecodeOptions
from infer.decoder import Decoder
from infer.engines import EngineLike
from infer.passes import Drafting, PassResult
from infer.report import rounds_of
from infer.trace import Round

Required = Mapping[int, frozenset[Pair]]
"""Committed tokens at the begin of a round -> what its verification required."""


def required(trace: Iterable[Round]) -> Required:
    """What a run that was made in the same way tells the oracle."""
    return {record.committed: record.required for record in rounds_of(trace)}


def told_run(
    decoder: Decoder, prompt: Sequence[int], options: DecodeOptions, told: Required
) -> tuple[Round, ...]:
    """As `Decoder.run`, with the oracle in place of the drafter's predictions; drafts are chains.

    A round that was not told of prefetches nothing.
    """
    engine: Any = _Told(decoder.engine, told)
    decoder.warm_up(options)
    return tuple(decode(engine, prompt, options, drafter=make_drafter(engine, options)))


class _Residency:
    """A residency whose prefetches are the oracle's; `begun`: a round, of which no pass was run."""

    def __init__(self, residency: Any):
        self._residency = residency
        self.begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._residency, name)

    def begin_round(self) -> None:
        self._residency.begin_round()
        self.begun = True

    def prefetch(self, pairs: Iterable[Pair], *, ahead: bool = False) -> None:
        """The drafter's predictions are not asked for."""

    def tell(self, pairs: Iterable[Pair]) -> None:
        """What the round needs, before its first pass."""
        if self.begun:
            self.begun = False
            self._residency.prefetch(pairs)


class _Told:
    """An engine of which each round's first draft pass is preceded by the oracle: `EngineLike`."""

    def __init__(self, engine: EngineLike, told: Required):
        self._engine, self._told = engine, told
        self.residency = _Residency(engine.residency)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def draft_row(self, token: int, *, start: int, drafting: Drafting) -> PassResult:
        """As `Engine.draft_row`."""
        self.residency.tell(self._told.get(start + 1, frozenset()))
        drafting = replace(drafting, prefetch=False)
        return self._engine.draft_row(token, start=start, drafting=drafting)
