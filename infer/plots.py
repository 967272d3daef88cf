"""Plots of a suite's rows, as PNG files. Everything comes from the rows that the tables show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from infer.trace import Round

INK, ACCENT = "#33415c", "#d1603d"
LINES = ("#33415c", "#d1603d", "#2a9d8f", "#e0a526", "#7b5ea7", "#5b9bd5", "#8c564b", "#7f8c3f")
"""Colours of lines; a plot with more lines varies their markers too."""
MARKERS = "os^D"


def _axes() -> tuple[Figure, Any]:
    """A single-panel figure, made without pyplot's global state."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], label: str) -> None:
    """Horizontal bars with their values, draft-expert rows in the accent colour."""
    colours = [ACCENT if "draft-expert" in name else INK for name in names]
    places = range(len(names))
    axes.barh(places, values, color=colours)
    axes.set_yticks(places, names)
    # The first on top; where two panels share the axis, inverting it twice would undo that.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(label)
    for place, value in zip(places, values, strict=True):
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)


def _rule(row: dict[str, Any]) -> str:
    """How a row's tokens were chosen."""
    temperature = row["options"]["temperature"]
    return f"T={temperature:g}" if temperature else "greedy"


def plot_modes(rows: Sequence[dict[str, Any]], path: Path, *, link: str) -> None:
    """Tokens per second and bytes of experts moved per emitted token; greedy rows come first."""
    shown = sorted(rows, key=lambda row: row["options"]["temperature"])
    names = [
        row["name"] if _rule(row) == "greedy" else f"{row['name']}, {_rule(row)}" for row in shown
    ]
    figure = Figure(figsize=(11, 1.2 + 0.27 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, names, [row["stats"]["decode_tps"] for row in shown], "tokens per second")
    per_token = []
    for row in shown:
        moved = sum(kind["bytes"] for kind in row["stats"]["loads"].values())
        per_token.append(moved / max(row["stats"]["emitted"], 1) / 1e6)
    _bars(right, names, per_token, "MB of experts moved per emitted token")
    greedy = sum(_rule(row) == "greedy" for row in shown)
    if 0 < greedy < len(shown):
        for axes in (left, right):
            axes.axhline(greedy - 0.5, color=INK, linewidth=0.6, linestyle=":")
    figure.suptitle(f"Decoding with offloaded experts, {link}")
    figure.savefig(path, dpi=130)


def acceptance_lines(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """(drafter, rule) -> acceptance by position, one line for runs that draft alike.

    Prefetching and caches change no draft, so that runs which differ in nothing else are one.
    """
    lines: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["stats"]["alpha_pos"] and row["options"]["cache"] == 0:
            drafter = row["name"].removesuffix(", prefetch")
            lines.setdefault((drafter, _rule(row)), row["stats"]["alpha_pos"])
    return lines


def plot_acceptance(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Chance that the i-th drafted token is accepted, those before it having been."""
    figure, axes = _axes()
    lines = acceptance_lines(rows)
    drafters = list(dict.fromkeys(drafter for drafter, _ in lines))
    for (drafter, rule), alphas in lines.items():
        round_, colour = divmod(drafters.index(drafter), len(LINES))
        axes.plot(
            range(1, len(alphas) + 1),
            alphas,
            "-" if rule == "greedy" else "--",
            color=LINES[colour],
            marker=MARKERS[round_ % len(MARKERS)],
            markersize=4,
            label=f"{drafter}, {rule}",
        )
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("acceptance")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=7, frameon=False, loc="lower left", ncols=2, handlelength=3.5)
    figure.savefig(path, dpi=130)


def unique_by_length(traces: Sequence[Sequence[Round]], longest: int) -> list[float]:
    """Mean number of distinct layer-experts that n successive tokens of the target use.

    Counted over sliding windows of autoregressive decodes.
    """
    result = []
    for length in range(1, longest + 1):
        counts = []
        for trace in traces:
            routes = [record.rows_routes[0] for record in trace if record.rows_routes]
            for first in range(len(routes) - length + 1):
                counts.append(len(frozenset().union(*routes[first : first + length])))
        if not counts:
            break
        result.append(sum(counts) / len(counts))
    return result


def plot_unique(curves: dict[str, list[float]], path: Path) -> None:
    """Distinct layer-experts against block length (the paper's Figures 3 and 5)."""
    figure, axes = _axes()
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, marker="o", label=name)
    axes.set_xlabel("rows of the block")
    axes.set_ylabel("distinct layer-experts")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


LOSSES = ("loss", "kl", "token", "residual", "router")
AGREEMENTS = ("agreement", "router_agreement")


def plot_losses(log: Sequence[dict[str, int | float]], path: Path) -> None:
    """Distillation against the step: the loss with its terms (log scale), and the agreements."""
    steps = [row["step"] for row in log]
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, names in zip(figure.subplots(1, 2), (LOSSES, AGREEMENTS), strict=True):
        for name, colour in zip(names, LINES, strict=False):
            if name in log[0]:
                axes.plot(steps, [row[name] for row in log], color=colour, label=name)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:  # a run on the residual loss alone has no agreements
            axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    left, right = figure.axes
    left.set_yscale("log")
    left.set_title("loss, and its terms before they are weighted", fontsize=10)
    right.set_title("share of tokens, and of experts, that agree", fontsize=10)
    figure.savefig(path, dpi=130)
