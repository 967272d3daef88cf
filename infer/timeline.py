"""A picture of a decode in time: passes, transfers by kind, and who waited for them.

    python -m infer.timeline TRACE.jsonl --out timeline.png [--id ID] [--rounds 6] [--skip 2]

Drawn from a trace (`dejax generate --trace`). Transfers that lie beside a draft or a verification
without a stall below them were hidden behind its computation.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from dejax.cli import run_module
from dejax.errors import UsageError
from infer.argument_types import InputFile, NamedFile, NonNegativeInt, Positional, PositiveInt
from infer.arguments import parse
from infer.console import say
from infer.plots import ACCENT, INK
from infer.trace import Round, read_trace

Bar = tuple[float, float]
"""Start and length, in seconds."""
COLOURS = {
    "draft passes": "#5b9bd5",
    "verification": INK,
    "draft loads": "#7b5ea7",
    "prefetches": "#2a9d8f",
    "demand loads": ACCENT,
    "stalls": "#e0a526",
}
_LOADS = {"draft": "draft loads", "prefetch": "prefetches", "demand": "demand loads"}


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m infer.timeline`."""

    trace: Positional[InputFile]
    """A trace of `dejax generate --trace`."""
    out: NamedFile
    """The picture to write, as PNG."""
    id: str | None = None
    """Which prompt; the first unless given."""
    rounds: PositiveInt = 6
    """How many rounds."""
    skip: NonNegativeInt = 2
    """Rounds to leave out before them."""


def lanes(rounds: Sequence[Round]) -> dict[str, list[Bar]]:
    """The bars of every lane, seconds from the first round's start."""
    found: dict[str, list[Bar]] = {name: [] for name in COLOURS}
    zero = rounds[0].began
    for record in rounds:
        start = record.began - zero
        if record.draft_passes:
            found["draft passes"].append((start, record.draft_seconds))
        found["verification"].append((start + record.draft_seconds, record.target_seconds))
        for load in record.loads:
            found[_LOADS[load.kind]].append((load.start - zero, load.end - load.start))
            if load.stall > 0:
                found["stalls"].append((load.end - load.stall - zero, load.stall))
    return found


def plot_timeline(rounds: Sequence[Round], path: Path, title: str) -> None:
    """Writes the picture of some rounds."""
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    axes = figure.subplots()
    for place, (name, bars) in enumerate(lanes(rounds).items()):
        milliseconds = [(1e3 * start, 1e3 * length) for start, length in bars]
        axes.broken_barh(milliseconds, (place - 0.4, 0.8), facecolors=COLOURS[name])
    axes.set_yticks(range(len(COLOURS)), list(COLOURS))
    axes.set_ylim(len(COLOURS) - 0.4, -0.6)
    for record in rounds:
        axes.axvline(1e3 * (record.began - rounds[0].began), color=INK, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("milliseconds; a line where a round begins")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> int:
    """Runs `python -m infer.timeline`."""
    about = "Draw the rounds of a decode in time, from its trace."
    args = parse(Arguments, argv, prog="python -m infer.timeline", description=about)
    header, traces = read_trace(args.trace)
    name = next(iter(traces), "") if args.id is None else args.id
    if name not in traces:
        raise UsageError(f"{args.trace}: has no prompt {name!r}; it has {', '.join(traces)}")
    rounds = [record for record in traces[name] if record.kind == "round"]
    chosen = rounds[args.skip : args.skip + args.rounds]
    if not chosen:
        raise UsageError(f"{args.trace}: prompt {name} has {len(rounds)} rounds; --skip fewer")
    title = f"{header.get('model')}, {header.get('mode')}, link {header.get('link')}"
    plot_timeline(chosen, args.out, title)
    say(f"{len(chosen)} rounds in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_module("timeline", main))
