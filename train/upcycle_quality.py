"""A healed MoE measured as `dejax upcycle` measures what it writes, for the card.

    python -m train.upcycle_quality DENSE MOE --run RUN.json --json HEALED.json

RUN.json is the result of the `dejax upcycle --json` that MOE was made from. The result has the same
form, with what was measured anew, and `healing`: how the MoE was healed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejax.ckpt.hf_weights import read_json
from dejax.cli import run_module
from dejax.errors import UsageError
from dejax.paths import kind_of, shown
from dejax.target import load_target
from infer.argument_types import InputFile, Model, OutputFile, Positional, PositiveInt
from infer.arguments import parse
from infer.loading import load_shown
from infer.output import report
from train.heal import RECORD
from train.upcycle import show
from train.upcycle_measure import Numbers, compare
from train.upcycle_results import read_run
from train.upcycle_text import LONGEST_WINDOW, held_out_windows


@dataclass(frozen=True)
class Arguments:
    """Arguments of `python -m train.upcycle_quality`."""

    dense: Positional[Model]
    """The dense model, a folder or a .gguf file."""
    moe: Positional[Model]
    """The MoE: what a healing wrote, or `dejax upcycle` itself."""
    run: InputFile
    """Result of the `dejax upcycle --json` that the MoE comes from."""
    held_out: tuple[InputFile, ...] = ()
    """Documents to measure on, in place of the demo's held-out ones."""
    windows: PositiveInt = 2
    """Windows of each kind of text, at most; two are what `dejax upcycle --fast` measures on."""
    json: OutputFile | None = None
    """Write the result here as JSON; - is standard output."""


def read_healing(folder: str, run: Numbers, file: Path) -> dict[str, Any]:
    """The record of a healing of the run's MoE in a folder; nothing if there is none.

    Raises:
      UsageError: it is a record of another MoE's healing.
    """
    path = Path(folder) / RECORD
    if kind_of(path) is None:
        return {}
    record = read_json(path)
    if record.get("target") != run.get("identity"):
        raise UsageError(
            f"{shown(path)}: healed from a MoE of identity {record.get('target')}, {file} is about "
            f"{run.get('identity')}; expected the result that goes with it"
        )
    return record


def measure(args: Arguments) -> Numbers:
    """The run's result with the MoE's quality and routing measured anew.

    Raises:
      UsageError: the models, the run or the text do not fit each other.
    """
    run = read_run(args.run)
    healing = read_healing(args.moe, run, args.run)
    dense = load_shown(args.dense)
    moe = load_target(args.moe, run["options"]["--dtype"])
    if dense.identity != run["options"]["DENSE"]:
        raise UsageError(
            f"{args.dense}: not the dense model of {args.run}, which was {run['dense']}"
        )
    if not healing and moe.identity != run.get("identity"):
        raise UsageError(f"{args.moe}: neither what {args.run} is about nor healed from it")
    window = min(LONGEST_WINDOW, dense.config.context)
    text = held_out_windows(dense.tokenizer, args.held_out, window=window, most=args.windows)
    found = run | compare(dense, moe, text, arms=1) | {"out": args.moe, "identity": moe.identity}
    return found | ({"healing": healing} if healing else {})


def main(argv: list[str]) -> int:
    """Runs `python -m train.upcycle_quality`."""
    about = "Measure a healed MoE beside its dense model, as `dejax upcycle` does."
    args = parse(Arguments, argv, prog="python -m train.upcycle_quality", description=about)
    found = measure(args)
    report(args.json, found, lambda: show(found))
    return 0


if __name__ == "__main__":
    sys.exit(run_module("upcycle_quality", main))
