"""Writes draft experts for other programs: `dejax export MODEL --draft D --format F --out P`.

`safetensors` is dejax's own adapter folder (see `dejax.ckpt.draft_state`), checked against MODEL
and written anew; with `--draft init:SEED` it is that of untrained draft experts.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from dejax.ckpt.draft_state import check_draft_folder, draft_tensors, resolve_draft, save_draft
from dejax.errors import UsageError
from dejax.target import read_outline
from infer.arguments import (
    DraftSpec,
    Model,
    OutputFile,
    OutputFolder,
    ParsedBy,
    Positional,
    did_you_mean,
    parse,
)
from infer.console import print_table
from infer.output import report
from infer.units import format_bytes

FORMATS = ("safetensors",)
LATER = ("torch", "gguf")


def export_format(text: str) -> str:
    """`--format`: one that this version writes."""
    if text in LATER:
        raise UsageError(f"{text} is not available in this version; use safetensors")
    if text not in FORMATS:
        hint = did_you_mean(text, FORMATS + LATER)
        raise UsageError(f"{text!r} is unknown; expected safetensors{hint}")
    return text


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax export`."""

    model: Positional[Model]
    """A Hugging Face folder, a converted folder, or tiny."""
    out: OutputFolder
    """Folder to write; an adapter that is there is replaced."""
    draft: DraftSpec | None = None
    """The draft experts to write (needed): a folder from `dejax distill`, or untrained ones."""
    format: Annotated[str, ParsedBy(export_format, "FORMAT")] = "safetensors"
    """What to write: safetensors, dejax's adapter folder, is what this version knows."""
    json: OutputFile | None = None
    """Write what was done here as JSON; - is standard output."""

    def __post_init__(self):
        if self.draft is None:
            raise UsageError("--draft is missing: this version exports draft experts, no targets")


def main(argv: list[str]) -> int:
    """Runs `dejax export`."""
    about = "Check draft experts against a target and write them for other programs."
    args = parse(Arguments, argv, prog="dejax export", description=about)
    check_draft_folder(args.out)
    outline = read_outline(args.model)
    draft = resolve_draft(str(args.draft), outline)
    tensors = draft_tensors(draft)
    done: dict[str, Any] = {
        "out": save_draft(args.out, draft, outline.config),
        "format": args.format,
        "target": outline.identity,
        "layers": len(draft.experts),
        "width": draft.config.width,
        "top_r": draft.config.top_r,
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    report(args.json, done, lambda: _show(done))
    return 0


def _show(done: dict[str, Any]) -> None:
    row = [done["layers"], done["width"], done["tensors"], format_bytes(done["bytes"])]
    print_table(str(done["out"]), ["layers", "width", "tensors", "size"], [row])
