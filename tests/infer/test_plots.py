"""Plots: which lines there are, that they can be told apart, and that scales are not mixed."""

import pytest
from matplotlib.figure import Figure

from infer import plots
from infer.suite import standard_runs


def row_of(run):
    loads = {kind: {"bytes": 10} for kind in ("draft", "prefetch", "demand")}
    alphas = [0.9, 0.8] if run.mode != "ar" else []
    return {
        "name": run.name,
        "options": {"temperature": run.temperature, "cache": run.cache},
        "stats": {"alpha_pos": alphas, "decode_tps": 10.0, "emitted": 4, "loads": loads},
    }


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, none of which is written."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    return figures


@pytest.mark.parametrize("every_seeded", [False, True])
def test_lines_of_acceptance_can_be_told_apart(saved, tmp_path, every_seeded):
    rows = [row_of(run) for run in standard_runs(6, every_seeded=every_seeded)]
    plots.plot_acceptance(rows, tmp_path / "a.png")
    lines = saved[0].axes[0].lines
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == (
        len(lines)
    )
    names = {line.get_label() for line in lines}
    assert {"top-1, K=4, greedy", "draft-expert, K=6, T=0.8"} <= names
    assert not any("prefetch" in name or "cached" in name for name in names)


def test_more_drafters_than_colours_vary_their_markers(saved, tmp_path):
    runs = standard_runs(6, every_seeded=False)[1:2]
    rows = [row_of(runs[0]) | {"name": f"drafter {index}"} for index in range(20)]
    plots.plot_acceptance(rows, tmp_path / "a.png")
    lines = saved[0].axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20


def test_every_run_has_a_bar(saved, tmp_path):
    rows = [row_of(run) for run in standard_runs(6, every_seeded=False)]
    plots.plot_modes(rows, tmp_path / "s.png", link="a link")
    names = [label.get_text() for label in saved[0].axes[0].get_yticklabels()]
    assert len(names) == len(set(names)) == len(rows)
    seeded = [name for name in names if name.endswith(", T=0.8")]
    assert names[-len(seeded) :] == seeded and "AR, T=0.8" in seeded
    for axes in saved[0].axes:
        bottom, top = axes.get_ylim()
        assert bottom > len(rows) - 1 and top < 0  # the first on top


def test_losses_and_agreements_have_axes_of_their_own(saved, tmp_path):
    log = [
        {"step": step, "loss": 0.9, "kl": 0.1, "router": 0.01, "agreement": 0.8, "grad_norm": 1.0}
        for step in (10, 20)
    ]
    plots.plot_losses(log, tmp_path / "l.png")
    left, right = saved[0].axes
    assert [line.get_label() for line in left.lines] == ["loss", "kl", "router"]
    assert [line.get_label() for line in right.lines] == ["agreement"]
    assert (left.get_yscale(), right.get_yscale()) == ("log", "linear")
