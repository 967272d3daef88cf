"""The project's performance page, from the JSON files that `dejax bench` wrote.

    python -m train.performance_page --results RESULT.json... --out docs/performance.md

Plots are written beside it, into the folder `performance`. Nothing on the page is typed by hand but
its words; a model's files are told together, in the order given.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.paths import read_file
from infer.argument_types import InputFile, NamedFile
from infer.arguments import parse
from infer.bench_plots import plot_dense_and_moe, plot_suite
from infer.bench_rows import COLUMNS
from infer.console import say
from infer.output import make_folder, write_whole
from infer.units import format_bytes, format_number
from train.card_pieces import prose, table

HEAD = """# Performance

Written by `python -m train.performance_page` from what `dejax bench` measured. What is compared was
measured in turns in one process; numbers are medians, *spread* is (largest - smallest) / median.
Every run of decoding emitted the tokens of autoregressive decoding, or its row says that it did
not.

**Simulated** stands where a link was: transfers are made for real, and then held back until a link
of the stated rate would have finished them. Speeds on it are simulated speeds.

- *x AR*: over autoregressive decoding without a cache over the same link.
- *of limit*: of what the link and this machine's computation allow: per layer, attention and
  router, then the longer of its loads and its computation, each measured apart.
- *link in use*: bytes moved over rate times time. *verify/AR*: a target pass over an
  autoregressive one. *draft/top-1*: a draft pass over one of shared + top-1.
"""

ABOUT = {
    "link": "Links: what moving experts reaches, and decoding over links of different rates.",
    "decode": "Decoding: what others do, and DraftExpert step by step.",
    "cache": "Decoding by the share of experts that the device holds.",
    "draft": "Drafting: one pass, and decoding by the longest draft.",
    "trees": "Systems side by side: DraftExpert's chains, trees by confidence, EcoSpec, and "
    "EcoSpec told the true routes (an oracle: **not a real system**), offloaded, half cached and "
    "resident. *MB read*: experts read from the device's memory; *bytes/tree of its size*: bytes "
    "moved a token (read, where all is resident) over those of confidence trees of the same mean "
    "size.",
    "verify": "Verification: one pass of the target by its rows.",
    "budget": "Verification under a budget (mode moe-spec). **Not lossless.**",
    "train": "A step of distillation beside the frozen target's forward pass.",
}


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.performance_page`."""

    results: tuple[InputFile, ...]
    """Files of `dejax bench --json` or `--out`, in the order of the page."""
    out: NamedFile
    """The page to write."""


def read_result(file: Path) -> dict[str, Any]:
    """A bench's JSON.

    Raises:
      UsageError: the file is none.
    """
    try:
        result = json.loads(read_file(file, "a result of dejax bench"))
        assert result["suite"] in ABOUT and result["rows"]
        for row in result["rows"]:
            if row["model"].startswith("/"):
                row["model"] = Path(row["model"]).name
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(f"{file} is not a result of dejax bench; give its --json file") from None
    return result


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, in the columns in which any of them has a number."""
    kept = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    cells = []
    for row in rows:
        found = ((name, row.get(name)) for name in kept)
        values = [None if value is None else COLUMNS[name][1](value) for name, value in found]
        texts = [format_number(v) if isinstance(v, float) else v or "-" for v in values]
        wrong = row["options"].get("identical_to_ar") is False
        cells.append([row["name"] + (" (**tokens differ**)" if wrong else ""), *texts])
    return table(["run", *(COLUMNS[name][0] for name in kept)], cells)


FACTORS = {
    "tokens_per_round": "tokens a round",
    "cost_verify": "verify",
    "cost_draft_total": "draft",
    "cost_other": "other",
    "predicted_speedup": "tokens / costs",
    "measured_speedup": "measured",
}
"""Columns of the table of factors."""


def factors_table(rows: Sequence[dict[str, Any]]) -> str | None:
    """What each speedup is made of; None where no row tells."""
    told = [row for row in rows if row.get("factors")]
    if not told:
        return None
    cells = [
        [row["name"], *("-" if v is None else f"{v:.2f}" for v in map(row["factors"].get, FACTORS))]
        for row in told
    ]
    return table(["costs in autoregressive steps", *FACTORS.values()], cells)


def about_machine(result: dict[str, Any]) -> str:
    """One sentence on what a result was measured with."""
    machine, versions = result["machine"], result["versions"]
    where = f"{machine['cpus']} CPU cores" if machine["backend"] == "cpu" else machine["device"]
    # Where the results went, and where models lie, is nobody's business.
    command = re.sub(r" --(json|out) \S+", "", result["command"])
    command = re.sub(r"(?<=\s)/\S*/(?=[^/\s])", "", command)
    return (
        f"`{command}` on {where}, {format_bytes(machine['memory_bytes'])}, load "
        f"{machine['load_average'][0]:.1f} at the end, jax {versions['jax']}."
    )


def section(result: dict[str, Any], folder: Path) -> str:
    """A result's part of the page; its plot goes into `folder`."""
    rows, suite = result["rows"], result["suite"]
    model = rows[0]["model"]
    links = sorted({row["link"] for row in rows if row["link"]})
    parts = [f"### {suite}", prose(ABOUT[suite], about_machine(result))]
    if links:
        simulated = [link for link in links if link.startswith("simulated")]
        what = "; ".join(simulated) if simulated else "; ".join(links)
        parts.append(prose(f"{'**Simulated links**' if simulated else 'Links'}: {what}."))
    parts.append(rows_table(rows))
    if (factors := factors_table(rows)) is not None:
        parts.append(factors)
    name = "".join(c if c.isalnum() else "-" for c in model) + f"-{suite}.png"
    if plot_suite(suite, rows, folder / name):
        parts.append(f"![{suite}, {model}]({folder.name}/{name})")
    return "\n\n".join(parts)


def page(results: Sequence[dict[str, Any]], folder: Path) -> str:
    """The whole page."""
    models: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        models.setdefault(result["rows"][0]["model"], []).append(result)
    parts = [HEAD.rstrip()]
    for model, found in models.items():
        parts.append(f"## {model}")
        parts += [section(result, folder) for result in found]
    parts += dense_and_moe(results, folder)
    return "\n\n".join(parts) + "\n"


def dense_and_moe(results: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """What more rows cost a dense model and a MoE, where both were measured."""
    rows = [row for result in results if result["suite"] == "verify" for row in result["rows"]]
    if len({row["name"].endswith("dense") for row in rows}) < 2:
        return []
    path = folder / "dense-and-moe.png"
    plot_dense_and_moe(rows, path)
    about = (
        "More rows make a pass of a mixture of experts dearer than one of a dense model, with "
        "everything resident too: every row brings experts of its own (Figure 4)."
    )
    return ["## Dense and MoE", prose(about), f"![dense and MoE]({folder.name}/{path.name})"]


def main(argv: list[str]) -> int:
    """Runs `python -m train.performance_page`."""
    about = "Write the performance page from results of dejax bench."
    args = parse(Arguments, argv, prog="python -m train.performance_page", description=about)
    results = [read_result(file) for file in args.results]
    folder = args.out.parent / "performance"
    make_folder(folder)
    write_whole(args.out, page(results, folder).encode())
    say(f"{args.out}, and plots in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_module("performance_page", main))
