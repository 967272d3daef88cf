"""Plots of the rows that `dejax bench` wrote, as PNG files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from infer.plots import ACCENT, INK, LINES, MARKERS

Number = int | float
Line = tuple[str, list[tuple[Number, Number]]]
"""A line's name and its points."""


def _kind(row: dict[str, Any]) -> str:
    """What a row's line is called: its mode, and what else sets it apart."""
    options = row["options"]
    parts = [row["mode"] if row["mode"] != "ar" else "AR"]
    parts += ["look-ahead"] if options.get("look_ahead") else []
    parts += ["truncated"] if options.get("truncate") else []
    parts += [f"T={options['temperature']:g}"] if options.get("temperature") else []
    return ", ".join(parts)


def lines_of(rows: Sequence[dict[str, Any]], x: str, y: str) -> list[Line]:
    """Lines of the option `x` against the field or option `y`, one a kind of run."""
    found: dict[str, list[tuple[Number, Number]]] = {}
    for row in rows:
        across = row["options"].get(x)
        up = row.get(y, row["options"].get(y))
        if across is not None and up is not None:
            found.setdefault(_kind(row), []).append((across, up))
    return [(name, sorted(points)) for name, points in found.items()]


def _plot(
    path: Path, lines: Sequence[Line], across: str, up: str, *, log: bool = False, zero: bool = True
) -> None:
    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for index, (name, points) in enumerate(lines):
        xs, ys = zip(*points, strict=True)
        style: dict[str, Any] = dict(color=LINES[index % len(LINES)], markersize=4)
        axes.plot(xs, ys, marker=MARKERS[index % len(MARKERS)], label=name, **style)
    if log:
        axes.set_xscale("log")
    if zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def plot_cache(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second by the share of experts that the device holds."""
    lines = lines_of([r for r in rows if r["tps"]], "cache", "tps")
    _plot(path, lines, "share of the experts that are cached", "tokens per second")


def plot_links(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second by the rate of the link."""
    plain = [r for r in rows if r["tps"] and not r["options"].get("cache")]
    lines = lines_of(plain, "link_bytes_per_second", "tps")
    lines = [(name, [(x / 1e9, y) for x, y in points]) for name, points in lines]
    _plot(path, lines, "GB/s of the simulated link", "tokens per second", log=True)


def plot_lengths(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed over autoregressive decoding by the longest draft."""
    chosen = [r for r in rows if r["tps"] and r["mode"] != "ar"]
    lines = lines_of(chosen, "draft_length", "ratio_to_ar")
    _plot(path, lines, "tokens of a draft at most (K)", "x autoregressive decoding")


def plot_widths(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What a pass costs, and how many experts it needs, by its rows (Figures 3 to 5)."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("rows of the pass")
    for cached, colour in (("nothing cached", ACCENT), ("all cached", INK), ("dense", INK)):
        chosen = [r for r in rows if r["name"].endswith(cached)]
        widths = [r["options"]["rows"] for r in chosen]
        if not chosen:
            continue
        left.plot(widths, [r["cost_verify"] for r in chosen], "o-", color=colour, label=cached)
        if colour == ACCENT:
            unique = [r["options"]["unique_layer_experts"] for r in chosen]
            right.plot(widths, unique, "o-", color=ACCENT, label="text of the target")
            right.plot(widths, [unique[0] * w for w in widths], ":", color=INK, label="no overlap")
    left.set_ylabel("time over that of one row")
    right.set_ylabel("distinct layer-experts")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def plot_dense_and_moe(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What a pass of dense models and of MoEs costs by its rows, everything resident (Figure 4)."""
    lines: dict[str, list[tuple[Number, Number]]] = {}
    for row in rows:
        kind = row["name"].rsplit(", ", 1)[-1]
        if kind != "nothing cached":
            name = f"{row['model']}, {'dense' if kind == 'dense' else 'MoE'}"
            lines.setdefault(name, []).append((row["options"]["rows"], row["cost_verify"]))
    _plot(path, list(lines.items()), "rows of the pass", "time over that of one row")


def plot_trees(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bytes a token by the nodes that a round verifies, greedy: a panel a place."""
    greedy = [row for row in rows if row["tps"] and not row["options"]["temperature"]]
    places = list(dict.fromkeys(_place(row) for row in greedy))
    figure = Figure(figsize=(3.6 * len(places), 3.8), layout="constrained")
    for axes, place in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        lines: dict[str, list[tuple[Number, Number]]] = {}
        for row in greedy:
            moved = row["bytes_per_token"]
            read = f"MB {'read' if moved is None else 'moved'} a token"
            count = (row["read_per_token"] if moved is None else moved) / 1e6
            if _place(row) == place and row["mode"] == "ar":
                axes.axhline(count, color=INK, linestyle=":", label="AR")
                axes.set_ylabel(read)
            elif _place(row) == place:
                lines.setdefault(_system(row), []).append((row["nodes_per_round"], count))
        for index, (name, points) in enumerate(lines.items()):
            style: dict[str, Any] = dict(color=LINES[index % len(LINES)], markersize=4)
            style["linestyle"] = "" if name == "chain" else "-"  # chains differ in their controller
            axes.plot(
                *zip(*sorted(points), strict=True), marker=MARKERS[index % 4], label=name, **style
            )
        axes.set_title(place, fontsize=9)
        axes.set_xlabel("nodes that a round verifies")
        axes.set_ylim(bottom=0)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)


def _place(row: dict[str, Any]) -> str:
    """Where the experts of a row are."""
    options = row["options"]
    if options["engine"] == "resident":
        return "all resident"
    return f"{options['cache']:.0%} cached" if options["cache"] else "nothing cached"


def _system(row: dict[str, Any]) -> str:
    """What a row's line is called among draft trees."""
    options = row["options"]
    if row["mode"] != "ecospec":
        return "chain" if options["tree"] == "chain" else "tree by confidence"
    if options["oracle"]:
        return "EcoSpec by oracle (no real system)"
    return "EcoSpec" + ("" if options["predictor"] == "router" else f", {options['predictor']}")


BUDGET_PANELS = {
    "ratio_to_ar": ("x autoregressive decoding", 1.0),
    "bytes_per_token": ("MB moved a token", 1e-6),
    "kl": ("KL from the exact laws (nats)", 1.0),
    "flip_rate": ("other likeliest token (% of rows)", 100.0),
}
"""What is drawn over a budget: field -> axis, and what its values are multiplied by."""
RANKS = {"weight": "experts by router weight", "residency": "experts on the device first"}


def plot_budget(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What a lossy verification gains and what it costs, by its budget and its ranking."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    figure.suptitle("mode moe-spec (lossless: false)", fontsize=10)
    plain = {"select": "substitution", "weights": "compensate", "exact_every": 0}
    chosen = [
        row
        for row in rows
        if (budget := row["options"]["budget"]) and plain.items() <= budget.items()
    ]
    sizes = sorted({row["options"]["budget"]["experts"] for row in chosen})
    exact = next(row for row in rows if row["mode"] == "draft-expert")
    panels = figure.subplots(2, 2).ravel()
    for axes, (field, (label, factor)) in zip(panels, BUDGET_PANELS.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        for (rank, name), style in zip(RANKS.items(), ("o-", "s--"), strict=True):
            points = sorted(
                (budget["experts"], factor * row[field])
                for row in chosen
                # With all experts allowed, there is nothing to rank.
                if (budget := row["options"]["budget"])["rank"] == rank
                or budget["experts"] == sizes[-1]
            )
            color = ACCENT if rank == "weight" else INK
            axes.plot(*zip(*points, strict=True), style, color=color, markersize=4, label=name)
        axes.axhline(factor * exact[field], color=ACCENT, linestyle=":", label="exact verification")
        axes.set_xscale("log")
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("experts a layer that a verification may use (B)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


PLOTS: dict[str, Callable[[Sequence[dict[str, Any]], Path], None]] = {
    "cache": plot_cache,
    "link": plot_links,
    "draft": plot_lengths,
    "verify": plot_widths,
    "budget": plot_budget,
    "trees": plot_trees,
}
"""The plot of a suite, if it has one."""


def plot_suite(suite: str, rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Writes a suite's plot; False if it has none, or no rows for it."""
    if suite not in PLOTS or (suite != "verify" and not any(row["tps"] for row in rows)):
        return False
    PLOTS[suite](rows, path)
    return True
