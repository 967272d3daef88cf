"""Plots of a suite's rows, as PNG files. Everything comes from the rows that the tables show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from infer.trace import Round

INK, PALE, ACCENT = "#33415c", "#b8c4d9", "#d1603d"


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
    axes.invert_yaxis()
    axes.set_xlabel(label)
    for place, value in zip(places, values, strict=True):
        axes.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)


def plot_modes(rows: Sequence[dict[str, Any]], path: Path, *, link: str) -> None:
    """Tokens per second and bytes of experts moved per emitted token, greedy rows."""
    greedy = [row for row in rows if row["options"]["temperature"] == 0]
    names = [row["name"] for row in greedy]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, names, [row["stats"]["decode_tps"] for row in greedy], "tokens per second")
    per_token = []
    for row in greedy:
        moved = sum(kind["bytes"] for kind in row["stats"]["loads"].values())
        per_token.append(moved / max(row["stats"]["emitted"], 1) / 1e6)
    _bars(right, names, per_token, "MB of experts moved per emitted token")
    figure.suptitle(f"Decoding with offloaded experts, {link}")
    figure.savefig(path, dpi=130)


def plot_acceptance(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Chance that the i-th drafted token is accepted, those before it having been."""
    figure, axes = _axes()
    for row in rows:
        alphas = row["stats"]["alpha_pos"]
        if not alphas or row["options"]["cache"] > 0:
            continue
        rule = "greedy" if row["options"]["temperature"] == 0 else "T=0.8"
        style = "-" if rule == "greedy" else "--"
        axes.plot(
            range(1, len(alphas) + 1), alphas, style, marker="o", label=f"{row['name']} {rule}"
        )
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("acceptance")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=7, frameon=False)
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


def plot_losses(log: Sequence[dict[str, int | float]], path: Path) -> None:
    """Distillation: agreement and each loss against the step."""
    steps = [row["step"] for row in log]
    names = [n for n in log[0] if n.startswith("loss") or n in ("agreement", "router_agreement")]
    figure, axes = _axes()
    for name in names:
        axes.plot(steps, [row[name] for row in log], label=name)
    axes.set_xlabel("step")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
