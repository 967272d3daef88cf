"""Writes draft experts for other programs: `dejax export MODEL --draft D --format F --out P`.

`safetensors` is dejax's own adapter folder (see `dejax.ckpt.draft_state`), checked against MODEL
and written anew; with `--draft init:SEED` it is that of untrained draft experts.
"""

from dataclasses import dataclass
from pathlib import Path

from dejax.ckpt.draft_state import draft_tensors, resolve_draft, save_draft
from dejax.errors import UsageError
from dejax.target import load_target
from infer.arguments import Positional, did_you_mean, format_bytes, parse
from infer.console import print_table

FORMATS = ("safetensors",)
LATER = ("torch", "gguf")


@dataclass(frozen=True)
class Arguments:
    """Arguments of `dejax export`."""

    model: Positional[str]
    """A model folder, or tiny."""
    out: Path
    """The folder to write."""
    draft: str | None = None
    """An adapter folder written by `dejax distill`, or init[:SEED]."""
    format: str = "safetensors"
    """safetensors (torch and gguf are not available in this version)."""

    def __post_init__(self):
        if self.format in LATER:
            raise UsageError(
                f"--format {self.format} is not available in this version; use safetensors"
            )
        if self.format not in FORMATS:
            hint = did_you_mean(self.format, FORMATS + LATER)
            raise UsageError(f"--format {self.format!r} is unknown; expected safetensors{hint}")
        if self.draft is None:
            raise UsageError("--draft is missing: this version exports draft experts, no targets")


def main(argv: list[str]) -> int:
    """Runs `dejax export`."""
    args = parse(Arguments, argv, prog="dejax export", description="Write draft experts.")
    target = load_target(args.model)
    draft = resolve_draft(str(args.draft), target)
    folder = save_draft(args.out, draft, target.config)
    tensors = draft_tensors(draft)
    size = sum(tensor.nbytes for tensor in tensors.values())
    row = [len(draft.experts), draft.config.width, len(tensors), format_bytes(size)]
    print_table(f"{folder}", ["layers", "width", "tensors", "size"], [row])
    return 0
